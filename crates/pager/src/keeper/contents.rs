//! What pages hold, wherever they are, without moving any of them: for a sample that is
//! packed to learn what a tenant's pages will take.

use strata_units::{PAGE_SIZE, PageId};

use crate::map::address::address_of;
use crate::map::entry::Entry;
use crate::tenant::Tenant;

/// Contents of those of `pages` that are at hand: in place, or in the store's DRAM.
///
/// Nothing is locked. A page that comes, goes or is replaced meanwhile may be left out or
/// read as what is there by then; one that leaves in the microsecond before it is read is
/// left out.
pub(super) fn contents(tenant: &Tenant, pages: &[PageId]) -> Vec<[u8; PAGE_SIZE]> {
    pages.iter().filter_map(|&page| content(tenant, page)).collect()
}

fn content(tenant: &Tenant, page: PageId) -> Option<[u8; PAGE_SIZE]> {
    match tenant.map.get(page) {
        Entry::Stored(handle) | Entry::Arriving(handle) => tenant.store.glance(handle),
        entry if entry.is_resident() => {
            let (space, piece) = tenant.map.owner(page.leaf())?;
            let process = tenant.space(space)?.process()?;
            let mut content = [0; PAGE_SIZE];
            let at = address_of(piece, page.index());
            (process.read(at, &mut content) == PAGE_SIZE).then_some(content)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::serve_tests::World;
    use crate::testing;

    #[test]
    fn what_pages_hold_is_read_where_they_are_and_moves_none() {
        let Some(mut world) = World::of(testing::tenant()) else { return };
        let seeds = 0..8u8;
        for seed in seeds.clone() {
            let page = usize::from(seed);
            world.expect(page, 0);
            world.write(page, seed);
            world.wait_for(page, Entry::Resident { shared: false });
        }
        world.evict_all(&[0, 2, 3, 6]);
        let ids: Vec<PageId> =
            seeds.clone().map(|seed| world.id(usize::from(seed)).expect("touched")).collect();
        let before: Vec<Entry> = ids.iter().map(|&id| world.tenant.map.get(id)).collect();
        let held = contents(&world.tenant, &ids);
        assert!(held.into_iter().eq(seeds.map(|seed| testing::page(seed).0)), "all, in order");
        assert!(before.into_iter().eq(ids.iter().map(|&id| world.tenant.map.get(id))));
        // What was discarded, or never touched, is not there.
        world.memory.discard(1, 2).expect("madvise");
        world.wait_for(1, Entry::Discarded);
        world.wait_for(2, Entry::Discarded);
        assert_eq!(contents(&world.tenant, &ids[1..3]), Vec::<[u8; PAGE_SIZE]>::new());
        world.end();
    }
}
