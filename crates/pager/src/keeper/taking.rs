//! Snapshots as the keeper takes them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::keeper::Keeper;
use crate::map::lock;
use crate::regions::registration::{register_new, register_part, stand_down};
use crate::snapshot::Went;
use crate::tenant::excluded::Excluded;
use crate::tenant::orders::{FillOrder, SnapshotOrder};
use crate::tenant::space::Space;

/// So long after its last snapshot a tenant far below its budget is left to the
/// kernel: until then another snapshot reads only what was written since.
const STAND_DOWN_AFTER: Duration = Duration::from_secs(600);

/// Whoever takes a torn snapshot again does so at once.
const TORN_KEPT_FOR: Duration = Duration::from_secs(10);

/// How long a snapshot waits for an agent that is late with a batch, before it is
/// refused: on a busy machine it sleeps for longer than a batch takes.
const STRAYS_PATIENCE: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Keeper<'_> {
    /// Takes a snapshot up to the thaw; the rest is done in rounds.
    pub(super) fn begin_snapshot(&mut self, order: SnapshotOrder) {
        let tenant = self.tenant;
        if self.capturing.is_some() {
            return order.refuse("another snapshot of it is being captured");
        }
        let mut spaces = self.living_spaces();
        let only = order.only();
        if let Some(only) = only {
            spaces.retain(|space| space.pid() == Some(only.pid));
        }
        if spaces.is_empty() || tenant.is_released() {
            return order.refuse("nothing of it is managed");
        }
        let _alone = lock(&tenant.placement.registering);
        let was_managed = tenant.under_pressure.swap(true, Ordering::Relaxed);
        self.stands_down |= !was_managed;
        self.snapshot_begun = Instant::now();
        for space in &spaces {
            let is_there = match only {
                Some(only) => register_part(space, tenant, only.range),
                None => register_new(space, tenant),
            };
            if !is_there {
                space.set_gone();
            }
            self.wait_for_strays(space);
        }
        let excluded = |space: &Space| match space.agent() {
            Some(agent) => Excluded::read(agent.control.control()),
            None => Excluded::default(),
        };
        let torn = self.torn.take();
        self.capturing = order.begin(tenant, &spaces, &excluded, torn);
    }

    /// What is on its way is in no place that a snapshot could name.
    fn wait_for_strays(&mut self, space: &Arc<Space>) {
        let begun = Instant::now();
        while space.has_strays.load(Ordering::Acquire)
            && !space.is_gone()
            && begun.elapsed() < STRAYS_PATIENCE
        {
            let report = self.evictor.fetch_strays(space, self.tenant);
            self.take_report(space, report);
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Has memory of a process come from a snapshot. Nobody evicts meanwhile.
    pub(super) fn fill(&mut self, order: FillOrder) {
        let tenant = self.tenant;
        if self.capturing.is_some() {
            return order.refuse("a snapshot of it is being captured");
        }
        let spaces = self.living_spaces();
        let Some(space) = spaces.iter().find(|space| space.pid() == Some(order.pid())) else {
            return order.refuse("its process is not managed");
        };
        if tenant.is_released() {
            return order.refuse("nothing of it is managed");
        }
        let _alone = lock(&tenant.placement.registering);
        // What is stored is of no use to who is not managed: it stays so.
        self.stands_down = false;
        tenant.under_pressure.store(true, Ordering::Relaxed);
        if !register_part(space, tenant, order.to()) {
            space.set_gone();
        }
        self.wait_for_strays(space);
        order.carry_out(tenant, space);
    }

    /// Captures some of what a snapshot waits for.
    pub(super) fn capture_on(&mut self, spare: bool) {
        match self.capturing.take().map(|capturing| capturing.go_on(self.tenant, spare)) {
            Some(Went::On(capturing)) => self.capturing = Some(capturing),
            Some(Went::Torn(torn)) => self.torn = Some(torn),
            Some(Went::Over) | None => {}
        }
        if self.torn.as_ref().is_some_and(|torn| torn.since.elapsed() > TORN_KEPT_FOR) {
            self.torn = None;
        }
    }

    /// Ends what was begun for snapshots: far from its budget a program runs as if
    /// there were no Strata.
    pub(super) fn stand_down_if_due(&mut self, spaces: &[Arc<Space>]) {
        if self.tenant.placement.registers.load(Ordering::Relaxed) {
            // Registered for what its programs have said, too.
            self.stands_down = false;
        }
        if !self.stands_down
            || self.capturing.is_some()
            || self.snapshot_begun.elapsed() < STAND_DOWN_AFTER
        {
            return;
        }
        // The advisor's sample of one that is far from its budget may have pages out
        // that nobody has used since: another time.
        self.stands_down = !self.tenant.under_pressure.load(Ordering::Relaxed);
        // One that was restored has pages in the store: it stays managed.
        if spaces.iter().all(|space| stand_down(space, self.tenant)) {
            self.stands_down = false;
            self.tenant.under_pressure.store(false, Ordering::Relaxed);
            self.rebuild();
        }
    }
}
