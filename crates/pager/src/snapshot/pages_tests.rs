//! Snapshots' memory compared, and changed into one another.

use std::collections::BTreeMap;

use strata_units::{PAGE_SIZE, PageBuffer, SpaceId};

use crate::tenant::Tenant;
use crate::testing;

const PAGE: u64 = PAGE_SIZE as u64;
/// In another leaf than the first pages.
const FAR: u64 = 600;

type Pages = BTreeMap<u64, u8>;

fn next(pages: &Pages) -> impl FnMut(&mut PageBuffer) -> std::io::Result<Option<u64>> + use<> {
    let mut left: Vec<_> = pages.clone().into_iter().rev().collect();
    move |buffer| {
        let Some((page, seed)) = left.pop() else { return Ok(None) };
        *buffer = *testing::page(seed);
        Ok(Some(page * PAGE))
    }
}

fn taken_in(tenant: &Tenant, pages: &Pages) -> SpaceId {
    tenant.import_memory(next(pages)).expect("taken in")
}

fn read(tenant: &Tenant, memory: SpaceId) -> Pages {
    let mut found = Pages::new();
    let seed = |page: &PageBuffer| (0..=255).find(|&seed| testing::page(seed).0 == page.0);
    let mut add = |address: u64, page: &PageBuffer| {
        found.insert(address / PAGE, seed(page).expect("a page of ours"));
        Ok(())
    };
    tenant.read_snapshot(memory, &mut add).expect("read");
    found
}

#[test]
fn what_has_changed_makes_one_memory_the_other() {
    let tenant = testing::tenant();
    let old = Pages::from([(0, 1), (1, 2), (2, 3), (3, 4), (FAR, 5), (2 * FAR, 6)]);
    let new = Pages::from([(0, 1), (1, 12), (4, 14), (FAR, 5), (3 * FAR, 6)]);
    let (there, before, after) =
        (taken_in(&tenant, &old), taken_in(&tenant, &old), taken_in(&tenant, &new));
    let (mut changed, mut gone) = (Vec::new(), Vec::new());
    tenant
        .read_changes(
            Some(before),
            after,
            |_| false,
            |address, page| {
                match page {
                    Some(_) => changed.push(address / PAGE),
                    None => gone.push((address, address + PAGE)),
                }
                Ok(())
            },
        )
        .expect("compared");
    assert_eq!(changed, [1, 4, 3 * FAR]);
    assert_eq!(gone, [2, 3, 2 * FAR].map(|page| (page * PAGE, (page + 1) * PAGE)));
    let changes = changed.into_iter().map(|page| (page, new[&page])).collect();
    tenant.update_memory(there, &gone, next(&changes)).expect("updated");
    assert_eq!(read(&tenant, there), new);
    assert_eq!(read(&tenant, before), old, "it shares content, and is another one");
    for memory in [there, before, after] {
        tenant.remove_snapshot_memory(memory);
    }
    assert!(tenant.snapshot_memories().is_empty());
}

#[test]
fn nothing_is_left_of_memory_that_could_not_be_updated() {
    let tenant = testing::tenant();
    let there = taken_in(&tenant, &Pages::from([(0, 1)]));
    let error = tenant.update_memory(there, &[], |_| Err(std::io::Error::other("cut")));
    assert_eq!(error.expect_err("it was cut").to_string(), "cut");
    assert!(tenant.snapshot_memories().is_empty());
    assert!(tenant.update_memory(there, &[], |_| Ok(None)).is_err());
}
