//! Agents say hello here. Each connection has a thread of its own for the
//! handshake, with a time limit; what an agent says is believed only of its own
//! process.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use strata_pager::{Hail, Tenant};
use strata_sys::peer::{Peer, peer_of};
use strata_sys::{
    ControlBlock, Priority, Range, SeqPacket, SeqPacketListener, UffdError, Userfaultfd,
    open_device,
};
use strata_units::wire::{
    AsBytes, Hello, HelloKind, MAGIC, Ready, TRANSFER_PAGES, Userfaultfd as UffdMessage, Verdict,
    Welcome,
};
use strata_units::{PAGE_SIZE, SpaceId};

use crate::config::Config;
use crate::logbook;
use crate::program::Program;
use crate::supervisor::Inheritance;
use crate::tenants::{Arriving, Tenants};

/// One handshake may take this long.
const PATIENCE: Duration = Duration::from_secs(5);
/// Handshakes at a time; further agents wait in the socket's queue.
const MOST_HANDSHAKES: usize = 128;
/// Highest address of a process that we manage (47 bits).
const HIGHEST: u64 = 1 << 47;

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
    config: Config,
    /// What agents are told of the other door; 0: there is none.
    back: u64,
    private_uid: Option<u32>,
    tenants: Arc<Tenants>,
    under_way: AtomicUsize,
}

/// Starts to serve the agents' socket.
pub(crate) fn serve(inheritance: &Inheritance, tenants: &Arc<Tenants>) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let private_uid =
        if inheritance.private { Some(std::fs::metadata("/proc/self")?.uid()) } else { None };
    let reception = Arc::new(Reception {
        config: inheritance.config.clone(),
        back: inheritance.back.as_ref().map_or(0, |(_, key)| *key),
        private_uid,
        tenants: Arc::clone(tenants),
        under_way: AtomicUsize::new(0),
    });
    listen(&reception, inheritance.agents.try_clone()?, Door::Front)?;
    if let Some((listener, _)) = &inheritance.back {
        listen(&reception, listener.try_clone()?, Door::Back)?;
    }
    Ok(())
}

