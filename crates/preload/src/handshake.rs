//! From connecting to Ready, for each `HelloKind`.
//!
//! Not here: what comes after (`agent`), and the messages' transport
//! (`message`).

use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::PAGE_SIZE;
use strata_units::wire::{
    CONTROL_BYTES, Control, Hello, HelloBefore, HelloKind, MAGIC_BEFORE, REQUIRED, Ready,
    Userfaultfd, Verdict, Welcome, back_name, version_number,
};

use crate::block::Block;
use crate::kernel::{self, Deadline, Fd};
use crate::message::{self, MessageError};
use crate::records;

/// Time for one handshake.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Where to look for a place for the probe page: the lower half of what the
/// smallest usual user address space has.
const PROBE_ADDRESSES: u64 = 1 << 46;

/// What this library is.
const LIBRARY: u64 = version_number(env!("CARGO_PKG_VERSION"));

/// Why there is no connection. The numbers travel in `Shared::outcome`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Failure {
    /// The daemon said that this program is not to be managed.
    Unmanaged = 0,
    /// No one listens, or the connection broke.
    Unreachable = 1,
    /// The daemon did not answer in time.
    Silent = 2,
    /// It answered something else than the protocol says.
    Protocol = 3,
    /// No userfaultfd from its `/dev/userfaultfd`.
    NoUserfaultfd = 4,
    /// A mapping failed.
    NoMemory = 5,
    /// No descriptor table of our own.
    NoDescriptorTable = 6,
    /// It is to be managed, and its user may not.
    NotAllowed = 7,
    /// The tenant that it names does not take it in.
    Refused = 8,
}

impl Failure {
    /// Whether the daemon has decided: to ask again would change nothing.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::Unmanaged | Self::NotAllowed | Self::Refused)
    }
}

impl From<MessageError> for Failure {
    fn from(error: MessageError) -> Self {
        match error {
            MessageError::Gone => Self::Unreachable,
            MessageError::Late => Self::Silent,
            MessageError::Malformed => Self::Protocol,
        }
    }
}

/// What a handshake yields.
pub(crate) struct Connection {
    /// Tells when the daemon is gone.
    pub(crate) socket: Fd,
    /// The userfaultfd; none after a resumption, whose caller has it.
    pub(crate) userfaultfd: Option<Fd>,
}

/// The page by which the daemon recognises a forked userfaultfd. Kept after a
/// failed handshake: a daemon that died may have registered it, and unmapping
/// would wait for a reader of events.
pub(crate) struct Probe(u64);

impl Probe {
    /// Maps a page somewhere at random.
    pub(crate) fn map() -> Option<Self> {
        let hint = kernel::random() % PROBE_ADDRESSES / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        let page = kernel::map_anonymous(hint, PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE)?;
        // The daemon registers it for a moment: who forks just then must not wait for a
        // reader of events.
        // SAFETY: mapped above, no references; the content stays.
        unsafe { kernel::advise(page, PAGE_SIZE, libc::MADV_DONTFORK) };
        Some(Self(page))
    }

    /// Unmaps it, after Ready.
    pub(crate) fn unmap(self) {
        // SAFETY: mapped above for this purpose, no references.
        unsafe { kernel::unmap(self.0, PAGE_SIZE) };
    }
}

