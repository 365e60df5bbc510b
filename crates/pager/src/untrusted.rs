//! What a worker reads that others wrote, each by itself, for whoever tries it with any
//! bytes (`fuzz/`): an agent's control block, and the files that a dead worker left.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use strata_store::{Descriptors, Store, StoreConfig};
use strata_units::wire::{BATCH_PAGES, Control};
use strata_units::{Handle, PAGES_PER_LEAF, PageId, SpaceId};

use crate::evict::{Moved, results_of};
use crate::life::recover::Files;
use crate::map::entry::Entry;
use crate::map::page_map::PageMap;
use crate::regions::registration::stacks_of;
use crate::tenant::excluded::Excluded;

/// What an agent's control block says.
#[derive(Debug)]
pub struct Said {
    excluded: Excluded,
    /// An address on the stack of each thread.
    pub stacks: Vec<u64>,
    /// How many pages of a batch were moved.
    pub moved: usize,
}

/// Reads a control block.
#[must_use]
pub fn read_control_block(control: &Control) -> Said {
    let count = (control.count.load(Ordering::Relaxed) as usize).min(BATCH_PAGES);
    let moved = results_of(control, count).into_iter().filter(|one| *one == Moved::Yes).count();
    Said { excluded: Excluded::read(control), stacks: stacks_of(control), moved }
}

impl Said {
    /// Whether the page at `address` is never evicted.
    #[must_use]
    pub fn keeps_in_place(&self, address: u64) -> bool {
        self.excluded.contains(address)
    }
}

/// A page map in which one space has those pages stored, from its first on: its files.
///
/// # Errors
/// Memory files cannot be made.
pub fn page_map_of(handles: &[Handle]) -> io::Result<Vec<OwnedFd>> {
    let map = PageMap::create()?;
    for (piece, handles) in handles.chunks(PAGES_PER_LEAF).enumerate() {
        let Some(leaf) = map.take(SpaceId(0), piece as u32) else { break };
        for (page, &handle) in leaf.pages().zip(handles) {
            map.set(page, Entry::Stored(handle));
        }
    }
    map.files().into_iter().map(|file| file.try_clone_to_owned()).collect()
}

/// A page map and a store, taken over.
pub struct TakenOver {
    map: Arc<PageMap>,
    /// It has what the page map names, and nothing else.
    pub store: Arc<Store>,
}

/// Takes over what a worker left.
///
/// # Errors
/// It is too much damaged.
pub fn take_over(
    map: Vec<OwnedFd>,
    store: Descriptors,
    config: StoreConfig,
) -> io::Result<TakenOver> {
    let Files { map, store, .. } = Files::of(PageMap::of_files(map)?, store, config, |_| Ok(()))?;
    Ok(TakenOver { map, store })
}

impl TakenOver {
    /// The pages that are in use, and the handles of those that are stored.
    #[must_use]
    pub fn pages(&self) -> Vec<(PageId, Option<Handle>)> {
        let leaves = self.map.leaves();
        let pages = leaves.iter().flat_map(|(leaf, _, _)| leaf.pages());
        pages.map(|page| (page, self.map.get(page).handle())).collect()
    }
}
