//! Memory of a living process that comes from a snapshot of another one: a guest's, whose
//! QEMU has mapped it, has not used it, and waits.
//!
//! The page map of the part is at another address then: leaf by leaf it is one that was
//! prepared, and page by page a copy, where there is none, or the process has touched
//! something already. That is overwritten in place; everything else is stored, and comes
//! when it is asked for. Runs on the keeper: nobody evicts meanwhile.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use strata_sys::{Process, Range};
use strata_units::{Handle, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer, PageId};

use crate::map::address::{address_of, ids_in};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::object::Object;
use crate::tenant::Tenant;
use crate::tenant::orders::{FillOrder, Filling, Order};
use crate::tenant::snapshots::Prepared;
use crate::tenant::space::{Gate, Space};

/// How often pages that came while others were overwritten are overwritten too.
const MOST_TURNS: u32 = 8;

impl Tenant {
    /// Has memory of one of its processes come from a snapshot of `origin`, which it
    /// shares its pages with. The process must not use that memory meanwhile. `prepared`: of
    /// that snapshot ([`Self::prepare_fill`]).
    ///
    /// # Errors
    /// What is in the memory is not known: the process must not run.
    pub fn fill(
        &self,
        origin: &Self,
        filling: Filling,
        prepared: Option<Prepared>,
    ) -> Result<(), String> {
        if let Some(problem) = filling.problem() {
            return Err(problem.to_owned());
        }
        if !Arc::ptr_eq(&self.map, &origin.map) {
            return Err("the snapshot was taken of another tenant".to_owned());
        }
        let known = lock(&origin.snapshots).get(&filling.memory).cloned();
        let known = known.ok_or("there is no such snapshot")?;
        let (answer, receiver) = mpsc::channel();
        self.order(Order::Fill(Box::new(FillOrder { filling, known, prepared, answer })));
        receiver.recv().unwrap_or_else(|_| Err("the tenant has ended".to_owned()))
    }
}

impl FillOrder {
    pub(crate) fn pid(&self) -> u32 {
        self.filling.pid
    }

    pub(crate) fn to(&self) -> Range {
        self.filling.to
    }

    /// Nothing is done, and why.
    pub(crate) fn refuse(self, why: &str) {
        // Whoever asked may have gone.
        let _ = self.answer.send(Err(why.to_owned()));
    }

    /// Does it, for a space in which nothing is on its way.
    pub(crate) fn carry_out(self, tenant: &Tenant, space: &Space) {
        let Self { filling, known, prepared, answer } = self;
        let outcome = match space.process() {
            Some(process) => space.fill(tenant, &process, &known, &filling, prepared),
            None => Err("its process has ended".to_owned()),
        };
        drop(known);
        // As above.
        let _ = answer.send(outcome);
    }
}

impl Space {
    pub(crate) fn fill(
        &self,
        tenant: &Tenant,
        process: &Process,
        known: &Object,
        filling: &Filling,
        mut prepared: Option<Prepared>,
    ) -> Result<(), String> {
        let failed = |error: io::Error| format!("its memory cannot be written: {error}");
        let memory = process.open_memory_to_write().map_err(failed)?;
        is_fresh(tenant, &lock(&self.gate), filling.to)?;
        // The gate is free: who writes may wait for others, and others for the gate.
        let mut written = BTreeSet::new();
        for _ in 0..MOST_TURNS {
            for address in present(process, filling.to)? {
                if written.insert(address) {
                    self.overwrite(tenant, &memory, known, filling, address)?;
                }
            }
            let mut gate = lock(&self.gate);
            if !gate.is_registered(filling.to) {
                return Err("its memory cannot be managed".to_owned());
            }
            let there = present(process, filling.to)?;
            if there.iter().all(|address| written.contains(address)) {
                let ready = prepared.as_mut().map(Prepared::object_mut);
                return self.enter(tenant, &mut gate, (known, ready), filling, &there);
            }
        }
        Err("its memory is in use".to_owned())
    }

    /// Puts the snapshot's content in place of a page that is there.
    fn overwrite(
        &self,
        tenant: &Tenant,
        memory: &File,
        known: &Object,
        filling: &Filling,
        address: u64,
    ) -> Result<(), String> {
        let mut buffer = PageBuffer::zeroed();
        match known.entry(&tenant.map, filling.source(address)) {
            Entry::Untouched => {}
            Entry::Stored(handle) => {
                tenant.store.get(handle, &mut buffer.0).map_err(|error| error.to_string())?;
            }
            _ => return Err(lost(filling.source(address))),
        }
        memory
            .write_all_at(&buffer.0, address)
            .map_err(|error| format!("its memory cannot be written at {address:#x}: {error}"))
    }

