//! One agent follows another: after the program has changed its user, its groups,
//! its root or a namespace, the agent is made anew by the thread that changed, so
//! that no thread is left that may what the program may no more.
//!
//! A thread cannot take over another one's user without privileges, and without
//! making the process undumpable; but it is born with those of whoever makes it.
//! The new agent takes a free seat, the old one gives it its two descriptors over
//! a socket between them (an *offer*, with a name that the kernel makes up) and
//! ends. The daemon notices nothing: connection, userfaultfd and control block
//! stay.
//!
//! ```text
//! none ──wanted by a thread──▶ WANTED ──old agent, between two commands──▶ OFFERED
//!                                │  ▲                                       │   │
//!                     withdrawn  ▼  │ (the program has changed once more)   ▼   ▼
//!                               NONE                                    TAKEN  REFUSED
//! ```
//!
//! Where the old agent has no descriptors yet, since it has not reached the
//! daemon, it just says BEGIN. While it is parked, or stands in the kernel, the
//! new one waits; the program does not, for long. Where the two cannot meet (a
//! network namespace was left), the old one stays.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use strata_units::wire::Userfaultfd;

use crate::agent;
use crate::block::{Block, Shared};
use crate::kernel::{self, Deadline, Fd};
use crate::message;
use crate::thread;

/// Nobody follows.
const NONE: u32 = 0;
/// A new agent sits in the other seat and waits.
const WANTED: u32 = 1;
/// The old one listens at [`Shared::offer`].
const OFFERED: u32 = 2;
/// The new one has everything; the old one is ending.
const TAKEN: u32 = 3;
/// The new one has nothing and is ending.
const REFUSED: u32 = 4;
/// The new one is to begin where the old one was: at the first contact.
const BEGIN: u32 = 5;

/// How long the program's thread waits for all of it, which takes a fraction of a
/// millisecond if nothing stands in the way.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often it wakes the agent, which may have been about to fall asleep.
const NAP: Duration = Duration::from_millis(1);
/// How long either agent sleeps before it looks again.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The same of the old one while it listens, and could be moving pages.
const LISTEN_FOR: Duration = Duration::from_millis(10);
/// For a message between two threads.
const MESSAGE_TIME: Duration = Duration::from_secs(1);

/// The calling thread, of the program, has changed what its new threads are born
/// with.
pub(crate) fn follow(block: &'static Block) {
    let shared = block.shared();
    // The child of a vfork has its parent's memory, and is not it.
    if shared.pid.load(Ordering::SeqCst) != kernel::process_id() {
        return;
    }
    // A signal handler may change the user as well.
    let before = kernel::block_signals();
    let deadline = Deadline::after(PATIENCE);
    if acquire(&shared.changing, deadline) {
        succeed(block, deadline);
        shared.changing.store(0, Ordering::SeqCst);
        kernel::futex_wake(&shared.changing);
    }
    kernel::restore_signals(before);
}

fn acquire(lock: &AtomicU32, deadline: Deadline) -> bool {
    while lock.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        if deadline.left().is_none() {
            return false;
        }
        kernel::futex_wait(lock, 1, NAP);
    }
    true
}

fn succeed(block: &'static Block, deadline: Deadline) {
    let shared = block.shared();
    let state = &shared.succession;
    // One that still waits was born before this change.
    if change(state, WANTED, NONE) {
        kernel::futex_wake(state);
    }
    settle(shared, block, deadline);
    let seat = shared.seat.load(Ordering::SeqCst) as usize;
    let next = thread::SEATS - 1 - seat;
    let timely = deadline.left().is_some_and(|left| thread::wait_free(block, next, left));
    if !timely || thread::is_free(block, seat) {
        // Nobody is there to be followed, or somebody cannot end.
        return;
    }
    state.store(WANTED, Ordering::SeqCst);
    // SAFETY: that seat is free, and only whoever holds the lock fills one.
    if !unsafe { thread::start(block, next, agent::follow) } {
        state.store(NONE, Ordering::SeqCst);
        return;
    }
    settle(shared, block, deadline);
    if state.load(Ordering::SeqCst) == TAKEN
        && let Some(left) = deadline.left()
    {
        thread::wait_free(block, seat, left);
    }
}

