//! The agent thread: first contact, the command loop, reconnecting, parking and
//! what comes after it in a copy of the process, the end.

use core::ffi::c_void;
use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::wire::{Control, HelloKind, RESTART_PARKED, RESTART_RESTORED};

use crate::batch::{self, Progress};
use crate::block::{Block, OUTCOME_FAILED, OUTCOME_PENDING, OUTCOME_READY};
use crate::handshake::{self, Connection, Failure, Probe};
use crate::kernel::{self, Fd};
use crate::message;

/// How often an idle agent looks whether the daemon still lives.
const LIVENESS: Duration = Duration::from_secs(1);
/// How often a parked agent looks whether it is in a copy of its process: what
/// the copy's first reply may be late by, at most.
const PARKED_NAP: Duration = Duration::from_millis(2);
/// First and longest pause between two attempts to reach the daemon.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Start routine; the argument is the [`Block`].
pub(crate) extern "C" fn thread_main(argument: *mut c_void) -> *mut c_void {
    // SAFETY: the starter passes its block, which lives for ever.
    let block = unsafe { &*argument.cast_const().cast::<Block>() };
    // SAFETY: null, or glibc's own counter, which it changes atomically and
    // which lives for ever.
    let threads = unsafe { block.settings().thread_count.as_ref() };
    // The agent is no thread of the program: when main has called pthread_exit
    // and the program's other threads end, the last of them must exit the
    // process. It counts again while glibc ends it.
    if let Some(threads) = threads {
        threads.fetch_sub(1, Ordering::SeqCst);
    }
    kernel::name_thread(c"strata-agent");
    live(block);
    if let Some(threads) = threads {
        threads.fetch_add(1, Ordering::SeqCst);
    }
    core::ptr::null_mut()
}

/// The agent's life, until it is sent away or never was wanted.
fn live(block: &Block) {
    let mut caller = Caller { block, probe: None };
    let first = match first_contact(&mut caller) {
        Ok((socket, userfaultfd)) if tell(block, OUTCOME_READY) => Ok((socket, userfaultfd)),
        // The constructor gave up in the same moment: the program runs
        // unmanaged, and the daemon sees the socket close.
        Ok(_) => Err(Failure::Silent),
        Err(failure) => Err(failure),
    };
    caller.unmap_probe();
    match first {
        Ok((socket, userfaultfd)) => obey(&mut caller, socket, userfaultfd),
        Err(failure) => {
            step_down(block);
            tell(block, OUTCOME_FAILED + failure as u32);
        }
    }
}

/// The handshake of a new process. A program that starts has nothing to lose:
/// one attempt. A forked child may have evicted pages: attempts for ever, while
/// `fork` returns after the first few seconds.
fn first_contact(caller: &mut Caller) -> Result<(Fd, Fd), Failure> {
    kernel::own_empty_descriptor_table().map_err(|_| Failure::NoDescriptorTable)?;
    let block = caller.block;
    let forked = block.hello_kind.load(Ordering::SeqCst) == HelloKind::Forked as u32;
    let kind = if forked { HelloKind::Forked } else { HelloKind::Start };
    let mut backoff = SHORTEST_PAUSE;
    loop {
        match caller.call(kind, None) {
            Ok(Connection { socket, userfaultfd: Some(userfaultfd) }) => {
                block.managed.store(1, Ordering::SeqCst);
                return Ok((socket, userfaultfd));
            }
            Ok(Connection { userfaultfd: None, .. }) => return Err(Failure::Protocol),
            Err(failure) if !forked || failure == Failure::Unmanaged => return Err(failure),
            Err(_) => backoff = pause(backoff),
        }
    }
}

/// Obeys until the daemon sends the agent away. The userfaultfd stays open all
/// the while: after the last copy closes, evicted pages would read as zero.
fn obey(caller: &mut Caller, mut socket: Fd, mut userfaultfd: Fd) {
    loop {
        match serve(caller.block, &socket, &userfaultfd) {
            End::DaemonGone => {
                drop(socket);
                socket = reconnect(caller, &userfaultfd);
            }
            End::Restored => {
                // Their numbers are the program's files now, or nobody's.
                socket.forget();
                userfaultfd.forget();
                (socket, userfaultfd) = begin_anew(caller);
            }
            End::Leave => break,
        }
        caller.unmap_probe();
    }
    // Nothing is stored any more, says the daemon: from here on the program is
    // an ordinary one, and so are its children.
    let control = caller.block.control();
    step_down(caller.block);
    drop(userfaultfd);
    if let Some(control) = control {
        finish(control, control.command_seq.load(Ordering::Acquire));
    }
}

/// Why commands are no longer obeyed.
enum End {
    /// The connection is lost.
    DaemonGone,
    /// The daemon said to leave.
    Leave,
    /// This is a copy of the process that was connected.
    Restored,
}

