//! The numbers of a dump's processes and threads: which they are, and whether they are free
//! for those that are restored.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use super::{FREE_WITHIN, RestoreError};
use crate::processes::{is_ending, kill_left_behind};

/// How long a CRIU whose worker has died may still take to collect its children.
const LEFT_AFTER: Duration = Duration::from_secs(1);
/// The number that the kernel gave last; the next one is given above it (see `pid_max` in
/// proc(5)).
const LAST_GIVEN: &str = "/proc/sys/kernel/ns_last_pid";
/// How long somebody else who has a number may keep it: most are short-lived.
const TAKEN_PATIENCE: Duration = Duration::from_secs(3);
/// How many processes may be started while a restore waits for its numbers, and do not come
/// to them.
const PASSED_AHEAD: u32 = 4096;

/// Numbers of the dump's processes and threads.
pub(super) fn numbers(images: &Path) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(images)? {
        let name = entry?.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix("core-")?.strip_suffix(".img"));
        found.extend(number.and_then(|number| number.parse::<u32>().ok()));
    }
    Ok(found)
}

/// Those of `numbers` that are in use, with the names of who uses them.
pub(super) fn taken(numbers: &[u32]) -> Vec<(u32, String)> {
    // Threads have an entry too; it is only not listed.
    let user = |number| fs::read_to_string(format!("/proc/{number}/comm")).ok();
    let mut found: Vec<_> = numbers
        .iter()
        .filter_map(|&number| Some((number, user(number)?.trim().to_owned())))
        .collect();
    found.sort();
    found
}

/// Refuses numbers that the kernel does not give; where it does not say which
/// those are, CRIU finds out.
pub(super) fn check_highest(numbers: &[u32], limit: Option<u32>) -> Result<(), RestoreError> {
    match (numbers.iter().max(), limit) {
        (Some(&number), Some(limit)) if number >= limit => {
            Err(RestoreError::TooHigh { number, limit })
        }
        _ => Ok(()),
    }
}

/// The last of `numbers` that the kernel would come to soon after `last`, as it gives each
/// below `limit` in turn.
fn last_due(numbers: &[u32], last: u32, limit: u32) -> Option<u32> {
    let ahead = |number: u32| (number + limit - last.min(limit)) % limit;
    let due = numbers.iter().copied().filter(|&number| number < limit);
    due.filter(|&number| (1..=PASSED_AHEAD).contains(&ahead(number))).max_by_key(|&n| ahead(n))
}

/// Has the kernel pass over those of `numbers` that it would give next: somebody else's
/// process would have one before CRIU has made its own.
pub(super) fn pass_over(numbers: &[u32], limit: Option<u32>) {
    let last = fs::read_to_string(LAST_GIVEN).ok().and_then(|last| last.trim().parse().ok());
    if let (Some(last), Some(limit)) = (last, limit.filter(|&limit| limit > 0))
        && let Some(number) = last_due(numbers, last, limit)
    {
        // Without it a number can be taken in this moment, which is said then.
        let _ = fs::write(LAST_GIVEN, number.to_string());
    }
}

/// The first number that the kernel does not give.
pub(super) fn limit() -> Option<u32> {
    fs::read_to_string("/proc/sys/kernel/pid_max").ok()?.trim().parse().ok()
}

/// Waits until nobody has `numbers`, and keeps them free. `limit`: the first that the kernel
/// does not give; `places`: where work directories of restores are.
pub(super) fn wait_free(
    numbers: &[u32],
    limit: Option<u32>,
    places: Option<&Path>,
) -> Result<(), RestoreError> {
    let began = Instant::now();
    loop {
        pass_over(numbers, limit);
        let taken = taken(numbers);
        if let Some(places) = places.filter(|_| began.elapsed() >= LEFT_AFTER) {
            taken.iter().for_each(|(number, _)| kill_left_behind(*number, places));
        }
        let living = |(number, _): &(u32, String)| !is_ending(*number);
        if taken.is_empty() {
            return Ok(());
        }
        let patience = if taken.iter().any(living) { TAKEN_PATIENCE } else { FREE_WITHIN };
        if began.elapsed() >= patience {
            return Err(RestoreError::Taken(taken));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_that_is_due_soon_is_passed_over() {
        assert_eq!(last_due(&[1000, 1002, 1001], 999, 32_768), Some(1002));
        assert_eq!(last_due(&[1000], 1000, 32_768), None, "given just now");
        assert_eq!(last_due(&[1000, 1001], 1000, 32_768), Some(1001));
        assert_eq!(last_due(&[1000, 9000], 990, 32_768), Some(1000), "the other is far");
        assert_eq!(last_due(&[400, 32_767], 32_760, 32_768), Some(400), "beyond the end");
        assert_eq!(last_due(&[], 7, 32_768), None);
        assert_eq!(last_due(&[5000], 7, 301), None, "not given at all");
        assert_eq!(last_due(&[900], 40_000, 32_768), Some(900), "a limit that was lowered");
    }

    #[test]
    fn numbers_that_the_kernel_does_not_give_are_refused() {
        let refused = check_highest(&[7, 32_768], Some(32_768)).expect_err("one too many");
        assert!(refused.to_string().contains("process number 32768"), "{refused}");
        assert!(check_highest(&[7, 32_767], Some(32_768)).is_ok());
        assert!(check_highest(&[], Some(1)).is_ok());
        assert!(check_highest(&[u32::MAX], None).is_ok());
    }
}
