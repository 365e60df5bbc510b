//! Agents say hello here. Each connection waits in the lobby until it has, and then has
//! a thread of its own for the handshake, with one time limit for all; what an agent says
//! is believed only of its own process. Whom a rule makes a tenant's is in
//! `agents/ruled.rs`.

mod ruled;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use strata_pager::{Hail, Space, Tenant};
use strata_sys::peer::{KnownPeer, Peer, peer_of};
use strata_sys::{
    ControlBlock, Disproof, Priority, Process, Range, SeqPacket, SeqPacketListener, UffdError,
    Userfaultfd, open_device,
};
use strata_units::SpaceId;
use strata_units::handshake::{Amiss, Handshake, Heard};
use strata_units::wire::{
    AsBytes, Hello, HelloKind, Ready, Userfaultfd as UffdMessage, Verdict, Welcome,
};

use crate::admission::{Deadline, Room};
use crate::current::Current;
use crate::lobby::{self, House, Rules};
use crate::logbook;
use crate::program::Program;
use crate::supervisor::Inheritance;
use crate::tenants::{Arriving, Tenants};

/// One handshake may take this long.
const PATIENCE: Duration = Duration::from_secs(5);
/// Handshakes at a time, and agents that wait for one. Who starts many processes at once
/// has each of them wait a moment for its turn.
const RULES: Rules = Rules {
    waiting: 2048,
    waiting_per_user: 256,
    served: Room { all: 128, for_root: 32, per_user: 16 },
    patience: PATIENCE,
    stack_bytes: 256 << 10,
};
/// How long an agent waits for another one of its process to be done with.
const COMING: Duration = Duration::from_millis(500);

/// By which of the two sockets an agent came.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Door {
    /// The one with a path, which has permissions.
    Front,
    /// The one without, to which anybody can connect: only for agents of
    /// processes that are known, and of their children.
    Back,
}

struct Reception {
    /// What is listened at, with its door.
    listeners: Vec<(SeqPacketListener, Door)>,
    current: Arc<Current>,
    /// What agents are told of the other door; 0: there is none.
    back: u64,
    private_uid: Option<u32>,
    tenants: Arc<Tenants>,
    /// Processes that are to get a space.
    comers: Mutex<Vec<Arc<Process>>>,
    unnamed: ruled::Unnamed,
}

/// Starts to serve the agents' socket.
pub(crate) fn serve(
    inheritance: &Inheritance,
    tenants: &Arc<Tenants>,
    current: &Arc<Current>,
) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let private_uid =
        if inheritance.private { Some(std::fs::metadata("/proc/self")?.uid()) } else { None };
    let mut listeners = vec![(inheritance.doors.agents.try_clone()?, Door::Front)];
    if let Some((listener, _)) = &inheritance.back {
        listeners.push((listener.try_clone()?, Door::Back));
    }
    let reception = Reception {
        listeners,
        current: Arc::clone(current),
        back: inheritance.back.as_ref().map_or(0, |(_, key)| *key),
        private_uid,
        tenants: Arc::clone(tenants),
        comers: Mutex::default(),
        unnamed: ruled::Unnamed::default(),
    };
    lobby::keep("agents", reception, RULES).map(drop)
}

impl House for Reception {
    type Guest = Guest;

    fn doors(&self) -> Vec<BorrowedFd<'_>> {
        self.listeners.iter().map(|(listener, _)| listener.as_fd()).collect()
    }

    fn accept(&self, door: usize) -> io::Result<Option<(Guest, u32)>> {
        let socket = self.listeners[door].0.accept()?;
        // Who has gone again has no name.
        let Ok(peer) = peer_of(&socket) else { return Ok(None) };
        Ok(Some((Guest { socket, peer }, peer.uid)))
    }

    fn serve(&self, Guest { socket, peer }: Guest, door: usize, deadline: Deadline) {
        // Who has ended is refused: its number can be another's by now.
        let outcome = KnownPeer::of(&socket)
            .and_then(|known| self.handshake(socket, &known, self.listeners[door].1, deadline));
        if let Err(error) = outcome {
            let line = format!("agent of process {}, user {}: {error}", peer.pid, peer.uid);
            logbook::tell_of(peer.uid, "hello", Priority::Warning, line);
        }
    }

    fn thrown_out(&self, uid: u32, why: &str) {
        let line = format!("an agent of user {uid} said no hello: {why}");
        logbook::tell_of(uid, "no hello", Priority::Warning, line);
    }
}

/// An agent that has connected.
struct Guest {
    socket: SeqPacket,
    peer: Peer,
}

