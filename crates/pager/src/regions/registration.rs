//! Which memory of a process is managed: reads its memory map, registers what
//! may be, and notes what is resident there.
//!
//! Runs on the keeper, not the handler: `/proc` can keep it waiting as long as
//! the process holds its own locks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use strata_sys::{Process, Range, Registration};
use strata_units::wire::Control;
use strata_units::{PAGE, PAGE_SIZE, PageId, SpaceId};

use crate::fault::handler;
use crate::fault::inherit::drop_what_was_not_inherited;
use crate::map::address::{EVERYTHING, overlaps};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::registry::SpaceField;
use crate::regions::eligibility::{is_data, managed};
use crate::tenant::Tenant;
use crate::tenant::space::{Agent, Space};

/// A mapping that holds the stack of a thread that was not recorded: its stack can lie in a heap that
/// its runtime keeps, and that is to be managed (Go's).
const LARGEST_UNRECORDED_BYTES: u64 = 16 << 20;
/// Mappings registered under one hold of the gate; of very many a part of them, because
/// the memory map is read again each time.
const REGISTERED_AT_ONCE: usize = 64;
const PARTS_OF_MANY: usize = 16;
/// Pages whose entries are changed under one hold of the gate.
const CHUNK_BYTES: u64 = 16 << 20;

/// An address on the stack of each thread.
pub(crate) fn stacks_of(control: &Control) -> Vec<u64> {
    control
        .threads
        .iter()
        .filter(|slot| slot.control_block.load(Ordering::Acquire) != 0)
        .map(|slot| slot.stack.load(Ordering::Relaxed))
        .filter(|&stack| stack != 0)
        .collect()
}

/// Registers what is eligible and new. Returns whether the process was there.
pub(crate) fn register_new(space: &Arc<Space>, tenant: &Arc<Tenant>) -> bool {
    register_some(space, tenant, |_| true)
}

/// The same, but only the mappings of which `range` has a part: far from its
/// budget the rest of a program is left alone.
pub(crate) fn register_within(space: &Arc<Space>, tenant: &Arc<Tenant>, range: Range) -> bool {
    let _alone = lock(&tenant.placement.registering);
    tenant.placement.registers.store(true, Ordering::Relaxed);
    register_some(space, tenant, |mapping| overlaps(mapping, range))
}

/// The same for the mappings of a guest's memory: the tenant's placement stays as it is.
/// The caller holds `registering`.
pub(crate) fn register_part(space: &Arc<Space>, tenant: &Arc<Tenant>, range: Range) -> bool {
    register_some(space, tenant, |mapping| overlaps(mapping, range))
}

/// Registers what lies between registered parts of `range`, however little it is: then
/// the kernel has one mapping there again.
pub(crate) fn register_whole(space: &Arc<Space>, tenant: &Arc<Tenant>, range: Range) -> bool {
    let _alone = lock(&tenant.placement.registering);
    let Some(agent) = space.agent() else { return true };
    let Ok(maps) = agent.process.maps() else { return false };
    let new: Vec<Range> = {
        let gate = lock(&space.gate);
        if !gate.registered.iter().any(|&known| overlaps(known, range)) {
            return true;
        }
        maps.iter()
            .filter(|mapping| {
                is_data(mapping, agent.ranges).is_ok() && overlaps(mapping.range, range)
            })
            .map(|mapping| mapping.range)
            .filter(|&part| !gate.is_registered(part))
            .collect()
    };
    tenant.placement.registers.store(true, Ordering::Relaxed);
    register_all(space, tenant, &agent.process, &new)
}

/// Registers `ranges` and enters what is resident there. Returns whether the process was
/// there.
pub(crate) fn register_all(
    space: &Space,
    tenant: &Tenant,
    process: &Process,
    ranges: &[Range],
) -> bool {
    // What goes from when it is registered on is not entered.
    lock(&space.gate).gone_meanwhile.look();
    let is_there = ranges
        .chunks(REGISTERED_AT_ONCE.max(ranges.len() / PARTS_OF_MANY))
        .all(|few| register_few(space, tenant, process, few));
    lock(&space.gate).gone_meanwhile.looked();
    is_there
}

fn register_few(space: &Space, tenant: &Tenant, process: &Process, ranges: &[Range]) -> bool {
    let Some(registered) = register(space, process, ranges) else { return false };
    for range in registered {
        note_resident(space, tenant, process, range);
    }
    true
}

fn register_some(space: &Arc<Space>, tenant: &Arc<Tenant>, wanted: impl Fn(Range) -> bool) -> bool {
    let Some(agent) = space.agent() else { return true };
    let Ok(maps) = agent.process.maps() else { return false };
    let control = agent.control.control();
    if control.thread_overflow.load(Ordering::Relaxed) != 0 {
        tenant.note(
            "threads",
            Some(
                "a process has had more than 4096 threads: its new mappings are not managed".into(),
            ),
        );
        return true;
    }
    let stacks = stacks_of(control);
    handler::start(space, tenant);
    // MOVE demands that its target is registered here.
    if space.uffd.register(agent.ranges.transfer) == Registration::Gone {
        return false;
    }
    let mut new = managed(&maps, agent.ranges, &stacks);
    {
        let gate = lock(&space.gate);
        new.retain(|&range| wanted(range) && !gate.is_registered(range));
    }
    if !new.is_empty() {
        // Threads that nobody recorded: those that a library makes past the
        // wrapper.
        let more = agent.process.stack_pointers();
        new.retain(|range| {
            range.len() > LARGEST_UNRECORDED_BYTES || !more.iter().any(|&at| range.contains(at))
        });
    }
    register_all(space, tenant, &agent.process, &new)
}

