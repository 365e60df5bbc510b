//! Pages that are sent by themselves, because somebody asked for them:
//!
//! ```text
//! sum of the rest (8) | of each page what it is (1) | the bytes of those that have any, packed
//! ```

use xxhash_rust::xxh3::xxh3_64;

use super::Page;
use strata_units::PAGE_SIZE;

/// Fast: somebody waits for them.
const LEVEL: i32 = 1;
/// Pages sent at a time, at most.
pub const MOST_SENT_PAGES: usize = 64;

/// What is said of one page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SentPage {
    /// It has these bytes.
    Bytes(Box<Page>),
    /// It is zero.
    Zero,
    /// Nobody has it any more.
    Lost,
}

/// A page's checksum, as what keeps pages one by one keeps it: never 0 or `u64::MAX`.
#[must_use]
pub fn sum_of_page(page: &Page) -> u64 {
    xxh3_64(page).clamp(1, u64::MAX - 1)
}

/// The answer to a question for pages, in their order.
///
/// # Panics
/// When there are more than [`MOST_SENT_PAGES`].
#[must_use]
pub fn pack_pages(pages: &[SentPage]) -> Vec<u8> {
    assert!(pages.len() <= MOST_SENT_PAGES, "{} pages at once", pages.len());
    let mut raw = Vec::with_capacity(pages.len() * PAGE_SIZE);
    let mut out = vec![0; 8];
    for page in pages {
        out.push(match page {
            SentPage::Zero => 0,
            SentPage::Bytes(bytes) => {
                raw.extend_from_slice(&bytes[..]);
                1
            }
            SentPage::Lost => 2,
        });
    }
    if !raw.is_empty() {
        // Fails for want of memory alone, which ends a program anyway.
        let packed = zstd::bulk::compress(&raw, LEVEL).unwrap_or_default();
        out.extend_from_slice(&packed);
    }
    let sum = xxh3_64(&out[8..]);
    out[..8].copy_from_slice(&sum.to_le_bytes());
    out
}

/// The `count` pages of such an answer; none: it is none.
#[must_use]
pub fn unpack_pages(bytes: &[u8], count: usize) -> Option<Vec<SentPage>> {
    let (sum, rest) = bytes.split_first_chunk::<8>()?;
    if count > MOST_SENT_PAGES || u64::from_le_bytes(*sum) != xxh3_64(rest) {
        return None;
    }
    let (kinds, packed) = rest.split_at_checked(count)?;
    let with_bytes = kinds.iter().filter(|&&kind| kind == 1).count();
    let raw = match with_bytes {
        0 if packed.is_empty() => Vec::new(),
        0 => return None,
        pages => zstd::bulk::decompress(packed, pages * PAGE_SIZE).ok()?,
    };
    let (pages, rest) = raw.as_chunks::<PAGE_SIZE>();
    if pages.len() != with_bytes || !rest.is_empty() {
        return None;
    }
    let mut pages = pages.iter();
    let page = |kind: &u8| match kind {
        0 => Some(SentPage::Zero),
        1 => pages.next().map(|page| SentPage::Bytes(Box::new(*page))),
        2 => Some(SentPage::Lost),
        _ => None,
    };
    kinds.iter().map(page).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_out_as_they_went_in() {
        let page = |value: u8| SentPage::Bytes(Box::new([value; PAGE_SIZE]));
        for pages in [
            vec![],
            vec![SentPage::Zero],
            vec![SentPage::Lost, page(3), SentPage::Zero, page(4)],
            vec![page(7); MOST_SENT_PAGES],
        ] {
            let packed = pack_pages(&pages);
            assert_eq!(unpack_pages(&packed, pages.len()), Some(pages.clone()));
            assert_eq!(unpack_pages(&packed, pages.len() + 1), None);
        }
    }

    #[test]
    fn a_changed_byte_is_seen() {
        let packed = pack_pages(&[SentPage::Bytes(Box::new([9; PAGE_SIZE])), SentPage::Zero]);
        for at in 0..packed.len() {
            let mut changed = packed.clone();
            changed[at] ^= 1;
            assert_eq!(unpack_pages(&changed, 2), None, "{at}");
            assert_eq!(unpack_pages(&packed[..at], 2), None, "{at}");
        }
    }

    #[test]
    fn what_is_more_than_was_asked_for_is_none() {
        // Sound, and packed so that it would be more than its pages.
        let mut out = vec![0; 8];
        out.push(1);
        out.extend(zstd::bulk::compress(&[5; 3 * PAGE_SIZE], 1).expect("memory"));
        let sum = xxh3_64(&out[8..]);
        out[..8].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(unpack_pages(&out, 1), None);
    }
}
