//! Signals for a process that stands for another one: it takes them, and passes them on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::poll::poll_readable;
use crate::uffd::own;

/// All that ask something of a program, but those by which a terminal stops it: its
/// parent stops with it.
const RELAYED: [i32; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
    libc::SIGCONT,
];

/// A signal that came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Relayed {
    /// Which.
    pub signal: i32,
    /// The kernel sent it, to all processes of the terminal.
    pub of_terminal: bool,
}

/// Takes the signals of this process, which has one thread.
#[derive(Debug)]
pub struct Relay(OwnedFd);

impl Relay {
    /// From now on. A program that is started later inherits that they are blocked:
    /// start it before.
    ///
    /// # Errors
    /// The kernel's.
    pub fn begin() -> io::Result<Self> {
        // SAFETY: a set that is initialised before it is read, valid signals, and a new
        // descriptor.
        let fd = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in RELAYED {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(own(fd))) }
    }

    /// Waits for the next signal. `None`: `ended` is readable, and no signal is.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next(&self, ended: &impl AsFd) -> io::Result<Option<Relayed>> {
        loop {
            let [came, _] = poll_readable([self.0.as_fd(), ended.as_fd()], None)?;
            if !came.readable {
                return Ok(None);
            }
            // SAFETY: all zeroes is valid; the kernel writes at most that.
            let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
            let bytes = size_of::<libc::signalfd_siginfo>();
            // SAFETY: an open descriptor, and a live struct of that size.
            let got = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut info).cast(), bytes) };
            if got == bytes as isize {
                return Ok(Some(Relayed {
                    signal: info.ssi_signo.cast_signed(),
                    of_terminal: info.ssi_code == libc::SI_KERNEL,
                }));
            }
        }
    }
}

/// Ends this process as another one has ended, whose `status` is as `wait` says it.
pub fn end_like(status: i32) -> ! {
    // SAFETY: integers, a set that is initialised before it is read, and a live limit.
    // A signal whose handling is the default ends the process before `kill` returns,
    // or never comes; then the number is what a shell makes of it.
    unsafe {
        if libc::WIFEXITED(status) {
            libc::_exit(libc::WEXITSTATUS(status));
        }
        let signal = libc::WTERMSIG(status);
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // Whoever died first has left the core.
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(signal, libc::SIG_DFL);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::kill(libc::getpid(), signal);
        libc::_exit(128 + signal)
    }
}
