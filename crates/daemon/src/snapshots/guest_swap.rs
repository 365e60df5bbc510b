//! The swap disk of a guest in its snapshots. Its pages are in the process that serves it; the
//! snapshot has those of the moment in which the guest stood still, as the memory of a process
//! that there is none of: stored, persisted, sent and removed as the guest's own memory is.
//!
//! ```text
//! take     it stands still: a reference there to each page ─▶ it runs: read from there, stored
//! fill     a disk of its own, empty ─▶ given all of them ─▶ the guest has its devices, runs
//! ```
//! A disk that has not got all of them is no guest's: whatever fails, the guest does not run.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use strata_api::{GuestSpec, Launch};
use strata_guest::moment::{self, Taken};
use strata_pager::Tenant;
use strata_sys::connect_now;
use strata_sys::peer::peer_of;
use strata_units::{PAGE_SIZE, PageBuffer, SpaceId};
use strata_vm::SWAP_MOMENTS_NAME;

use super::disk::{Known, Process};
use crate::tenants::chain;

/// The number of the process whose memory it is: nobody's.
pub(super) const SWAP_PID: u32 = 0;
/// How long whoever serves it may take for the pages of a moment, or for the next page.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to have taken the last page that it was given.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);

fn failed(why: &dyn std::fmt::Display) -> String {
    format!("its swap disk: {why}")
}

/// The size of a guest's swap disk.
pub(super) fn size_bytes(spec: &GuestSpec) -> Option<u64> {
    spec.launch.as_ref().and_then(|launch: &Launch| launch.swap_bytes)
}

/// Whoever serves a disk of a guest at `socket`, in its directory: a process of the user `uid`.
/// What is in that directory is that user's, and may lead elsewhere.
pub(super) fn connected(socket: &Path, uid: u32) -> Result<UnixStream, String> {
    let told = |error: io::Error| error.to_string();
    let stream = connect_now(socket).map_err(told)?;
    if peer_of(&stream).map_err(told)?.uid != uid {
        return Err("another user's process answers in its place".to_owned());
    }
    stream
        .set_read_timeout(Some(ANSWERED_WITHIN))
        .and_then(|()| stream.set_write_timeout(Some(ANSWERED_WITHIN)))
        .map_err(told)?;
    Ok(stream)
}

fn moments_of(directory: &Path, uid: u32) -> Result<UnixStream, String> {
    connected(&directory.join(SWAP_MOMENTS_NAME), uid).map_err(|why| failed(&why))
}

/// Its pages of now, when the guest stands still.
pub(super) fn taken(directory: &Path, uid: u32, size_bytes: u64) -> Result<Taken, String> {
    let stream = moments_of(directory, uid)?;
    moment::take(stream, size_bytes).map_err(|error| failed(&error))
}

/// Stores them with the guest's snapshots.
pub(super) fn stored(tenant: &Tenant, mut taken: Taken) -> Result<SpaceId, String> {
    let next = |buffer: &mut PageBuffer| {
        let index = taken.page(buffer)?;
        Ok(index.map(|index| index * PAGE_SIZE as u64))
    };
    tenant.import_memory(next).map_err(|error| failed(&chain(&error)))
}

/// What a snapshot has of it.
pub(super) fn process(memory: SpaceId) -> Process {
    Process {
        pid: SWAP_PID,
        memory: Some(memory.0),
        restart: None,
        own: (0, 0),
        needed: Vec::new(),
        settings: Vec::new(),
        touched: Vec::new(),
        touched_then: Vec::new(),
    }
}

/// Gives the swap disk of a guest that is to come from a snapshot, and has its files in
/// `directory`, what is in there. `holder` has that.
pub(super) fn given(
    known: &Known,
    spec: &GuestSpec,
    holder: &Tenant,
    (directory, uid): (&Path, u32),
) -> Result<(), String> {
    let memory = known.processes.iter().find(|process| process.pid == SWAP_PID);
    let memory = match (size_bytes(spec), memory) {
        (None, None) => return Ok(()),
        (Some(_), Some(process)) => process.memory.ok_or("its swap disk is not loaded")?,
        _ => return Err("it contradicts itself: the guest's swap disk".to_owned()),
    };
    let stream = moments_of(directory, uid)?;
    stream.set_read_timeout(Some(TAKEN_WITHIN)).map_err(|error| failed(&error))?;
    let given = moment::give(&stream, |each| {
        holder
            .read_snapshot(SpaceId(memory), |address, page| each(address / PAGE_SIZE as u64, page))
    });
    given.map_err(|error: io::Error| failed(&chain(&error)))
}
