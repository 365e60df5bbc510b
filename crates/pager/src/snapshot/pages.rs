//! Snapshots' memory, read out page by page and taken in again.

use std::io;

use strata_store::Put;
use strata_units::{ADDRESSES_END, Handle, PAGES_PER_LEAF, PageBuffer, PageId, SpaceId};

use crate::map::address::address_of;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::Object;
use crate::tenant::Tenant;

/// Says the next page's address and its handle, with a reference; none: that was the last.
pub(super) type NextPage<'a> = &'a mut dyn FnMut() -> io::Result<Option<(u64, Handle)>>;

impl Tenant {
    /// Calls `each(address, page)` for the pages of the snapshot `memory` that
    /// are not zero, in order of their addresses.
    ///
    /// # Errors
    /// A page cannot be read; or what `each` says.
    pub fn read_snapshot(
        &self,
        memory: SpaceId,
        mut each: impl FnMut(u64, &PageBuffer) -> io::Result<()>,
    ) -> io::Result<()> {
        let known = lock(&self.snapshots).get(&memory).cloned();
        let known = known.ok_or_else(|| io::Error::other("there is no such snapshot"))?;
        let mut buffer = PageBuffer::zeroed();
        for (address, page) in known.pages() {
            let lost = |why: String| {
                io::Error::other(format!("the page at {address:#x} cannot be read: {why}"))
            };
            match self.map.get(page) {
                Entry::Untouched => {}
                Entry::Stored(handle) => {
                    self.store
                        .get(handle, &mut buffer.0)
                        .map_err(|error| lost(error.to_string()))?;
                    each(address, &buffer)?;
                }
                _ => return Err(lost("it was lost before".into())),
            }
        }
        Ok(())
    }

    /// Calls `each(address, page)` for the pages of the snapshot `memory` that are not
    /// what they are in `before` (none: nothing), in order of their addresses; without a page
    /// where there is none any more. Both are of one tenant: content that was not written
    /// since has one handle in both. Pages of which `is_carried` says so were taken elsewhere
    /// as they were read.
    ///
    /// # Errors
    /// A page cannot be read; or what `each` says.
    pub fn read_changes(
        &self,
        before: Option<SpaceId>,
        memory: SpaceId,
        is_carried: impl Fn(u64) -> bool,
        mut each: impl FnMut(u64, Option<&PageBuffer>) -> io::Result<()>,
    ) -> io::Result<()> {
        let known = |id| {
            let known = lock(&self.snapshots).get(&id).cloned();
            known.ok_or_else(|| io::Error::other("there is no such snapshot"))
        };
        let (before, after) = (before.map(known).transpose()?, known(memory)?);
        let mut buffer = PageBuffer::zeroed();
        for (piece, leaves) in after.beside(before.as_deref()) {
            for index in 0..PAGES_PER_LEAF {
                let [old, new] = leaves.map(|leaf| {
                    leaf.map_or(Entry::Untouched, |leaf| self.map.get(PageId::new(leaf, index)))
                });
                let address = address_of(piece, index);
                let lost = |why: String| {
                    io::Error::other(format!("the page at {address:#x} cannot be read: {why}"))
                };
                match new {
                    Entry::Lost if is_carried(address) => {}
                    Entry::Lost => return Err(lost("it was lost before".into())),
                    _ if new == old => {}
                    Entry::Untouched => each(address, None)?,
                    Entry::Stored(handle) => {
                        self.store
                            .get(handle, &mut buffer.0)
                            .map_err(|error| lost(error.to_string()))?;
                        each(address, Some(&buffer))?;
                    }
                    _ => return Err(lost("it was lost before".into())),
                }
            }
        }
        Ok(())
    }

