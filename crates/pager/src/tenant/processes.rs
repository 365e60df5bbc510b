//! A tenant's processes: which there are, and what is sent to them.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use strata_sys::{Process, SIGKILL, SIGSTOP};
use strata_units::SpaceId;

use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::space::{Agent, Space};

impl Tenant {
    /// Its processes. One that has ended is among them until it is taken down.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.members().iter().map(|process| process.pid()).collect()
    }

    /// Whether the process of this number lives, and no other one of it does.
    #[must_use]
    pub fn is_alone(&self, pid: u32) -> bool {
        let mut living = self.members();
        living.retain(|process| !process.has_exited());
        living.iter().map(|process| process.pid()).eq([pid])
    }

    fn members(&self) -> Vec<Arc<Process>> {
        let mut released = lock(&self.released_agents).clone();
        released.retain(|agent| !agent.process.has_exited());
        let released = released.into_iter().map(|agent| Arc::clone(&agent.process));
        let held = self.space_list().into_iter().filter_map(|space| space.held_process());
        held.chain(released).collect()
    }

    /// Whether a process ever attached, and whether any is attached now.
    #[must_use]
    pub fn attachment(&self) -> (bool, bool) {
        let now = !self.spaces.read().unwrap_or_else(PoisonError::into_inner).is_empty();
        (self.had_space.load(Ordering::Relaxed) || now, now || self.has_released_process())
    }

    /// Ends its processes: `signal` to each. Returns how many were there.
    pub fn signal(&self, signal: i32) -> usize {
        let released = lock(&self.released_agents).clone();
        self.space_list()
            .iter()
            .filter_map(|space| space.agent())
            .chain(released)
            .filter(|agent| agent.process.pidfd().signal(signal))
            .count()
            + self.signal_restored(signal)
    }

    /// Ends its processes at once, and none of them sees another's end.
    pub fn kill(&self) {
        // Whoever waits for a single one shall not be told that it stopped.
        if self.pids().len() > 1 {
            self.signal(SIGSTOP);
        }
        self.signal(SIGKILL);
    }

    /// The same for those whose agents have not come yet.
    fn signal_restored(&self, signal: i32) -> usize {
        let mut waiting = self.space_list();
        waiting.retain(|space| space.agent().is_none() && space.uffd.is_alive());
        waiting
            .iter()
            .filter_map(|space| space.held_process())
            .filter(|process| process.pidfd().signal(signal))
            .count()
    }

    /// Whether a living process is the tenant's: attended, restored, released, or about
    /// to be another program's, which it has executed.
    #[must_use]
    pub fn has_process(&self, pid: u32) -> bool {
        let lives = |process: &Process| process.pid() == pid && !process.has_exited();
        let is_it = |agent: &Arc<Agent>| lives(&agent.process);
        self.space_list().iter().any(|space| match space.agent() {
            Some(agent) => is_it(&agent),
            None => space.held_process().is_some_and(|held| lives(&held)) && space.uffd.is_alive(),
        }) || lock(&self.released_agents).iter().any(is_it)
            || lock(&self.ending_agents).iter().any(is_it)
    }

    /// The living space of the process that lives and has this number.
    #[must_use]
    pub fn space_of(&self, pid: u32) -> Option<Arc<Space>> {
        let is_it = |space: &Arc<Space>| {
            space.process().is_some_and(|one| one.pid() == pid && !one.has_exited())
        };
        self.space_list().into_iter().find(|space| is_it(space) && space.uffd.is_alive())
    }

    /// The processes of its spaces that have agents, as far as they live.
    #[must_use]
    pub fn processes(&self) -> Vec<Arc<Process>> {
        let all = self.space_list().into_iter().filter_map(|space| space.process());
        all.filter(|process| !process.has_exited()).collect()
    }

    /// Sends a message to the agent of a space.
    pub fn tell_agent(&self, id: SpaceId, bytes: &[u8]) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotConnected);
        let agent = self.space(id).and_then(|space| space.agent()).ok_or_else(gone)?;
        lock(&agent.socket).as_ref().ok_or_else(gone)?.send(bytes, &[])
    }

    /// The versions of the library in its processes, from the oldest on; 0: one that does
    /// not tell.
    #[must_use]
    pub fn libraries(&self) -> Vec<u64> {
        let spaces = self.space_list();
        let versions = spaces.iter().filter_map(|space| Some(space.agent()?.library));
        versions.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Whether a process that was released still runs.
    #[must_use]
    pub fn has_released_process(&self) -> bool {
        lock(&self.released_agents).iter().any(|agent| !agent.process.has_exited())
    }
}
