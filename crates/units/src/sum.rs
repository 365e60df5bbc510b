//! A sum that tells a changed byte.

/// FNV-1a of 64 bits (Fowler, Noll and Vo). The same everywhere and for ever: sums are kept.
/// Nobody is kept from making two inputs with one sum.
#[must_use]
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let step = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(PRIME);
    bytes.into_iter().fold(BASIS, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_that_were_published() {
        assert_eq!(fnv1a(*b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(*b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(*b"foobar"), 0x8594_4171_f739_67e8);
    }
}
