//! Numbers as text where nothing may be allocated, or not for each of them.

/// Digits that the largest number has.
pub const DECIMAL_DIGITS: usize = 20;

/// A number in decimal, written to the end of `digits`.
pub fn decimal(number: u64, digits: &mut [u8; DECIMAL_DIGITS]) -> &str {
    let mut at = digits.len();
    let mut rest = number;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    // Digits are characters.
    core::str::from_utf8(&digits[at..]).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_the_library_writes_them() {
        for number in [0, 7, 10, 4096, u64::MAX - 1, u64::MAX] {
            assert_eq!(decimal(number, &mut [b'x'; DECIMAL_DIGITS]), number.to_string());
        }
    }
}
