//! One process of a snapshot in a core file, for debuggers.

use std::io;
use std::path::Path;

use strata_api::SnapshotRef;
use strata_pager::Tenant;
use strata_snapshot::coredump::{CoreError, Process, Writer};
use strata_units::SpaceId;

use super::files::{TELL_PAGES, told};
use super::{Snapshots, Tell};
use crate::tenants::chain;

/// Why there is no core file, and what to do.
pub(crate) struct Refused {
    pub(crate) why: String,
    pub(crate) todo: &'static str,
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self { why, todo: "" }
    }
}

impl From<CoreError> for Refused {
    fn from(error: CoreError) -> Self {
        Self { why: chain(&error), todo: "" }
    }
}

impl Snapshots {
    /// Writes the process `pid` of a snapshot into a core file.
    pub(crate) fn core(
        &self,
        uid: u32,
        named: &SnapshotRef,
        pid: u32,
        path: &Path,
        tell: Tell<'_>,
    ) -> Result<(), Refused> {
        let _turn = self.turn_of(uid, named)?;
        if self.find(uid, named)?.guest.is_some() {
            return Err(Refused {
                why: "it is of a virtual machine, whose processors' registers only QEMU reads"
                    .into(),
                todo: "strata clone it, and give the clone's QEMU the command dump-guest-memory",
            });
        }
        let (known, holder) = self.loaded(uid, named, tell)?;
        let images = self.disk.images(&known.info.id);
        let listed = known.processes.iter().find(|process| process.pid == pid);
        let (start, end) = listed.map_or((0, 0), |process| process.own);
        let process = Process::read(&images, pid, &(start..end))?;
        let memory = listed.and_then(|process| process.memory);
        let memory = SpaceId(memory.ok_or_else(|| "its memory is not loaded".to_owned())?);
        write(&holder, memory, Writer::create(path, process)?, tell)
    }
}

fn write(
    holder: &Tenant,
    memory: SpaceId,
    mut writer: Writer,
    tell: Tell<'_>,
) -> Result<(), Refused> {
    let (mut pages, mut refused) = (0, None);
    let read = holder.read_snapshot(memory, |address, page| {
        pages += 1;
        if pages % TELL_PAGES == 0 {
            tell(told("writing", pages, None));
        }
        writer.page(address, &page.0).map_err(|error| {
            refused = Some(error);
            io::Error::other("writing")
        })
    });
    match (read, refused) {
        (_, Some(error)) => Err(error.into()),
        (Err(error), None) => Err(chain(&error).into()),
        (Ok(()), None) => Ok(writer.finish().map(|_| ())?),
    }
}
