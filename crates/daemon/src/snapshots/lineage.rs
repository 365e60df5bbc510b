//! Where tenants come from and live. A name says nothing of that: a program may
//! be started under the name of a clone that has gone.

use std::sync::Arc;

use strata_api::{PortForward, SnapshotId};
use strata_pager::Tenant;

use super::disk::{Line, Place};
use super::{Snapshots, forward, lock};

/// Tells lives of one name apart, also for the next worker: the same number there
/// (serde_json with `float_roundtrip`; without, one in some reads back otherwise).
pub(super) fn life_of(tenant: &Tenant) -> u64 {
    tenant.record().started.to_bits()
}

impl Snapshots {
    /// What is known of this life of a tenant.
    pub(super) fn line_of(&self, tenant: &Tenant) -> Line {
        let lineage = lock(&self.lineage);
        let line = lineage.get(&tenant.record().name);
        line.filter(|line| line.life == life_of(tenant)).cloned().unwrap_or_default()
    }

    fn change_line(&self, tenant: &Tenant, change: impl FnOnce(&mut Line)) {
        let mut lineage = lock(&self.lineage);
        let line = lineage.entry(tenant.record().name.clone()).or_default();
        if line.life != life_of(tenant) {
            *line = Line { last: line.last, life: life_of(tenant), ..Line::default() };
        }
        change(line);
        // Only a listing suffers, and clones if this worker dies.
        let _ = self.disk.write_lineage(&lineage);
    }

    /// The memory of a tenant comes from a snapshot.
    pub(super) fn descends(&self, tenant: &Tenant, from: &SnapshotId) {
        self.change_line(tenant, |line| line.parent = Some(from.clone()));
    }

    /// Where a tenant lives from now on, also when it is brought back later.
    pub(super) fn settle(
        &self,
        tenant: &Arc<Tenant>,
        mut place: Option<Place>,
    ) -> Result<Vec<PortForward>, String> {
        for one in place.iter_mut().flat_map(|place| &mut place.forwards) {
            *one = forward::start(tenant, *one)?;
        }
        let forwards = place.as_ref().map(|place| place.forwards.clone()).unwrap_or_default();
        self.change_line(tenant, |line| line.place = place);
        Ok(forwards)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_time_is_the_same_when_it_was_written_and_read() {
        for step in 0..10_000u64 {
            let started = f64::from_bits(1_795_303_000.25f64.to_bits() + step * 7919);
            let text = serde_json::to_string(&started).expect("a number");
            let read: f64 = serde_json::from_str(&text).expect("a number");
            assert_eq!(read.to_bits(), started.to_bits(), "{text}");
        }
    }
}
