//! The page map: 8 bytes of [`Entry`] and 2 bytes of policy for every managed
//! page, in leaves of 512 (an aligned 2 MiB piece of one address space), in
//! memory files that outlive the worker. The page map is the truth; everything
//! else is rebuilt from it.
//!
//! A leaf's owner word is stored last when it is taken (its entries are zero by
//! then) and cleared first when it is given back.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use strata_sys::{Priority, SharedMemory, adopt_fd, log};
use strata_units::{LeafIndex, PAGES_PER_LEAF, PageId, SpaceId};

use crate::map::entry::Entry;

const ENTRY_BYTES: u64 = 8;
const AGE_BYTES: u64 = 2;
const OWNER_BYTES: u64 = 8;
const LEAF_ENTRIES_BYTES: u64 = ENTRY_BYTES * PAGES_PER_LEAF as u64;
const LEAF_AGES_BYTES: u64 = AGE_BYTES * PAGES_PER_LEAF as u64;
/// A page id is 32 bits: 16 TiB of managed memory a tenant.
const MOST_LEAVES: u64 = 1 << 23;
/// A small machine's tenants may still reserve much and touch little.
const LEAST_LEAVES: u64 = 1 << 16;
/// Managed memory a tenant may have, in machines.
const MACHINES: u64 = 32;
/// The owners' file begins with the number of leaves that were ever in use.
const HEADER_WORDS: u64 = 1;

/// Bytes of address space that one leaf describes.
const LEAF_SPAN_BYTES: u64 = (PAGES_PER_LEAF * strata_units::PAGE_SIZE) as u64;
/// Bytes of Strata memory that one leaf costs.
pub(crate) const LEAF_BYTES: u64 = LEAF_ENTRIES_BYTES + LEAF_AGES_BYTES + OWNER_BYTES;

/// The number of an aligned 2 MiB piece of an address space.
pub(crate) type Piece = u32;

/// What a leaf's owner word says.
fn owner_of(space: SpaceId, piece: Piece) -> u64 {
    (u64::from(space.0) + 1) << 32 | u64::from(piece)
}

#[derive(Debug, Default)]
struct Free {
    /// Leaves below this were in use at some time.
    next: u32,
    /// Leaves that can be used again.
    list: Vec<LeafIndex>,
}

#[derive(Debug)]
pub(crate) struct PageMap {
    entries: SharedMemory,
    ages: SharedMemory,
    owners: SharedMemory,
    free: Mutex<Free>,
}

impl PageMap {
    pub(crate) fn create() -> io::Result<Self> {
        let machine_leaves = strata_sys::total_bytes()? / LEAF_SPAN_BYTES;
        let leaves = (machine_leaves * MACHINES).clamp(LEAST_LEAVES, MOST_LEAVES);
        Ok(Self {
            entries: SharedMemory::create("strata-map", leaves * LEAF_ENTRIES_BYTES)?,
            ages: SharedMemory::create("strata-ages", leaves * LEAF_AGES_BYTES)?,
            owners: SharedMemory::create("strata-owners", (leaves + HEADER_WORDS) * OWNER_BYTES)?,
            free: Mutex::default(),
        })
    }

    fn most_leaves(&self) -> u64 {
        self.entries.len_bytes() / LEAF_ENTRIES_BYTES
    }

    /// Numbers of the descriptors, for [`Self::attach`].
    pub(crate) fn fds(&self) -> Vec<RawFd> {
        self.files().map(|file| file.as_raw_fd()).to_vec()
    }

    pub(crate) fn files(&self) -> [BorrowedFd<'_>; 3] {
        [&self.entries, &self.ages, &self.owners].map(|file| file.as_fd())
    }

    /// Maps an earlier worker's files again.
    pub(crate) fn attach(fds: &[RawFd]) -> io::Result<Self> {
        let files = fds.iter().map(|&fd| adopt_fd(fd)).collect::<Option<Vec<OwnedFd>>>();
        Self::of_files(files.unwrap_or_default())
    }

