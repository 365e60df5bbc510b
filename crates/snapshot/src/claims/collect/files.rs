//! What open files claim, sockets among them.

use super::{Collector, int, text};
use crate::claims::What;
use crate::message::Message;

/// Kinds of files (`fd_types`).
mod kind {
    pub(super) const REGULAR: u32 = 1;
    pub(super) const PIPE: u32 = 2;
    pub(super) const FIFO: u32 = 3;
    pub(super) const INET: u32 = 4;
    pub(super) const UNIX: u32 = 5;
    pub(super) const EVENT: u32 = 6;
    pub(super) const POLL: u32 = 7;
    pub(super) const INOTIFY: u32 = 8;
    pub(super) const SIGNAL: u32 = 9;
    pub(super) const PACKET: u32 = 10;
    pub(super) const TERMINAL: u32 = 11;
    pub(super) const FANOTIFY: u32 = 12;
    pub(super) const NETLINK: u32 = 13;
    pub(super) const NAMESPACE: u32 = 14;
    pub(super) const TUN: u32 = 15;
    pub(super) const EXTERNAL: u32 = 16;
    pub(super) const TIMER: u32 = 17;
    pub(super) const MEMORY: u32 = 18;
    pub(super) const BPF: u32 = 19;
    pub(super) const PIDFD: u32 = 20;
}

/// `CLOCK_REALTIME`, `CLOCK_MONOTONIC`, `CLOCK_BOOTTIME`: those that wake no machine.
const CLOCKS: [u32; 3] = [0, 1, 7];
/// `SOCK_STREAM`, `SOCK_DGRAM`; internet protocols TCP, UDP, UDP-Lite.
const SOCKET_TYPES: [u32; 2] = [1, 2];
const PROTOCOLS: [u32; 3] = [6, 17, 136];
const FAMILIES: [u32; 2] = [2, 10];
/// `TCP_ESTABLISHED`, `TCP_LISTEN`, `TCP_CLOSE`.
const STATES: [u32; 3] = [1, 10, 7];
const ESTABLISHED: u32 = 1;
const TCP: u32 = 6;
const FIRST_FREE_PORT: u32 = 1024;
/// What everybody may set (`SO_PRIORITY`).
const MOST_PRIORITY: u32 = 6;

