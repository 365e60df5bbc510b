//! Logarithms and powers of two, as exact as estimates of gaps need them (an error
//! below a thousandth of an octave), without a branch or a call: the walk takes them
//! by the million, and compilers make four at a time of them.

/// log2 of a normal number, within 2e-4.
pub(crate) fn log2(value: f32) -> f32 {
    debug_assert!(value >= f32::MIN_POSITIVE && value.is_finite(), "{value}");
    let bits = value.to_bits() as i32;
    let exponent = (bits >> 23) - 127;
    let x = f32::from_bits((bits & 0x7f_ffff | 0x3f80_0000) as u32) - 1.0;
    // log2(1 + x) on 0..1, least squares, exact at both ends.
    let bulge = 0.438_073_25 + x * (-0.236_693_41 + x * 0.080_307_3);
    exponent as f32 + x + x * (1.0 - x) * bulge
}

/// 2 to the power of `octaves`, which is in -126..127; relative error below 2e-4.
pub(crate) fn exp2(octaves: f32) -> f32 {
    debug_assert!((-126.0..127.0).contains(&octaves), "{octaves}");
    // The last bits of a number of this size are worth 1: added and taken off again
    // it rounds to the nearest, which its low bits name.
    const ROUND: f32 = (3 << 22) as f32;
    let rounded = octaves + ROUND;
    let x = octaves - (rounded - ROUND);
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    // 2^x on -½..½, least squares, exact at 0.
    let fraction = 1.0 + x * (0.693_316_6 + x * (0.241_924_8 + x * 0.054_602_28));
    fraction * f32::from_bits(exponent.wrapping_add(127) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_as_near_as_they_say() {
        for step in 0..100_000 {
            let octaves = -60.0 + step as f32 * 1.2e-3;
            let power = f64::from(octaves).exp2();
            assert!((f64::from(exp2(octaves)) / power - 1.0).abs() < 2e-4, "2^{octaves}");
            let value = power as f32;
            let error = f64::from(log2(value)) - f64::from(value).log2();
            assert!(error.abs() < 2e-4, "log2({value})");
        }
        for octaves in -126..127 {
            assert_eq!(exp2(octaves as f32), (octaves as f32).exp2());
            assert_eq!(log2((octaves as f32).exp2()), octaves as f32);
        }
    }
}
