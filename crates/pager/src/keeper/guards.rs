//! Guards that nobody told of: made by a system call that did not pass the library
//! (`docs/lost-content.md`). Where one stands nothing is left, so what is stored of that
//! place goes; and then nothing can come in the place of the guard.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_sys::{Process, Range};
use strata_units::PAGE_SIZE;

use super::Keeper;
use crate::map::address::{PIECE_BYTES, add_run, ids_in};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::tenant::space::Space;

/// How often page tables are looked through for guards; never more than a part of the
/// time.
const LOOK_EVERY: Duration = Duration::from_millis(250);
const PART: u32 = 100;

/// When they are looked for.
#[derive(Debug)]
pub(super) struct Guards {
    due: Instant,
}

impl Guards {
    pub(super) fn new(now: Instant) -> Self {
        Self { due: now + LOOK_EVERY }
    }
}

impl Keeper<'_> {
    /// Looks for guards, if it is time to.
    pub(super) fn look_for_guards(&mut self, spaces: &[Arc<Space>]) {
        let began = Instant::now();
        if began < self.guards.due {
            return;
        }
        for space in spaces {
            let Some(process) = space.process() else { continue };
            let span = {
                let gate = lock(&space.gate);
                let (first, last) = (gate.registered.first(), gate.registered.last());
                first.zip(last).map(|(first, last)| Range { start: first.start, end: last.end })
            };
            let Some(span) = span else { continue };
            // In order, and so are the pieces in which they are.
            let mut pieces: Vec<u64> = Vec::new();
            // An error: the process is gone.
            let _ = process.guards(span, |guards| {
                let first = (guards.start / PIECE_BYTES).max(pieces.last().map_or(0, |p| p + 1));
                pieces.extend(first..guards.end.div_ceil(PIECE_BYTES));
            });
            for piece in pieces {
                let start = piece * PIECE_BYTES;
                let part = Range { start, end: start + PIECE_BYTES };
                self.forget_below_guards(space, &process, part);
            }
        }
        let now = Instant::now();
        self.guards.due = now + LOOK_EVERY.max((now - began) * PART);
    }

    /// Looks once more, now with the gate: as long as that is held no page comes to
    /// where a guard was, so what the page map has there is from before the guard.
    fn forget_below_guards(&mut self, space: &Space, process: &Process, part: Range) {
        let tenant = self.tenant;
        let mut gate = lock(&space.gate);
        let mut dead: Vec<Range> = Vec::new();
        let note = |guards: Range| {
            for (_, leaf, part) in gate.object.pages_in(guards) {
                for (address, page) in ids_in(leaf, part) {
                    // What is on its way is in the handler's hands, or in the transfer
                    // range: the next time.
                    let entry = tenant.map.get(page);
                    let is_settled =
                        entry.is_resident() || matches!(entry, Entry::Stored(_) | Entry::Lost);
                    if is_settled {
                        let end = address + PAGE_SIZE as u64;
                        add_run(&mut dead, Range { start: address, end });
                    }
                }
            }
        };
        if process.guards(part, note).is_err() {
            return;
        }
        for range in dead {
            space.discarded(tenant, &mut gate, range, false);
        }
    }
}
