//! What programs ask about their own memory, carried out. Whose memory it is, is
//! found out before.

use std::sync::Arc;

use strata_api::{MAX_PLACE_PAGES, MAX_PLACE_RANGES, PlaceOutcome, PlaceWish, Reply, tier_letters};
use strata_pager::{MOST_SETTINGS, Refused, Setting, Space, Tenant, Whereabouts, Wish};
use strata_sys::Range;
use strata_units::{ByteSize, PAGE_SIZE};

pub(crate) fn place(
    tenant: &Arc<Tenant>,
    space: &Arc<Space>,
    wish: PlaceWish,
    ranges: &[(u64, u64)],
) -> Reply {
    let outcome = if ranges.len() > MAX_PLACE_RANGES {
        Err(Refused::Range)
    } else {
        let ranges: Vec<Range> = ranges.iter().map(|&(start, end)| Range { start, end }).collect();
        let place = |wish| tenant.place(space, &ranges, wish);
        match wish {
            PlaceWish::Normal => place(Wish::Normal),
            PlaceWish::Unpin => place(Wish::Unpin),
            PlaceWish::Pin => place(Wish::Set(Setting::Pinned)),
            PlaceWish::Sequential => place(Wish::Set(Setting::Sequential)),
            PlaceWish::Compressed => place(Wish::Set(Setting::Compressed)),
            PlaceWish::Node => place(Wish::Set(Setting::Node)),
            PlaceWish::File => place(Wish::Set(Setting::File)),
            PlaceWish::Whole => tenant.make_whole(space, &ranges),
        }
    };
    match outcome {
        Ok(()) => Reply::Place { outcome: PlaceOutcome::Done, message: String::new() },
        Err(refused) => refusal(&refused),
    }
}

fn refusal(refused: &Refused) -> Reply {
    let (outcome, message) = match refused {
        Refused::Budget { most_bytes } => {
            (PlaceOutcome::Budget, format!("of its budget {} can be pinned", ByteSize(*most_bytes)))
        }
        Refused::TooMany => (
            PlaceOutcome::TooMany,
            format!("more than {MOST_SETTINGS} ranges of the process would have settings"),
        ),
        Refused::NoTier => (PlaceOutcome::NoTier, "the tenant has no such tier".to_owned()),
        Refused::Range => (PlaceOutcome::Range, "a range is none".to_owned()),
        Refused::Memory(why) => (PlaceOutcome::TooMany, format!("it cannot be kept: {why}")),
    };
    Reply::Place { outcome, message }
}

pub(crate) fn whereabouts(tenant: &Tenant, space: &Space, start: u64, pages: u32) -> Reply {
    let end = start.checked_add(u64::from(pages) * PAGE_SIZE as u64);
    let found = match end.filter(|_| (1..=MAX_PLACE_PAGES).contains(&pages)) {
        Some(end) => tenant.whereabouts(space, Range { start, end }),
        None => Err(Refused::Range),
    };
    match found {
        Ok(found) => Reply::Where { tiers: found.into_iter().map(letter).collect() },
        Err(refused) => refusal(&refused),
    }
}

const fn letter(place: Whereabouts) -> char {
    match place {
        Whereabouts::NotManaged => tier_letters::NOT_MANAGED,
        Whereabouts::Dram => tier_letters::DRAM,
        Whereabouts::Node => tier_letters::NODE,
        Whereabouts::Staged => tier_letters::STAGED,
        Whereabouts::Compressed => tier_letters::COMPRESSED,
        Whereabouts::File => tier_letters::FILE,
        Whereabouts::Untouched => tier_letters::UNTOUCHED,
        Whereabouts::Lost => tier_letters::LOST,
    }
}
