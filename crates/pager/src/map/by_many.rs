//! Work on the page map that several threads share: mostly each waits for memory, because
//! what it looks at lies far apart.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, available_parallelism};

const MOST_THREADS: usize = 4;

/// As many threads as help.
pub(crate) fn threads() -> usize {
    available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS)
}

/// What `work` makes of each of `parts`, in their order, in `threads` threads, this one among
/// them; the others are called `name`.
pub(crate) fn by_many<T: Sync, R: Send>(
    (name, threads): (&str, usize),
    parts: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let some = || {
        let take = || next.fetch_add(1, Ordering::Relaxed);
        let mut done = Vec::new();
        while let Some((number, part)) = Some(take()).and_then(|at| Some((at, parts.get(at)?))) {
            done.push((number, work(part)));
        }
        done
    };
    let mut done = thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(parts.len()))
            // Without one there is one less.
            .filter_map(|_| thread::Builder::new().name(name.into()).spawn_scoped(scope, some).ok())
            .collect();
        let mut done = some();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|&(number, _)| number);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_done_once_and_the_results_are_in_order() {
        for threads in [1, 3, 100] {
            for count in [0, 1, 2, 257] {
                let parts: Vec<usize> = (0..count).collect();
                let done = by_many(("some", threads), &parts, |&part| part * 3);
                assert_eq!(done, parts.iter().map(|part| part * 3).collect::<Vec<_>>());
            }
        }
    }
}
