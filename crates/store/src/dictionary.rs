//! The dictionaries of a store: where they outlive the worker, and the forms
//! that zstd works with.
//!
//! A dictionary that was adopted stays for good, because objects packed with it
//! may: a frame names its dictionary in its header, so an object's word need
//! not. Which dictionary is worth adopting is decided in `train`.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};

use strata_sys::SharedMemory;
use zstd::zstd_safe::{CDict, DDict, get_dict_id_from_dict};

use crate::codec::{DICTIONARY_LEVEL, Rivals};
use crate::store::lock;

/// Dictionaries of one store, in its lifetime. Each costs about 90 KiB for good,
/// the newest 430 more for packing; one is adopted only where it saves a tenth
/// over the last, so a store that has used them all up has changed its content
/// sixteen times.
pub(crate) const MAX_DICTIONARIES: usize = 16;
/// A slot of the region: the header, then the content.
const SLOT_BYTES: u64 = 32 << 10;
const HEADER_BYTES: u64 = 64;
const LENGTH_OFFSET: u64 = 0;
const CHECKSUM_OFFSET: u64 = 8;
/// The longest dictionary, so that a slot is whole pages. On 4 KiB pages of JSON
/// records 32 KiB pack 4 % tighter than 16, and 64 not at all tighter.
pub(crate) const MAX_CONTENT_BYTES: usize = (SLOT_BYTES - HEADER_BYTES) as usize;
/// What a table's memory file holds for dictionaries.
pub(crate) const REGION_BYTES: u64 = MAX_DICTIONARIES as u64 * SLOT_BYTES;

/// Where zstd keeps a dictionary's id.
const ID_RANGE: std::ops::Range<usize> = 4..8;

/// The dictionaries' place in the object table's memory file.
pub(crate) struct Region {
    memory: Arc<SharedMemory>,
    offset: u64,
    seed: u64,
}

/// What a slot holds.
#[derive(PartialEq, Eq, Debug)]
enum Slot {
    Empty,
    /// Written whole once, and not what was written any more. Its id is never
    /// given to another dictionary: objects still name it.
    Damaged,
    Whole(Vec<u8>),
}

impl Region {
    pub(crate) fn new(memory: Arc<SharedMemory>, offset: u64, seed: u64) -> Self {
        Self { memory, offset, seed }
    }

    fn slot(&self, id: u32) -> u64 {
        assert!((1..=MAX_DICTIONARIES as u32).contains(&id), "dictionary id {id} out of range");
        self.offset + u64::from(id - 1) * SLOT_BYTES
    }

    fn checksum(&self, id: u32, content: &[u8]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(content, self.seed.wrapping_add(u64::from(id)))
    }

    fn read(&self, id: u32) -> Slot {
        let slot = self.slot(id);
        let length = self.memory.atomic_u64(slot + LENGTH_OFFSET).load(Acquire);
        if length == 0 {
            return Slot::Empty;
        }
        if length > MAX_CONTENT_BYTES as u64 {
            return Slot::Damaged;
        }
        let mut content = vec![0; length as usize];
        self.memory.read(slot + HEADER_BYTES, &mut content);
        let checksum = self.memory.atomic_u64(slot + CHECKSUM_OFFSET).load(Relaxed);
        if checksum == self.checksum(id, &content) && id_of(&content) == Some(id) {
            Slot::Whole(content)
        } else {
            Slot::Damaged
        }
    }

    /// Fills an empty slot. The length comes last: whoever dies before it has
    /// left no dictionary, whoever dies after it a whole one. `moment` is called
    /// after each step, for the test that dies there.
    fn write(&self, id: u32, content: &[u8], mut moment: impl FnMut()) {
        assert!(content.len() <= MAX_CONTENT_BYTES);
        let slot = self.slot(id);
        let half = content.len() / 2;
        self.memory.write(slot + HEADER_BYTES, &content[..half]);
        moment();
        self.memory.write(slot + HEADER_BYTES + half as u64, &content[half..]);
        moment();
        let checksum = self.checksum(id, content);
        self.memory.atomic_u64(slot + CHECKSUM_OFFSET).store(checksum, Relaxed);
        moment();
        self.memory.atomic_u64(slot + LENGTH_OFFSET).store(content.len() as u64, Release);
        moment();
    }

