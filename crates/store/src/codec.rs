//! Page in, fewer bytes out: lz4 and zstd, with or without a dictionary, with
//! contexts and buffers kept per thread so that reading allocates nothing.

use std::cell::RefCell;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use strata_units::{PAGE_SIZE, PageBuffer};
use zstd::zstd_safe::{CCtx, CParameter, DCtx, get_dict_id_from_frame};

use crate::config::Fingerprint;
use crate::dictionary::{Dictionaries, Encoder};
use crate::location::{Codec, MAX_COMPRESSED, SizeClass};

/// A page of bytes.
pub(crate) type Page = [u8; PAGE_SIZE];

/// zstd's level without a dictionary: on 4 KiB pages of JSON records level 3
/// costs more and gains nothing.
const ZSTD_LEVEL: i32 = 1;
/// And with one: on the same pages level 3 packs 4 % tighter than level 1. Alone
/// it is as fast, beside a busy program it takes half as long again (its tables
/// are three times as large).
pub(crate) const DICTIONARY_LEVEL: i32 = 1;
/// A page that a dictionary packs into this is not tried with lz4 as well. Above
/// it lz4 may do as well, and is unpacked sooner.
const SURE_BYTES: usize = 1024;
/// Above it pages are told apart by how many times so much a dictionary leaves of them.
const KINDS: usize = MAX_COMPRESSED / SURE_BYTES - 1;
/// Weight of one try in the mean that tells whether lz4 does as well.
const TRIES_SHIFT: u32 = 6;
/// Where lz4 wins less than one of so many tries, one of so many pages is tried.
const SELDOM: u32 = 16;
/// All tries, as a mean has it.
const EVERY: u32 = 1 << 16;
/// Enough of a frame to find its dictionary's id.
pub(crate) const FRAME_HEADER_BYTES: usize = 18;

/// Pages that a packed object can touch in the file tier.
pub(crate) const CLUSTER_PAGES: usize = 2;

/// What a thread needs to read and write objects.
pub(crate) struct Scratch {
    /// Bytes as stored, of one object.
    pub(crate) packed: Page,
    /// The aligned range of the file tier that covers one object.
    pub(crate) cluster: Box<Cluster>,
    /// Another try at the same page.
    spare: Page,
    decompressor: Option<DCtx<'static>>,
    compressor: Option<CCtx<'static>>,
}

/// An aligned buffer for one read of the file tier.
#[repr(C, align(4096))]
pub(crate) struct Cluster(pub(crate) [u8; CLUSTER_PAGES * PAGE_SIZE]);
const _: () = assert!(align_of::<Cluster>() == align_of::<PageBuffer>());

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        packed: [0; PAGE_SIZE],
        cluster: Box::new(Cluster([0; CLUSTER_PAGES * PAGE_SIZE])),
        spare: [0; PAGE_SIZE],
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
            self.decompressor = DCtx::try_create();
        }
        self.decompressor.is_some()
    }

    /// Turns `self.packed[..len]` back into a page. False when the bytes are
    /// not what the codec writes, or need a dictionary that is not there; the
    /// caller checks the content in any case.
    pub(crate) fn unpack(
        &mut self,
        codec: Codec,
        len: usize,
        dictionaries: &Dictionaries,
        out: &mut Page,
    ) -> bool {
        let packed = &self.packed[..len];
        match codec {
            Codec::Staged | Codec::Raw => {
                out.copy_from_slice(&self.packed);
                len == PAGE_SIZE
            }
            Codec::Lz4 => lz4::block::decompress_to_buffer(packed, Some(PAGE_SIZE as i32), out)
                .is_ok_and(|written| written == PAGE_SIZE),
            Codec::Zstd => {
                if !self.prepare() {
                    return false;
                }
                let (packed, Some(context)) = (&self.packed[..len], &mut self.decompressor) else {
                    return false;
                };
                let written = match dictionary_of(packed) {
                    0 => context.decompress(&mut out[..], packed),
                    id => match dictionaries.decoder(id) {
                        Some(decoder) => {
                            context.decompress_using_ddict(&mut out[..], packed, decoder)
                        }
                        None => return false,
                    },
                };
                written == Ok(PAGE_SIZE)
            }
        }
    }

    /// Compresses `page` into `self.packed` the fast way: with the dictionary
    /// where there is one and it does better than lz4 by a size class, else with
    /// lz4. Codec and length; none when neither comes below [`MAX_COMPRESSED`].
    pub(crate) fn pack_fast(
        &mut self,
        encoder: Option<&Encoder>,
        page: &Page,
    ) -> Option<(Codec, usize)> {
        let dense = encoder
            .and_then(|encoder| self.pack_dense(Some(encoder), page).map(|dense| (encoder, dense)));
        let Some((encoder, dense)) = dense else {
            return Some((Codec::Lz4, pack_lz4(page, &mut self.packed)?));
        };
        if let Some(rival) = encoder.rivals.rival_of(dense)
            && rival.is_worth_a_try()
        {
            let fast = pack_lz4(page, &mut self.spare);
            let fast = fast.filter(|&fast| SizeClass::of(fast) <= SizeClass::of(dense));
            rival.note(fast.is_some());
            if let Some(fast) = fast {
                self.packed[..fast].copy_from_slice(&self.spare[..fast]);
                return Some((Codec::Lz4, fast));
            }
        }
        Some((Codec::Zstd, dense))
    }

    /// Compresses `page` into `self.packed` with zstd, with the dictionary where
    /// there is one; the length, or none when it does not come below
    /// [`MAX_COMPRESSED`].
    pub(crate) fn pack_dense(&mut self, encoder: Option<&Encoder>, page: &Page) -> Option<usize> {
        if self.compressor.is_none() {
            self.compressor = new_compressor();
        }
        let context = self.compressor.as_mut()?;
        let out = &mut self.packed[..MAX_COMPRESSED];
        match encoder {
            Some(encoder) => context.compress_using_cdict(out, page, &encoder.prepared).ok(),
            None => context.compress2(out, page).ok(),
        }
    }
}

