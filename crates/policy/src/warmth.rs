//! Which parts of the memory on the node are worth DRAM, where somebody has watched
//! what is used.
//!
//! What is seen is coarse: of a part, the share of samples that found one of its pages
//! used. While the budget has room, everything that is used comes back. Without room
//! whatever comes pushes out something else, so it comes only if it is used clearly
//! more than what is in DRAM: where all is used alike, nothing moves.

/// A part of a tenant's memory, as it was seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watched {
    /// Pages of it on the node...
    pub node_pages: usize,
    /// ...and in DRAM.
    pub dram_pages: usize,
    /// Samples that found it used.
    pub hits: u32,
}

/// What may come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Pages for which nothing has to go.
    pub free_pages: usize,
    /// Pages for which something has to, at most.
    pub exchanged_pages: usize,
}

/// One hit may be anybody's, a debugger's too.
const LEAST_HITS: u32 = 2;
/// Clearly more: half as much again as the mean of what is in DRAM...
const TIMES: (u128, u128) = (3, 2);
/// ...and so many samples more: what chance makes of twenty.
const BEYOND_CHANCE: u128 = 3;

/// Which of the parts are worth it, those first that are used most, and of those the
/// smallest: it says most about its pages.
#[must_use]
pub fn worth_dram(seen: &[Watched], room: Room) -> Vec<usize> {
    let mut used: Vec<usize> = (0..seen.len())
        .filter(|&part| seen[part].node_pages > 0 && seen[part].hits >= LEAST_HITS)
        .collect();
    used.sort_by_key(|&part| (std::cmp::Reverse(seen[part].hits), seen[part].node_pages));
    let dram: u128 = seen.iter().map(|part| part.dram_pages as u128).sum();
    let weighted: u128 =
        seen.iter().map(|part| part.dram_pages as u128 * u128::from(part.hits)).sum();
    // Without anything to compare it with, nothing is clearly more.
    let is_clear = |part: &Watched| {
        let hits = u128::from(part.hits) * dram;
        dram > 0 && hits * TIMES.1 >= weighted * TIMES.0 && hits >= weighted + BEYOND_CHANCE * dram
    };
    let Room { mut free_pages, mut exchanged_pages } = room;
    used.retain(|&part| {
        let part = &seen[part];
        let left = match part.node_pages <= free_pages {
            true => &mut free_pages,
            false if is_clear(part) => &mut exchanged_pages,
            false => return false,
        };
        let fits = part.node_pages <= *left;
        *left -= if fits { part.node_pages } else { 0 };
        fits
    });
    used
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(node_pages: usize, hits: u32) -> Watched {
        Watched { node_pages, dram_pages: 0, hits }
    }

    fn dram(dram_pages: usize, hits: u32) -> Watched {
        Watched { node_pages: 0, dram_pages, hits }
    }

    const FULL: Room = Room { free_pages: 0, exchanged_pages: 1000 };

    #[test]
    fn with_room_everything_that_is_used_comes_the_hottest_first() {
        let room = Room { free_pages: 1000, exchanged_pages: 0 };
        let seen = [node(100, 2), node(200, 9), node(10, 9), node(50, 1), node(0, 20), node(5, 0)];
        assert_eq!(worth_dram(&seen, room), [2, 1, 0]);
        // What is in DRAM is used more: there is room all the same.
        let seen = [node(100, 3), dram(500, 20)];
        assert_eq!(worth_dram(&seen, room), [0]);
        // Room for some: the hotter ones.
        let room = Room { free_pages: 150, exchanged_pages: 0 };
        assert_eq!(worth_dram(&[node(100, 5), node(100, 8), node(40, 3)], room), [1, 2]);
    }

    #[test]
    fn without_room_only_what_is_clearly_hotter_comes() {
        // All alike: it would only go round.
        for hits in [0, 1, 2, 10, 19, 20] {
            assert_eq!(worth_dram(&[node(100, hits), dram(500, hits)], FULL), [0; 0]);
        }
        assert_eq!(worth_dram(&[node(100, 20), dram(500, 5)], FULL), [0]);
        assert_eq!(worth_dram(&[node(100, 6), dram(500, 5)], FULL), [0; 0], "chance");
        assert_eq!(worth_dram(&[node(100, 2), dram(500, 0)], FULL), [0; 0], "chance");
        assert_eq!(worth_dram(&[node(100, 3), dram(500, 0)], FULL), [0]);
        // The mean is that of pages, not of parts.
        let seen = [node(100, 12), dram(1, 20), dram(500, 2), dram(1, 20)];
        assert_eq!(worth_dram(&seen, FULL), [0]);
        // A part that lies in both counts as both.
        let both = Watched { node_pages: 100, dram_pages: 100, hits: 18 };
        assert_eq!(worth_dram(&[both], FULL), [0; 0]);
        assert_eq!(worth_dram(&[both, dram(900, 0)], FULL), [0]);
        assert_eq!(worth_dram(&[node(100, 20)], FULL), [0; 0], "nothing to compare it with");
    }

    #[test]
    fn no_more_comes_than_may_whatever_was_seen() {
        let mut state = 7_u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..2000 {
            let part = |next: &mut dyn FnMut(u64) -> u64| Watched {
                node_pages: next(600) as usize,
                dram_pages: next(600) as usize,
                hits: next(21) as u32,
            };
            let seen: Vec<Watched> = (0..next(30)).map(|_| part(&mut next)).collect();
            let room =
                Room { free_pages: next(4000) as usize, exchanged_pages: next(2000) as usize };
            let chosen = worth_dram(&seen, room);
            let pages: usize = chosen.iter().map(|&part| seen[part].node_pages).sum();
            assert!(pages <= room.free_pages + room.exchanged_pages);
            assert!(chosen.windows(2).all(|two| seen[two[0]].hits >= seen[two[1]].hits));
            let mut once = chosen.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!(once.len(), chosen.len());
            assert!(chosen.iter().all(|&part| seen[part].hits >= LEAST_HITS));
        }
        let huge = Watched { node_pages: usize::MAX >> 8, dram_pages: 1 << 32, hits: u32::MAX };
        assert_eq!(worth_dram(&[huge, huge], FULL), [0; 0]);
    }
}