    /// Gives back what a dead worker may have begun to write.
    fn wipe(&self, id: u32) -> io::Result<()> {
        self.memory.punch(self.slot(id), SLOT_BYTES)
    }
}

fn id_of(content: &[u8]) -> Option<u32> {
    get_dict_id_from_dict(content).map(std::num::NonZeroU32::get)
}

/// A dictionary made ready to pack with.
pub(crate) struct Encoder {
    pub(crate) id: u32,
    pub(crate) prepared: CDict<'static>,
    pub(crate) rivals: Rivals,
}

/// A dictionary in both prepared forms, not adopted yet.
pub(crate) struct Candidate {
    content: Vec<u8>,
    decoder: DDict<'static>,
    pub(crate) encoder: Encoder,
}

impl Candidate {
    /// Prepares a trained dictionary under `id`, which its frames will name;
    /// none when zstd does not take it.
    pub(crate) fn prepare(mut content: Vec<u8>, id: u32) -> Option<Self> {
        if content.len() > MAX_CONTENT_BYTES {
            return None;
        }
        content.get_mut(ID_RANGE)?.copy_from_slice(&id.to_le_bytes());
        if id_of(&content) != Some(id) {
            return None;
        }
        let prepared = CDict::try_create(&content, DICTIONARY_LEVEL)?;
        let decoder = DDict::try_create(&content)?;
        Some(Self { content, decoder, encoder: Encoder { id, prepared, rivals: Rivals::new() } })
    }

    /// What it costs once adopted: content and prepared forms.
    pub(crate) fn cost_bytes(&self) -> u64 {
        SLOT_BYTES + (self.decoder.sizeof() + self.encoder.prepared.sizeof()) as u64
    }
}

/// All dictionaries of a store. Reading takes no lock.
pub(crate) struct Dictionaries {
    region: Region,
    /// By id − 1; set once and for good.
    decoders: [OnceLock<DDict<'static>>; MAX_DICTIONARIES],
    /// What new pages are packed with. Superseded ones go with their last user.
    current: Mutex<Option<Arc<Encoder>>>,
    /// Its id, 0 for none.
    current_id: AtomicU32,
    /// The id that the next one gets.
    next_id: AtomicU32,
    /// Bytes of the prepared forms.
    decoder_bytes: AtomicU64,
    encoder_bytes: AtomicU64,
}

impl Dictionaries {
    /// Those that a memory file holds: none in a new one. A damaged one is left
    /// out, and so is one that zstd does not take.
    pub(crate) fn load(region: Region) -> Self {
        let mut newest = None;
        let mut next_id = 1;
        let decoders = std::array::from_fn(|_| OnceLock::new());
        let decoder_bytes = AtomicU64::new(0);
        for id in 1..=MAX_DICTIONARIES as u32 {
            let content = match region.read(id) {
                Slot::Empty => continue,
                Slot::Damaged => None,
                Slot::Whole(content) => Candidate::prepare(content, id),
            };
            next_id = id + 1;
            if let Some(Candidate { decoder, encoder, .. }) = content {
                decoder_bytes.fetch_add(decoder.sizeof() as u64, Relaxed);
                let _ = decoders[id as usize - 1].set(decoder);
                newest = Some(encoder);
            }
        }
        for id in next_id..=MAX_DICTIONARIES as u32 {
            // Failing to give memory back costs memory.
            let _ = region.wipe(id);
        }
        let encoder_bytes = newest.as_ref().map_or(0, |encoder| encoder.prepared.sizeof() as u64);
        Self {
            region,
            decoders,
            current_id: AtomicU32::new(newest.as_ref().map_or(0, |encoder| encoder.id)),
            current: Mutex::new(newest.map(Arc::new)),
            next_id: AtomicU32::new(next_id),
            decoder_bytes,
            encoder_bytes: AtomicU64::new(encoder_bytes),
        }
    }