impl AsFd for Guest {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

fn amiss(what: Amiss) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn hail_of(hello: &Hello, process: &Arc<Process>) -> Hail {
    Hail {
        process: Arc::clone(process),
        transfer: hello.transfer,
        own: Range { start: hello.own_start, end: hello.own_end },
        restart: hello.restart,
        library: hello.library,
    }
}

impl Reception {
    fn welcome(
        &self,
        (socket, magic): (&SeqPacket, u64),
        verdict: Verdict,
        space: u32,
        fds: &[&dyn AsFd],
    ) -> io::Result<()> {
        self.answer((socket, magic), verdict as u32, space, fds)
    }

    /// In the version that it speaks. `verdict`: with [`REQUIRED`] where the program must not run without.
    fn answer(
        &self,
        (socket, magic): (&SeqPacket, u64),
        verdict: u32,
        space: u32,
        fds: &[&dyn AsFd],
    ) -> io::Result<()> {
        let message = Welcome { magic, verdict, space, back: self.back };
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        socket.send(&message.to_bytes(), &fds)
    }

    fn handshake(
        &self,
        socket: SeqPacket,
        known: &KnownPeer,
        door: Door,
        deadline: Deadline,
    ) -> io::Result<()> {
        let peer = known.peer();
        socket.set_timeout(deadline.time_left()?)?;
        let mut bytes = [0; size_of::<Hello>()];
        let (got, fds) = socket.receive(&mut bytes)?;
        let mut handshake = Handshake::default();
        let Heard::Hello(hello, kind) = handshake.hear(&bytes[..got], fds.len()).map_err(amiss)?
        else {
            return Ok(());
        };
        // A private daemon's front door is one user's; without a token, whoever comes
        // there is managed by a rule.
        let unknown = kind == HelloKind::Start || (hello.token == 0 && self.private_uid.is_some());
        if door == Door::Back && unknown {
            return Err(invalid("it is no process of this daemon's, and came by the back door"));
        }
        if kind == HelloKind::Resumed {
            drop(fds);
            return self.resume(socket, known, hello.magic);
        }
        if kind == HelloKind::Restored {
            return self.restored(socket, known, &hello);
        }
        let (arriving, required) = match self.tenant_of(&hello, kind, known)? {
            Belongs::To(arriving, required) => (arriving, required),
            Belongs::Nowhere => {
                return self.welcome((&socket, hello.magic), Verdict::Unmanaged, 0, &[]);
            }
            Belongs::ToButMayNot { name, required } => {
                say_not_allowed(&name, peer);
                return self.answer(
                    (&socket, hello.magic),
                    Verdict::NotAllowed as u32 | required,
                    0,
                    &[],
                );
            }
            Belongs::Refused { why, required } => {
                let line = format!("process {} of user {} is refused: {why}", peer.pid, peer.uid);
                logbook::tell_of(peer.uid, "refused", Priority::Warning, line);
                return self.answer(
                    (&socket, hello.magic),
                    Verdict::Refused as u32 | required,
                    0,
                    &[],
                );
            }
        };
        let tenant = &arriving.tenant;
        // From here on nothing goes by its number.
        let process = Arc::new(Process::of_peer(known).map_err(|error| {
            io::Error::new(error.kind(), format!("it cannot be looked at: {error}"))
        })?);
        let comer = self.comes(&process)?;
        let control = ControlBlock::create(hello.magic)?;
        let hail = hail_of(&hello, &process);
        if kind == HelloKind::Forked
            && let Some(space) = tenant.orphan_with(hello.probe, None)
        {
            space.prove(&process, hello.probe).map_err(disproved)?;
            let uffd = space.userfaultfd()?;
            self.welcome((&socket, hello.magic), Verdict::Adopt, space.id().0, &[&control, &uffd])?;
            tenant.attach_orphan(&space, control, socket, hail)?;
            drop(comer);
            return ready(tenant, space.id(), hello.magic);
        }
        // It has been answered before, and has not heard it: a worker died over it.
        let known = tenant.space_of(peer.pid).filter(|_| kind == HelloKind::Forked);
        if let Some(space) = known {
            let uffd = space.userfaultfd()?;
            tenant.resume(&space, socket, |socket, control| {
                self.welcome((socket, hello.magic), Verdict::Adopt, space.id().0, &[control, &uffd])
            })?;
            drop(comer);
            return ready(tenant, space.id(), hello.magic);
        }
        if !self.may_have_device(peer) {
            say_not_allowed(&tenant.record().name, peer);
            return self.answer(
                (&socket, hello.magic),
                Verdict::NotAllowed as u32 | required,
                0,
                &[],
            );
        }
        // Before the process has made anything; counted again when it is attached.
        if let Err(why) = self.tenants.attach(tenant, peer.pid, || Ok(())) {
            let line = format!("process {} of user {} is refused: {why}", peer.pid, peer.uid);
            logbook::tell_of(peer.uid, "refused", Priority::Warning, line);
            return self.answer((&socket, hello.magic), Verdict::Refused as u32 | required, 0, &[]);
        }
        let device = open_device()?;
        self.answer(
            (&socket, hello.magic),
            Verdict::Create as u32 | required,
            0,
            &[&control, &device],
        )?;
        handshake.asked_for_userfaultfd();
        socket.set_timeout(deadline.time_left()?)?;
        let mut bytes = [0; size_of::<UffdMessage>()];
        let (got, mut fds) = socket.receive(&mut bytes)?;
        handshake.hear(&bytes[..got], fds.len()).map_err(amiss)?;
        let fd = fds.pop().ok_or(Amiss::NoUserfaultfd).map_err(amiss)?;
        let uffd = Userfaultfd::handshake(fd).map_err(|error| match error {
            UffdError::Features(missing) => io::Error::other(format!(
                "this kernel lacks userfaultfd features {missing:#x} (UFFDIO_MOVE needs Linux 6.8); see strata doctor"
            )),
            UffdError::Io(error) => error,
        })?;
        // One that executed a program leaves the space of its memory before behind, for a
        // moment: that is no other's.
        let before: Vec<&Process> = comer.before.iter().map(AsRef::as_ref).collect();
        process.prove(&uffd, hello.probe, &before).map_err(disproved)?;
        let attach = || tenant.attach(uffd, control, socket, hail);
        let space = self.tenants.attach(tenant, peer.pid, attach)?;
        // From here on it may execute another program, whose agent then comes.
        drop(comer);
        ready(tenant, space.id(), hello.magic)
    }