/// Registers those of `ranges` that are still one mapping each, and remembers
/// them: memory that is taken for registered and is not would be evicted, and
/// then read as zero.
///
/// The kernel registers what is mapped in a range and says nothing of holes, and
/// the memory map from which `ranges` were taken is old by now. So the map is
/// read again: a mapping is registered as a whole or not at all, so a range that
/// lies within one mapping is registered, or has been mapped anew since, and a
/// message that says so is on its way. The gate is held from the first to the
/// last: that message cannot be acted on before its range is remembered.
///
/// None: the process is gone.
fn register(space: &Space, process: &Process, ranges: &[Range]) -> Option<Vec<Range>> {
    let mut gate = lock(&space.gate);
    let mut registered = Vec::with_capacity(ranges.len());
    for &range in ranges {
        match space.uffd.register(range) {
            Registration::Done => registered.push(range),
            // Gone or changed since the map was read; or not ours to manage.
            Registration::Refused => {}
            Registration::Gone => return None,
        }
    }
    let maps = process.maps().ok()?;
    // What is not whole is looked at again when the map is read the next time.
    registered.retain(|&range| {
        let at = maps.partition_point(|mapping| mapping.range.end <= range.start);
        maps.get(at).is_some_and(|mapping| {
            mapping.range.start <= range.start && range.end <= mapping.range.end
        })
    });
    for &range in &registered {
        gate.add_registered(range);
    }
    Some(registered)
}

/// Ends the registration of a space in which everything is in place; whether it
/// was so. The kernel serves it alone again, with huge pages.
pub(crate) fn stand_down(space: &Space, tenant: &Tenant) -> bool {
    let mut gate = lock(&space.gate);
    let leaves: Vec<_> = gate.object.leaves().collect();
    let in_place = |page| {
        let entry = tenant.map.get(page);
        entry.reads_zero() || entry.is_resident()
    };
    if !leaves.iter().flat_map(|(_, leaf)| leaf.pages()).all(in_place) {
        return false;
    }
    for &range in &gate.registered {
        // Refused: it changed, and a message says how.
        if space.uffd.unregister(range) == Registration::Gone {
            return false;
        }
    }
    gate.registered.clear();
    gate.base = None;
    for (piece, leaf) in leaves {
        for page in leaf.pages() {
            let entry = tenant.map.get(page);
            tenant.overwrite(page, entry, Entry::Untouched);
        }
        gate.object.give_back(&tenant.map, piece);
    }
    true
}

/// Enters pages of `range` that are in the address space already.
fn note_resident(space: &Space, tenant: &Tenant, process: &Process, range: Range) {
    let mut parts = Vec::new();
    // Gone, then: there is nothing to enter.
    let _ = process.present(range, |found| {
        let starts = (found.start..found.end).step_by(CHUNK_BYTES as usize);
        parts
            .extend(starts.map(|start| Range { start, end: (start + CHUNK_BYTES).min(found.end) }));
    });
    // False: the page map is full.
    let _ = parts.into_iter().all(|part| enter_resident(space, tenant, part));
}

/// Enters the pages of `part`, which were seen in place. A page that was evicted since is not
/// `Untouched`, so it stays as it is; one that was discarded is, if nothing was known of it.
/// False: the page map is full.
fn enter_resident(space: &Space, tenant: &Tenant, part: Range) -> bool {
    let mut gate = lock(&space.gate);
    // Unmapped meanwhile: the message has been acted on, or will be.
    if !gate.is_registered(part) {
        return true;
    }
    let gone = gate.gone_meanwhile.of(part);
    for address in (part.start..part.end).step_by(PAGE_SIZE) {
        if gone.has(address) {
            continue;
        }
        let Some(page) = gate.object.page_or_new(&tenant.map, address) else { return false };
        tenant.found_resident(page, Entry::Untouched);
    }
    true
}

/// A forked child's agent has come, and the child still waits for it: makes its
/// page map agree with what the kernel let it inherit. Mappings that the parent
/// advised to keep from children are missing or empty there.
pub(crate) fn adjust_child(space: &Space, tenant: &Tenant, agent: &Agent) -> io::Result<()> {
    let flags = agent.process.mapping_flags()?;
    let stacks = stacks_of(agent.control.control());
    // The child of a process that was just restored inherits registrations of
    // memory that is not to be managed: it is served, and never evicted.
    let is_managed = managed(&agent.process.maps()?, agent.ranges, &stacks);
    let mut gate = lock(&space.gate);
    gate.registered.clear();
    for mapping in flags.iter().filter(|mapping| mapping.registered) {
        if is_managed.binary_search_by_key(&mapping.range.start, |range| range.start).is_ok() {
            gate.add_registered(mapping.range);
        }
    }
    drop_what_was_not_inherited(tenant, &mut gate, &flags);
    // What is not settled here is fetched as what any agent has left in its transfer range.
    let _ = space.settle_leaving(tenant, &mut gate, &agent.process);
    Ok(())
}

