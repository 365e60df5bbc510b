//! The numbers of a dump's processes and threads: which they are, and whether they are free
//! for those that are restored.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use super::{FREE_WITHIN, RestoreError};
use crate::processes::{is_ending, kill_left_behind};

/// How long a CRIU whose worker has died may still take to collect its children.
const LEFT_AFTER: Duration = Duration::from_secs(1);

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

/// Waits until nobody has `numbers`. `places`: where work directories of restores are.
pub(super) fn wait_free(numbers: &[u32], places: Option<&Path>) -> Result<(), RestoreError> {
    let began = Instant::now();
    let end = began + FREE_WITHIN;
    loop {
        let taken = taken(numbers);
        if let Some(places) = places.filter(|_| began.elapsed() >= LEFT_AFTER) {
            taken.iter().for_each(|(number, _)| kill_left_behind(*number, places));
        }
        let living = |(number, _): &(u32, String)| !is_ending(*number);
        if taken.is_empty() {
            return Ok(());
        }
        if taken.iter().any(living) || Instant::now() >= end {
            return Err(RestoreError::Taken(taken));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_the_kernel_does_not_give_are_refused() {
        let refused = check_highest(&[7, 32_768], Some(32_768)).expect_err("one too many");
        assert!(refused.to_string().contains("process number 32768"), "{refused}");
        assert!(check_highest(&[7, 32_767], Some(32_768)).is_ok());
        assert!(check_highest(&[], Some(1)).is_ok());
        assert!(check_highest(&[u32::MAX], None).is_ok());
    }
}