/// Obeys commands.
fn serve(block: &Block, socket: &Fd, userfaultfd: &Fd) -> End {
    let Some(control) = block.control() else { return End::DaemonGone };
    let transfer = block.settings().transfer;
    loop {
        let command = control.command_seq.load(Ordering::Acquire);
        if command == control.done_seq.load(Ordering::Relaxed) {
            let woken = kernel::futex_wait(&control.command_seq, command, LIVENESS);
            if !woken && message::hung_up(socket) {
                return End::DaemonGone;
            }
            continue;
        }
        match batch::execute(control, userfaultfd, transfer, || message::hung_up(socket)) {
            Progress::Done => finish(control, command),
            Progress::Park => {
                if park(block, control, command) == Life::Copy {
                    return End::Restored;
                }
            }
            Progress::Interrupted => return End::DaemonGone,
            Progress::Leave => return End::Leave,
        }
    }
}

/// In whose life a parked agent wakes up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    /// The one in which it was parked: there is a next command.
    Same,
    /// That of a copy.
    Copy,
}

/// Reports the command `parked` as done and waits for another one, or to be in a
/// copy of the process. It must not look for the daemon meanwhile: in the copy,
/// the socket's number is one of the program's files. And nobody wakes it there,
/// for no daemon sees the copy's control block.
fn park(block: &Block, control: &Control, parked: u32) -> Life {
    let state = &block.restart.state;
    state.store(RESTART_PARKED, Ordering::SeqCst);
    finish(control, parked);
    loop {
        kernel::futex_wait(&control.command_seq, parked, PARKED_NAP);
        if state.load(Ordering::SeqCst) == RESTART_RESTORED {
            return Life::Copy;
        }
        if control.command_seq.load(Ordering::Acquire) == parked {
            continue;
        }
        let taken_back =
            state.compare_exchange(RESTART_PARKED, 0, Ordering::SeqCst, Ordering::SeqCst);
        return if taken_back.is_ok() { Life::Same } else { Life::Copy };
    }
}

/// The first contact of a copy: asks for ever, since its pages are stored.
fn begin_anew(caller: &mut Caller) -> (Fd, Fd) {
    // In this order: at no moment does a thread that looks find neither.
    caller.block.lives.fetch_add(1, Ordering::SeqCst);
    caller.block.restart.state.store(0, Ordering::SeqCst);
    let mut backoff = SHORTEST_PAUSE;
    // Before any other system call that knows descriptors.
    while kernel::own_empty_descriptor_table().is_err() {
        backoff = pause(backoff);
    }
    loop {
        if let Ok(Connection { socket, userfaultfd: Some(userfaultfd) }) =
            caller.call(HelloKind::Restored, None)
        {
            caller.block.lives.fetch_add(1, Ordering::SeqCst);
            return (socket, userfaultfd);
        }
        backoff = pause(backoff);
    }
}

/// Reports a command as done.
fn finish(control: &Control, command: u32) {
    control.done_seq.store(command, Ordering::Release);
    kernel::futex_wake(&control.done_seq);
}

/// Comes back to a daemon, however long there is none, with the userfaultfd
/// that it needs. Whatever goes wrong, or is answered, the agent asks again:
/// ending would close the userfaultfd.
fn reconnect(caller: &mut Caller, userfaultfd: &Fd) -> Fd {
    let mut backoff = SHORTEST_PAUSE;
    loop {
        match caller.call(HelloKind::Resumed, Some(userfaultfd)) {
            Ok(Connection { socket, .. }) => return socket,
            Err(_) => backoff = pause(backoff),
        }
    }
}

/// Pauses, and says how long the next pause is to be.
fn pause(duration: Duration) -> Duration {
    kernel::pause(duration);
    (duration * 2).min(LONGEST_PAUSE)
}

/// Whoever makes handshakes, with the probe page, which outlives failed ones.
struct Caller<'block> {
    block: &'block Block,
    probe: Option<Probe>,
}

impl Caller<'_> {
    fn call(&mut self, kind: HelloKind, held: Option<&Fd>) -> Result<Connection, Failure> {
        if self.probe.is_none() {
            self.probe = Probe::map();
        }
        let probe = self.probe.as_ref().ok_or(Failure::NoMemory)?;
        handshake::shake(self.block, kind, held, probe)
    }

    fn unmap_probe(&mut self) {
        if let Some(probe) = self.probe.take() {
            probe.unmap();
        }
    }
}

/// Makes the process an unmanaged one.
fn step_down(block: &Block) {
    block.managed.store(0, Ordering::SeqCst);
    block.shared().control.store(core::ptr::null_mut(), Ordering::SeqCst);
}

/// Tells the waiting starter how the handshake went; false: it no longer waits.
fn tell(block: &Block, outcome: u32) -> bool {
    let told = &block.shared().outcome;
    let first =
        told.compare_exchange(OUTCOME_PENDING, outcome, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    kernel::futex_wake(told);
    first
}