/// Whether lz4 does as well as a dictionary, of the pages of one kind that both were
/// tried on. Counts of two threads at once may get lost.
pub(crate) struct Rival {
    /// Of [`EVERY`] tries it wins so many: a mean that fades.
    wins: AtomicU32,
    /// Pages that were not tried, since the last that was.
    passed: AtomicU32,
}

/// One for each kind of page: by what the dictionary makes of it.
pub(crate) struct Rivals([Rival; KINDS]);

impl Rivals {
    /// As long as nothing is known every page is tried.
    pub(crate) fn new() -> Self {
        let always = || Rival { wins: AtomicU32::new(EVERY), passed: AtomicU32::new(0) };
        Self(std::array::from_fn(|_| always()))
    }

    /// For pages that the dictionary packs into so many bytes; none where lz4 is not
    /// tried at all.
    fn rival_of(&self, dense: usize) -> Option<&Rival> {
        self.0.get((dense.checked_sub(SURE_BYTES + 1)?) / SURE_BYTES)
    }
}

impl Rival {
    fn is_worth_a_try(&self) -> bool {
        let passed = self.passed.load(Relaxed) + 1;
        let tried = self.wins.load(Relaxed) >= EVERY / SELDOM || passed >= SELDOM;
        self.passed.store(if tried { 0 } else { passed }, Relaxed);
        tried
    }

    fn note(&self, won: bool) {
        let wins = self.wins.load(Relaxed);
        let won = if won { EVERY >> TRIES_SHIFT } else { 0 };
        self.wins.store(wins - (wins >> TRIES_SHIFT) + won, Relaxed);
    }
}

fn pack_lz4(page: &Page, out: &mut Page) -> Option<usize> {
    let mode = Some(lz4::block::CompressionMode::FAST(1));
    lz4::block::compress_to_buffer(page, mode, false, &mut out[..MAX_COMPRESSED]).ok()
}

/// The dictionary that a frame needs, by the frame's beginning; 0: none.
pub(crate) fn dictionary_of(frame: &[u8]) -> u32 {
    get_dict_id_from_frame(frame).map_or(0, std::num::NonZeroU32::get)
}

/// The page's length is known and its content has a checksum of ours, so the
/// frame carries neither. (With a dictionary it carries the length, which costs
/// one byte: zstd's call for prepared dictionaries asks for it.)
fn new_compressor() -> Option<CCtx<'static>> {
    let mut context = CCtx::try_create()?;
    context.set_parameter(CParameter::CompressionLevel(ZSTD_LEVEL)).ok()?;
    context.set_parameter(CParameter::ChecksumFlag(false)).ok()?;
    context.set_parameter(CParameter::ContentSizeFlag(false)).ok()?;
    Some(context)
}

/// A page's xxh3-128: its low 32 bits are the object's checksum and its name for
/// deduplication, the high 64 go into [`Fingerprint`]. The seed is the store's own
/// secret, or a tenant could choose pages that all fall into one bucket of the
/// index.
#[derive(Clone, Copy)]
pub(crate) struct Digest(u128);

impl Digest {
    pub(crate) fn of(page: &Page, seed: u64) -> Self {
        Self(xxhash_rust::xxh3::xxh3_128_with_seed(page, seed))
    }

    /// What the object table keeps.
    pub(crate) const fn hash(self) -> u32 {
        self.0 as u32
    }

