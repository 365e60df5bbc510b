//! What the last survey of a tenant has found, and who waits for the next.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use crate::tenant::Tenant;

/// After so many surveys in which it stood still: a young process is left out at first.
const STILL_AFTER: u32 = 3;

/// Resident anonymous bytes that are not managed, by cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Unmanaged {
    /// May be managed, and is not registered (yet).
    pub untouched_bytes: u64,
    /// In mappings that are too small.
    pub small_bytes: u64,
    /// Stacks of threads.
    pub stacks_bytes: u64,
    /// In executable mappings.
    pub executable_bytes: u64,
    /// In mappings of files: programs' data, `/dev/zero`.
    pub files_bytes: u64,
    /// In processes that no agent is in.
    pub unattended_bytes: u64,
}

/// A process of the tenant that no agent is in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unattended {
    /// Its number.
    pub pid: u32,
    /// What it executes.
    pub name: String,
    /// Its resident anonymous bytes, shared pages in proportion.
    pub bytes: u64,
    /// Why, for people.
    pub why: &'static str,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// By cause.
    pub unmanaged: Unmanaged,
    /// Some of the processes without an agent.
    pub unattended: Vec<Unattended>,
    /// How many there are.
    pub unattended_processes: usize,
}

/// The last survey, and who wants the next.
#[derive(Debug, Default)]
pub(crate) struct Surveyed {
    pub(crate) state: Mutex<State>,
    pub(crate) done: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) survey: Survey,
    pub(crate) taken: Option<Instant>,
    pub(crate) asked: Option<Instant>,
    /// Not before this, if nobody waits for the first.
    pub(crate) next: Option<Instant>,
    /// When its processes were looked through.
    pub(crate) looked: Option<Instant>,
    /// How often it had stood up by then, and surveys since.
    pub(crate) still: (u64, u32),
    /// Said in the log already.
    pub(crate) said: BTreeSet<u32>,
}

impl State {
    /// Whether nothing of the tenant has run for some surveys, this one included.
    pub(crate) fn stands_still(&mut self, tenant: &Tenant) -> bool {
        let stood_up = tenant.stood_up.load(Ordering::Relaxed);
        let (before, surveys) = self.still;
        let is_still = tenant.stands_still.load(Ordering::Relaxed) && before == stood_up;
        self.still = (stood_up, if is_still { surveys.saturating_add(1) } else { 0 });
        self.still.1 > STILL_AFTER
    }
}
