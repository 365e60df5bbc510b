//! Work on the page map that several threads share: mostly each waits for memory, because
//! what it looks at lies far apart.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use strata_sys::Helpers;

use crate::map::lock;

const MOST_THREADS: usize = 4;

/// As many threads as help.
pub(crate) fn threads() -> usize {
    available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS)
}

static HELPERS: Helpers = Helpers::new();

/// What `work` makes of each of `parts`, in their order, in `threads` threads, this one among
/// them.
pub(crate) fn by_many<T: Sync, R: Send>(
    threads: usize,
    parts: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(parts.len()));
    let some = || {
        let take = || next.fetch_add(1, Ordering::Relaxed);
        let mut own = Vec::new();
        while let Some((number, part)) = Some(take()).and_then(|at| Some((at, parts.get(at)?))) {
            own.push((number, work(part)));
        }
        lock(&done).append(&mut own);
    };
    HELPERS.beside(threads.clamp(1, parts.len().max(1)) - 1, &some);
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|&(number, _)| number);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_done_once_and_the_results_are_in_order() {
        for threads in [1, 3, 9] {
            for count in [0, 1, 2, 257] {
                let parts: Vec<usize> = (0..count).collect();
                let done = by_many(threads, &parts, |&part| part * 3);
                assert_eq!(done, parts.iter().map(|part| part * 3).collect::<Vec<_>>());
            }
        }
    }
}
