//! `strata_snapshot`: a program takes a snapshot of itself.
//!
//! The calling thread asks the daemon itself, over its socket for requests; the
//! agent has no part in it. The snapshot is taken while the connection is open
//! and the thread waits for the reply. In whatever is restored of it, the
//! connection is at its end, and the thread finds itself in a copy: the
//! `Restart` page says so until the agent has looked, `Block::lives` ever after.
//! Where the restorer could not write that page before the copy ran, it says for
//! a moment more what it said at the dump: that the agent is parked.
//!
//! There is no limit of time: a capture takes what it takes, and a clock may
//! jump between a dump and a restore.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::label_problem;
use strata_units::wire::CONTROL_SOCKET_NAME;
use strata_units::wire::restart::{RESTART_PARKED, RESTART_RESTORED};

use crate::block::{self, Block};
use crate::kernel::{self, Deadline, Fd, word};
use crate::message;
use crate::reason;
use crate::reply::{Line, Reader};
use crate::syscall::call;

/// For connecting and for sending the request.
const REACH_TIME: Duration = Duration::from_secs(5);
/// How long a copy's call waits until it is told that it is in a copy, or until the
/// daemon knows the copy.
const ANSWERED_TIME: Duration = Duration::from_secs(10);
/// Between two looks whether it does.
const NAP: Duration = Duration::from_millis(1);
/// What is read at a time: a usual reply fits, or the answer about some thousand
/// pages.
const CHUNK_BYTES: usize = 4096;
/// Longest request: the longest label with some thirty bytes around it.
const REQUEST_BYTES: usize = 128;

/// Who returns from the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    /// The process that called.
    Same,
    /// A copy of it.
    Copy,
}

/// Why there is no snapshot, as far as is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failure {
    /// The label cannot be one, for this reason.
    Label(&'static str),
    /// Nobody manages this process.
    NotManaged,
    /// The daemon is not to be reached.
    Unreachable,
    /// The daemon said no; why is kept already.
    Refused,
    /// The daemon went away before it answered.
    Lost,
    /// It answered something else than the protocol says.
    Protocol,
}

impl Failure {
    /// The call's result.
    fn code(self) -> c_int {
        match self {
            Self::Label(_) => -libc::EINVAL,
            Self::NotManaged => -libc::ENOSYS,
            Self::Unreachable => -libc::ENOTCONN,
            Self::Refused => -libc::ECANCELED,
            Self::Lost => -libc::ECONNRESET,
            Self::Protocol => -libc::EPROTO,
        }
    }

    /// What is to be kept of it.
    fn reason(self) -> Option<&'static str> {
        match self {
            Self::Label(problem) => Some(problem),
            Self::NotManaged => Some("this process is not managed by Strata"),
            Self::Unreachable => {
                Some("the daemon's socket for requests cannot be reached from this process")
            }
            Self::Refused => None,
            Self::Lost => Some("the daemon went away before it answered; strata snapshots tells"),
            Self::Protocol => Some("the daemon speaks another protocol (versions differ?)"),
        }
    }
}

/// Takes a snapshot of the tenant that this process belongs to; what is returned
/// to whom is said in `include/strata.h`.
///
/// # Safety
/// `label` must be null or a C string.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn strata_snapshot(label: *const c_char) -> c_int {
    reason::clear();
    // SAFETY: a C string if it is not null, says the caller.
    let label = (!label.is_null()).then(|| unsafe { CStr::from_ptr(label) });
    match take(label) {
        Ok(Life::Same) => 0,
        Ok(Life::Copy) => 1,
        Err(failure) => {
            if let Some(text) = failure.reason() {
                reason::keep(text.as_bytes());
            }
            failure.code()
        }
    }
}

