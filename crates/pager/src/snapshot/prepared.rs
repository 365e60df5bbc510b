//! Page maps of processes to come: copies of a snapshot's, each stored page of which
//! has gained a reference. They are made while somebody makes the process, or ahead of
//! that, so that nobody waits for them: that costs 10 bytes a page, and its
//! references are nobody's in the store's statistics.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, available_parallelism};

use strata_store::Retained;
use strata_units::{LeafIndex, PAGES_PER_LEAF, PageId, SpaceId};

use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::page_map::Piece;
use crate::tenant::Tenant;
use crate::tenant::snapshots::{MapCopy, Memory};

/// Threads that copy a page map: mostly each waits for memory, because counts of
/// references lie far apart.
const MOST_COPIERS: usize = 4;
/// Leaves that one of them takes at a time; few, because whoever makes the process
/// has the same CPUs.
const PART: usize = 8;

/// The page map of a process that is about to be restored. Dropped, it was not
/// needed.
pub struct Prepared {
    tenant: Arc<Tenant>,
    slot: SpaceId,
    directory: BTreeMap<Piece, LeafIndex>,
    taken: bool,
}

impl Prepared {
    pub(crate) fn slot(&self) -> SpaceId {
        self.slot
    }

    /// Once.
    pub(crate) fn take_directory(&mut self) -> BTreeMap<Piece, LeafIndex> {
        std::mem::take(&mut self.directory)
    }

    /// The slot is a process's from now on.
    pub(crate) fn keep(mut self) {
        self.taken = true;
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.taken {
            self.tenant.forget_slot(self.slot);
        }
    }
}

impl Tenant {
    /// Copies the page map of the snapshot `memory` of `origin`, which this tenant
    /// shares its pages with, for a process to come; takes the one that is ready,
    /// where there is one.
    ///
    /// # Errors
    /// There is no such snapshot, or no room.
    ///
    /// # Panics
    /// When they do not share their pages.
    pub fn prepare_restore(
        self: &Arc<Self>,
        origin: &Self,
        memory: SpaceId,
    ) -> io::Result<Prepared> {
        assert!(Arc::ptr_eq(&self.map, &origin.map), "it was made beside its origin");
        let known = lock(&origin.snapshots).get(&memory).cloned();
        let known = known.ok_or_else(|| io::Error::other("there is no such snapshot"))?;
        let is_own = self.id == origin.id;
        let ready = if is_own { self.take_ready(memory) } else { None };
        let copied = match ready {
            Some(ready) => ready,
            None => {
                let threads = available_parallelism().map_or(1, NonZero::get).min(MOST_COPIERS);
                self.copy_map(&known, is_own, threads)?
            }
        };
        let MapCopy { slot, directory, .. } = copied;
        Ok(Prepared { tenant: Arc::clone(self), slot, directory, taken: false })
    }

    /// Has page maps for these of its snapshots ready, and for no others.
    ///
    /// # Errors
    /// There is no room.
    pub fn keep_ready(&self, memories: &[SpaceId]) -> io::Result<()> {
        self.forget_ready_but(memories);
        for &memory in memories {
            let known = lock(&self.snapshots).get(&memory).cloned();
            let Some(known) = known.filter(|_| !self.is_ready(memory)) else { continue };
            // Nobody waits for it.
            let copied = self.copy_map(&known, true, 1)?;
            self.store.set_aside(copied.retained);
            lock(&self.ready).insert(memory, copied);
            // Whoever removes the snapshot waits for us, its readers, and forgets this
            // then; but it was removed before we looked, or the tenant has ended.
            if self.has_ended() || !self.has_snapshot_memory(memory) {
                self.forget_ready(memory);
            }
            drop(known);
        }
        Ok(())
    }

    fn take_ready(&self, memory: SpaceId) -> Option<MapCopy> {
        let copied = lock(&self.ready).remove(&memory)?;
        self.store.count_again(copied.retained);
        Some(copied)
    }

    pub(crate) fn forget_ready(&self, memory: SpaceId) {
        if let Some(copied) = self.take_ready(memory) {
            self.forget_slot(copied.slot);
        }
    }

    pub(crate) fn forget_ready_but(&self, kept: &[SpaceId]) {
        let others: Vec<_> =
            lock(&self.ready).keys().filter(|memory| !kept.contains(memory)).copied().collect();
        others.into_iter().for_each(|memory| self.forget_ready(memory));
    }

    fn forget_slot(&self, slot: SpaceId) {
        self.forget_leaves(slot);
        self.registry.remove_space(slot);
    }

    /// Copies a snapshot's page map. `with_ages`: the tenant's time is that of the
    /// snapshot.
    fn copy_map(&self, known: &Memory, with_ages: bool, threads: usize) -> io::Result<MapCopy> {
        let slot = self
            .registry
            .add_space(self.id, None)
            .ok_or_else(|| io::Error::other("this daemon manages 8192 processes already"))?;
        let mut directory = BTreeMap::new();
        let mut leaves = Vec::with_capacity(known.directory.len());
        for (&piece, &leaf) in &known.directory {
            let Some(target) = self.map.take(slot, piece) else {
                self.forget_slot(slot);
                return Err(io::Error::other("its page map is full"));
            };
            directory.insert(piece, target);
            leaves.push((leaf, target));
        }
        let parts: Vec<_> = leaves.chunks(PART).collect();
        let next = AtomicUsize::new(0);
        let retained = Mutex::new(Retained::default());
        let copy = || {
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let part = self.copy_leaves(part, with_ages);
                *lock(&retained) += part;
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads.min(parts.len()) {
                // Without it there is one less.
                let _ = thread::Builder::new().name("prepare".into()).spawn_scoped(scope, copy);
            }
            copy();
        });
        let retained = *lock(&retained);
        Ok(MapCopy { slot, directory, retained })
    }

    /// Copies each first leaf to the second.
    fn copy_leaves(&self, leaves: &[(LeafIndex, LeafIndex)], with_ages: bool) -> Retained {
        let mut entries = Vec::with_capacity(PAGES_PER_LEAF);
        let mut handles = Vec::with_capacity(PAGES_PER_LEAF);
        let mut retained = Retained::default();
        for &(leaf, target) in leaves {
            entries.clear();
            entries.extend(leaf.pages().map(|page| self.map.get(page)));
            handles.clear();
            handles.extend(entries.iter().filter_map(|&entry| match entry {
                Entry::Stored(handle) => Some(handle),
                _ => None,
            }));
            retained += self.store.retain_all(&handles);
            for (index, &entry) in entries.iter().enumerate() {
                let (from, to) = (PageId::new(leaf, index), PageId::new(target, index));
                let copy = match entry {
                    Entry::Untouched => continue,
                    Entry::Stored(_) => entry,
                    // Its content is not known: whoever touches it is told.
                    _ => Entry::Lost,
                };
                if with_ages {
                    let age = self.map.age(from).load(Ordering::Relaxed);
                    self.map.age(to).store(age, Ordering::Relaxed);
                }
                self.map.set(to, copy);
            }
        }
        retained
    }
}
