//! The bytes of a snapshot file: header, block heads, extents, block table,
//! footer. Encoding and decoding of fixed structures only; nothing here reads or
//! writes a file, or allocates.
//!
//! All numbers are little-endian. All checksums are XXH3 with the file's seed.

use strata_units::PAGE_SIZE;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use super::Page;

/// Begins a file. The first byte and the last show a transfer as text.
pub(crate) const MAGIC: [u8; 8] = *b"\x89strata\n";
/// Ends a file.
pub(super) const END: [u8; 8] = *b"strata!\n";
/// The version that this code writes and reads.
pub(super) const VERSION: u32 = 1;

pub(super) const HEADER_BYTES: usize = 32;
pub(super) const HEAD_BYTES: usize = 40;
pub(super) const EXTENT_BYTES: usize = 16;
pub(super) const ENTRY_BYTES: usize = 8;
pub(super) const FOOTER_BYTES: usize = 56;

/// Pages of a block. More compress better, fewer make a single page cheaper to
/// read.
pub(super) const BLOCK_PAGES: usize = 16;
/// Bytes of a file or of the directory in one block.
pub(super) const CHUNK_BYTES: usize = 128 << 10;
/// Extents in one block.
pub(super) const BLOCK_EXTENTS: usize = 4096;
/// A block is never longer.
pub(super) const MAX_BLOCK_BYTES: usize = HEAD_BYTES + 8 * BLOCK_PAGES + CHUNK_BYTES;
const _: () = assert!(BLOCK_PAGES * PAGE_SIZE <= CHUNK_BYTES);
const _: () = assert!(BLOCK_EXTENTS * EXTENT_BYTES <= CHUNK_BYTES);

/// Page numbers are below: 64-bit addresses.
pub(super) const MAX_PAGE_NUMBER: u64 = 1 << 52;
/// Pages that one extent covers, at most.
pub(super) const MAX_EXTENT_PAGES: u32 = (1 << 31) - 1;
/// Pages in a file, at most (16 TiB), repeated ones counted each time.
pub(super) const MAX_PAGES: u64 = 1 << 32;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// The checksum of anything but a page.
pub(super) fn sum(bytes: &[u8], seed: u64) -> u64 {
    // A fuzzer does not find sums that fit, and what is behind them is to be found.
    if cfg!(fuzzing) { 0 } else { xxh3_64_with_seed(bytes, seed) }
}

/// The digest of a page: its name for deduplication. The low half is the
/// checksum that the file keeps.
pub(super) fn digest(page: &Page, seed: u64) -> u128 {
    xxh3_128_with_seed(page, seed)
}

pub(super) fn page_sum(page: &Page, seed: u64) -> u64 {
    if cfg!(fuzzing) { 0 } else { digest(page, seed) as u64 }
}

/// The value when the page is one 32-bit value throughout.
pub(super) fn fill_value(page: &Page) -> Option<u32> {
    let value = u32_at(page, 0);
    // Nearly every page that is not filled ends at the second value.
    (u32_at(page, 4) == value && page[4..] == page[..PAGE_SIZE - 4]).then_some(value)
}

pub(super) fn fill(value: u32, out: &mut Page) {
    for chunk in out.chunks_exact_mut(4) {
        chunk.copy_from_slice(&value.to_le_bytes());
    }
}

/// Why a header is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BadHeader {
    Magic,
    Version(u32),
    PageSize(u32),
    Sum,
}

pub(super) fn encode_header(seed: u64) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[12..16].copy_from_slice(&(PAGE_SIZE as u32).to_le_bytes());
    out[16..24].copy_from_slice(&seed.to_le_bytes());
    let sum = sum(&out[..24], 0);
    out[24..].copy_from_slice(&sum.to_le_bytes());
    out
}

