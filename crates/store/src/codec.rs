//! Page in, fewer bytes out: lz4 and zstd behind two functions, with contexts
//! and buffers kept per thread so that reading allocates nothing.

use std::cell::RefCell;

use strata_units::{PAGE_SIZE, PageBuffer};
use zstd::bulk::{Compressor, Decompressor};

use crate::location::{Codec, MAX_COMPRESSED};

/// A page of bytes.
pub(crate) type Page = [u8; PAGE_SIZE];

/// zstd's level for repacking: on 4 KiB pages of JSON records level 3 costs
/// more and gains nothing.
const ZSTD_LEVEL: i32 = 1;

/// Pages that a packed object can touch in the file tier.
pub(crate) const CLUSTER_PAGES: usize = 2;

/// What a thread needs to read and write objects.
pub(crate) struct Scratch {
    /// Bytes as stored, of one object.
    pub(crate) packed: Page,
    /// The aligned range of the file tier that covers one object.
    pub(crate) cluster: Box<Cluster>,
    decompressor: Option<Decompressor<'static>>,
    compressor: Option<Compressor<'static>>,
}

/// An aligned buffer for one read of the file tier.
#[repr(C, align(4096))]
pub(crate) struct Cluster(pub(crate) [u8; CLUSTER_PAGES * PAGE_SIZE]);
const _: () = assert!(align_of::<Cluster>() == align_of::<PageBuffer>());

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        packed: [0; PAGE_SIZE],
        cluster: Box::new(Cluster([0; CLUSTER_PAGES * PAGE_SIZE])),
        decompressor: None,
        compressor: None,
    });
}

/// Lends this thread's scratch memory.
pub(crate) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with(|scratch| work(&mut scratch.borrow_mut()))
}

impl Scratch {
    /// Makes the decompression context, which is otherwise made by the first
    /// zstd page that the thread reads. Whether it is there.
    pub(crate) fn prepare(&mut self) -> bool {
        if self.decompressor.is_none() {
            self.decompressor = Decompressor::new().ok();
        }
        self.decompressor.is_some()
    }

    /// Turns `self.packed[..len]` back into a page. False when the bytes are
    /// not what the codec writes; the caller checks the content in any case.
    pub(crate) fn unpack(&mut self, codec: Codec, len: usize, out: &mut Page) -> bool {
        let Self { packed, .. } = self;
        match codec {
            Codec::Staged | Codec::Raw => {
                out.copy_from_slice(packed);
                len == PAGE_SIZE
            }
            Codec::Lz4 => {
                lz4::block::decompress_to_buffer(&packed[..len], Some(PAGE_SIZE as i32), out)
                    .is_ok_and(|written| written == PAGE_SIZE)
            }
            Codec::Zstd => {
                if !self.prepare() {
                    return false;
                }
                self.decompressor.as_mut().is_some_and(|decompressor| {
                    decompressor
                        .decompress_to_buffer(&self.packed[..len], &mut out[..])
                        .is_ok_and(|written| written == PAGE_SIZE)
                })
            }
        }
    }

    /// Compresses `page` into `self.packed`; the length, or none when it does
    /// not come below [`MAX_COMPRESSED`]. `codec` is lz4 or zstd.
    pub(crate) fn pack(&mut self, codec: Codec, page: &Page) -> Option<usize> {
        let out = &mut self.packed[..MAX_COMPRESSED];
        match codec {
            Codec::Lz4 => {
                let mode = Some(lz4::block::CompressionMode::FAST(1));
                lz4::block::compress_to_buffer(page, mode, false, out).ok()
            }
            Codec::Zstd => {
                if self.compressor.is_none() {
                    self.compressor = new_compressor();
                }
                self.compressor.as_mut()?.compress_to_buffer(page, out).ok()
            }
            Codec::Staged | Codec::Raw => None,
        }
    }
}

/// The page's length is known and its content has a checksum of ours, so the
/// frame carries neither.
fn new_compressor() -> Option<Compressor<'static>> {
    let mut compressor = Compressor::new(ZSTD_LEVEL).ok()?;
    compressor.include_checksum(false).ok()?;
    compressor.include_contentsize(false).ok()?;
    Some(compressor)
}

/// The low half of the page's xxh3: both its checksum and its name for
/// deduplication.
pub(crate) fn hash(page: &Page) -> u32 {
    xxhash_rust::xxh3::xxh3_64(page) as u32
}

/// The value when the page is one 32-bit value throughout.
pub(crate) fn fill_value(page: &Page) -> Option<u32> {
    // Equal to itself shifted by one value, after looking at the first two:
    // nearly every page that is not filled ends there.
    let (first, rest) = page.split_first_chunk::<4>()?;
    (rest[..4] == *first && page[4..] == page[..PAGE_SIZE - 4]).then(|| u32::from_ne_bytes(*first))
}

/// The page of one value.
pub(crate) fn fill(value: u32, out: &mut Page) {
    for chunk in out.chunks_exact_mut(4) {
        chunk.copy_from_slice(&value.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_page() -> Page {
        let mut page = [0; PAGE_SIZE];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = b"{\"name\":\"someone\",\"age\":31}\n"[at % 27] ^ (at / 512) as u8;
        }
        page
    }

    #[test]
    fn both_codecs_give_the_page_back() {
        let page = text_page();
        for codec in [Codec::Lz4, Codec::Zstd] {
            with_scratch(|scratch| {
                let len = scratch.pack(codec, &page).expect("text compresses");
                assert!(len < 2000, "{codec:?} {len}");
                let mut out = [0; PAGE_SIZE];
                assert!(scratch.unpack(codec, len, &mut out));
                assert!(out == page);
                assert!(!scratch.unpack(codec, len - 1, &mut out) || out != page);
            });
        }
    }

    #[test]
    fn noise_stays_raw() {
        let mut page = [0; PAGE_SIZE];
        let mut state = 88_172_645_463_325_252u64;
        for chunk in page.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.copy_from_slice(&state.to_ne_bytes());
        }
        with_scratch(|scratch| {
            assert_eq!(scratch.pack(Codec::Lz4, &page), None);
            assert_eq!(scratch.pack(Codec::Zstd, &page), None);
        });
    }

    #[test]
    fn filled_pages_are_found() {
        let mut page = [0; PAGE_SIZE];
        for value in [0, 0x0101_0101, 0xdead_beef] {
            fill(value, &mut page);
            assert_eq!(fill_value(&page), Some(value));
        }
        for at in [0, 3, 4, 7, 8, 2048, PAGE_SIZE - 1] {
            let mut other = page;
            other[at] ^= 1;
            assert_eq!(fill_value(&other), None, "{at}");
        }
    }
}
