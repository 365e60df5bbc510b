//! Memory that stands still here and runs elsewhere: what of it is not there yet, and its
//! pages, read one by one, while it is captured and after.

use std::io;

use strata_units::{Handle, LeafIndex, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer, PageId, SpaceId};

use crate::capture::read_protected;
use crate::map::address::address_of;
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::Object;
use crate::map::page_map::Piece;
use crate::tenant::Tenant;
use crate::tenant::space::Space;

/// How memory differs from what it was before: ranges, first bytes and ends, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// What is there and was not so before.
    pub changed: Vec<(u64, u64)>,
    /// What was there, and is not any more.
    pub gone: Vec<(u64, u64)>,
    /// Pages in `changed`.
    pub pages: u64,
}

/// What came of reading a page that is lent.
#[derive(Debug, PartialEq, Eq)]
pub enum Lent {
    /// It has these bytes.
    Bytes,
    /// It is zero.
    Zero,
    /// It is about to be captured, or to be found: ask again.
    NotYet,
    /// It cannot be read any more.
    Lost(String),
}

impl Tenant {
    /// How the memory of the process `pid`, which stands still and of which a snapshot is
    /// being taken, differs from the snapshot `before`; none: from nothing.
    ///
    /// # Errors
    /// There is no such snapshot.
    pub fn differences(&self, pid: u32, before: Option<SpaceId>) -> io::Result<Differences> {
        let space = self.space_of(pid).ok_or_else(missing)?;
        self.differences_in(&space, before)
    }

    pub(super) fn differences_in(
        &self,
        space: &Space,
        before: Option<SpaceId>,
    ) -> io::Result<Differences> {
        let object = {
            let gate = lock(&space.gate);
            gate.capture.as_ref().ok_or_else(missing)?.object.clone()
        };
        self.compare(before, &object, |piece, leaf| {
            if let Some(capture) = lock(&space.gate).capture.as_mut()
                && capture.object.id() == object.id()
            {
                // What was not written since has one name in both.
                capture.take_from_base(self, piece, leaf);
            }
        })
    }

    /// The same of the snapshot `after`, which is whole.
    ///
    /// # Errors
    /// There is no such snapshot.
    pub fn differences_of(
        &self,
        after: SpaceId,
        before: Option<SpaceId>,
    ) -> io::Result<Differences> {
        let after = lock(&self.snapshots).get(&after).cloned().ok_or_else(missing)?;
        self.compare(before, &after, |_, _| ())
    }

    fn compare(
        &self,
        before: Option<SpaceId>,
        after: &Object,
        prepare: impl Fn(Piece, LeafIndex),
    ) -> io::Result<Differences> {
        let known = |id| lock(&self.snapshots).get(&id).cloned().ok_or_else(missing);
        let before = before.map(known).transpose()?;
        let mut found = Differences::default();
        for (piece, leaves) in after.beside(before.as_deref()) {
            if let [_, Some(leaf)] = leaves {
                prepare(piece, leaf);
            }
            for index in 0..PAGES_PER_LEAF {
                let [old, new] = leaves.map(|leaf| {
                    leaf.map_or(Entry::Untouched, |leaf| self.map.get(PageId::new(leaf, index)))
                });
                let address = address_of(piece, index);
                if new == Entry::Untouched && old != new {
                    join(&mut found.gone, address);
                } else if new != old {
                    join(&mut found.changed, address);
                    found.pages += 1;
                }
            }
        }
        Ok(found)
    }

    /// Reads the page at `address` of a whole snapshot.
    pub fn lent_page(&self, id: SpaceId, address: u64, out: &mut PageBuffer) -> Lent {
        let Some(known) = lock(&self.snapshots).get(&id).cloned() else {
            return Lent::Lost("its snapshot is gone".to_owned());
        };
        match known.entry(&self.map, address) {
            Entry::Untouched => Lent::Zero,
            Entry::Stored(handle) => self.read_lent(handle, out),
            _ => Lent::Lost("it was lost before".to_owned()),
        }
    }

    /// The same of the process `pid`, which stands still and is being captured.
    pub fn lent_page_of(&self, pid: u32, address: u64, out: &mut PageBuffer) -> Lent {
        match self.space_of(pid) {
            Some(space) => self.lent_page_in(&space, address, out),
            None => Lent::NotYet,
        }
    }

    pub(super) fn lent_page_in(&self, space: &Space, address: u64, out: &mut PageBuffer) -> Lent {
        let gate = lock(&space.gate);
        let Some(capture) = &gate.capture else { return Lent::NotYet };
        match capture.object.entry(&self.map, address) {
            Entry::Untouched => Lent::Zero,
            Entry::Stored(handle) => {
                self.store.retain(handle);
                drop(gate);
                let read = self.read_lent(handle, out);
                self.store.release(handle);
                read
            }
            // It is what it was at the freeze if it is protected after it was read.
            Entry::Pending => match read_protected(&capture.pages, address, &mut out.0)[..] {
                [true] => Lent::Bytes,
                _ => Lent::NotYet,
            },
            Entry::Copied => Lent::NotYet,
            _ => Lent::Lost("it was lost before".to_owned()),
        }
    }

    fn read_lent(&self, handle: Handle, out: &mut PageBuffer) -> Lent {
        match self.store.get(handle, &mut out.0) {
            Ok(_) => Lent::Bytes,
            Err(error) => Lent::Lost(error.to_string()),
        }
    }
}

fn missing() -> io::Error {
    io::Error::other("there is no such snapshot")
}

/// Adds a page to ranges in order.
fn join(ranges: &mut Vec<(u64, u64)>, address: u64) {
    let end = address + PAGE_SIZE as u64;
    match ranges.last_mut() {
        Some(last) if last.1 == address => last.1 = end,
        _ => ranges.push((address, end)),
    }
}