    /// Takes pages into the memory `id` of a snapshot that nobody restores yet, in the
    /// places of those that are there; `gone`, first bytes and ends, are not there any more.
    ///
    /// # Errors
    /// As for [`Self::import_memory`]: nothing is left of it then.
    pub fn update_memory(
        &self,
        id: SpaceId,
        gone: &[(u64, u64)],
        mut next: impl FnMut(&mut PageBuffer) -> io::Result<Option<u64>>,
    ) -> io::Result<()> {
        let mut buffer = PageBuffer::zeroed();
        self.take_in_over(id, gone, &mut || self.stored(&mut buffer, &mut next))
    }

    /// The same with pages that `next` names.
    pub(super) fn take_in_over(
        &self,
        id: SpaceId,
        gone: &[(u64, u64)],
        next: NextPage<'_>,
    ) -> io::Result<()> {
        let known = lock(&self.snapshots).get(&id).cloned();
        let known = known.ok_or_else(|| io::Error::other("there is no such snapshot"))?;
        self.forget_ready(id);
        let mut object = Object::clone(&known);
        drop(known);
        self.forget_pages(&object, gone);
        let outcome = self.take_pages_in(&mut object, next);
        self.know_snapshot(object);
        if outcome.is_err() {
            self.remove_snapshot_memory(id);
        }
        outcome
    }

    fn forget_pages(&self, object: &Object, gone: &[(u64, u64)]) {
        for (address, page) in object.pages() {
            // In order, and without overlaps.
            let after = gone.partition_point(|&(start, _)| start <= address);
            let is_gone = after > 0 && address < gone[after - 1].1;
            let entry = self.map.get(page);
            if is_gone && entry != Entry::Untouched {
                self.overwrite(page, entry, Entry::Untouched);
            }
        }
    }

    /// Takes in the memory of one process of a snapshot. `next` fills the buffer
    /// and says where the page belongs; none: that was the last.
    ///
    /// # Errors
    /// What `next` says; or there is no room. Nothing is left of it then.
    pub fn import_memory(
        &self,
        mut next: impl FnMut(&mut PageBuffer) -> io::Result<Option<u64>>,
    ) -> io::Result<SpaceId> {
        let mut buffer = PageBuffer::zeroed();
        self.take_in(&mut || self.stored(&mut buffer, &mut next))
    }

    /// Stores the next page that is brought.
    fn stored(
        &self,
        buffer: &mut PageBuffer,
        next: &mut dyn FnMut(&mut PageBuffer) -> io::Result<Option<u64>>,
    ) -> io::Result<Option<(u64, Handle)>> {
        let Some(address) = next(buffer)? else { return Ok(None) };
        let handle = self.store.put(&buffer.0, Put::Fast).map_err(io::Error::other)?;
        Ok(Some((address, handle)))
    }

    /// Makes a snapshot of an address space of the pages that `next` names, each with a
    /// reference.
    pub(super) fn take_in(&self, next: NextPage<'_>) -> io::Result<SpaceId> {
        let id = self.registry.add_space(self.id, None);
        let id = id.ok_or_else(|| {
            io::Error::other("this daemon has 8192 processes and snapshots already")
        })?;
        let mut object = Object::new(id);
        let outcome = self.take_pages_in(&mut object, next);
        if let Err(error) = outcome {
            self.forget_leaves(id);
            self.registry.remove_space(id);
            return Err(error);
        }
        self.know_snapshot(object);
        self.registry.snapshot_is_whole(id);
        Ok(id)
    }

    fn take_pages_in(&self, object: &mut Object, next: NextPage<'_>) -> io::Result<()> {
        while let Some((address, handle)) = next()? {
            let page = self.place_in(object, address);
            let page = page.inspect_err(|_| self.store.release(handle))?;
            self.overwrite(page, self.map.get(page), Entry::Stored(handle));
        }
        Ok(())
    }

    fn place_in(&self, object: &mut Object, address: u64) -> io::Result<PageId> {
        if address >= ADDRESSES_END {
            return Err(io::Error::other("a page of it has no address that a program can have"));
        }
        let page = object.page_or_new(&self.map, address);
        page.ok_or_else(|| io::Error::other("the page map is full"))
    }
}