/// Charges inherited pages at `addresses` to `space`; returns them.
pub(crate) fn take_charge(space: &Space, tenant: &Tenant, addresses: &[u64]) -> Vec<PageId> {
    let gate = lock(&space.gate);
    let shared = Entry::Resident { shared: true };
    let mut taken = Vec::new();
    for &address in addresses {
        if let Some(page) = gate.object.page(address)
            && tenant.found_resident(page, shared)
        {
            taken.push(page);
        }
    }
    taken
}

/// Looks which inherited pages to charge here: those that are this process's
/// alone by now, and those that the parent holds no longer.
pub(crate) fn settle_shared(space: &Space, tenant: &Tenant) {
    let Some(agent) = space.agent() else { return };
    let parent = tenant.registry.space_field(space.id, SpaceField::Parent).load(Ordering::Relaxed);
    let parent = parent.checked_sub(1).and_then(|id| tenant.space(SpaceId(id)));
    let mut left = false;
    let pieces = lock(&space.gate).object.pages_in(EVERYTHING);
    let shared = Entry::Resident { shared: true };
    for (_, leaf, part) in pieces {
        let mut present = Vec::new();
        let read = agent.process.page_presence(part, |index, presence| {
            present.push((part.start + index * PAGE, presence.exclusive));
        });
        if read.is_err() {
            return;
        }
        // One gate at a time.
        let held_by_parent: Vec<bool> = match &parent {
            Some(parent) => {
                let gate = lock(&parent.gate);
                let holds = |address| {
                    gate.object.page(address).is_some_and(|page| {
                        let entry = tenant.map.get(page);
                        entry.is_resident() || matches!(entry, Entry::Leaving { .. })
                    })
                };
                present.iter().map(|&(address, _)| holds(address)).collect()
            }
            None => vec![false; present.len()],
        };
        let gate = lock(&space.gate);
        for (&(address, exclusive), held) in present.iter().zip(held_by_parent) {
            if (exclusive || !held)
                && let Some(page) = gate.object.page(address)
            {
                tenant.found_resident(page, shared);
            }
        }
        left |=
            crate::map::address::ids_in(leaf, part).any(|(_, page)| tenant.map.get(page) == shared);
    }
    space.has_shared.store(left, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use strata_sys::OwnMemory;

    use super::*;
    use crate::map::address::one_page;
    use crate::testing;

    #[test]
    fn what_went_away_since_it_was_seen_is_not_taken_for_resident() {
        let memory = OwnMemory::create(4).expect("memory");
        let Some(uffd) = testing::userfaultfd() else { return };
        let tenant = testing::tenant();
        let space = testing::space(&tenant, uffd);
        let process = testing::own_process();
        (0..4).for_each(|page| memory.write_page(page, &testing::page(1 + page as u8)));
        let (whole, one) = (memory.range(), one_page(memory.address(1)));
        let registered = register(&space, &process, &[whole]).expect("it lives");
        assert_eq!(registered, [whole]);
        {
            // As of a program that was told to go on, and whose page the kernel has not taken yet.
            let mut gate = lock(&space.gate);
            gate.gone_meanwhile.look();
            space.discarded(&tenant, &mut gate, one, false);
        }
        assert!(enter_resident(&space, &tenant, whole));
        let entries = || {
            let gate = lock(&space.gate);
            [0, 1, 2, 3]
                .map(|page| gate.object.page(memory.address(page)).map(|id| tenant.map.get(id)))
        };
        let resident = Some(Entry::Resident { shared: false });
        assert_eq!(entries(), [resident, Some(Entry::Untouched), resident, resident]);
        // Whoever looks after that sees what is.
        lock(&space.gate).gone_meanwhile.looked();
        note_resident(&space, &tenant, &process, whole);
        assert_eq!(entries(), [resident; 4]);
        space.uffd.unregister(whole);
    }

    #[test]
    fn a_range_with_a_hole_is_not_taken_for_registered() {
        // Dropped last: while its userfaultfd is open, that would wait.
        let mut memory = OwnMemory::create(64).expect("memory");
        let Some(uffd) = testing::userfaultfd() else { return };
        let tenant = testing::tenant();
        let space = testing::space(&tenant, uffd);
        let whole = memory.range();
        // After the memory map was read, half of it goes.
        memory.shrink_to(32);
        let process = testing::own_process();
        assert_eq!(register(&space, &process, &[whole]).expect("this process lives"), []);
        assert!(lock(&space.gate).registered.is_empty());
        let half = memory.range();
        assert_eq!(register(&space, &process, &[half]).expect("this process lives"), [half]);
        assert_eq!(lock(&space.gate).registered, [half]);
    }
}
