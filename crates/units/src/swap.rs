//! How large a guest's swap disk is, for whoever asks for one and whoever serves it.

use crate::PAGE;

/// Bytes of the smallest.
pub const LEAST_SWAP_BYTES: u64 = 1 << 20;
/// Bytes of the largest.
pub const MOST_SWAP_BYTES: u64 = 256 << 30;

/// Whether one can have so many bytes: whole pages.
#[must_use]
pub fn is_swap_size(bytes: u64) -> bool {
    (LEAST_SWAP_BYTES..=MOST_SWAP_BYTES).contains(&bytes) && bytes.is_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_disk_has_whole_pages_between_least_and_most() {
        for right in [LEAST_SWAP_BYTES, LEAST_SWAP_BYTES + PAGE, MOST_SWAP_BYTES] {
            assert!(is_swap_size(right), "{right}");
        }
        for wrong in [0, LEAST_SWAP_BYTES - PAGE, LEAST_SWAP_BYTES + 1, MOST_SWAP_BYTES + PAGE] {
            assert!(!is_swap_size(wrong), "{wrong}");
        }
    }
}