/// One attempt. When it succeeds, `block.control()` is the daemon's newest.
/// `held` is the userfaultfd of a process that resumes.
pub(crate) fn shake(
    block: &Block,
    kind: HelloKind,
    held: Option<&Fd>,
    probe: &Probe,
) -> Result<Connection, Failure> {
    let deadline = Deadline::after(HANDSHAKE_TIME);
    let socket = reach(block, kind, deadline)?;
    let magic = block.magic();
    let hello = Hello {
        magic,
        kind: kind as u32,
        pid: kernel::process_id(),
        token: block.restart.token.load(Ordering::Relaxed),
        transfer: block.settings().transfer,
        probe: probe.0,
        own_start: block.start(),
        own_end: block.end(),
        restart: (&raw const block.restart) as u64,
        library: LIBRARY,
    };
    let held = held.as_slice();
    if magic == MAGIC_BEFORE {
        message::send(&socket, &HelloBefore::from(hello), held)?;
    } else {
        message::send(&socket, &hello, held)?;
    }

    let (welcome, [first, second]) = message::receive::<Welcome>(&socket, deadline)?;
    if welcome.magic != magic {
        return Err(Failure::Protocol);
    }
    if welcome.verdict & REQUIRED != 0 {
        block.shared().required.store(1, Ordering::SeqCst);
    }
    let userfaultfd = match (verdict(welcome.verdict & !REQUIRED), kind, first, second) {
        (Some(Verdict::Unmanaged), _, None, None) => return Err(Failure::Unmanaged),
        (Some(Verdict::NotAllowed), _, None, None) => return Err(Failure::NotAllowed),
        (Some(Verdict::Refused), _, None, None) => return Err(Failure::Refused),
        (
            Some(Verdict::Create),
            HelloKind::Start | HelloKind::Forked,
            Some(control),
            Some(device),
        ) => {
            use_control(block, &control)?;
            let userfaultfd =
                kernel::new_userfaultfd(&device).map_err(|_| Failure::NoUserfaultfd)?;
            drop((control, device));
            message::send(&socket, &Userfaultfd { magic }, &[&userfaultfd])?;
            Some(userfaultfd)
        }
        (
            Some(Verdict::Adopt),
            HelloKind::Forked | HelloKind::Restored,
            Some(control),
            Some(userfaultfd),
        ) => {
            use_control(block, &control)?;
            Some(userfaultfd)
        }
        (Some(Verdict::Resume), HelloKind::Resumed, Some(control), None) => {
            use_control(block, &control)?;
            None
        }
        _ => return Err(Failure::Protocol),
    };

    let (ready, _) = message::receive::<Ready>(&socket, deadline)?;
    if ready.magic != magic {
        return Err(Failure::Protocol);
    }
    block.restart.back.store(welcome.back, Ordering::Relaxed);
    Ok(Connection { socket, userfaultfd })
}

/// A connection to the daemon: by its socket's path or, where that leads nowhere
/// from here or to somebody else, by the other socket's name.
fn reach(block: &Block, kind: HelloKind, deadline: Deadline) -> Result<Fd, MessageError> {
    let restart = &block.restart;
    let direct = message::connect(&block.socket(), libc::SOCK_SEQPACKET, deadline);
    if let Ok(socket) = &direct
        && matches!(kind, HelloKind::Start | HelloKind::Restored)
        && let Some((_, uid)) = message::peer(socket)
    {
        // Whoever may bind that path now is the daemon; later it may be the path of
        // another file, in a root directory of the program's.
        restart.daemon_uid.store(uid, Ordering::Relaxed);
    }
    let uid = restart.daemon_uid.load(Ordering::Relaxed);
    let daemons = |socket: Fd| {
        let is_daemon = message::peer(&socket).is_some_and(|(_, peer)| peer == uid);
        if is_daemon { Ok(socket) } else { Err(MessageError::Gone) }
    };
    let back = restart.back.load(Ordering::Relaxed);
    match direct.and_then(daemons) {
        Err(MessageError::Gone) if back != 0 => {
            message::connect_abstract(&back_name(back), deadline).and_then(daemons)
        }
        direct => direct,
    }
}

fn verdict(number: u32) -> Option<Verdict> {
    const ALL: [Verdict; 6] = [
        Verdict::Unmanaged,
        Verdict::Create,
        Verdict::Adopt,
        Verdict::Resume,
        Verdict::NotAllowed,
        Verdict::Refused,
    ];
    ALL.into_iter().find(|verdict| *verdict as u32 == number)
}

/// Maps the control memfd and puts it in use, records included, so that the
/// daemon knows of every thread before it says Ready.
fn use_control(block: &Block, file: &Fd) -> Result<(), Failure> {
    if kernel::file_bytes(file).is_none_or(|bytes| bytes < CONTROL_BYTES as u64) {
        return Err(Failure::Protocol);
    }
    let place = block.control_place();
    // SAFETY: one of the two places that the constructor mapped for control
    // blocks, and not the one in use.
    if !unsafe { kernel::map_shared_at(file, place, CONTROL_BYTES) } {
        return Err(Failure::NoMemory);
    }
    // SAFETY: a mapping of full length, page-aligned, never unmapped; all
    // fields are atomic and take any bytes.
    let control = unsafe { &*(place as *const Control) };
    if control.magic.load(Ordering::Acquire) != block.magic() {
        return Err(Failure::Protocol);
    }
    records::publish(block, control);
    Ok(())
}