    /// Enters the page map of the part, with copies of leaves that were `prepared`. `there`
    /// is in place, as the snapshot has it.
    fn enter(
        &self,
        tenant: &Tenant,
        gate: &mut Gate,
        (known, prepared): (&Object, Option<&mut Object>),
        filling: &Filling,
        there: &BTreeSet<u64>,
    ) -> Result<(), String> {
        let map = &tenant.map;
        is_fresh(tenant, gate, filling.to)?;
        // What is missing reads as zero; what is not is not looked at again.
        for (_, leaf, part) in gate.object.pages_in(filling.to) {
            for (address, page) in ids_in(leaf, part) {
                let entry = map.get(page);
                if !there.contains(&address) && entry != Entry::Untouched {
                    tenant.overwrite(page, entry, Entry::Untouched);
                }
            }
        }
        for &address in there {
            let page = gate.object.page_or_new(map, address).ok_or("its page map is full")?;
            if map.get(page).reads_zero() {
                tenant.now_resident(page);
            }
        }
        self.copy_pages(tenant, gate, (known, prepared), filling, there)?;
        *lock(&self.touched) = Some(Vec::new());
        let wanted = filling.wanted.iter().filter_map(|range| {
            let start = filling.target(range.start)?;
            Some(Range { start, end: start + range.len() })
        });
        lock(&self.hot).extend(wanted);
        self.kick.ring();
        Ok(())
    }

    fn copy_pages(
        &self,
        tenant: &Tenant,
        gate: &mut Gate,
        (known, mut prepared): (&Object, Option<&mut Object>),
        filling: &Filling,
        there: &BTreeSet<u64>,
    ) -> Result<(), String> {
        let mut copied: Vec<(PageId, PageId, Entry)> = Vec::with_capacity(PAGES_PER_LEAF);
        let mut handles: Vec<Handle> = Vec::with_capacity(PAGES_PER_LEAF);
        for (piece, leaf) in known.leaves_in(filling.from) {
            if let Some(target) = filling.piece_for(piece)
                && let Some(prepared) = prepared.as_deref_mut()
                && gate.object.take_over(&tenant.map, target, (prepared, piece))
            {
                continue;
            }
            copied.clear();
            handles.clear();
            for index in 0..PAGES_PER_LEAF {
                let Some(address) = filling.target(address_of(piece, index)) else { continue };
                let from = PageId::new(leaf, index);
                let copy = match tenant.map.get(from) {
                    Entry::Untouched => continue,
                    _ if there.contains(&address) => continue,
                    Entry::Stored(handle) => {
                        handles.push(handle);
                        Entry::Stored(handle)
                    }
                    // Its content is not known: whoever touches it is told.
                    _ => Entry::Lost,
                };
                let to = gate.object.page_or_new(&tenant.map, address);
                copied.push((from, to.ok_or("its page map is full")?, copy));
            }
            tenant.store.retain_all(&handles);
            for &(from, to, entry) in &copied {
                let age = tenant.map.age(from).load(Ordering::Relaxed);
                tenant.map.age(to).store(age, Ordering::Relaxed);
                tenant.map.set(to, entry);
            }
        }
        Ok(())
    }
}

/// Refuses memory of which something is stored, on its way or lost.
fn is_fresh(tenant: &Tenant, gate: &Gate, range: Range) -> Result<(), String> {
    let fresh = |page| {
        let entry = tenant.map.get(page);
        entry.reads_zero() || entry.is_resident()
    };
    let mut pieces = gate.object.pages_in(range).into_iter();
    match pieces.all(|(_, leaf, part)| ids_in(leaf, part).all(|(_, page)| fresh(page))) {
        true => Ok(()),
        false => Err("a part of its memory is not in place".to_owned()),
    }
}

fn lost(address: u64) -> String {
    format!("the snapshot has lost the page at {address:#x}")
}

/// Addresses of the pages of `range` that the kernel has in place.
fn present(process: &Process, range: Range) -> Result<BTreeSet<u64>, String> {
    let mut pages = BTreeSet::new();
    process
        .present(range, |part| pages.extend((part.start..part.end).step_by(PAGE_SIZE)))
        .map_err(|error| format!("its page table cannot be read: {error}"))?;
    Ok(pages)
}
