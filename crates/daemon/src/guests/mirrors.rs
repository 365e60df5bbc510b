//! Disks of a guest that its QEMU copies to another host, for as long as that takes: beside
//! the rounds of a move, in which it stands still now and then, and up to the last moment.
//!
//! A guest of which that is so is marked as one whose disks are copied; whoever finds the
//! mark, and nobody sees to it, has QEMU end that.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use strata_pager::Tenant;
use strata_vm::Monitor;
use strata_vm::disks::{self, CopyProgress, WrittenDisk};

use super::disks::{ASKED_WITHIN, ENDED_WITHIN, clean};
use super::monitor::{COPYING, name_of, says};
use super::{Guests, lock};

/// A disk that is to be copied.
pub(crate) struct FarDisk<'a> {
    pub(crate) disk: &'a WrittenDisk,
    /// The socket at which the way to the other host begins.
    pub(crate) way: String,
    /// It is an overlay there, too.
    pub(crate) is_over: bool,
}

/// A guest whose disks are being copied. Dropped, they are not any more.
pub(crate) struct Mirrored {
    guests: Arc<Guests>,
    tenant: Arc<Tenant>,
}

impl Mirrored {
    /// Has the guest's QEMU begin.
    pub(crate) fn begin(
        guests: &Arc<Guests>,
        tenant: &Arc<Tenant>,
        far: &[FarDisk<'_>],
    ) -> Result<Self, String> {
        guests.write_mark(tenant, COPYING)?;
        lock(&guests.mirrored).insert(name_of(tenant));
        let mirrored = Self { guests: Arc::clone(guests), tenant: Arc::clone(tenant) };
        mirrored.ask(|monitor| {
            for (number, far) in far.iter().enumerate() {
                monitor.allow(ASKED_WITHIN);
                disks::begin_far(monitor, number, far.disk, (&far.way, far.is_over))
                    .map_err(|error| format!("the disk {}: {error}", far.disk.file))?;
            }
            Ok(())
        })?;
        Ok(mirrored)
    }

    /// How far it is.
    pub(crate) fn progress(&self) -> Result<CopyProgress, String> {
        self.ask(|monitor| disks::progress(monitor).map_err(|error| error.to_string()))
    }

    fn ask<T>(&self, what: impl FnOnce(&mut Monitor) -> Result<T, String>) -> Result<T, String> {
        let _alone = self.guests.alone(&self.tenant)?;
        let directory = self.guests.directory(&self.tenant);
        let mut talk = self.guests.talk(&self.tenant, &directory, ASKED_WITHIN)?;
        what(&mut talk.monitor)
    }
}

impl Drop for Mirrored {
    fn drop(&mut self) {
        let mark = self.guests.mark(&self.tenant);
        // Else it stands still for good, or has ended.
        if says(&mark, COPYING) && self.ask(clean).is_ok() {
            let _ = fs::remove_file(mark);
        }
        // From here on others see to what is left.
        lock(&self.guests.mirrored).remove(&name_of(&self.tenant));
    }
}

impl Guests {
    /// Whether somebody sees to it that a guest of that mark copies disks.
    pub(super) fn is_mirrored(&self, folder: &str, mark: &Path) -> bool {
        lock(&self.mirrored).contains(folder) && says(mark, COPYING)
    }
}

/// Ends the copies: they are of this moment, in which the guest stands still.
pub(super) fn finish(monitor: &mut Monitor) -> Result<(), String> {
    monitor.allow(ENDED_WITHIN);
    disks::finish(monitor).map_err(|error| error.to_string())
}
