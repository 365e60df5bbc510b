//! The `[[snapshot]]` tables of a configuration file.

use std::ops::Range;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Reader, Refusal, duration, tenant_name, truth, wrong_type};
use crate::config::{DEFAULT_KEEP, Schedule, exact_time};

/// All keys of a `[[snapshot]]` schedule.
const SCHEDULE_KEYS: [&str; 4] = ["name", "every", "keep", "persist"];
/// Schedules at most: each is looked at on every tick of the clock.
const MAX_SCHEDULES: usize = 256;
/// Scheduled snapshots of one tenant at most: a listing of them is still read.
const MAX_KEEP: u32 = 1000;
/// Longest time from one scheduled snapshot to the next.
const MAX_EVERY: Duration = Duration::from_secs(31 * 24 * 3600);

impl Reader<'_> {
    pub(super) fn schedules(&mut self, whole: &DeTable<'_>) -> Vec<Schedule> {
        const KEY: &str = "snapshot";
        const WANTED: &str = "[[snapshot]] schedules";
        let Some(value) = whole.get(KEY) else { return Vec::new() };
        let Some(array) = value.get_ref().as_array() else {
            self.complain(&value.span(), KEY, wrong_type(value.get_ref(), WANTED));
            return Vec::new();
        };
        if array.len() > MAX_SCHEDULES {
            let what =
                format!("{} schedules are more than the {MAX_SCHEDULES} allowed", array.len());
            self.complain(&value.span(), KEY, (what, "leave some out".into()));
            return Vec::new();
        }
        let mut schedules: Vec<Schedule> = Vec::new();
        for element in array.iter() {
            let Some(table) = element.get_ref().as_table() else {
                self.complain(&element.span(), KEY, wrong_type(element.get_ref(), WANTED));
                continue;
            };
            let Some(schedule) = self.schedule(table, &element.span()) else { continue };
            if schedules.iter().any(|other| other.name == schedule.name) {
                let at = table.get("name").map_or(element.span(), Spanned::span);
                let what = format!("{:?} has a schedule already", schedule.name);
                self.complain(&at, "name", (what, "leave one of them out".into()));
            }
            schedules.push(schedule);
        }
        schedules
    }

    fn schedule(&mut self, table: &DeTable<'_>, at: &Range<usize>) -> Option<Schedule> {
        self.unknown_keys(table, &SCHEDULE_KEYS, "snapshot");
        for (key, example) in [("name", "\"db\""), ("every", "\"5m\"")] {
            if !table.contains_key(key) {
                let todo = format!("add {key} = {example}");
                self.complain(at, "snapshot", (format!("a schedule needs the key {key}"), todo));
            }
        }
        let name = self.get(table, "name", tenant_name);
        let every = self.get(table, "every", interval);
        let keep = self.get(table, "keep", count).unwrap_or(DEFAULT_KEEP);
        let persist = self.get(table, "persist", truth).unwrap_or(false);
        Some(Schedule { name: name?, every: every?, keep, persist })
    }
}

fn interval(value: &DeValue<'_>) -> Result<Duration, Refusal> {
    let least = Duration::from_secs(strata_api::MIN_SCHEDULE_SECONDS);
    let time = duration(value, MAX_EVERY)?;
    if time < least {
        let what = format!("{} is too often", exact_time(time));
        let todo =
            format!("a snapshot stops the program for a moment: {} or more", exact_time(least));
        return Err((what, todo));
    }
    Ok(time)
}

fn count(value: &DeValue<'_>) -> Result<u32, Refusal> {
    let wanted = format!("how many to keep, 1 to {MAX_KEEP}");
    let integer = value.as_integer().ok_or_else(|| wrong_type(value, &wanted))?;
    match u32::from_str_radix(integer.as_str(), integer.radix()) {
        Ok(count) if (1..=MAX_KEEP).contains(&count) => Ok(count),
        _ => Err((format!("{} cannot be kept", integer.as_str()), format!("write {wanted}"))),
    }
}