fn take(label: Option<&CStr>) -> Result<Life, Failure> {
    let label = label.map(checked).transpose()?;
    let managed = |block: &&Block| block.managed.load(Ordering::SeqCst) != 0;
    let block = block::existing().filter(managed).ok_or(Failure::NotManaged)?;
    let began = settled_life(block);
    let mut request = [0; REQUEST_BYTES];
    let request = write_request(&mut request, label);
    let address = beside(&block.socket(), CONTROL_SOCKET_NAME).ok_or(Failure::Unreachable)?;
    let socket = message::connect(&address, libc::SOCK_STREAM, Deadline::after(REACH_TIME));
    let outcome = match socket {
        Ok(socket) => {
            send(&socket, request);
            wait(&socket)
        }
        Err(_) => Err(Failure::Unreachable),
    };
    match outcome {
        // A copy that was made at any moment of this call has come back all the
        // same, and the connection is not its own.
        Err(Failure::Lost | Failure::Unreachable) if told_life(block) != began => Ok(Life::Copy),
        outcome => outcome.map(|()| Life::Same),
    }
}

/// A label that can be one, and needs no escaping.
fn checked(label: &CStr) -> Result<&str, Failure> {
    let text = label.to_str().map_err(|_| Failure::Label("a label is not UTF-8"))?;
    label_problem(text).map_or(Ok(text), |problem| Err(Failure::Label(problem)))
}

/// Which of its lives as a copy the process is in, from that life's first moment
/// on; and whether the daemon knows it.
fn life(block: &Block) -> (u32, bool) {
    // In this order: the agent counts before it takes the mark back.
    let marked = block.restart.state.load(Ordering::SeqCst) == RESTART_RESTORED;
    let lives = block.lives.load(Ordering::SeqCst);
    let is_known = lives.is_multiple_of(2) && !marked;
    (if is_known { lives / 2 } else { lives / 2 + 1 }, is_known)
}

/// The same, but waits in a copy until the daemon knows it: what came back may
/// ask for the next snapshot at once. After a while it is for the daemon to
/// refuse.
fn settled_life(block: &Block) -> u32 {
    let deadline = Deadline::after(ANSWERED_TIME);
    loop {
        let (number, is_known) = life(block);
        if is_known || deadline.left().is_none() {
            return number;
        }
        kernel::pause(NAP);
    }
}

/// In which life a call has lost its connection. While the agent is parked, this
/// may be a copy that is not told yet; or a daemon has died, and the next one
/// wakes the agent.
fn told_life(block: &Block) -> u32 {
    let deadline = Deadline::after(ANSWERED_TIME);
    while block.restart.state.load(Ordering::SeqCst) == RESTART_PARKED && deadline.left().is_some()
    {
        kernel::pause(NAP);
    }
    life(block).0
}

/// The address of another socket of the daemon's; none: it would be too long.
pub(crate) fn beside(agents: &libc::sockaddr_un, socket: &str) -> Option<libc::sockaddr_un> {
    let mut address = *agents;
    let end = agents.sun_path.iter().position(|byte| *byte == 0)?;
    let directory = agents.sun_path[..end].iter().rposition(|byte| *byte == b'/' as c_char);
    let name = address.sun_path.get_mut(directory.map_or(0, |slash| slash + 1)..)?;
    // One zero must be left.
    let (last, room) = name.split_last_mut()?;
    *last = 0;
    room.fill(0);
    let name = room.get_mut(..socket.len())?;
    for (to, from) in name.iter_mut().zip(socket.bytes()) {
        *to = from as c_char;
    }
    Some(address)
}

