//! The agent thread: first contact, the command loop, reconnecting, parking and
//! what comes after it in a copy of the process, the end.

use core::sync::atomic::Ordering;
use core::time::Duration;

use strata_units::wire::restart::{RESTART_PARKED, RESTART_RESTORED};
use strata_units::wire::{Control, HelloKind};

use crate::batch::{self, Progress};
use crate::block::{Block, OUTCOME_ABANDONED, OUTCOME_FAILED, OUTCOME_READY, OUTCOME_TRYING};
use crate::handshake::{self, Connection, Failure, HANDSHAKE_TIME, Probe};
use crate::kernel::{self, Deadline, Fd};
use crate::message;
use crate::succession::{self, Turn};
use crate::thread;

/// How often an agent looks whether the daemon still lives when there is nothing to do:
/// half as often each time, down to this.
const LIVENESS: Duration = Duration::from_secs(1);
const LEAST_LIVENESS: Duration = Duration::from_secs(64);
/// How often a parked agent looks whether it is in a copy of its process: what
/// the copy's first reply may be late by, at most.
const PARKED_NAP: Duration = Duration::from_millis(2);
/// First and longest pause between two attempts to reach the daemon.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Of the time for a first handshake, what is left for the last attempt.
const LONGEST_REPLACEMENT: Duration = Duration::from_secs(3);

/// Start routine of a process's first agent.
pub(crate) extern "C" fn begin(block: &'static Block) {
    if thread::settle_in().is_err() {
        step_down(block);
        tell(block, OUTCOME_FAILED + Failure::NoDescriptorTable as u32);
        return;
    }
    live(block);
}

/// Start routine of one that follows another one.
pub(crate) extern "C" fn follow(block: &'static Block) {
    // Without a table of its own it is refused when it is to take something over.
    let _ = thread::settle_in();
    match succession::take_over(block) {
        Turn::Obey(socket, userfaultfd) => {
            obey(&mut Caller { block, probe: None }, socket, userfaultfd);
        }
        Turn::Begin => live(block),
        Turn::End => {}
    }
}

