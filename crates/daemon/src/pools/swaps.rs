//! Guests' swap disks: what their processes say of them, as long as they are connected. The
//! pages are there, not here; a guest's budget is charged with what they cost.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use strata_api::{PoolAdmission, PoolStats, Stats, SwapStats};
use strata_guest::SwapFigures;
use strata_units::PAGE_SIZE;

use crate::lock::lock;

/// Charges a user's guest with so many bytes; whether there is such a guest.
pub(super) type Charge = Box<dyn Fn(u32, &str, u64) -> bool + Send + Sync>;

/// What a swap disk's pool is called: its guest's name, and this.
const SUFFIX: &str = ".swap";

/// All of them.
pub(super) struct Swaps {
    charge: Charge,
    /// By owner and guest.
    known: Mutex<BTreeMap<(u32, String), SwapFigures>>,
}

/// One that is connected.
pub(super) struct Here {
    swaps: Arc<Swaps>,
    key: (u32, String),
}

impl Swaps {
    pub(super) fn new(charge: Charge) -> Arc<Self> {
        Arc::new(Self { charge, known: Mutex::default() })
    }

    /// The swap disk of a guest of user `uid`, which is about to tell its figures.
    pub(super) fn meet(self: &Arc<Self>, uid: u32, guest: &str) -> Result<Here, String> {
        if strata_api::name_problem(guest).is_some() || !(self.charge)(uid, guest, 0) {
            return Err(format!("you have no guest {guest}"));
        }
        let key = (uid, guest.to_owned());
        let mut known = lock(&self.known);
        // The process before may be about to be missed.
        if known.contains_key(&key) {
            return Err(format!("{guest} has a swap disk"));
        }
        known.insert(key.clone(), SwapFigures::default());
        Ok(Here { swaps: Arc::clone(self), key })
    }

    /// Those of user `uid`, of root all, as pools.
    pub(super) fn list(&self, uid: u32) -> Vec<PoolStats> {
        let known = lock(&self.known);
        let own = known.iter().filter(|((owner, _), _)| uid == 0 || *owner == uid);
        own.map(|(key, figures)| stats(key, figures)).collect()
    }

    /// The guest of user `uid` whose swap disk is called so.
    pub(super) fn guest_of(&self, (uid, name): &(u32, String)) -> Option<String> {
        let key = (*uid, name.strip_suffix(SUFFIX)?.to_owned());
        lock(&self.known).contains_key(&key).then_some(key.1)
    }

    /// Adds what is known of a guest's swap disk to what is known of the guest.
    pub(super) fn add(&self, stats: &mut Stats) {
        let known = lock(&self.known);
        if let Some(guest) = &mut stats.guest
            && let Some(figures) = known.get(&(stats.uid, stats.name.clone()))
        {
            guest.swap = Some(SwapStats {
                size_bytes: figures.size_bytes,
                page_bytes: figures.pages * PAGE_SIZE as u64,
                cost_bytes: figures.cost_bytes,
            });
        }
    }
}

impl Here {
    pub(super) fn hear(&self, figures: SwapFigures) {
        let (uid, guest) = &self.key;
        (self.swaps.charge)(*uid, guest, figures.cost_bytes);
        lock(&self.swaps.known).insert(self.key.clone(), figures);
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        let (uid, guest) = &self.key;
        (self.swaps.charge)(*uid, guest, 0);
        lock(&self.swaps.known).remove(&self.key);
    }
}

fn stats((uid, guest): &(u32, String), figures: &SwapFigures) -> PoolStats {
    let bytes = |pages: u64| pages * PAGE_SIZE as u64;
    PoolStats {
        name: format!("{guest}{SUFFIX}"),
        uid: *uid,
        guest: Some(guest.clone()),
        admission: PoolAdmission::First,
        limit_bytes: figures.size_bytes,
        cost_bytes: figures.cost_bytes,
        page_bytes: bytes(figures.pages),
        deduplicated_bytes: bytes(figures.deduplicated_pages),
        fill_bytes: bytes(figures.fill_pages),
        files: 1,
        connections: 1,
        gets_total: figures.gets,
        hits_total: figures.gets.saturating_sub(figures.corrupt),
        puts_total: figures.puts,
        refused_total: figures.refused,
        forgotten_total: figures.discarded,
        corrupt_total: figures.corrupt,
        ..PoolStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn a_guest_is_charged_for_its_swap_disk_as_long_as_that_is_there() {
        let charged = Arc::new(AtomicU64::new(77));
        let noted = Arc::clone(&charged);
        let swaps = Swaps::new(Box::new(move |uid, guest, bytes| {
            let is_there = (uid, guest) == (7, "web");
            if is_there {
                noted.store(bytes, Relaxed);
            }
            is_there
        }));
        for (uid, guest) in [(8, "web"), (7, "db"), (7, ""), (7, "../x")] {
            assert!(swaps.meet(uid, guest).is_err(), "{uid} {guest}");
        }
        let here = swaps.meet(7, "web").expect("its guest");
        assert!(swaps.meet(7, "web").is_err(), "one at a time");
        let figures =
            SwapFigures { size_bytes: 1 << 30, cost_bytes: 9, pages: 3, ..SwapFigures::default() };
        here.hear(figures);
        assert_eq!(charged.load(Relaxed), 9);
        assert!(swaps.list(8).is_empty() && swaps.list(0) == swaps.list(7));
        let listed = swaps.list(7);
        assert_eq!((listed[0].name.as_str(), listed[0].page_bytes), ("web.swap", 3 << 12));
        assert_eq!(swaps.guest_of(&(7, "web.swap".into())).as_deref(), Some("web"));
        assert_eq!(swaps.guest_of(&(8, "web.swap".into())), None);
        drop(here);
        assert!(charged.load(Relaxed) == 0 && swaps.list(7).is_empty());
        assert!(swaps.meet(7, "web").is_ok(), "the next process's");
    }
}
