//! What the policy's time goes by: how many units an arrival counts for follows from
//! the processor time that the tenant's processes use between arrivals.

use std::sync::Arc;
use std::time::Duration;

use strata_policy::Clock;

use super::Keeper;
use crate::tenant::space::Space;

/// How far the clock was told.
#[derive(Debug, Default)]
pub(super) struct Told {
    clock: Clock,
    /// Pages that had arrived, and what their processes had worked; none at first.
    last: Option<(u64, Duration)>,
}

impl Keeper<'_> {
    /// Has arrivals count for what was worked since the last ones. To ask for it costs
    /// a look at each thread, so not for a few.
    pub(super) fn tell_time(&mut self, spaces: &[Arc<Space>]) {
        let tenant = self.tenant;
        let arrivals = tenant.account.arrivals();
        let since = self.told.last.map_or(u64::MAX, |(before, _)| arrivals - before);
        if since < Clock::LEAST_ARRIVALS {
            return;
        }
        // Of a process that has ended nothing is known any more: then this is less than before.
        let work = spaces.iter().filter_map(|space| space.process()?.processor_time()).sum();
        if let Some((_, before)) = self.told.last.replace((arrivals, work)) {
            let resident = tenant.census().resident;
            let units = self.told.clock.advance(work.saturating_sub(before), since, resident);
            tenant.account.set_units_of_arrival(units);
        }
    }
}