    /// What unpacks the frames that name `id`.
    pub(crate) fn decoder(&self, id: u32) -> Option<&DDict<'static>> {
        self.decoders.get((id as usize).checked_sub(1)?)?.get()
    }

    /// What new pages are to be packed with.
    pub(crate) fn current(&self) -> Option<Arc<Encoder>> {
        lock(&self.current).clone()
    }

    /// Whether there is one, without the lock.
    pub(crate) fn has_current(&self) -> bool {
        self.current_id.load(Acquire) != 0
    }

    /// The id for another one, if there is room.
    pub(crate) fn next_id(&self) -> Option<u32> {
        let id = self.next_id.load(Acquire);
        (id as usize <= MAX_DICTIONARIES).then_some(id)
    }

    /// Keeps a dictionary where it survives the worker, then packs with it. One
    /// thread at a time, with the id that [`Dictionaries::next_id`] gave it.
    pub(crate) fn adopt(&self, candidate: Candidate) {
        let Candidate { content, decoder, encoder } = candidate;
        let id = encoder.id;
        assert_eq!(self.next_id(), Some(id), "dictionaries are adopted one at a time, in order");
        self.region.write(id, &content, || ());
        self.next_id.store(id + 1, Release);
        self.decoder_bytes.fetch_add(decoder.sizeof() as u64, Relaxed);
        assert!(self.decoders[id as usize - 1].set(decoder).is_ok(), "dictionary {id} is taken");
        // Only now can anything be packed with it: what survives of an object
        // never names a dictionary that does not.
        self.encoder_bytes.store(encoder.prepared.sizeof() as u64, Relaxed);
        *lock(&self.current) = Some(Arc::new(encoder));
        self.current_id.store(id, Release);
    }

    /// How many there are to read with.
    pub(crate) fn count(&self) -> u32 {
        self.decoders.iter().filter(|decoder| decoder.get().is_some()).count() as u32
    }

    /// What zstd keeps for them in ordinary memory.
    pub(crate) fn prepared_bytes(&self) -> u64 {
        self.decoder_bytes.load(Relaxed) + self.encoder_bytes.load(Relaxed)
    }

    /// What they cost altogether: the slots that were written, too.
    pub(crate) fn bytes(&self) -> u64 {
        let slots = u64::from(self.next_id.load(Relaxed) - 1);
        slots * SLOT_BYTES + self.prepared_bytes()
    }
}

/// Dictionaries for tests.
#[cfg(test)]
pub(crate) mod testing {
    use std::sync::OnceLock;

    use super::MAX_CONTENT_BYTES;

    /// More than a page of sentences: what pages of a `flavour` have in common
    /// is not what one of them repeats.
    pub(crate) fn records(flavour: u32, page: u32) -> Vec<u8> {
        let mix = |value: u32| value.wrapping_mul(2_654_435_761).rotate_left(15) ^ value;
        let sentence = |line: u32| {
            let number = flavour * 1000 + mix(page * 100 + line) % 300;
            (1..8)
                .map(|word| format!("{:x} ", mix(mix(number).wrapping_add(word))))
                .collect::<String>()
        };
        (0..100).map(sentence).collect::<String>().into_bytes()
    }