fn listen(reception: &Arc<Reception>, listener: SeqPacketListener, door: Door) -> io::Result<()> {
    let reception = Arc::clone(reception);
    std::thread::Builder::new().name("agents".into()).spawn(move || {
        loop {
            while reception.under_way.load(Ordering::Acquire) >= MOST_HANDSHAKES {
                std::thread::sleep(Duration::from_millis(5));
            }
            match listener.accept() {
                Ok(socket) => receive(&reception, socket, door),
                // Out of descriptors, say: do not spin.
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    })?;
    Ok(())
}

fn receive(reception: &Arc<Reception>, socket: SeqPacket, door: Door) {
    reception.under_way.fetch_add(1, Ordering::AcqRel);
    let own = Arc::clone(reception);
    let thread =
        std::thread::Builder::new().name("hello".into()).stack_size(256 << 10).spawn(move || {
            let peer = peer_of(&socket);
            if let Err(error) = peer.and_then(|peer| {
                own.handshake(socket, peer, door).map_err(|error| {
                    io::Error::new(error.kind(), format!("agent of process {}: {error}", peer.pid))
                })
            }) {
                logbook::tell(Priority::Warning, error);
            }
            own.under_way.fetch_sub(1, Ordering::AcqRel);
        });
    if thread.is_err() {
        // The agent sees its connection close and goes on unmanaged.
        reception.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// A hello whose numbers make sense.
fn checked(hello: &Hello) -> io::Result<HelloKind> {
    let aligned = |address: u64| address.is_multiple_of(PAGE_SIZE as u64);
    let transfer_end = hello.transfer.saturating_add((TRANSFER_PAGES * PAGE_SIZE) as u64);
    let kind = match hello.kind {
        1 => HelloKind::Start,
        2 => HelloKind::Forked,
        3 => HelloKind::Resumed,
        4 => HelloKind::Restored,
        _ => return Err(invalid("says hello in an unknown way")),
    };
    let sane = hello.magic == MAGIC
        && aligned(hello.transfer)
        && aligned(hello.probe)
        && hello.transfer != 0
        && transfer_end <= HIGHEST
        && hello.probe < HIGHEST
        && hello.own_start <= hello.own_end
        && hello.own_end <= HIGHEST
        && aligned(hello.restart)
        && (hello.restart == 0 || (hello.own_start..hello.own_end).contains(&hello.restart));
    if sane { Ok(kind) } else { Err(invalid("its hello is of another version, or garbage")) }
}

fn hail_of(hello: &Hello, peer: Peer) -> Hail {
    Hail {
        pid: peer.pid,
        transfer: hello.transfer,
        own: Range { start: hello.own_start, end: hello.own_end },
        restart: hello.restart,
    }
}

impl Reception {
    fn welcome(
        &self,
        socket: &SeqPacket,
        verdict: Verdict,
        space: u32,
        fds: &[&dyn AsFd],
    ) -> io::Result<()> {
        let message = Welcome { magic: MAGIC, verdict: verdict as u32, space, back: self.back };
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        socket.send(&message.to_bytes(), &fds)
    }

    fn handshake(&self, socket: SeqPacket, peer: Peer, door: Door) -> io::Result<()> {
        socket.set_timeout(PATIENCE)?;
        let mut bytes = [0; size_of::<Hello>()];
        let (got, fds) = socket.receive(&mut bytes)?;
        if got == 0 {
            return Ok(());
        }
        let hello =
            Hello::from_bytes(&bytes[..got]).ok_or_else(|| invalid("its hello is cut short"))?;
        let kind = checked(&hello)?;
        // A private daemon's front door is one user's; without a token, whoever comes
        // there is managed by a rule.
        let unknown = kind == HelloKind::Start || (hello.token == 0 && self.private_uid.is_some());
        if door == Door::Back && unknown {
            return Err(invalid("it is no process of this daemon's, and came by the back door"));
        }
        if kind == HelloKind::Resumed {
            return self.resume(socket, peer, fds.into_iter().next());
        }
        if kind == HelloKind::Restored {
            return self.restored(socket, peer, &hello);
        }
        let arriving = match self.tenant_of(&hello, kind, peer)? {
            Belongs::To(arriving) => arriving,
            Belongs::Nowhere => return self.welcome(&socket, Verdict::Unmanaged, 0, &[]),
            Belongs::ToButMayNot(name) => {
                say_not_allowed(&name, peer);
                return self.welcome(&socket, Verdict::NotAllowed, 0, &[]);
            }
        };
        let tenant = &arriving.tenant;
        let control = ControlBlock::create()?;
        let hail = hail_of(&hello, peer);
        if kind == HelloKind::Forked
            && let Some(space) = tenant.orphan_with(hello.probe, None)
        {
            let uffd = space.userfaultfd()?;
            self.welcome(&socket, Verdict::Adopt, space.id().0, &[&control, &uffd])?;
            tenant.attach_orphan(&space, control, socket, hail)?;
            return ready(tenant, space.id());
        }
        if !self.may_have_device(peer) {
            say_not_allowed(&tenant.record().name, peer);
            return self.welcome(&socket, Verdict::NotAllowed, 0, &[]);
        }
        let device = open_device()?;
        self.welcome(&socket, Verdict::Create, 0, &[&control, &device])?;
        let mut bytes = [0; size_of::<UffdMessage>()];
        let (got, mut fds) = socket.receive(&mut bytes)?;
        let whole = UffdMessage::from_bytes(&bytes[..got]).is_some_and(|m| m.magic == MAGIC);
        let (Some(fd), true) = (fds.pop(), whole) else {
            return Err(invalid("it sent no userfaultfd"));
        };
        let uffd = Userfaultfd::handshake(fd).map_err(|error| match error {
            UffdError::Features(missing) => io::Error::other(format!(
                "this kernel lacks userfaultfd features {missing:#x} (UFFDIO_MOVE needs Linux 6.8); see strata doctor"
            )),
            UffdError::Io(error) => error,
        })?;
        let space = tenant.attach(uffd, control, socket, hail)?;
        ready(tenant, space.id())
    }

    /// A process that came back from a snapshot. Whom it belongs to is known by
    /// its userfaultfd; until it is, its agent asks again.
    fn restored(&self, socket: SeqPacket, peer: Peer, hello: &Hello) -> io::Result<()> {
        let tenant = self.tenants.by_token(hello.token);
        let found = tenant.and_then(|tenant| {
            let space = tenant.orphan_with(hello.probe, Some(peer.pid))?;
            Some((tenant, space))
        });
        let Some((tenant, space)) = found else {
            return Err(invalid("it is a restored process of no snapshot of this daemon"));
        };
        let control = ControlBlock::create()?;
        let uffd = space.userfaultfd()?;
        self.welcome(&socket, Verdict::Adopt, space.id().0, &[&control, &uffd])?;
        tenant.attach_restored(&space, control, socket, hail_of(hello, peer))?;
        ready(&tenant, space.id())?;
        tenant.settle_restored(&space)
    }

    /// Whose process this is.
    fn tenant_of(&self, hello: &Hello, kind: HelloKind, peer: Peer) -> io::Result<Belongs> {
        loop {
            let tenant = match self.tenants.by_token(hello.token) {
                Some(tenant) => self.tenants.of_descent(peer.pid, tenant),
                None if hello.token != 0 => return Ok(Belongs::Nowhere),
                None => {
                    let program = Program::of(peer.pid)?;
                    let Some(rule) = program.rule(&self.config.manage) else {
                        return Ok(Belongs::Nowhere);
                    };
                    // Before a tenant is made that nobody would be in. (A forked
                    // child may have its parent's userfaultfd.)
                    if kind == HelloKind::Start && !self.may_have_device(peer) {
                        return Ok(Belongs::ToButMayNot(rule.name.clone()));
                    }
                    self.tenants.of_rule(rule, &program).map_err(io::Error::other)?
                }
            };
            if tenant.is_released() {
                return Ok(Belongs::Nowhere);
            }
            // Else it was taken down just now: the program before has ended. A rule
            // makes it anew.
            if let Some(arriving) = self.tenants.await_program(tenant) {
                return Ok(Belongs::To(arriving));
            }
        }
    }

    fn may_have_device(&self, peer: Peer) -> bool {
        peer.uid == 0
            || self.private_uid == Some(peer.uid)
            || self.config.uffd_users.iter().any(|user| user.uid == peer.uid)
    }

    /// An agent lost its connection. Only a process that is known is answered:
    /// to be told that it is not managed would make it close its userfaultfd,
    /// and its missing pages would read as zero.
    fn resume(
        &self,
        socket: SeqPacket,
        peer: Peer,
        uffd: Option<std::os::fd::OwnedFd>,
    ) -> io::Result<()> {
        drop(uffd);
        let known = self
            .tenants
            .list()
            .into_iter()
            .find_map(|tenant| Some((tenant.space_of(peer.pid)?, tenant)));
        let Some((space, tenant)) = known else {
            return Err(invalid("it belongs to a daemon that is gone"));
        };
        tenant.resume(&space, socket, |socket, control| {
            self.welcome(socket, Verdict::Resume, space.id().0, &[control])
        })?;
        ready(&tenant, space.id())
    }
}

/// Whose a program is that says hello.
enum Belongs {
    To(Arriving),
    /// The tenant of this name, which its user keeps it out of.
    ToButMayNot(String),
    /// Nobody wants it managed.
    Nowhere,
}

fn say_not_allowed(name: &str, peer: Peer) {
    let Peer { pid, uid, .. } = peer;
    let line = format!(
        "{name}: process {pid} runs unmanaged: user {uid} may not use userfaultfd: add it to uffd_users"
    );
    logbook::tell(Priority::Warning, line);
}

fn ready(tenant: &Tenant, space: SpaceId) -> io::Result<()> {
    tenant.tell_agent(space, &Ready { magic: MAGIC }.to_bytes())
}
