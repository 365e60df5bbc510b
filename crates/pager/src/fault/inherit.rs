//! What a forked child has of its parent's memory.
//!
//! The fork's message makes its page map a copy of its parent's. Where that is not what the
//! child has, its own page table says so, once it is known which process it is: because its
//! agent has said hello, or because a thread of it waits ([`crate::fault::unattended`]).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use strata_sys::{EventFd, Fill, MappingFlags, Process, Range, Userfaultfd};
use strata_units::{PAGE, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer, PageId, SpaceId};

use crate::map::address::{EVERYTHING, address_of, ids_in, one_page};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::SpaceAddress;
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Leaving, Space, slots_with_a_page};

/// Pages that are looked for in a process to tell whose memory it is, at most.
const MOST_WITNESSES: usize = 4096;

impl Space {
    /// The child's space with a copy of this one's page map, until it is
    /// [known](Self::settle_leaving) what else it has.
    pub(super) fn copy_for_child(
        &self,
        tenant: &Tenant,
        gate: &Gate,
        child: SpaceId,
        uffd: OwnedFd,
    ) -> Result<Space, (String, OwnedFd)> {
        let kick = match EventFd::new() {
            Ok(kick) => kick,
            Err(error) => return Err((error.to_string(), uffd)),
        };
        let Some((object, leaves)) = gate.object.shaped_like(&tenant.map, child) else {
            return Err(("the page map is full".into(), uffd));
        };
        let space = Space::new(child, Userfaultfd::adopt(uffd), kick);
        space.unadjusted.store(true, Ordering::Release);
        let mut child_gate = lock(&space.gate);
        for (piece, leaf, copy) in leaves {
            tenant.prefetch_counts(leaf);
            for index in 0..PAGES_PER_LEAF {
                let (from, to) = (PageId::new(leaf, index), PageId::new(copy, index));
                let entry = tenant.map.get(from).inherited();
                match entry {
                    Entry::Untouched => continue,
                    Entry::Leaving { slot, .. } => {
                        child_gate.slots[usize::from(slot)] = address_of(piece, index);
                        space.has_strays.store(true, Ordering::Release);
                    }
                    Entry::Resident { .. } => space.has_shared.store(true, Ordering::Release),
                    Entry::Stored(handle) | Entry::Arriving(handle) => {
                        tenant.store.retain(handle);
                    }
                    // Not what a child inherits.
                    Entry::Kept(_) | Entry::OnNode => {}
                    Entry::Lost | Entry::Discarded | Entry::Pending | Entry::Copied => {}
                }
                let age = tenant.map.age(from).load(Ordering::Relaxed);
                tenant.map.age(to).store(age, Ordering::Relaxed);
                tenant.inherit(to, entry);
            }
        }
        child_gate.object = object;
        child_gate.registered.clone_from(&gate.registered);
        drop(child_gate);
        Ok(space)
    }

    /// A forked child's pages that were on their way out when it was made: `process`, whose
    /// memory this is, has each in its slot of the transfer range, from where it is put in
    /// place, or in place still. Nothing has moved them since, and what comes of the move in
    /// its parent says nothing about the child. The caller holds the gate.
    ///
    /// # Errors
    /// Why some of them are leaving still; nobody reads those.
    pub(crate) fn settle_leaving(
        &self,
        tenant: &Tenant,
        gate: &mut Gate,
        process: &Process,
    ) -> Result<(), String> {
        let slots = 0..gate.slots.len();
        let leaving: Vec<(usize, Leaving)> =
            slots.filter_map(|slot| Some((slot, gate.leaving(&tenant.map, slot)?))).collect();
        if !leaving.is_empty() {
            let transfer = self.transfer(tenant);
            let moved = slots_with_a_page(process, transfer, 0..gate.slots.len())
                .map_err(|error| format!("its page tables: {error}"))?;
            let mut content = PageBuffer::zeroed();
            for (slot, leaving) in leaving {
                if !moved[slot] {
                    let page = leaving.page;
                    tenant.overwrite(page, tenant.map.get(page), Entry::Resident { shared: true });
                    self.has_shared.store(true, Ordering::Release);
                    gate.slots[slot] = 0;
                    self.uffd.wake(one_page(leaving.address));
                    continue;
                }
                if process.read(transfer + slot as u64 * PAGE, &mut content.0) < PAGE_SIZE {
                    return Err("its memory cannot be read".into());
                }
                gate.put_back(tenant, &self.uffd, (slot, leaving), &content)
                    .map_err(|why| format!("a page cannot be put in place: {why:?}"))?;
                tenant.noticed_resident(leaving.page);
            }
        }
        self.has_strays.store(false, Ordering::Release);
        Ok(())
    }

    /// Shows that this is the memory of `process`, which was found by a number: by a page of
    /// its transfer range, which nobody writes to while it has no agent. Where it has none
    /// there one is put into a slot through which nothing leaves; where the range is not this
    /// userfaultfd's, as in a process that was restored, a page of the program's own will do.
    ///
    /// # Errors
    /// Why that is not shown.
    pub(crate) fn prove_found(
        &self,
        tenant: &Tenant,
        gate: &Gate,
        process: &Process,
    ) -> Result<(), String> {
        let gone = |error: io::Error| format!("its page tables: {error}");
        let transfer = self.transfer(tenant);
        let slot_at = |slot: usize| transfer + slot as u64 * PAGE;
        let there = slots_with_a_page(process, transfer, 0..gate.slots.len()).map_err(gone)?;
        let proved = |page| process.prove_by(&self.uffd, page).map_err(|why| why.to_string());
        if let Some(slot) = there.iter().position(|&there| there) {
            return proved(slot_at(slot));
        }
        if let Some(slot) = gate.slots.iter().position(|&address| address == 0) {
            // Present: put there for another candidate, which so is not this one.
            let filled = self.uffd.copy(slot_at(slot), &PageBuffer::zeroed());
            if matches!(filled, Fill::Done { .. } | Fill::Present) {
                return proved(slot_at(slot));
            }
        }
        let pages = gate.object.pages().filter(|&(_, page)| {
            let entry = tenant.map.get(page);
            entry.is_resident() || matches!(entry, Entry::Leaving { .. })
        });
        for (address, _) in pages.take(MOST_WITNESSES) {
            if process.is_page_present(address).map_err(gone)? {
                return proved(address);
            }
        }
        Err("it has no page by which its userfaultfd can be told".into())
    }

    fn transfer(&self, tenant: &Tenant) -> u64 {
        tenant.registry.space_address(self.id, SpaceAddress::Transfer).load(Ordering::Relaxed)
    }
}

/// Forgets what a child's page map has of mappings that the child does not have, or
/// finds empty.
pub(crate) fn drop_what_was_not_inherited(
    tenant: &Tenant,
    gate: &mut Gate,
    flags: &[MappingFlags],
) {
    let kept: Vec<Range> = flags
        .iter()
        .filter(|mapping| mapping.registered && !mapping.wiped_on_fork)
        .map(|mapping| mapping.range)
        .collect();
    let inherits = |address: u64| kept.iter().any(|range| range.contains(address));
    for (_, leaf, part) in gate.object.pages_in(EVERYTHING) {
        if kept.iter().any(|range| range.start <= part.start && part.end <= range.end) {
            continue;
        }
        for (address, page) in ids_in(leaf, part) {
            let entry = tenant.map.get(page);
            if entry == Entry::Untouched || inherits(address) {
                continue;
            }
            if let Entry::Leaving { slot, .. } = entry {
                gate.slots[usize::from(slot)] = 0;
            }
            tenant.overwrite(page, entry, Entry::Untouched);
        }
    }
}
