//! Page maps of processes to come: copies of a snapshot's, each stored page of which
//! has gained a reference. They are made while somebody makes the process, or ahead of
//! that, so that nobody waits for them: that costs 10 bytes a page, and its
//! references are nobody's in the store's statistics.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use strata_store::Retained;
use strata_units::{PAGES_PER_LEAF, PageId, SpaceId};

use crate::map::by_many::{self, by_many};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::{LeafPair, Object};
use crate::tenant::Tenant;
use crate::tenant::snapshots::{MapCopy, Prepared};

/// Leaves that a thread takes at a time; few, because whoever makes the process has the
/// same CPUs.
const PART: usize = 8;

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
            None => self.copy_map(&known, is_own, by_many::threads())?,
        };
        Ok(Prepared::of(self, copied))
    }

    /// The same for memory that goes to another address ([`Tenant::fill`]): its leaves
    /// change their owner then, and so what is ready of `origin` serves any tenant.
    ///
    /// # Errors
    /// As it.
    ///
    /// # Panics
    /// As it.
    pub fn prepare_fill(
        self: &Arc<Self>,
        origin: &Arc<Self>,
        memory: SpaceId,
    ) -> io::Result<Prepared> {
        match origin.take_ready(memory) {
            Some(ready) => Ok(Prepared::of(origin, ready)),
            None => self.prepare_restore(origin, memory),
        }
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
            self.forget_slot(copied.object.id());
        }
    }

    pub(crate) fn forget_ready_but(&self, kept: &[SpaceId]) {
        let others: Vec<_> =
            lock(&self.ready).keys().filter(|memory| !kept.contains(memory)).copied().collect();
        others.into_iter().for_each(|memory| self.forget_ready(memory));
    }

    /// Copies a snapshot's page map. `with_ages`: the tenant's time is that of the
    /// snapshot.
    fn copy_map(&self, known: &Object, with_ages: bool, threads: usize) -> io::Result<MapCopy> {
        let slot = self
            .registry
            .add_space(self.id, None)
            .ok_or_else(|| io::Error::other("this daemon manages 8192 processes already"))?;
        let Some((object, leaves)) = known.shaped_like(&self.map, slot) else {
            self.forget_slot(slot);
            return Err(io::Error::other("its page map is full"));
        };
        let parts: Vec<_> = leaves.chunks(PART).collect();
        let copied = by_many(threads, &parts, |part| self.copy_leaves(part, with_ages));
        let mut retained = Retained::default();
        copied.into_iter().for_each(|part| retained += part);
        Ok(MapCopy { object, retained })
    }

    /// Copies each first leaf to the second.
    fn copy_leaves(&self, leaves: &[LeafPair], with_ages: bool) -> Retained {
        let mut entries = Vec::with_capacity(PAGES_PER_LEAF);
        let mut handles = Vec::with_capacity(PAGES_PER_LEAF);
        let mut retained = Retained::default();
        for &(_, leaf, target) in leaves {
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
