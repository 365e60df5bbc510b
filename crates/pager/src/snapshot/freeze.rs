//! The freeze of a snapshot: a tenant's processes stop, what they have is protected or
//! captured, and they run on. What is captured after that is in `snapshot`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_store::Put;
use strata_sys::{Process, Range};
use strata_units::{PAGE_SIZE, SpaceId};

use super::{PATIENCE, undo};
use crate::capture::Seen;
use crate::map::address::EVERYTHING;
use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::excluded::Excluded;
use crate::tenant::orders::{
    Captured, Carried, Carry, Freeze, SnapshotError, SnapshotRequest, Stand, Standing, failed,
    restless,
};
use crate::tenant::space::Space;

/// At the end of a thread's stack: its control block, and what belongs to it.
const THREAD_BYTES: u64 = 8 * PAGE_SIZE as u64;

pub(super) type Begun = (Freeze, Vec<(Arc<Space>, SpaceId)>, u64);

pub(super) fn take(
    tenant: &Arc<Tenant>,
    spaces: &[Arc<Space>],
    excluded: &dyn Fn(&Space) -> Excluded,
    mut request: SnapshotRequest,
    buffer: &mut [u8],
) -> Result<Begun, SnapshotError> {
    let mut leaves = 0;
    let part = request.only.map_or(EVERYTHING, |only| only.range);
    for space in spaces {
        let Some(process) = space.process() else {
            return Err(restless("a process of it has no agent"));
        };
        if request.only.is_none() && request.stand != Stand::Already {
            bring_threads(tenant, space, &process)?;
        }
        leaves += space.arm(&process, part, &excluded(space))?;
        lock(&space.gate).is_precise = request.urgent;
    }
    // For all of them at once: until the freeze none is taken.
    tenant.map.prepare(leaves).map_err(failed)?;
    for space in spaces {
        let is_parked = match request.stand {
            Stand::Already => space.stands_aside(),
            _ => space.park(),
        };
        if !is_parked {
            unpark(spaces);
            let ends = space.agent().is_none_or(|agent| agent.process.has_exited());
            let what = "the agent of a process does not answer";
            return Err(if ends { restless(what) } else { failed(what) });
        }
    }
    *lock(&tenant.freeze_began) = Some(Instant::now());
    let frozen = (request.freeze)();
    *lock(&tenant.freeze_began) = None;
    let Standing { pids, since: began } = match frozen {
        Ok(frozen) => frozen,
        Err(error) => {
            unpark(spaces);
            return Err(error);
        }
    };
    let mut taken = Taken { tenant, processes: Vec::new(), spaces: Vec::new() };
    let mut outcome = taken.freeze_all(spaces, &pids, part, excluded, buffer);
    let pending_pages = taken.spaces.iter().filter_map(|(s, _)| s.capture_state()).map(|s| s.0);
    let pending_pages = pending_pages.sum();
    let unknown: u64 = taken.spaces.iter().map(|(space, _)| space.unknown_pages()).sum();
    if outcome.is_ok() && request.stand == Stand::UntilCaptured {
        outcome = match request.carry.as_mut() {
            Some(carry) => taken.carry_all(carry, buffer),
            None => taken.capture_all(pending_pages, buffer),
        };
    } else if outcome.is_ok() && unknown > 0 && unknown <= request.most_frozen_pages {
        outcome = taken.capture_unknown(buffer);
    }
    let stay = request.stand != Stand::Briefly && outcome.is_ok();
    let thawed = (request.thaw)();
    let whole_freeze = began.elapsed();
    if stay {
        // They obey when they run again, if they do.
        spaces.iter().for_each(|space| space.unpark_later());
    } else {
        unpark(spaces);
    }
    if let Err(error) = outcome.and_then(|()| thawed.map_err(failed)) {
        taken.undo();
        return Err(error);
    }
    let Taken { processes, spaces, .. } = taken;
    let freeze =
        Freeze { processes, frozen: whole_freeze, captured: Duration::ZERO, copied_pages: 0 };
    if let Some(frozen) = request.frozen {
        frozen(&freeze);
    }
    Ok((freeze, spaces, pending_pages))
}

/// Brings what whoever stops a thread reads of it, and reads without waiting: the
/// end of its stack, where the C library has the thread's control block.
fn bring_threads(tenant: &Tenant, space: &Space, process: &Process) -> Result<(), SnapshotError> {
    let maps = process.maps().map_err(restless)?;
    let ends: Vec<Range> = process
        .stack_pointers()
        .into_iter()
        .filter_map(|pointer| maps.iter().find(|mapping| mapping.range.contains(pointer)))
        .map(|mapping| mapping.range)
        .map(|Range { start, end }| Range { start: start.max(end - THREAD_BYTES.min(end)), end })
        .collect();
    tenant.bring_back(space, &ends).map_err(failed)
}

