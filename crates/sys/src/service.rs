//! What a service manager and its services tell each other: sockets that it listens at for
//! them (sd_listen_fds(3)), and what they say of themselves (sd_notify(3)). Descriptors from
//! number 3 on and datagrams need no library of the manager's.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use crate::supervise::adopt_fd;

const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
const WATCHDOG_US: &str = "WATCHDOG_USEC";
const WATCHDOG_PID: &str = "WATCHDOG_PID";
const LISTEN_PID: &str = "LISTEN_PID";
const LISTEN_FDS: &str = "LISTEN_FDS";
/// Descriptors of this program's own, which it had before it executed its successor: its
/// process, whether a manager listens at them, too, and their numbers.
const HANDED_OVER: &str = "STRATAD_HANDED_OVER";
/// All of these, so that no child takes them for its own.
const NAMES: [&str; 7] = [
    NOTIFY_SOCKET,
    WATCHDOG_US,
    WATCHDOG_PID,
    LISTEN_PID,
    LISTEN_FDS,
    "LISTEN_FDNAMES",
    HANDED_OVER,
];
const FIRST_LISTEN_FD: RawFd = 3;
/// A daemon has two sockets; more than this is no number of descriptors.
const MOST_SOCKETS: usize = 16;
/// Longest that a manager which takes nothing holds up its service.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whom a service tells how it is; nobody, if no manager wants to know.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Notifier {
    socket: Option<OsString>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Whether anybody wants to know.
    #[must_use]
    pub fn is_heard(&self) -> bool {
        self.socket.is_some()
    }

    /// The manager ends a service that says nothing for so long.
    #[must_use]
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// A socket to tell it by; none: nobody wants to know.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(&self) -> io::Result<Option<UnixDatagram>> {
        if !self.is_heard() {
            return Ok(None);
        }
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Some(socket))
    }

    /// Says `lines` (`READY=1`, say) by [`Self::open`]'s socket; to nobody, if there is nobody.
    ///
    /// # Errors
    /// The manager's socket is not there, or takes nothing.
    pub fn tell(&self, socket: &UnixDatagram, lines: &str) -> io::Result<()> {
        let Some(name) = &self.socket else { return Ok(()) };
        socket.send_to_addr(lines.as_bytes(), &address(name)?).map(drop)
    }

    /// The environment in which a program that this process executes is heard, too.
    pub fn environment(&self) -> impl Iterator<Item = (&'static str, OsString)> + use<> {
        let watchdog = |time: Duration| (WATCHDOG_US, time.as_micros().to_string().into());
        let socket = self.socket.clone().map(|name| (NOTIFY_SOCKET, name));
        socket.into_iter().chain(self.watchdog.map(watchdog))
    }
}

fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(name),
    }
}

/// Sockets at which somebody listened for this program before it began.
#[derive(Debug, Default)]
pub struct HandedSockets {
    /// Closed on exec.
    pub sockets: Vec<OwnedFd>,
    /// A service manager goes on listening at them when this process has ended: their names
    /// are its own.
    pub are_managers: bool,
}

impl HandedSockets {
    /// What makes a program that this process executes next find `sockets`; it keeps them open
    /// until then.
    ///
    /// # Errors
    /// The kernel's.
    pub fn hand_over(
        sockets: &[&dyn AsFd],
        are_managers: bool,
    ) -> io::Result<(&'static str, String)> {
        let mut words = format!("{} {}", std::process::id(), u8::from(are_managers));
        for socket in sockets {
            set_close_on_exec(socket.as_fd().as_raw_fd(), false)?;
            words += &format!(" {}", socket.as_fd().as_raw_fd());
        }
        Ok((HANDED_OVER, words))
    }

    /// It has executed none after all.
    pub fn take_back(sockets: &[&dyn AsFd]) {
        for socket in sockets {
            // Of an open descriptor it cannot fail.
            let _ = set_close_on_exec(socket.as_fd().as_raw_fd(), true);
        }
    }
}

