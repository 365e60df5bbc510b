//! How address spaces come to a tenant: a process that starts, a child that was forked,
//! an agent that connects again; and a tenant beside another.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use strata_sys::{ControlBlock, EventFd, Range, Registration, SeqPacket, Userfaultfd};
use strata_units::PAGE_SIZE;

use crate::map::lock;
use crate::map::registry::SpaceField;
use crate::regions::registration::adjust_child;
use crate::tenant::space::{Agent, Space};
use crate::tenant::{Hail, Tenant, TenantSpec};

impl Tenant {
    /// Makes a tenant that shares the pages of this one: what is the same is
    /// kept once.
    pub fn create_beside(&self, spec: TenantSpec) -> io::Result<Arc<Self>> {
        // The files are the same, so is the tier.
        let tier = self.record.tier.as_ref().map(|(path, limit)| (PathBuf::from(path), *limit));
        let spec = TenantSpec { tier, ..spec };
        let (map, store) = (Arc::clone(&self.map), Arc::clone(&self.store));
        let tenant = Self::make(&self.registry, spec, self.record.family, map, store)?;
        // Its processes come at once, and with memory.
        tenant.start_keeper();
        Ok(tenant)
    }

    /// A process that starts under this tenant: its userfaultfd after the
    /// handshake, and everything that its agent said.
    pub fn attach(
        self: &Arc<Self>,
        uffd: Userfaultfd,
        control: ControlBlock,
        socket: SeqPacket,
        hail: Hail,
    ) -> io::Result<Arc<Space>> {
        let space = self.attach_unkept(uffd, control, socket, hail)?;
        self.start_keeper();
        self.wake_keeper();
        Ok(space)
    }

    /// The same, without a keeper.
    pub(crate) fn attach_unkept(
        self: &Arc<Self>,
        uffd: Userfaultfd,
        control: ControlBlock,
        socket: SeqPacket,
        hail: Hail,
    ) -> io::Result<Arc<Space>> {
        let agent = Agent::new(control, socket, hail);
        let kick = EventFd::new()?;
        let id = self
            .registry
            .add_space(self.id, Some(uffd.as_fd().as_raw_fd()))
            .ok_or_else(|| io::Error::other("this daemon manages 8192 processes already"))?;
        let space = Arc::new(Space::new(id, uffd, kick));
        space.transfer_clean.store(true, Ordering::Release);
        space.attach_agent(&self.registry, agent);
        self.registry.space_goes_live(id);
        self.adopt_space(Arc::clone(&space));
        Ok(space)
    }

    /// A space whose userfaultfd a fork made and whose agent has not come yet,
    /// if the process in which `probe` is mapped is the one; with `restored`, one
    /// that was restored as the process of that number.
    ///
    /// A restored process can fork before its agent has come, and its child then
    /// has its probe mapped too: the probe alone does not tell them apart.
    #[must_use]
    pub fn orphan_with(&self, probe: u64, restored: Option<u32>) -> Option<Arc<Space>> {
        let range = Range { start: probe, end: probe.saturating_add(PAGE_SIZE as u64) };
        // Whoever holds a gate may just be making the child's space: wait for
        // that by taking each gate once.
        for space in self.space_list() {
            drop(lock(&space.gate));
        }
        let pid_of = |space: &Space| space.held_process().map(|process| process.pid());
        let mut orphans = self.space_list();
        orphans.retain(|space| space.agent().is_none() && pid_of(space) == restored);
        orphans.into_iter().find(|space| {
            let found = space.uffd.register(range) == Registration::Done;
            if found {
                space.uffd.unregister(range);
            }
            found
        })
    }

    /// The agent of a forked child came.
    pub fn attach_orphan(
        &self,
        space: &Space,
        control: ControlBlock,
        socket: SeqPacket,
        hail: Hail,
    ) -> io::Result<()> {
        let agent = Agent::new(control, socket, hail);
        adjust_child(space, self, &agent)?;
        space.attach_agent(&self.registry, agent);
        self.wake_keeper();
        Ok(())
    }

    /// An agent connected again. `greet` sends it the control block's
    /// descriptor.
    pub fn resume(
        &self,
        space: &Space,
        socket: SeqPacket,
        greet: impl FnOnce(&SeqPacket, &ControlBlock) -> io::Result<()>,
    ) -> io::Result<()> {
        let agent = space.agent().ok_or_else(|| io::Error::other("it has not said hello yet"))?;
        greet(&socket, &agent.control)?;
        self.registry.set_space_fd(space.id, SpaceField::Socket, Some(socket.as_fd().as_raw_fd()));
        *lock(&agent.socket) = Some(socket);
        Ok(())
    }
}