/// The seed of the file's checksums.
pub(super) fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<u64, BadHeader> {
    if bytes[..8] != MAGIC {
        return Err(BadHeader::Magic);
    }
    let version = u32_at(bytes, 8);
    if version != VERSION {
        return Err(BadHeader::Version(version));
    }
    if u64_at(bytes, 24) != sum(&bytes[..24], 0) {
        return Err(BadHeader::Sum);
    }
    let page_bytes = u32_at(bytes, 12);
    if page_bytes != PAGE_SIZE as u32 {
        return Err(BadHeader::PageSize(page_bytes));
    }
    Ok(u64_at(bytes, 16))
}

/// What a block holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Distinct pages, in order of their numbers.
    Pages = 1,
    /// Which pages a process has; the owner is the process.
    Extents = 2,
    /// A piece of a file; the owner is the file.
    File = 3,
    /// A piece of the directory.
    Directory = 4,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Pages, Self::Extents, Self::File, Self::Directory]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// An entry of the block table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockEntry {
    /// Length of the whole block.
    pub(super) len_bytes: u32,
    pub(super) kind: Kind,
    /// Position of the process or file in the directory; else 0.
    pub(super) owner: u16,
}

impl BlockEntry {
    pub(super) fn encode(self) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        out[..4].copy_from_slice(&self.len_bytes.to_le_bytes());
        out[4] = self.kind as u8;
        out[6..].copy_from_slice(&self.owner.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let entry = Self {
            len_bytes: u32_at(bytes, 0),
            kind: Kind::of(bytes[4])?,
            owner: u16_at(bytes, 6),
        };
        let fits = (HEAD_BYTES..=MAX_BLOCK_BYTES).contains(&(entry.len_bytes as usize));
        let owned = matches!(entry.kind, Kind::Extents | Kind::File);
        (fits && bytes[5] == 0 && (owned || entry.owner == 0)).then_some(entry)
    }
}

/// What a block begins with. The sums of a block's pages follow, then what it
/// holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockHead {
    pub(super) kind: Kind,
    pub(super) owner: u16,
    /// Pages or extents in it; else 0.
    pub(super) items: u32,
    /// Length of what it holds, unpacked and as it lies in the file. Equal: not
    /// packed.
    pub(super) raw_bytes: u32,
    pub(super) stored_bytes: u32,
    /// Position in the table.
    pub(super) number: u32,
    /// Of the bytes as stored.
    pub(super) stored_sum: u64,
}

impl BlockHead {
    /// Bytes of the sums that follow the head.
    pub(super) fn sums_bytes(&self) -> usize {
        if self.kind == Kind::Pages { 8 * self.items as usize } else { 0 }
    }

    pub(super) fn encode(&self, page_sums: &[u8], seed: u64) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        out[0] = self.kind as u8;
        out[2..4].copy_from_slice(&self.owner.to_le_bytes());
        out[4..8].copy_from_slice(&self.items.to_le_bytes());
        out[8..12].copy_from_slice(&self.raw_bytes.to_le_bytes());
        out[12..16].copy_from_slice(&self.stored_bytes.to_le_bytes());
        out[16..20].copy_from_slice(&self.number.to_le_bytes());
        out[24..32].copy_from_slice(&self.stored_sum.to_le_bytes());
        let sum = head_sum(&out, page_sums, seed);
        out[32..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// The head of the block in `bytes`, checked with the sums behind it, and its
    /// lengths against that of `bytes`.
    pub(super) fn decode(bytes: &[u8], seed: u64) -> Option<Self> {
        if bytes.len() < HEAD_BYTES {
            return None;
        }
        let head = Self {
            kind: Kind::of(bytes[0])?,
            owner: u16_at(bytes, 2),
            items: u32_at(bytes, 4),
            raw_bytes: u32_at(bytes, 8),
            stored_bytes: u32_at(bytes, 12),
            number: u32_at(bytes, 16),
            stored_sum: u64_at(bytes, 24),
        };
        let (items, raw) = (head.items as usize, head.raw_bytes as usize);
        let counted = match head.kind {
            Kind::Pages => (1..=BLOCK_PAGES).contains(&items) && raw == items * PAGE_SIZE,
            Kind::Extents => (1..=BLOCK_EXTENTS).contains(&items) && raw == items * EXTENT_BYTES,
            Kind::File | Kind::Directory => items == 0 && (1..=CHUNK_BYTES).contains(&raw),
        };
        let stored = head.stored_bytes as usize;
        if !counted || stored > raw || HEAD_BYTES + head.sums_bytes() + stored != bytes.len() {
            return None;
        }
        let sums = &bytes[HEAD_BYTES..HEAD_BYTES + head.sums_bytes()];
        (bytes[1] == 0
            && bytes[20..24] == [0; 4]
            && u64_at(bytes, 32) == head_sum(bytes, sums, seed))
        .then_some(head)
    }
}

fn head_sum(head: &[u8], page_sums: &[u8], seed: u64) -> u64 {
    let mut bytes = [0; 32 + 8 * BLOCK_PAGES];
    bytes[..32].copy_from_slice(&head[..32]);
    bytes[32..32 + page_sums.len()].copy_from_slice(page_sums);
    sum(&bytes[..32 + page_sums.len()], seed)
}

/// Consecutive pages of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    /// Number (address / 4096) of the first one.
    pub(super) first: u64,
    /// How many.
    pub(super) count: u32,
    pub(super) content: Content,
}

