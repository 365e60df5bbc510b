//! Snapshots' memory, read out page by page and taken in again.

use std::io;

use strata_store::Put;
use strata_units::{Handle, PAGES_PER_LEAF, PageBuffer, PageId, PageNumber, SpaceId};

use crate::map::address::{address_of, piece_of};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::snapshots::Memory;

/// Highest address that a managed process can have (47 bits).
const HIGHEST: u64 = (1 << 47) - 1;

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
        for (&piece, &leaf) in &known.directory {
            for index in 0..PAGES_PER_LEAF {
                let address = address_of(piece, index);
                let lost = |why: String| {
                    io::Error::other(format!("the page at {address:#x} cannot be read: {why}"))
                };
                match self.map.get(PageId::new(leaf, index)) {
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
        }
        Ok(())
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
        self.take_in(&mut || {
            let Some(address) = next(&mut buffer)? else { return Ok(None) };
            let handle = self.store.put(&buffer.0, Put::Fast).map_err(io::Error::other)?;
            Ok(Some((address, handle)))
        })
    }

    /// Makes a snapshot of an address space of the pages that `next` names, each with a
    /// reference.
    pub(super) fn take_in(&self, next: NextPage<'_>) -> io::Result<SpaceId> {
        let id = self.registry.add_space(self.id, None);
        let id = id.ok_or_else(|| {
            io::Error::other("this daemon has 8192 processes and snapshots already")
        })?;
        let mut memory = Memory::default();
        let outcome = self.take_pages_in(id, &mut memory, next);
        if let Err(error) = outcome {
            self.forget_leaves(id);
            self.registry.remove_space(id);
            return Err(error);
        }
        self.know_snapshot(id, memory.directory);
        self.registry.snapshot_is_whole(id);
        Ok(id)
    }

    fn take_pages_in(
        &self,
        id: SpaceId,
        memory: &mut Memory,
        next: NextPage<'_>,
    ) -> io::Result<()> {
        while let Some((address, handle)) = next()? {
            let page = self.place_in(id, memory, address);
            let page = page.inspect_err(|_| self.store.release(handle))?;
            self.overwrite(page, self.map.get(page), Entry::Stored(handle));
        }
        Ok(())
    }

    fn place_in(&self, id: SpaceId, memory: &mut Memory, address: u64) -> io::Result<PageId> {
        if address > HIGHEST {
            return Err(io::Error::other("a page of it has no address that a program can have"));
        }
        let page = PageNumber::containing(address);
        let piece = piece_of(page);
        let leaf = match memory.directory.get(&piece) {
            Some(&leaf) => leaf,
            None => {
                let leaf = self.map.take(id, piece);
                let leaf = leaf.ok_or_else(|| io::Error::other("the page map is full"))?;
                memory.directory.insert(piece, leaf);
                leaf
            }
        };
        Ok(PageId::new(leaf, page.0 as usize % PAGES_PER_LEAF))
    }
}