impl Collector<'_> {
    /// An entry of the list of all open files.
    pub(super) fn file(&mut self, entry: &Message) {
        let process = self.holders.get(&int(entry, 2)).copied();
        let kind = int(entry, 1);
        // One, and that of its kind; what else is in it would be read as well.
        let field = match kind {
            kind::REGULAR => 3,
            kind::INET => 4,
            kind::EVENT => 8,
            kind::POLL => 9,
            kind::SIGNAL => 10,
            kind::TIMER => 12,
            kind::UNIX => 16,
            kind::FIFO => 17,
            kind::PIPE => 18,
            kind::TERMINAL => 19,
            kind::MEMORY => 20,
            kind::INOTIFY => 13,
            kind::PACKET => 6,
            kind::FANOTIFY => 14,
            kind::NETLINK => 7,
            kind::NAMESPACE => 5,
            kind::TUN => 11,
            kind::EXTERNAL => 15,
            kind::BPF => 21,
            kind::PIDFD => 22,
            _ => return self.unknown(format!("open file of kind {kind}")),
        };
        let of_kind: Vec<u64> =
            entry.0.iter().map(|(field, _)| *field).filter(|f| *f > 2).collect();
        let Some(inner) = entry.message(field).filter(|_| of_kind == [field]) else {
            return self.unknown(format!("open file {} is not of its kind", int(entry, 2)));
        };
        match kind {
            kind::REGULAR => self.regular(process, &inner),
            kind::INET => self.inet(process, &inner),
            kind::UNIX => self.unix(process, &inner),
            kind::EVENT | kind::POLL | kind::SIGNAL => self.owner(process, &inner, 3),
            kind::PIPE | kind::MEMORY => self.owner(process, &inner, 4),
            kind::TIMER => {
                self.owner(process, &inner, 3);
                let clock = int(&inner, 4);
                if !CLOCKS.contains(&clock) {
                    self.claim(process, What::OpenFile("timer that wakes the machine"));
                }
            }
            kind::TERMINAL => self.claim(process, What::Terminal),
            kind::FIFO => self.claim(process, What::OpenFile("named pipe")),
            kind::INOTIFY => self.claim(process, What::OpenFile("inotify, by file handles")),
            kind::FANOTIFY => self.claim(process, What::OpenFile("fanotify")),
            kind::PACKET => self.claim(process, What::OpenFile("packet socket")),
            kind::NETLINK => self.claim(process, What::OpenFile("netlink socket")),
            kind::NAMESPACE => self.claim(process, What::OpenFile("namespace")),
            kind::TUN => self.claim(process, What::OpenFile("network device (tun)")),
            kind::EXTERNAL => self.claim(process, What::OpenFile("file of a plug-in of CRIU")),
            kind::BPF => self.claim(process, What::OpenFile("BPF map")),
            _ => self.claim(process, What::OpenFile("descriptor of a process")),
        }
    }

    fn regular(&mut self, process: Option<u32>, file: &Message) {
        let path = match file.bytes_of(6).map(<[u8]>::to_vec).map(String::from_utf8) {
            Some(Ok(path)) if path.starts_with('/') && !path.contains('\0') => path,
            _ => return self.unknown("file without a path in plain text"),
        };
        if int(file, 9) != 0 {
            self.claim(process, What::OpenFile("file of a plug-in of CRIU"));
        }
        self.claim(process, What::File(path, int(file, 2)));
        self.owner(process, file, 5);
    }

    /// Whom a descriptor sends signals to.
    fn owner(&mut self, process: Option<u32>, file: &Message, field: u64) {
        let owner = file.message(field).unwrap_or_default();
        let (user, effective, pid) = (int(&owner, 1), int(&owner, 2), int(&owner, 5));
        if pid == 0 {
            return;
        }
        // A group of processes is a negative number.
        let number = pid.cast_signed().unsigned_abs();
        if !self.pids.contains(&number) {
            self.claim(process, What::SignalTo(format!("process {}", pid.cast_signed())));
        }
        self.claim(process, What::User(user));
        self.claim(process, What::User(effective));
    }

    fn options(&mut self, process: Option<u32>, socket: &Message, field: u64) {
        let options = socket.message(field).unwrap_or_default();
        let mut needs = Vec::new();
        if int(&options, 8) > MOST_PRIORITY {
            needs.push(format!("priority {}", int(&options, 8)));
        }
        if int(&options, 10) != 0 {
            needs.push(format!("mark {}", int(&options, 10)));
        }
        if options.bytes_of(15).is_some() {
            needs.push(format!("bound to the device {}", text(&options, 15)));
        }
        for what in needs {
            self.claim(process, What::Socket(what));
        }
    }

    fn inet(&mut self, process: Option<u32>, socket: &Message) {
        let (family, type_, protocol) = (int(socket, 3), int(socket, 4), int(socket, 5));
        let is_plain = FAMILIES.contains(&family)
            && SOCKET_TYPES.contains(&type_)
            && PROTOCOLS.contains(&protocol);
        if !is_plain {
            let what = format!("family {family}, type {type_}, protocol {protocol}");
            self.claim(process, What::Socket(what));
        }
        let state = int(socket, 6);
        if !STATES.contains(&state) {
            self.claim(process, What::Socket(format!("state {state}")));
        }
        let (port, other) = (int(socket, 7), int(socket, 8));
        if (1..FIRST_FREE_PORT).contains(&port) {
            self.claim(process, What::Port(port));
        }
        if protocol == TCP && state == ESTABLISHED {
            self.claim(process, What::Connection(format!("from port {port} to port {other}")));
        }
        if socket.bytes_of(17).is_some() {
            self.claim(process, What::Socket(format!("bound to the device {}", text(socket, 17))));
        }
        if socket.message(16).is_some_and(|options| options.bytes_of(4).is_some()) {
            self.claim(process, What::Socket("options of a raw socket".into()));
        }
        self.owner(process, socket, 13);
        self.options(process, socket, 14);
    }

    fn unix(&mut self, process: Option<u32>, socket: &Message) {
        let name = socket.bytes_of(11).unwrap_or_default();
        if name.first().is_some_and(|&byte| byte != 0) {
            let path = text(socket, 11);
            let path = path.trim_end_matches('\0').to_owned();
            self.claim(process, What::SocketPath(path));
        }
        if int(socket, 6) != 0 {
            let what = format!("stands for another's ({:#x})", int(socket, 6));
            self.claim(process, What::Socket(what));
        }
        if socket.message(13).is_some() || socket.bytes_of(14).is_some() {
            self.claim(process, What::Socket("permissions or a directory of a path".into()));
        }
        self.owner(process, socket, 9);
        self.options(process, socket, 10);
    }
}