/// The agent's life, until it is sent away, or never was wanted, or another one
/// goes on with it.
fn live(block: &Block) {
    let mut caller = Caller { block, probe: None };
    let first = match first_contact(&mut caller) {
        Some(Ok((socket, userfaultfd))) if tell(block, OUTCOME_READY) => Ok((socket, userfaultfd)),
        // The constructor gave up in the same moment: the program runs
        // unmanaged, and the daemon sees the socket close.
        Some(Ok(_)) => Err(Failure::Silent),
        Some(Err(failure)) => Err(failure),
        None => return,
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
/// one attempt, or, where it must not run unmanaged, as many as there is time for: a
/// daemon's worker may just be replaced. A forked child may have evicted pages: attempts
/// for ever, while `fork` returns after the first. None: another agent makes them from
/// now on.
fn first_contact(caller: &mut Caller) -> Option<Result<(Fd, Fd), Failure>> {
    let block = caller.block;
    let forked = block.hello_kind.load(Ordering::SeqCst) == HelloKind::Forked as u32;
    let kind = if forked { HelloKind::Forked } else { HelloKind::Start };
    let mut backoff = SHORTEST_PAUSE;
    let deadline = Deadline::after(HANDSHAKE_TIME);
    loop {
        match caller.call(kind, None) {
            Ok(Connection { socket, userfaultfd: Some(userfaultfd) }) => {
                block.managed.store(1, Ordering::SeqCst);
                return Some(Ok((socket, userfaultfd)));
            }
            Ok(Connection { userfaultfd: None, .. }) => return Some(Err(Failure::Protocol)),
            Err(Failure::Unreachable)
                if !forked
                    && block.shared().required.load(Ordering::SeqCst) != 0
                    && deadline.left().is_some_and(|left| left > LONGEST_REPLACEMENT) =>
            {
                succession::pause(block, SHORTEST_PAUSE);
            }
            Err(failure) if !forked || failure.is_final() => {
                return Some(Err(failure));
            }
            Err(_) => {
                tell(block, OUTCOME_TRYING);
                backoff = pause(block, backoff);
            }
        }
        // The probe page stays: nobody reads the events of its being unmapped.
        if succession::let_begin(block) {
            return None;
        }
    }
}

/// Obeys until the daemon sends the agent away. The userfaultfd stays open all
/// the while: after the last copy closes, evicted pages would read as zero.
fn obey(caller: &mut Caller, mut socket: Fd, mut userfaultfd: Fd) {
    loop {
        match serve(caller.block, &socket, &userfaultfd) {
            End::DaemonGone => match reconnect(caller, &socket, &userfaultfd) {
                Some(newer) => socket = newer,
                None => return,
            },
            End::Wanted => {
                if succession::hand_over(caller.block, &socket, &userfaultfd) {
                    return;
                }
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
    /// Another agent waits to go on.
    Wanted,
    /// This is a copy of the process that was connected.
    Restored,
}

/// Obeys commands.
fn serve(block: &Block, socket: &Fd, userfaultfd: &Fd) -> End {
    let Some(control) = block.control() else { return End::DaemonGone };
    let transfer = block.settings().transfer;
    let mut liveness = LIVENESS;
    loop {
        if succession::is_wanted(block) {
            return End::Wanted;
        }
        let command = control.command_seq.load(Ordering::Acquire);
        if command == control.done_seq.load(Ordering::Relaxed) {
            let woken = kernel::futex_wait(&control.command_seq, command, liveness);
            if !woken && message::hung_up(socket) {
                return End::DaemonGone;
            }
            liveness = if woken { LIVENESS } else { (liveness * 2).min(LEAST_LIVENESS) };
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
    while thread::settle_in().is_err() {
        backoff = pause(caller.block, backoff);
    }
    loop {
        if let Ok(Connection { socket, userfaultfd: Some(userfaultfd) }) =
            caller.call(HelloKind::Restored, None)
        {
            caller.block.lives.fetch_add(1, Ordering::SeqCst);
            return (socket, userfaultfd);
        }
        backoff = pause(caller.block, backoff);
    }
}

/// Reports a command as done.
fn finish(control: &Control, command: u32) {
    control.done_seq.store(command, Ordering::Release);
    kernel::futex_wake(&control.done_seq);
}

/// Comes back to a daemon, however long there is none, with the userfaultfd
/// that it needs. Whatever goes wrong, or is answered, the agent asks again:
/// ending would close the userfaultfd. None: another agent asks from now on.
fn reconnect(caller: &mut Caller, broken: &Fd, userfaultfd: &Fd) -> Option<Fd> {
    let mut backoff = SHORTEST_PAUSE;
    loop {
        match caller.call(HelloKind::Resumed, Some(userfaultfd)) {
            Ok(Connection { socket, .. }) => return Some(socket),
            Err(_) => backoff = pause(caller.block, backoff),
        }
        // That one finds the connection broken and goes on here.
        if succession::is_wanted(caller.block)
            && succession::hand_over(caller.block, broken, userfaultfd)
        {
            return None;
        }
    }
}

/// Pauses, and says how long the next pause is to be.
fn pause(block: &Block, duration: Duration) -> Duration {
    succession::pause(block, duration);
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

/// Tells the waiting starter how the handshake went; false: it has given up, and
/// the program runs unmanaged.
fn tell(block: &Block, outcome: u32) -> bool {
    let told = &block.shared().outcome;
    let before = told.load(Ordering::SeqCst);
    // Only a first agent is given up, and only once, and nobody else tells.
    let tells = before != OUTCOME_ABANDONED
        && told.compare_exchange(before, outcome, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    kernel::futex_wake(told);
    tells
}