fn set_close_on_exec(fd: RawFd, closed: bool) -> io::Result<()> {
    // SAFETY: integers only.
    let code = unsafe { libc::fcntl(fd, libc::F_SETFD, if closed { libc::FD_CLOEXEC } else { 0 }) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What the environment says.
#[derive(PartialEq, Eq, Debug, Default)]
struct Said {
    notifier: Notifier,
    numbers: Vec<RawFd>,
    are_managers: bool,
}

impl Said {
    /// What is meant for process `own`; `get` reads the environment.
    fn of(get: impl Fn(&str) -> Option<OsString>, own: u32) -> io::Result<Self> {
        let number = |name| get(name)?.to_str()?.parse::<u64>().ok();
        let is_own = |name| number(name) == Some(u64::from(own));
        let mut said = Self::default();
        said.notifier.socket = get(NOTIFY_SOCKET).filter(|name| !name.is_empty());
        if said.notifier.is_heard() && (get(WATCHDOG_PID).is_none() || is_own(WATCHDOG_PID)) {
            let time = number(WATCHDOG_US).filter(|&time| time > 0);
            said.notifier.watchdog = time.map(Duration::from_micros);
        }
        let handed = get(HANDED_OVER).map(|words| words.to_string_lossy().into_owned());
        let mut words = handed.iter().flat_map(|words| words.split(' '));
        if words.next().and_then(|word| word.parse().ok()) == Some(own) {
            said.are_managers = words.next() == Some("1");
            said.numbers = words.filter_map(|word| word.parse().ok()).collect();
        } else if is_own(LISTEN_PID) {
            let count = number(LISTEN_FDS).and_then(|count| usize::try_from(count).ok());
            said.are_managers = true;
            said.numbers =
                (FIRST_LISTEN_FD..).take(count.unwrap_or(0).min(MOST_SOCKETS + 1)).collect();
        }
        let fits = |&number: &RawFd| number >= FIRST_LISTEN_FD;
        if said.numbers.len() > MOST_SOCKETS || !said.numbers.iter().all(fits) {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        Ok(said)
    }
}

/// What a service manager, or the program that executed this one, has for this process. It is
/// taken out of the environment: no child of this one's speaks for it.
///
/// Only for the beginning of `main`, while the process is single-threaded (asserted) and
/// nothing of its own is open.
///
/// # Errors
/// A descriptor that is named is not open, or there are more than a daemon has.
pub fn take_from_service_manager() -> io::Result<(Notifier, HandedSockets)> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    assert_eq!(threads, 1, "the environment is changed before anybody reads it");
    let said = Said::of(|name| env::var_os(name), std::process::id());
    for name in NAMES {
        // SAFETY: no other thread (asserted above) reads the environment or changes it.
        unsafe { env::remove_var(name) };
    }
    let Said { notifier, numbers, are_managers } = said?;
    let mut handed = HandedSockets { sockets: Vec::new(), are_managers };
    for number in numbers {
        // Nobody else in this process owns it, by the contract above.
        let socket = adopt_fd(number).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        set_close_on_exec(number, true)?;
        handed.sockets.push(socket);
    }
    Ok((notifier, handed))
}

/// What kind of unix socket somebody listens at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Listening {
    /// Streams of bytes.
    Streams,
    /// Connections of packets.
    Packets,
}

impl Listening {
    /// None: nobody listens there, or it is of another kind.
    #[must_use]
    pub fn at(socket: impl AsFd) -> Option<Self> {
        let option = |name| {
            let mut value: libc::c_int = 0;
            let mut length = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: the descriptor is open for the call, and the kernel writes at most
            // `length` bytes, the size of the live integer.
            let code = unsafe {
                libc::getsockopt(
                    socket.as_fd().as_raw_fd(),
                    libc::SOL_SOCKET,
                    name,
                    (&raw mut value).cast(),
                    &raw mut length,
                )
            };
            (code == 0).then_some(value)
        };
        if option(libc::SO_DOMAIN)? != libc::AF_UNIX || option(libc::SO_ACCEPTCONN)? == 0 {
            return None;
        }
        match option(libc::SO_TYPE)? {
            libc::SOCK_STREAM => Some(Self::Streams),
            libc::SOCK_SEQPACKET => Some(Self::Packets),
            _ => None,
        }
    }
}

/// The time that `MONOTONIC_USEC=` is of.
#[must_use]
pub fn monotonic_us() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is live; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::SeqPacketListener;
    use std::os::unix::net::UnixListener;

    fn said(variables: &[(&str, &str)], own: u32) -> io::Result<Said> {
        let value = |name: &str| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| OsString::from(value))
        };
        Said::of(value, own)
    }

    #[test]
    fn what_is_meant_for_another_process_is_left_alone() {
        assert_eq!(said(&[], 7).expect("nothing"), Said::default());
        let listen = [(LISTEN_PID, "7"), (LISTEN_FDS, "2")];
        let found = said(&listen, 7).expect("two");
        assert_eq!((found.numbers, found.are_managers), (vec![3, 4], true));
        assert_eq!(said(&listen, 8).expect("another's"), Said::default());
        assert!(said(&[(LISTEN_PID, "7"), (LISTEN_FDS, "9999999999")], 7).is_err());
        let own = said(&[(HANDED_OVER, "7 0 12 13"), listen[0], listen[1]], 7).expect("its own");
        assert_eq!((own.numbers, own.are_managers), (vec![12, 13], false));
        assert_eq!(said(&[(HANDED_OVER, "8 1 12 13")], 7).expect("another's"), Said::default());
        assert!(said(&[(HANDED_OVER, "7 1 2")], 7).is_err(), "that is standard error");
        let watched = [(NOTIFY_SOCKET, "/run/n"), (WATCHDOG_US, "2000000")];
        let seconds = |found: Said| found.notifier.watchdog().map(|time| time.as_secs());
        assert_eq!(seconds(said(&watched, 7).expect("watched")), Some(2));
        let of_another = [watched[0], watched[1], (WATCHDOG_PID, "8")];
        assert_eq!(seconds(said(&of_another, 7).expect("another is")), None);
        assert_eq!(seconds(said(&watched[1..], 7).expect("nobody hears it")), None);
    }

    #[test]
    fn what_is_told_arrives_at_a_path_and_at_a_name_without_one() {
        let unique = format!("strata-notify-{}", std::process::id());
        let path = env::temp_dir().join(&unique);
        let by_name = SocketAddr::from_abstract_name(&unique).expect("a name");
        for (socket, name) in [
            (UnixDatagram::bind(&path), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&by_name), format!("@{unique}").into()),
        ] {
            let socket = socket.expect("bound");
            let notifier = Notifier { socket: Some(name.clone()), watchdog: None };
            let mouth = notifier.open().expect("a socket").expect("somebody hears it");
            notifier.tell(&mouth, "READY=1\nSTATUS=well").expect("told");
            let mut heard = [0; 64];
            let bytes = socket.recv(&mut heard).expect("heard");
            assert_eq!(&heard[..bytes], b"READY=1\nSTATUS=well");
            assert_eq!(notifier.environment().collect::<Vec<_>>(), [(NOTIFY_SOCKET, name)]);
            drop(socket);
            assert!(notifier.tell(&mouth, "READY=1").is_err(), "nobody is there");
        }
        std::fs::remove_file(&path).expect("removed");
        assert!(Notifier::default().open().expect("no socket").is_none());
    }

    #[test]
    fn listeners_are_told_apart() {
        let name = format!("strata-listening-{}", std::process::id());
        let packets = SeqPacketListener::bind_abstract(name.as_bytes()).expect("bound");
        assert_eq!(Listening::at(&packets), Some(Listening::Packets));
        let address = SocketAddr::from_abstract_name(format!("{name}-s")).expect("a name");
        let streams = UnixListener::bind_addr(&address).expect("bound");
        assert_eq!(Listening::at(&streams), Some(Listening::Streams));
        assert_eq!(Listening::at(UnixDatagram::unbound().expect("a socket")), None);
        assert_eq!(Listening::at(std::fs::File::open("/dev/null").expect("a file")), None);
    }

    #[test]
    fn what_is_handed_over_stays_open_in_the_program_that_is_executed() {
        let name = format!("strata-handed-{}", std::process::id());
        let listener = SeqPacketListener::bind_abstract(name.as_bytes()).expect("bound");
        let number = listener.as_fd().as_raw_fd();
        let is_open_in_child = || {
            let path = format!("/proc/self/fd/{number}");
            let looked = std::process::Command::new("test").args(["-e", &path]).status();
            looked.expect("test").success()
        };
        assert!(!is_open_in_child());
        let (_, words) = HandedSockets::hand_over(&[&listener], true).expect("handed over");
        assert_eq!(words, format!("{} 1 {number}", std::process::id()));
        assert!(is_open_in_child());
        HandedSockets::take_back(&[&listener]);
        assert!(!is_open_in_child());
    }

    #[test]
    fn time_goes_on() {
        let first = monotonic_us();
        assert!(first > 0 && monotonic_us() >= first);
    }
}