/// What an extent's pages hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Distinct pages: that of this number first, then the following ones.
    Stored(u32),
    /// All of them this value throughout.
    Filled(u32),
}

impl Extent {
    /// One page.
    pub(super) fn of(number: u64, content: Content) -> Self {
        Self { first: number, count: 1, content }
    }

    /// The page number after the last one.
    pub(super) fn end(&self) -> u64 {
        self.first + u64::from(self.count)
    }

    /// The content of the page `number`, which it covers.
    pub(super) fn at(&self, number: u64) -> Content {
        match self.content {
            Content::Stored(first) => Content::Stored(first + (number - self.first) as u32),
            filled @ Content::Filled(_) => filled,
        }
    }

    /// Takes `next` in if it continues this one.
    pub(super) fn join(&mut self, next: &Self) -> bool {
        let follows = match (self.content, next.content) {
            (Content::Stored(a), Content::Stored(b)) => a.checked_add(self.count) == Some(b),
            (Content::Filled(a), Content::Filled(b)) => a == b,
            _ => false,
        };
        let fits = self.count <= MAX_EXTENT_PAGES - next.count;
        let joins = follows && fits && self.end() == next.first;
        if joins {
            self.count += next.count;
        }
        joins
    }

    pub(super) fn encode(&self) -> [u8; EXTENT_BYTES] {
        let (filled, value) = match self.content {
            Content::Stored(number) => (0, number),
            Content::Filled(value) => (1, value),
        };
        let word = u64::from(value) | u64::from(self.count) << 32 | filled << 63;
        let mut out = [0; EXTENT_BYTES];
        out[..8].copy_from_slice(&self.first.to_le_bytes());
        out[8..].copy_from_slice(&word.to_le_bytes());
        out
    }

    /// None: it names pages that cannot be, or contents from `contents` on.
    pub(super) fn decode(bytes: &[u8], contents: u64) -> Option<Self> {
        let (first, word) = (u64_at(bytes, 0), u64_at(bytes, 8));
        let count = (word >> 32) as u32 & MAX_EXTENT_PAGES;
        let value = word as u32;
        let content = if word >> 63 == 1 { Content::Filled(value) } else { Content::Stored(value) };
        let known = matches!(content, Content::Filled(_))
            || u64::from(value) + u64::from(count) <= contents;
        let possible = first < MAX_PAGE_NUMBER && first + u64::from(count) <= MAX_PAGE_NUMBER;
        (count > 0 && possible && known).then_some(Self { first, count, content })
    }
}

/// What a file ends with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Footer {
    pub(super) table_offset: u64,
    pub(super) blocks: u64,
    /// Distinct pages.
    pub(super) contents: u64,
    pub(super) table_sum: u64,
    /// Of the whole file.
    pub(super) len_bytes: u64,
}