    /// The same, of descriptors that are the caller's.
    pub(crate) fn of_files(files: Vec<OwnedFd>) -> io::Result<Self> {
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "a page map file is gone");
        let mut files = files.into_iter();
        let mut next = || SharedMemory::from_fd(files.next().ok_or_else(missing)?);
        let this =
            Self { entries: next()?, ages: next()?, owners: next()?, free: Mutex::default() };
        let next = this.high_water().load(Ordering::Acquire).min(this.most_leaves()) as u32;
        let mut free = Free { next, list: Vec::new() };
        for leaf in (0..next).map(LeafIndex) {
            if this.owner(leaf).is_none() {
                // A worker killed while it gave the leaf back left entries.
                this.owner_word(leaf).store(0, Ordering::Release);
                this.clear(leaf)?;
                free.list.push(leaf);
            }
        }
        *this.free.lock().unwrap_or_else(PoisonError::into_inner) = free;
        Ok(this)
    }

    fn high_water(&self) -> &AtomicU64 {
        self.owners.atomic_u64(0)
    }

    fn owner_word(&self, leaf: LeafIndex) -> &AtomicU64 {
        self.owners.atomic_u64((u64::from(leaf.0) + HEADER_WORDS) * OWNER_BYTES)
    }

    /// Every leaf in use, with its space and piece.
    pub(crate) fn leaves(&self) -> Vec<(LeafIndex, SpaceId, Piece)> {
        let next = self.free.lock().unwrap_or_else(PoisonError::into_inner).next;
        (0..next)
            .map(LeafIndex)
            .filter_map(|leaf| {
                let (space, piece) = self.owner(leaf)?;
                Some((leaf, space, piece))
            })
            .collect()
    }

    /// The leaves in use among `count` from number `from` on, perhaps none of
    /// them. None: no leaf has been in use from there on.
    pub(crate) fn leaf_range(&self, from: usize, count: usize) -> Option<Vec<LeafIndex>> {
        let next = self.free.lock().unwrap_or_else(PoisonError::into_inner).next as usize;
        (from < next).then(|| {
            (from..(from + count).min(next))
                .map(|leaf| LeafIndex(leaf as u32))
                .filter(|&leaf| self.owner(leaf).is_some())
                .collect()
        })
    }

    /// The space and piece of a leaf; none while it is free, or its owner is no space.
    pub(crate) fn owner(&self, leaf: LeafIndex) -> Option<(SpaceId, Piece)> {
        let word = self.owner_word(leaf).load(Ordering::Acquire);
        let space = ((word >> 32) as u32).checked_sub(1)?;
        Some((SpaceId(space), word as u32))
    }

    /// Takes a leaf, all of whose pages are untouched. None: the tenant manages
    /// as much as its page map can hold.
    pub(crate) fn take(&self, space: SpaceId, piece: Piece) -> Option<LeafIndex> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let leaf = match free.list.pop() {
            Some(leaf) => leaf,
            None => {
                let leaf = free.next;
                if u64::from(leaf) >= self.most_leaves() {
                    return None;
                }
                self.high_water().store(u64::from(leaf) + 1, Ordering::Release);
                free.next = leaf + 1;
                LeafIndex(leaf)
            }
        };
        self.hand_over(leaf, space, piece);
        Some(leaf)
    }

    /// Gives a leaf, with all of its pages, to another space, or another piece of one.
    pub(crate) fn hand_over(&self, leaf: LeafIndex, space: SpaceId, piece: Piece) {
        self.owner_word(leaf).store(owner_of(space, piece), Ordering::Release);
    }

    /// Has the memory of the next `count` leaves ready, so that whoever takes them
    /// does not wait for it. Until they are taken nobody counts it.
    pub(crate) fn prepare(&self, count: usize) -> io::Result<()> {
        let (again, next) = {
            let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let again: Vec<LeafIndex> = free.list.iter().rev().take(count).copied().collect();
            (again, u64::from(free.next))
        };
        let new = ((count - again.len()) as u64).min(self.most_leaves() - next);
        let again = again.into_iter().map(|leaf| (u64::from(leaf.0), 1));
        for (leaf, count) in again.chain([(next, new)].into_iter().filter(|_| new > 0)) {
            self.entries.populate(leaf * LEAF_ENTRIES_BYTES, count * LEAF_ENTRIES_BYTES)?;
            self.ages.populate(leaf * LEAF_AGES_BYTES, count * LEAF_AGES_BYTES)?;
        }
        Ok(())
    }

    /// Gives a leaf back. The caller has released what its entries held.
    pub(crate) fn give_back(&self, leaf: LeafIndex) {
        self.owner_word(leaf).store(0, Ordering::Release);
        if let Err(error) = self.clear(leaf) {
            // Not used again, then: its entries may not be zero.
            log(
                Priority::Warning,
                format_args!("a leaf of the page map cannot be given back: {error}"),
            );
            return;
        }
        self.free.lock().unwrap_or_else(PoisonError::into_inner).list.push(leaf);
    }

    fn clear(&self, leaf: LeafIndex) -> io::Result<()> {
        // One file-system page each: punching gives the memory back, and the
        // hole reads as zero.
        self.entries.punch(u64::from(leaf.0) * LEAF_ENTRIES_BYTES, LEAF_ENTRIES_BYTES)?;
        self.ages.write(u64::from(leaf.0) * LEAF_AGES_BYTES, &[0; LEAF_AGES_BYTES as usize]);
        Ok(())
    }

    /// Leaves in use.
    pub(crate) fn leaf_count(&self) -> u64 {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        u64::from(free.next) - free.list.len() as u64
    }

    pub(crate) fn get(&self, page: PageId) -> Entry {
        Entry::decode(self.word(page).load(Ordering::Acquire))
    }

    pub(crate) fn set(&self, page: PageId, entry: Entry) {
        self.word(page).store(entry.encode(), Ordering::Release);
    }

    /// Changes an entry only from `from`; whether it did.
    pub(crate) fn replace(&self, page: PageId, from: Entry, to: Entry) -> bool {
        self.word(page)
            .compare_exchange(from.encode(), to.encode(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Whether a page of `leaf` is on its way out.
    pub(crate) fn has_leaving(&self, leaf: LeafIndex) -> bool {
        let mut words = [0; LEAF_ENTRIES_BYTES as usize];
        self.entries.read(u64::from(leaf.0) * LEAF_ENTRIES_BYTES, &mut words);
        let words = words.as_chunks().0.iter().map(|&word| u64::from_ne_bytes(word));
        words.fold(false, |any, word| any | Entry::is_leaving(word))
    }

    /// All pages of `leaf`, which is new, are pending, and as old as those of `like`.
    pub(crate) fn set_pending(&self, leaf: LeafIndex, like: Option<LeafIndex>) {
        let pending = [Entry::Pending.encode().to_ne_bytes(); PAGES_PER_LEAF];
        self.entries.write(u64::from(leaf.0) * LEAF_ENTRIES_BYTES, pending.as_flattened());
        if let Some(like) = like {
            let mut ages = [0; LEAF_AGES_BYTES as usize];
            self.ages.read(u64::from(like.0) * LEAF_AGES_BYTES, &mut ages);
            self.ages.write(u64::from(leaf.0) * LEAF_AGES_BYTES, &ages);
        }
    }

    fn word(&self, page: PageId) -> &AtomicU64 {
        self.entries.atomic_u64(u64::from(page.0) * ENTRY_BYTES)
    }

    /// The policy's two bytes.
    pub(crate) fn age(&self, page: PageId) -> &AtomicU16 {
        self.ages.atomic_u16(u64::from(page.0) * AGE_BYTES)
    }
}