fn unpark(spaces: &[Arc<Space>]) {
    for space in spaces {
        space.unpark();
    }
}

/// Slots that were filled so far.
struct Taken<'a> {
    tenant: &'a Arc<Tenant>,
    processes: Vec<Captured>,
    spaces: Vec<(Arc<Space>, SpaceId)>,
}

impl Taken<'_> {
    fn freeze_all(
        &mut self,
        spaces: &[Arc<Space>],
        pids: &[u32],
        part: Range,
        excluded: &dyn Fn(&Space) -> Excluded,
        buffer: &mut [u8],
    ) -> Result<(), SnapshotError> {
        let tenant = self.tenant;
        for space in spaces {
            let pid = space.pid().filter(|pid| pids.contains(pid));
            if pid.is_none() {
                return Err(restless("a process of it does not belong to the others"));
            }
        }
        for &pid in pids {
            let known = spaces.iter().find(|space| space.pid() == Some(pid));
            let Some((space, process)) = known.and_then(|space| Some((space, space.process()?)))
            else {
                return Err(restless(format!("process {pid} is not managed")));
            };
            let snapshot = tenant
                .registry
                .add_space(tenant.id, None)
                .ok_or_else(|| failed("this daemon has 8192 processes and snapshots already"))?;
            self.spaces.push((Arc::clone(space), snapshot));
            let excluded = excluded(space);
            let agent = space.agent();
            self.processes.push(Captured {
                pid,
                memory: snapshot,
                restart: agent.as_ref().and_then(|agent| agent.restart),
                own: agent.map_or(Range { start: 0, end: 0 }, |agent| agent.ranges.own),
                needed: excluded.within(part),
                settings: lock(&space.gate).settings.ranges().to_vec(),
            });
            let maps = process.maps().map_err(failed)?;
            let seen = Seen { process: &process, maps: &maps, excluded: &excluded };
            space.freeze(tenant, snapshot, part, &seen, buffer)?;
        }
        Ok(())
    }

    /// Captures while the processes stand still what the snapshot before does not
    /// have: the rest cannot be torn.
    fn capture_unknown(&self, buffer: &mut [u8]) -> Result<(), SnapshotError> {
        for (space, _) in &self.spaces {
            let since = Instant::now();
            let mut before = None;
            while !space.capture_unknown(self.tenant, Put::Fast, buffer) {
                let state = space.capture_state();
                let is_torn = state.is_some_and(|(_, torn)| torn);
                let is_stuck = state == before && since.elapsed() > PATIENCE;
                if is_torn || is_stuck {
                    return Err(failed("its memory cannot be captured"));
                }
                before = state;
            }
        }
        Ok(())
    }

    /// Captures all that is pending, raw where there is room: it may soon be forgotten.
    fn capture_all(&self, pending: u64, buffer: &mut [u8]) -> Result<(), SnapshotError> {
        let room = self.tenant.headroom_pages() > pending as i64;
        let how = if room { Put::Staged } else { Put::Fast };
        self.spaces.iter().try_for_each(|(space, _)| {
            self.capture_space(space, || Ok(space.capture_some(self.tenant, how, buffer)))
        })
    }

    /// The same, and what the snapshot before does not have is carried.
    fn carry_all(&self, carry: &mut Carry, buffer: &mut [u8]) -> Result<(), SnapshotError> {
        let nobody = || failed("nobody takes its memory any more");
        if !carry(Carried::Standing(&self.processes)) {
            return Err(nobody());
        }
        self.spaces.iter().try_for_each(|&(ref space, memory)| {
            let mut each = |start, bytes: &[u8]| carry(Carried::Pages { memory, start, bytes });
            self.capture_space(space, || {
                space.carry_some(self.tenant, &mut each, buffer).ok_or_else(nobody)
            })
        })
    }

    /// Captures a space with `some`, which says how many pages it has captured.
    fn capture_space(
        &self,
        space: &Space,
        mut some: impl FnMut() -> Result<usize, SnapshotError>,
    ) -> Result<(), SnapshotError> {
        let mut since = Instant::now();
        while space.capture_state().is_some_and(|(pending, _)| pending > 0) {
            if some()? > 0 {
                since = Instant::now();
            } else if since.elapsed() > PATIENCE {
                return Err(failed("its memory cannot be captured"));
            }
        }
        Ok(())
    }

    fn undo(self) {
        undo(self.tenant, &self.spaces);
    }
}