impl Footer {
    pub(super) fn encode(&self, seed: u64) -> [u8; FOOTER_BYTES] {
        let mut out = [0; FOOTER_BYTES];
        let words = [self.table_offset, self.blocks, self.contents, self.table_sum, self.len_bytes];
        for (place, word) in out.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let sum = sum(&out[..40], seed);
        out[40..48].copy_from_slice(&sum.to_le_bytes());
        out[48..].copy_from_slice(&END);
        out
    }

    /// None: not whole, or not the footer of a file of this length.
    pub(super) fn decode(bytes: &[u8; FOOTER_BYTES], seed: u64, len_bytes: u64) -> Option<Self> {
        let footer = Self {
            table_offset: u64_at(bytes, 0),
            blocks: u64_at(bytes, 8),
            contents: u64_at(bytes, 16),
            table_sum: u64_at(bytes, 24),
            len_bytes: u64_at(bytes, 32),
        };
        let table = footer.blocks.checked_mul(ENTRY_BYTES as u64)?;
        let end = footer.table_offset.checked_add(table)?.checked_add(FOOTER_BYTES as u64)?;
        let whole = bytes[48..] == END
            && u64_at(bytes, 40) == sum(&bytes[..40], seed)
            && footer.len_bytes == len_bytes
            && footer.table_offset >= HEADER_BYTES as u64
            && footer.blocks <= u64::from(u32::MAX)
            && footer.contents <= MAX_PAGES
            && end == len_bytes;
        whole.then_some(footer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_join_when_pages_and_contents_go_on() {
        let stored =
            |first, count, number| Extent { first, count, content: Content::Stored(number) };
        let filled = |first, count, value| Extent { first, count, content: Content::Filled(value) };
        let mut extent = stored(10, 2, 5);
        assert!(!extent.join(&stored(13, 1, 7)), "a gap");
        assert!(!extent.join(&stored(12, 1, 8)), "another content");
        assert!(!extent.join(&filled(12, 1, 7)));
        assert!(extent.join(&stored(12, 1, 7)));
        assert_eq!(extent, stored(10, 3, 5));
        assert_eq!(extent.at(12), Content::Stored(7));
        let mut extent = filled(1, MAX_EXTENT_PAGES - 1, 9);
        assert!(!extent.join(&filled(extent.end(), 1, 8)));
        assert!(extent.join(&filled(extent.end(), 1, 9)));
        assert!(!extent.join(&filled(extent.end(), 1, 9)), "31 bits are full");
        assert_eq!(Extent::decode(&extent.encode(), 0), Some(extent));
    }

    #[test]
    fn impossible_extents_are_refused() {
        let extent = |first, count, content| Extent { first, count, content };
        let refused =
            |extent: Extent, contents| Extent::decode(&extent.encode(), contents).is_none();
        assert!(refused(extent(1, 0, Content::Filled(0)), 9));
        assert!(refused(extent(MAX_PAGE_NUMBER, 1, Content::Filled(0)), 9));
        assert!(refused(extent(MAX_PAGE_NUMBER - 1, 2, Content::Filled(0)), 9));
        assert!(!refused(extent(MAX_PAGE_NUMBER - 1, 1, Content::Filled(0)), 9));
        assert!(refused(extent(1, 2, Content::Stored(8)), 9));
        assert!(!refused(extent(1, 1, Content::Stored(8)), 9));
        assert!(refused(extent(1, MAX_EXTENT_PAGES, Content::Stored(u32::MAX)), 9));
    }

    #[test]
    fn filled_pages_are_found() {
        let mut page = [0; PAGE_SIZE];
        fill(0xdead_beef, &mut page);
        assert_eq!(fill_value(&page), Some(0xdead_beef));
        for at in [0, 3, 4, 7, 8, 2048, PAGE_SIZE - 1] {
            let mut other = page;
            other[at] ^= 1;
            assert_eq!(fill_value(&other), None, "{at}");
        }
    }
}