    /// A process that came back from a snapshot. Whom it belongs to is known by
    /// its userfaultfd; until it is, its agent asks again.
    fn restored(&self, socket: SeqPacket, known: &KnownPeer, hello: &Hello) -> io::Result<()> {
        let tenant = self.tenants.by_token(hello.token);
        let found = tenant.and_then(|tenant| {
            let space = tenant.orphan_with(hello.probe, Some(known.peer().pid))?;
            // Opened when it was restored, before it ran.
            let process = space.held_process().filter(|process| process.is(known))?;
            Some((tenant, space, process))
        });
        let Some((tenant, space, process)) = found else {
            return Err(invalid("it is a restored process of no snapshot of this daemon"));
        };
        let comer = self.comes(&process)?;
        if space.process().is_some() {
            return Err(disproved(Disproof::Known(0)));
        }
        space.prove(&process, hello.probe).map_err(disproved)?;
        let control = ControlBlock::create(hello.magic)?;
        let uffd = space.userfaultfd()?;
        self.welcome((&socket, hello.magic), Verdict::Adopt, space.id().0, &[&control, &uffd])?;
        tenant.attach_restored(&space, control, socket, hail_of(hello, &process))?;
        drop(comer);
        ready(&tenant, space.id(), hello.magic)?;
        tenant.settle_restored(&space)
    }

    /// Whose process this is. Nothing is made before it is known that it may be.
    fn tenant_of(&self, hello: &Hello, kind: HelloKind, known: &KnownPeer) -> io::Result<Belongs> {
        let peer = known.peer();
        // The child of a fork is the tenant's in which its memory is registered.
        let joins = |tenant: &Arc<Tenant>| {
            self.tenants.admits(tenant, peer)
                || (kind == HelloKind::Forked && tenant.orphan_with(hello.probe, None).is_some())
        };
        loop {
            let (tenant, required) = match self.tenants.by_token(hello.token) {
                Some(tenant) => {
                    let tenant = self.tenants.of_descent(peer.pid, tenant);
                    if !joins(&tenant) {
                        return Ok(Belongs::Refused { why: NOT_THEIRS.into(), required: 0 });
                    }
                    (tenant, 0)
                }
                None if hello.token != 0 => {
                    return Ok(Belongs::Refused { why: NOT_THEIRS.into(), required: 0 });
                }
                None => {
                    let forked = match kind {
                        HelloKind::Forked => self.of_memory(hello, known)?,
                        _ => None,
                    };
                    let found = match forked {
                        Some(found) => Ok(found),
                        None => self.of_rules(&Program::of(peer.pid)?, peer, joins),
                    };
                    match found {
                        Ok(found) => found,
                        Err(otherwise) => return Ok(otherwise),
                    }
                }
            };
            if tenant.is_released() {
                return Ok(Belongs::Nowhere);
            }
            // Else it was taken down just now: the program before has ended. A rule
            // makes it anew.
            if let Some(arriving) = self.tenants.await_arrival(tenant) {
                return Ok(Belongs::To(arriving, required));
            }
        }
    }