    pub(crate) const fn fingerprint(self) -> Fingerprint {
        Fingerprint((self.0 >> 64) as u64)
    }
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
    use std::sync::Arc;

    use strata_sys::SharedMemory;

    use super::*;
    use crate::dictionary::testing::{records, trained};
    use crate::dictionary::{Candidate, REGION_BYTES, Region};

    fn text_page() -> Page {
        let mut page = [0; PAGE_SIZE];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = b"{\"name\":\"someone\",\"age\":31}\n"[at % 27] ^ (at / 512) as u8;
        }
        page
    }

    /// One dictionary for the pages of [`text_page`]'s kind, or none.
    fn dictionaries(count: u32) -> Dictionaries {
        let memory = SharedMemory::create("strata-test", REGION_BYTES).expect("memory");
        let dictionaries = Dictionaries::load(Region::new(Arc::new(memory), 0, 1));
        for id in 1..=count {
            dictionaries.adopt(Candidate::prepare(trained(id), id).expect("a dictionary"));
        }
        dictionaries
    }

    #[test]
    fn both_codecs_give_the_page_back() {
        let page = text_page();
        let none = dictionaries(0);
        for codec in [Codec::Lz4, Codec::Zstd] {
            with_scratch(|scratch| {
                let len = match codec {
                    Codec::Zstd => scratch.pack_dense(None, &page).expect("text compresses"),
                    _ => scratch.pack_fast(None, &page).expect("text compresses").1,
                };
                assert!(len < 2000, "{codec:?} {len}");
                assert_eq!(dictionary_of(&scratch.packed[..len]), 0);
                let mut out = [0; PAGE_SIZE];
                assert!(scratch.unpack(codec, len, &none, &mut out));
                assert!(out == page);
                assert!(!scratch.unpack(codec, len - 1, &none, &mut out) || out != page);
            });
        }
    }

    #[test]
    fn a_frame_finds_its_dictionary_and_reads_without_growing_the_context() {
        let three = dictionaries(3);
        let encoder = three.current();
        let mut page = [0; PAGE_SIZE];
        page.copy_from_slice(&records(3, 1_000_000)[..PAGE_SIZE]);
        with_scratch(|scratch| {
            let plain = scratch.pack_dense(None, &page).expect("records compress");
            let (codec, len) = scratch.pack_fast(encoder.as_deref(), &page).expect("as well");
            assert!(codec == Codec::Zstd && len < plain, "{codec:?} {len} {plain}");
            assert_eq!(dictionary_of(&scratch.packed[..FRAME_HEADER_BYTES]), 3);
            let mut out = [0; PAGE_SIZE];
            assert!(scratch.prepare());
            let size = |scratch: &Scratch| scratch.decompressor.as_ref().map(DCtx::sizeof);
            let before = size(scratch);
            for _ in 0..100 {
                assert!(scratch.unpack(codec, len, &three, &mut out) && out == page);
            }
            assert_eq!(size(scratch), before);
            // Without its dictionary, or with one that is not its own.
            assert!(!scratch.unpack(codec, len, &dictionaries(2), &mut out));
            let at = (4..FRAME_HEADER_BYTES).find(|&at| {
                scratch.packed[at] = scratch.packed[at].wrapping_sub(1);
                let found = dictionary_of(&scratch.packed[..len]) == 2;
                scratch.packed[at] = scratch.packed[at].wrapping_add(u8::from(!found));
                found
            });
            assert!(at.is_some(), "the id is in the header");
            assert!(!scratch.unpack(codec, len, &three, &mut out) || out != page);
        });
    }

    #[test]
    fn lz4_is_tried_seldom_where_it_loses_and_always_where_it_wins() {
        let rivals = Rivals::new();
        assert!(rivals.rival_of(SURE_BYTES).is_none(), "sure");
        assert!(rivals.rival_of(MAX_COMPRESSED).is_some());
        let rival = rivals.rival_of(SURE_BYTES + 1).expect("not sure");
        let tries = |pages: u32, won: bool| {
            let tried = |_: &u32| {
                let tried = rival.is_worth_a_try();
                if tried {
                    rival.note(won);
                }
                tried
            };
            (0..pages).filter(tried).count() as u32
        };
        let losing = tries(10_000, false);
        assert!((10_000 / SELDOM..1000).contains(&losing), "{losing}");
        assert_eq!(tries(SELDOM * 100, false), 100);
        // Found out by the few that are tried, then by all.
        let winning = tries(10_000, true);
        assert!(winning > 9_000, "{winning}");
        assert_eq!(tries(100, true), 100);
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
            let one = dictionaries(1).current();
            for encoder in [None, one.as_deref()] {
                assert_eq!(scratch.pack_fast(encoder, &page), None);
                assert_eq!(scratch.pack_dense(encoder, &page), None);
            }
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
