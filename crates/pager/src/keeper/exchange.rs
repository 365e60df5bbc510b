//! What the keeper knows of the exchange between compressed memory and the file
//! tier; what follows from it is decided in `strata_policy::exchange`.

use strata_policy::Level;
use strata_policy::exchange::{Compressed, Flow, Horizon, LOOK_EVERY, horizon};
use strata_units::PAGE;

use crate::map::counters::{Counter, Latencies};
use crate::tenant::Tenant;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    before: Flow,
    /// The time then, also where nothing could be said.
    looked: u64,
    horizon: Option<Level>,
}

impl Exchange {
    /// Pages with smaller gaps are worth compressed memory.
    pub(super) fn horizon(&mut self, tenant: &Tenant) -> Option<Level> {
        tenant.record.tier.as_ref()?;
        // Where the file comes first, nothing is to be in compressed memory.
        if tenant.record.tier_order.is_file_first() {
            return None;
        }
        let count = |counter| tenant.counters.get(counter);
        let evicted = count(Counter::Evictions).saturating_sub(count(Counter::EvictionsUnchanged));
        let now =
            Flow { time: count(Counter::PolicyTime), stored: evicted + count(Counter::Promotions) };
        if now.time.saturating_sub(self.looked) >= LOOK_EVERY {
            self.looked = now.time;
            let store = tenant.store.stats();
            let staged = store.staged_bytes / PAGE;
            let median = |of| tenant.counters.latency_us(of, [0.5])[0];
            let compressed = Compressed {
                pages: store.objects.saturating_sub(store.file_objects + staged),
                bytes: store.dram_bytes.saturating_sub(store.staged_bytes),
                budget_bytes: tenant.budget_bytes(),
                fault_us: median(Latencies::Compressed),
                file_fault_us: median(Latencies::File),
            };
            if let Horizon::At(level) = horizon(self.before, now, &compressed) {
                self.horizon = level;
                self.before = now;
            }
        }
        self.horizon
    }
}