    /// A dictionary of such records. `flavour` is 1 to 3.
    pub(crate) fn trained(flavour: u32) -> Vec<u8> {
        static TRAINED: [OnceLock<Vec<u8>>; 3] = [const { OnceLock::new() }; 3];
        let train = || {
            let pages: Vec<Vec<u8>> = (0..100).map(|page| records(flavour, page)).collect();
            zstd::dict::from_samples(&pages, MAX_CONTENT_BYTES).expect("trained")
        };
        TRAINED[flavour as usize - 1].get_or_init(train).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::trained;
    use super::*;

    const SEED: u64 = 77;

    fn memory() -> Arc<SharedMemory> {
        Arc::new(SharedMemory::create("strata-test", REGION_BYTES).expect("memory"))
    }

    fn load(memory: &Arc<SharedMemory>) -> Dictionaries {
        Dictionaries::load(Region::new(Arc::clone(memory), 0, SEED))
    }

    #[test]
    fn a_death_at_any_step_leaves_none_or_all_of_a_dictionary() {
        let original = memory();
        let dictionaries = load(&original);
        dictionaries.adopt(Candidate::prepare(trained(1), 1).expect("a dictionary"));
        let second = Candidate::prepare(trained(2), 2).expect("a dictionary");
        let mut seen = Vec::new();
        Region::new(Arc::clone(&original), 0, SEED).write(2, &second.content, || {
            // The next worker's view of what is there now.
            let copy = memory();
            let mut bytes = vec![0; REGION_BYTES as usize];
            original.read(0, &mut bytes);
            copy.write(0, &bytes);
            let recovered = load(&copy);
            assert!(recovered.decoder(1).is_some());
            let current = recovered.current().expect("one was whole").id;
            assert_eq!(recovered.decoder(2).is_some(), current == 2);
            assert_eq!(recovered.next_id(), Some(current + 1));
            // Another one fits there, whatever was left behind.
            let content = trained(3);
            let next = Candidate::prepare(content, current + 1).expect("a dictionary");
            recovered.adopt(next);
            assert_eq!(load(&copy).count(), current + 1);
            seen.push(current);
        });
        assert_eq!(seen, [1, 1, 1, 2]);
    }

    #[test]
    fn a_damaged_one_is_left_out_and_its_id_not_used_again() {
        let whole = Candidate::prepare(trained(1), 1).expect("a dictionary").content;
        let length = whole.len() as u64;
        for (at, bit) in [(0, 1), (8, 1), (HEADER_BYTES, 1), (HEADER_BYTES + length - 1, 0x80)] {
            let memory = memory();
            let dictionaries = load(&memory);
            for id in 1..=3 {
                dictionaries.adopt(Candidate::prepare(trained(id), id).expect("a dictionary"));
            }
            let mut byte = [0];
            memory.read(2 * SLOT_BYTES + at, &mut byte);
            memory.write(2 * SLOT_BYTES + at, &[byte[0] ^ bit]);
            let recovered = load(&memory);
            assert!(recovered.decoder(3).is_none(), "damage at {at}");
            assert_eq!(recovered.current().expect("the one before").id, 2);
            assert_eq!((recovered.count(), recovered.next_id()), (2, Some(4)));
        }
        // A dictionary in another's place is damage too.
        let memory = memory();
        load(&memory).adopt(Candidate::prepare(trained(1), 1).expect("a dictionary"));
        let mut slot = vec![0; SLOT_BYTES as usize];
        memory.read(0, &mut slot);
        memory.write(SLOT_BYTES, &slot);
        assert_eq!(load(&memory).count(), 1);
    }

    #[test]
    fn sixteen_and_no_more() {
        let memory = memory();
        let dictionaries = load(&memory);
        let content = trained(1);
        for id in 1..=MAX_DICTIONARIES as u32 {
            assert_eq!(dictionaries.next_id(), Some(id));
            dictionaries.adopt(Candidate::prepare(content.clone(), id).expect("a dictionary"));
        }
        assert_eq!(dictionaries.next_id(), None);
        assert_eq!(dictionaries.count(), MAX_DICTIONARIES as u32);
        let recovered = load(&memory);
        assert_eq!(recovered.next_id(), None);
        assert_eq!(recovered.bytes(), dictionaries.bytes());
        assert!(recovered.bytes() >= memory.allocated_bytes().expect("fstat"));
        assert!(recovered.decoder(0).is_none() && recovered.decoder(17).is_none());
    }

    #[test]
    fn what_was_only_begun_costs_nothing_after_recovery() {
        let memory = memory();
        memory.write(5 * SLOT_BYTES + HEADER_BYTES, &[1; 9000]);
        assert!(memory.allocated_bytes().expect("fstat") > 0);
        assert_eq!(load(&memory).count(), 0);
        assert_eq!(memory.allocated_bytes().expect("fstat"), 0);
    }
}