/// Wakes both agents until neither waits for the other one.
fn settle(shared: &Shared, block: &Block, deadline: Deadline) {
    let state = &shared.succession;
    while deadline.left().is_some() {
        let now = state.load(Ordering::SeqCst);
        if now != WANTED && now != OFFERED {
            return;
        }
        kernel::futex_wake(state);
        if let Some(control) = block.control() {
            kernel::futex_wake(&control.command_seq);
        }
        kernel::futex_wait(state, now, NAP);
    }
}

fn change(state: &AtomicU32, from: u32, to: u32) -> bool {
    state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// Does another agent wait to go on?
pub(crate) fn is_wanted(block: &Block) -> bool {
    block.shared().succession.load(Ordering::SeqCst) == WANTED
}

/// Sleeps, but not when another agent waits.
pub(crate) fn pause(block: &Block, duration: Duration) {
    let state = &block.shared().succession;
    let now = state.load(Ordering::SeqCst);
    if now != WANTED {
        kernel::futex_wait(state, now, duration);
    }
}

/// Has the one that waits begin anew; false: none does.
pub(crate) fn let_begin(block: &Block) -> bool {
    let state = &block.shared().succession;
    let begins = change(state, WANTED, BEGIN);
    if begins {
        kernel::futex_wake(state);
    }
    begins
}

/// Gives both descriptors to the one that waits; true: it has them, and whoever
/// gave them is to end.
pub(crate) fn hand_over(block: &Block, socket: &Fd, userfaultfd: &Fd) -> bool {
    let shared = block.shared();
    let state = &shared.succession;
    let Ok((listener, name)) = message::listen_anywhere() else {
        change(state, WANTED, REFUSED);
        kernel::futex_wake(state);
        return false;
    };
    shared.offer.store(name, Ordering::SeqCst);
    if !change(state, WANTED, OFFERED) {
        return false;
    }
    kernel::futex_wake(state);
    let mut given = false;
    loop {
        match state.load(Ordering::SeqCst) {
            OFFERED if !given => {
                let deadline = Deadline::after(LISTEN_FOR);
                given = message::accept_own(&listener, deadline).is_ok_and(|other| {
                    let message = Userfaultfd { magic: block.magic() };
                    message::send(&other, &message, &[userfaultfd, socket]).is_ok()
                });
            }
            OFFERED => {
                kernel::futex_wait(state, OFFERED, LOOK_EVERY);
            }
            end => return end == TAKEN,
        }
    }
}

/// What the new agent is to do.
pub(crate) enum Turn {
    /// To go on with the daemon's connection and the userfaultfd.
    Obey(Fd, Fd),
    /// To make the first contact.
    Begin,
    /// To end: another one follows, or nobody does.
    End,
}

/// Waits for the old agent's descriptors.
pub(crate) fn take_over(block: &Block) -> Turn {
    let shared = block.shared();
    let state = &shared.succession;
    loop {
        match state.load(Ordering::SeqCst) {
            WANTED => {
                kernel::futex_wait(state, WANTED, LOOK_EVERY);
            }
            OFFERED => break,
            BEGIN => {
                change_seats(shared);
                change(state, BEGIN, TAKEN);
                return Turn::Begin;
            }
            _ => return Turn::End,
        }
    }
    // Once more: the process may have been restored while this thread waited.
    let settled = kernel::own_empty_descriptor_table().is_ok();
    let taken = settled.then(|| receive(shared)).flatten();
    let end = if taken.is_some() { TAKEN } else { REFUSED };
    if taken.is_some() {
        change_seats(shared);
    }
    state.store(end, Ordering::SeqCst);
    kernel::futex_wake(state);
    match taken {
        Some((userfaultfd, socket)) => Turn::Obey(socket, userfaultfd),
        None => Turn::End,
    }
}

fn receive(shared: &Shared) -> Option<(Fd, Fd)> {
    let deadline = Deadline::after(MESSAGE_TIME);
    let name = shared.offer.load(Ordering::SeqCst);
    let old = message::connect_own(name, deadline).ok()?;
    match message::receive::<Userfaultfd>(&old, deadline) {
        Ok((_, [Some(userfaultfd), Some(socket)])) => Some((userfaultfd, socket)),
        _ => None,
    }
}

fn change_seats(shared: &Shared) {
    let next = thread::SEATS as u32 - 1 - shared.seat.load(Ordering::SeqCst);
    shared.seat.store(next, Ordering::SeqCst);
}
