//! Page maps of processes to come, and of memory that comes into one.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread::{Builder, JoinHandle};

use strata_pager::{Prepared, Revival, Tenant};
use strata_units::SpaceId;

use super::disk::{Known, Process};

type Copied = (u32, io::Result<Prepared>);

/// Of a tenant, as the other one, which it shares its pages with, has it in a snapshot.
type Prepare = fn(&Arc<Tenant>, &Arc<Tenant>, SpaceId) -> io::Result<Prepared>;

/// The page maps of processes to come, copied while somebody makes them. Until it is
/// dropped their tenant is coming back.
pub(super) struct Preparing {
    /// Who comes, and whose pages these are.
    tenant: Arc<Tenant>,
    origin: Arc<Tenant>,
    memories: Vec<(u32, SpaceId)>,
    prepare: Prepare,
    thread: Option<JoinHandle<()>>,
    copied: Option<Receiver<Copied>>,
    ready: BTreeMap<u32, io::Result<Prepared>>,
    _revival: Revival,
}

impl Preparing {
    pub(super) fn begin(
        tenant: &Arc<Tenant>,
        origin: &Arc<Tenant>,
        known: &Known,
    ) -> Result<Self, String> {
        let memory_of = |process: &Process| Some((process.pid, SpaceId(process.memory?)));
        let memories: Option<Vec<_>> = known.processes.iter().map(memory_of).collect();
        let memories = memories.ok_or("its memory is not loaded")?;
        let prepare: Prepare = |tenant, origin, memory| tenant.prepare_restore(origin, memory);
        Self::begin_all(tenant, origin, memories, prepare)
    }

    /// For the memory of a guest, whose QEMU has the number `pid` by then.
    pub(super) fn of_guest(
        tenant: &Arc<Tenant>,
        origin: &Arc<Tenant>,
        pid: u32,
        memory: SpaceId,
    ) -> Result<Self, String> {
        Self::begin_all(tenant, origin, vec![(pid, memory)], Tenant::prepare_fill)
    }

    fn begin_all(
        tenant: &Arc<Tenant>,
        origin: &Arc<Tenant>,
        memories: Vec<(u32, SpaceId)>,
        prepare: Prepare,
    ) -> Result<Self, String> {
        let mut preparing = Self {
            tenant: Arc::clone(tenant),
            origin: Arc::clone(origin),
            memories,
            prepare,
            thread: None,
            copied: None,
            ready: BTreeMap::new(),
            _revival: tenant.revival(),
        };
        preparing.again()?;
        Ok(preparing)
    }

    /// Copies them once more, for the next try: those of the last one are used up.
    pub(super) fn again(&mut self) -> Result<(), String> {
        self.end();
        self.ready.clear();
        let (tenant, origin) = (Arc::clone(&self.tenant), Arc::clone(&self.origin));
        let (memories, prepare) = (self.memories.clone(), self.prepare);
        let (send, copied) = mpsc::channel();
        let thread = Builder::new().name("prepare".into()).spawn(move || {
            for (pid, memory) in memories {
                let prepared = prepare(&tenant, &origin, memory);
                // Whoever restores it has given up.
                if send.send((pid, prepared)).is_err() {
                    break;
                }
            }
        });
        self.thread = Some(thread.map_err(|error| format!("no thread for a restore: {error}"))?);
        self.copied = Some(copied);
        Ok(())
    }

    fn end(&mut self) {
        self.copied = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Waits for all of them: there is room for what is to come.
    pub(super) fn wait(&mut self) -> Result<(), String> {
        while let Some(Ok((pid, prepared))) = self.copied.as_ref().map(Receiver::recv) {
            let prepared = prepared.map_err(|error| error.to_string())?;
            self.ready.insert(pid, Ok(prepared));
        }
        Ok(())
    }

    /// Of the process that had the number `pid`.
    pub(super) fn of(&mut self, pid: u32) -> Result<Prepared, String> {
        loop {
            if let Some(prepared) = self.ready.remove(&pid) {
                return prepared.map_err(|error| error.to_string());
            }
            let next = self.copied.as_ref().and_then(|copied| copied.recv().ok());
            let (pid, prepared) = next.ok_or("a process is restored twice")?;
            self.ready.insert(pid, prepared);
        }
    }
}

impl Drop for Preparing {
    fn drop(&mut self) {
        // Nothing of it is left when the tenant is discarded.
        self.end();
    }
}
