//! Waiting for descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::uffd::own;

/// What one descriptor is ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Polled {
    /// There is something to read.
    pub readable: bool,
    /// The other end is gone.
    pub hangup: bool,
}

/// Waits until one of `fds` is readable or hung up, at most `timeout` (none:
/// for ever). A signal ends the wait with nothing ready.
pub fn poll_readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[Polled; N]> {
    let mut list =
        fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    let spec = timeout.map(timespec);
    let spec_pointer = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `list` holds N pollfds, `spec_pointer` is null or points to
    // `spec`, which outlives the call.
    let code = unsafe {
        libc::ppoll(list.as_mut_ptr(), N as libc::nfds_t, spec_pointer, std::ptr::null())
    };
    if code < 0 {
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok([Polled::default(); N]);
        }
        return Err(error);
    }
    Ok(list.map(|entry| Polled {
        readable: entry.revents & libc::POLLIN != 0,
        hangup: entry.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
    }))
}

/// The same for as many as there are.
pub fn poll_all(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Vec<Polled>> {
    let pollfd =
        |fd: &BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut list: Vec<libc::pollfd> = fds.iter().map(pollfd).collect();
    let spec = timeout.map(timespec);
    let spec_pointer = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `list` holds as many pollfds as is said, `spec_pointer` is null or points
    // to `spec`, which outlives the call.
    let code = unsafe {
        libc::ppoll(list.as_mut_ptr(), list.len() as libc::nfds_t, spec_pointer, std::ptr::null())
    };
    if code < 0 {
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok(vec![Polled::default(); fds.len()]);
        }
        return Err(error);
    }
    let polled = |entry: &libc::pollfd| Polled {
        readable: entry.revents & libc::POLLIN != 0,
        hangup: entry.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
    };
    Ok(list.iter().map(polled).collect())
}

fn timespec(timeout: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    }
}

/// `N` descriptors that are waited for again and again: the kernel keeps the
/// list, so that a wait costs less than [`poll_readable`].
#[derive(Debug)]
pub struct Poller<const N: usize> {
    epoll: OwnedFd,
}

impl<const N: usize> Poller<N> {
    /// Waits for `fds`, which must stay open as long as this.
    pub fn new(fds: [BorrowedFd<'_>; N]) -> io::Result<Self> {
        // SAFETY: takes a flag and returns a new descriptor.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let epoll = own(fd);
        for (index, fd) in fds.iter().enumerate() {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: index as u64 };
            // SAFETY: the kernel copies `event` during the call.
            let code = unsafe {
                libc::epoll_ctl(
                    epoll.as_raw_fd(),
                    libc::EPOLL_CTL_ADD,
                    fd.as_raw_fd(),
                    &raw mut event,
                )
            };
            if code < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self { epoll })
    }

    /// Which of the descriptors are readable (or hung up), after at most
    /// `timeout` (none: for ever, without a timer). A signal ends the wait with
    /// none.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<[bool; N]> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; N];
        let spec = timeout.map(timespec);
        let spec_pointer = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `events` has room for N, `spec_pointer` is null or points to
        // `spec`, which outlives the call, and there is no signal mask.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                N as libc::c_int,
                spec_pointer,
                std::ptr::null::<libc::sigset_t>(),
                0usize,
            )
        };
        let mut ready = [false; N];
        if count < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                return Ok(ready);
            }
            return Err(error);
        }
        for event in &events[..count as usize] {
            ready[event.u64 as usize] = true;
        }
        Ok(ready)
    }
}

/// Descriptors that come and go, each waited for until it was readable once: the kernel
/// keeps the list, so that those that stay silent cost nothing.
#[derive(Debug)]
pub struct PollSet {
    epoll: OwnedFd,
}

impl PollSet {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes a flag and returns a new descriptor.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { epoll: own(fd) }) }
    }

    /// Waits for `fd` too, from now on and until it is closed. It is `key`'s.
    pub fn add(&self, fd: impl AsFd, key: u64) -> io::Result<()> {
        let events = (libc::EPOLLIN | libc::EPOLLONESHOT) as u32;
        let mut event = libc::epoll_event { events, u64: key };
        // SAFETY: both are open for the call, and the kernel copies `event` during it.
        let code = unsafe {
            libc::epoll_ctl(
                self.epoll.as_raw_fd(),
                libc::EPOLL_CTL_ADD,
                fd.as_fd().as_raw_fd(),
                &raw mut event,
            )
        };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits until one is readable; the keys of some that are, which are not told again.
    /// A signal ends the wait with none.
    pub fn wait(&self) -> io::Result<Vec<u64>> {
        const MOST: usize = 64;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: `events` has room for as many as is said.
        let count = unsafe {
            libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), MOST as libc::c_int, -1)
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            let interrupted = error.kind() == io::ErrorKind::Interrupted;
            return if interrupted { Ok(Vec::new()) } else { Err(error) };
        }
        Ok(events[..count as usize].iter().map(|event| event.u64).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::EventFd;

    #[test]
    fn all_are_waited_for_at_once() {
        let (one, two) = (EventFd::new().expect("eventfd"), EventFd::new().expect("eventfd"));
        two.ring();
        let ready = poll_all(&[one.as_fd(), two.as_fd()], None).expect("poll");
        assert_eq!(ready.iter().map(|one| one.readable).collect::<Vec<_>>(), [false, true]);
        two.clear();
        let ready = poll_all(&[two.as_fd()], Some(Duration::from_micros(200))).expect("poll");
        assert_eq!(ready, [Polled::default()]);
    }

    #[test]
    fn a_poller_says_which_descriptor_is_ready_and_says_it_until_it_is_taken() {
        let (one, two) = (EventFd::new().expect("eventfd"), EventFd::new().expect("eventfd"));
        let poller = Poller::new([one.as_fd(), two.as_fd()]).expect("epoll");
        let short = Some(Duration::from_micros(200));
        assert_eq!(poller.wait(short).expect("wait"), [false, false]);
        two.ring();
        assert_eq!(poller.wait(short).expect("wait"), [false, true]);
        assert_eq!(poller.wait(short).expect("wait"), [false, true]);
        two.clear();
        one.ring();
        assert_eq!(poller.wait(short).expect("wait"), [true, false]);
    }

    #[test]
    fn who_was_readable_is_told_once_and_who_was_closed_never() {
        let set = PollSet::new().expect("epoll");
        let events = [(); 3].map(|()| EventFd::new().expect("eventfd"));
        for (key, event) in events.iter().enumerate() {
            set.add(event, key as u64 + 7).expect("added");
        }
        let [first, second, third] = events;
        first.ring();
        drop(first);
        second.ring();
        assert_eq!(set.wait().expect("wait"), [8]);
        second.ring();
        third.ring();
        assert_eq!(set.wait().expect("wait"), [9]);
    }
}