    /// A process that is to get a space. One address space has one: who shares memory with
    /// a process that has a space, or is about to get one, is refused.
    fn comes(&self, process: &Arc<Process>) -> io::Result<Comer<'_>> {
        let comers = || self.comers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_here = |other: &Arc<Process>| {
            other.pid() == process.pid() && !other.has_exited() || other.shares_memory_with(process)
        };
        // A program that was executed in the middle of the handshake of the one before has
        // that end in a moment.
        let until = Instant::now() + COMING;
        loop {
            let mut comers = comers();
            if !comers.iter().any(is_here) {
                comers.push(Arc::clone(process));
                break;
            }
            drop(comers);
            if Instant::now() >= until {
                return Err(disproved(Disproof::Known(0)));
            }
            std::thread::sleep(COMING / 100);
        }
        let mut comer =
            Comer { process: Arc::clone(process), before: Vec::new(), comers: &self.comers };
        for tenant in self.tenants.list() {
            for other in tenant.processes() {
                if other.pid() == process.pid() {
                    // The same process; whether it is the same memory is seen later.
                    comer.before.push(other);
                } else if other.shares_memory_with(process) {
                    return Err(disproved(Disproof::Known(0)));
                }
            }
        }
        Ok(comer)
    }

    fn may_have_device(&self, peer: Peer) -> bool {
        peer.uid == 0
            || self.private_uid == Some(peer.uid)
            || self.current.get().uffd_users.iter().any(|user| user.uid == peer.uid)
    }

    /// An agent lost its connection. Only a process that is known is answered:
    /// to be told that it is not managed would make it close its userfaultfd,
    /// and its missing pages would read as zero.
    fn resume(&self, socket: SeqPacket, known: &KnownPeer, magic: u64) -> io::Result<()> {
        let is_it = |space: &Space| space.process().is_some_and(|process| process.is(known));
        let found = self.tenants.list().into_iter().find_map(|tenant| {
            Some((tenant.space_of(known.peer().pid).filter(|space| is_it(space))?, tenant))
        });
        let Some((space, tenant)) = found else {
            return Err(invalid("it belongs to a daemon that is gone"));
        };
        tenant.resume(&space, socket, |socket, control| {
            self.welcome((socket, magic), Verdict::Resume, space.id().0, &[control])
        })?;
        ready(&tenant, space.id(), magic)
    }
}

/// See [`Reception::comes`].
struct Comer<'a> {
    process: Arc<Process>,
    /// The same process, as it was when its agent said hello before.
    before: Vec<Arc<Process>>,
    comers: &'a Mutex<Vec<Arc<Process>>>,
}

impl Drop for Comer<'_> {
    fn drop(&mut self) {
        let mut comers = self.comers.lock().unwrap_or_else(PoisonError::into_inner);
        comers.retain(|process| !Arc::ptr_eq(process, &self.process));
    }
}

fn disproved(why: Disproof) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why.to_string())
}

/// Whose a program is that says hello.
enum Belongs {
    /// And [`REQUIRED`], if it must not run otherwise.
    To(Arriving, u32),
    /// The tenant of this name, which its user keeps it out of.
    ToButMayNot { name: String, required: u32 },
    /// It says that it is a tenant's, or a rule does, and it does not become one's.
    Refused { why: String, required: u32 },
    /// Nobody wants it managed.
    Nowhere,
}

/// The same for a tenant that is not there and for one that is another user's.
const NOT_THEIRS: &str = "there is no such tenant of its user's";

fn say_not_allowed(name: &str, peer: Peer) {
    let Peer { pid, uid, .. } = peer;
    let line = format!(
        "{name}: process {pid} runs unmanaged: user {uid} may not use userfaultfd: add it to uffd_users"
    );
    logbook::tell_of(uid, "not allowed", Priority::Warning, line);
}

fn ready(tenant: &Tenant, space: SpaceId, magic: u64) -> io::Result<()> {
    tenant.tell_agent(space, &Ready { magic }.to_bytes())
}