fn write_request<'a>(room: &'a mut [u8; REQUEST_BYTES], label: Option<&str>) -> &'a [u8] {
    let parts = match label {
        Some(label) => [r#"{"request":"snapshot_self","label":""#, label, "\"}\n"],
        None => [r#"{"request":"snapshot_self","label":"#, "null", "}\n"],
    };
    let mut length = 0;
    for (to, from) in room.iter_mut().zip(parts.iter().flat_map(|part| part.bytes())) {
        *to = from;
        length += 1;
    }
    &room[..length]
}

/// Sends the request. Where that fails, the reply, if there is one, says why.
pub(crate) fn send(socket: &Fd, request: &[u8]) {
    let address = request.as_ptr() as u64;
    let flags = word(libc::MSG_NOSIGNAL);
    let arguments = [socket.word(), address, request.len() as u64, flags, 0, 0];
    // A new connection takes so short a line as a whole.
    // SAFETY: the buffer is valid for its length; the kernel only reads it.
    while unsafe { call(libc::SYS_sendto, arguments) } == Err(libc::EINTR) {}
}

/// Waits for the reply. The thread may be dumped in it.
fn wait(socket: &Fd) -> Result<(), Failure> {
    let mut reader = Reader::new();
    match receive(socket, &mut reader).ok_or(Failure::Lost)? {
        Line::Taken => Ok(()),
        Line::Refused => {
            reason::keep(reader.message());
            Err(Failure::Refused)
        }
        _ => Err(Failure::Protocol),
    }
}

/// The reply to a request, behind what tells of progress; none: the connection has
/// ended, or a limit of time that the socket has.
pub(crate) fn receive(socket: &Fd, reader: &mut Reader<'_>) -> Option<Line> {
    let mut chunk = [0_u8; CHUNK_BYTES];
    loop {
        let buffer = chunk.as_mut_ptr() as u64;
        let arguments = [socket.word(), buffer, CHUNK_BYTES as u64, 0, 0, 0];
        // SAFETY: the buffer is valid for its length.
        let line = match unsafe { call(libc::SYS_recvfrom, arguments) } {
            Err(libc::EINTR) => continue,
            Ok(0) | Err(_) => return None,
            Ok(length) => reader.take(&chunk[..(length as usize).min(CHUNK_BYTES)]),
        };
        if let Some(line) = line.filter(|line| *line != Line::Progress) {
            return Some(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(path: &str) -> libc::sockaddr_un {
        // SAFETY: all zero is a valid address.
        let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
        for (to, from) in address.sun_path.iter_mut().zip(path.bytes()) {
            *to = from as c_char;
        }
        address
    }

    fn moved(path: &str) -> Option<String> {
        let address = beside(&address(path), CONTROL_SOCKET_NAME)?;
        let bytes = address.sun_path.iter().take_while(|byte| **byte != 0);
        Some(bytes.map(|byte| char::from(*byte as u8)).collect())
    }

    #[test]
    fn the_other_socket_is_in_the_same_directory() {
        assert_eq!(moved("/run/strata/agent.sock").as_deref(), Some("/run/strata/control.sock"));
        assert_eq!(moved("agent.sock").as_deref(), Some("control.sock"));
        assert_eq!(
            moved("/run/a-very-long-name-of-a-socket").as_deref(),
            Some("/run/control.sock")
        );
        let fits = format!("/{}/a", "d".repeat(107 - 2 - CONTROL_SOCKET_NAME.len()));
        let longest = moved(&fits).expect("it fits");
        assert!(longest.len() == 107 && longest.ends_with("/control.sock"));
        assert_eq!(moved(&format!("/d{}", &fits[1..])), None);
    }

    #[test]
    fn requests_are_lines_that_the_daemon_reads() {
        let mut room = [0; REQUEST_BYTES];
        let longest = "l".repeat(strata_units::MAX_LABEL_BYTES);
        for (label, expected) in [
            (None, "null".to_owned()),
            (Some("v1.2_x"), "\"v1.2_x\"".to_owned()),
            (Some(longest.as_str()), format!("\"{longest}\"")),
        ] {
            let line = write_request(&mut room, label);
            let expected = format!("{{\"request\":\"snapshot_self\",\"label\":{expected}}}\n");
            assert_eq!(line, expected.as_bytes());
        }
    }

    #[test]
    fn labels_are_looked_at_before_anybody_is_asked() {
        for label in [c"", c"12", c"a b", c"\"}", c"\xff"] {
            // SAFETY: a C string.
            assert_eq!(unsafe { strata_snapshot(label.as_ptr()) }, -libc::EINVAL, "{label:?}");
        }
        for label in [core::ptr::null(), c"good".as_ptr()] {
            // SAFETY: null or a C string.
            assert_eq!(unsafe { strata_snapshot(label) }, -libc::ENOSYS);
        }
    }
}
