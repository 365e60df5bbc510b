//! Guests that come from snapshots: QEMU is started here, as the caller and with the
//! caller's rights, waits, and the daemon gives it the guest's memory and devices.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use strata_api::{
    GuestDisk, GuestSpec, Launch, Reply, Request, RevivedTenant, SnapshotRef, clone_name,
};
use strata_units::ByteSize;
use strata_units::wire::ENV_GUEST;
use strata_vm::{Again, Networks, OtherDisk, PoolDisk, again, disks_again};

use crate::client::{ask_watching, misunderstood, refused};
use crate::failure::{Failure, Result, printable};
use crate::guest_domain::{self, Paused};
use crate::guest_identity::{self, GuestNet, Own};
use crate::pool_disks::{Exports, Servers};
use crate::program::{self, Caller, Program};
use crate::progress::Meter;
use crate::snapshots::long;
use crate::{place, run, vm};

/// In the guest's directory: what its QEMU says.
const LOG_NAME: &str = "qemu.log";
/// Bytes of that which are shown when it fails.
const MAX_SHOWN_BYTES: u64 = 4096;
/// And lines.
const SHOWN_LINES: usize = 3;

/// How long a worker may take that follows one that has died, and how often it is asked.
const NEXT_WORKER_WITHIN: Duration = Duration::from_secs(20);
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How long a QEMU may take until it has its consoles, and how often they are tried.
const OPEN_WITHIN: Duration = Duration::from_secs(10);
const OPEN_EVERY: Duration = Duration::from_millis(5);

/// What guests are asked for.
pub(crate) struct Wish<'a> {
    /// As for every clone; none: the daemon makes one.
    pub(crate) name: Option<&'a str>,
    pub(crate) count: u32,
    /// The one of that name, which lives, goes back.
    pub(crate) rollback: bool,
    /// It is ended before it runs: it is seen that it can come.
    pub(crate) rehearse: bool,
    /// Of a clone, its network.
    pub(crate) net: GuestNet,
    /// Programs that serve disks to each.
    pub(crate) servers: u32,
}

impl<'a> Wish<'a> {
    /// One of that name.
    pub(crate) fn one(name: &'a str, servers: u32) -> Self {
        let (name, net) = (Some(name), GuestNet::Kind);
        Self { name, count: 1, rollback: false, rehearse: false, net, servers }
    }
}

/// A QEMU that was started and has no guest yet. Dropped, it is ended.
pub(crate) struct Waiting {
    child: Option<Child>,
    /// Of a QEMU that libvirt has started.
    domain: Option<Paused>,
    name: String,
    log: PathBuf,
    /// Sockets of its consoles.
    consoles: Vec<PathBuf>,
    /// Of a clone, what is its own.
    own: Option<Own>,
    /// What was started, and the version that it has to be; libvirt's are looked at before.
    qemu: Option<(Program, String)>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(domain) = self.domain.take() {
            domain.end();
        }
    }
}

impl Waiting {
    pub(crate) fn pid(&self) -> u32 {
        match &self.domain {
            Some(domain) => domain.pid,
            None => self.child.as_ref().map_or(0, Child::id),
        }
    }

    /// What came of it, with the ports that lead to it.
    fn with_ports(&self, tenant: RevivedTenant) -> RevivedTenant {
        let forwards = self.own.as_ref().map(Own::forwards).unwrap_or_default();
        RevivedTenant { forwards, ..tenant }
    }

    /// Whether it is another QEMU than the guest ran in. The daemon asks its monitor, too,
    /// before it gets the guest; one that does not know these words has ended by then.
    fn another_version(&self, what: &str) -> Option<Failure> {
        let (program, version) = self.qemu.as_ref()?;
        vm::other_version(vm::version(program, what).ok()?, version, what)
    }

    /// It goes on without us.
    pub(crate) fn let_go(mut self) {
        drop(self.child.take());
        drop(self.domain.take());
    }

    /// Opens its consoles, for as long as its devices are loaded. A serial line that was
    /// full in the snapshot, because nobody read it, is sent on when QEMU hears of room in
    /// it; of a socket that nobody has opened QEMU never hears.
    fn attended(&mut self) -> Vec<UnixStream> {
        let until = Instant::now() + OPEN_WITHIN;
        let mut attended = Vec::new();
        for console in &self.consoles {
            attended.push(loop {
                match UnixStream::connect(console) {
                    Ok(line) => break line,
                    Err(error) => {
                        // It says itself why it has ended.
                        let lives = self.child.as_mut().is_some_and(|child| {
                            child.try_wait().is_ok_and(|status| status.is_none())
                        });
                        if !lives || Instant::now() > until {
                            if lives {
                                run::warn(&format!(
                                    "{}: if {} was full in the snapshot, it stays silent: {error}",
                                    self.name,
                                    console.display()
                                ));
                            }
                            return attended;
                        }
                    }
                }
                std::thread::sleep(OPEN_EVERY);
            });
        }
        attended
    }

    /// The last lines that QEMU said, if anything: what the last one says of is in those before.
    fn said(&self) -> Option<String> {
        let mut text = Vec::new();
        File::open(&self.log).ok()?.take(MAX_SHOWN_BYTES).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let said: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = &said[said.len().saturating_sub(SHOWN_LINES)..];
        (!last.is_empty()).then(|| printable(&last.join("; ")))
    }
}

/// Starts the QEMU of a guest that is to come from a snapshot; its consoles are open for as
/// long as they are held.
pub(crate) fn wait_for(
    socket: &Path,
    snapshot: &SnapshotRef,
    (name, servers): (&str, u32),
    what: &str,
) -> Result<(Waiting, Vec<UnixStream>)> {
    let one = (Some(name.to_owned()), false, 1);
    let servers = Servers::start(servers, what)?;
    let mut waiting = start(socket, snapshot, one, (&GuestNet::Kind, servers), what)?;
    if let Some(failure) = waiting.another_version(what) {
        return Err(failure);
    }
    let attended = waiting.attended();
    Ok((waiting, attended))
}

/// Has guests come from a snapshot: all, or none.
pub(crate) fn revive(
    socket: &Path,
    snapshot: &SnapshotRef,
    wish: &Wish<'_>,
    what: &str,
) -> Result<Vec<RevivedTenant>> {
    let &Wish { name, count, rollback, rehearse, ref net, servers } = wish;
    let mut waiting = Vec::new();
    let each = (1..=count).map(|_| Servers::start(servers, what));
    let mut servers = each.collect::<Result<Vec<_>>>()?.into_iter();
    for (index, servers) in (1..=count).zip(&mut servers) {
        let name = name.map(|name| clone_name(name, index, count));
        let one = (name, rollback, index);
        waiting.push(start(socket, snapshot, one, (net, servers), what)?);
    }
    let mut alive = Vec::new();
    for one in &mut waiting {
        let _attended = one.attended();
        let pid = one.pid();
        let request = Request::GuestFill {
            name: one.name.clone(),
            snapshot: snapshot.clone(),
            pid,
            rollback,
            again: false,
            rehearse,
        };
        match filled(socket, request, what) {
            Ok(Reply::Revived { tenants, warnings }) => {
                warnings.iter().for_each(|warning| run::warn(warning));
                alive.extend(tenants.into_iter().map(|tenant| one.with_ports(tenant)));
            }
            Ok(_) => return Err(misunderstood(what)),
            Err(failure) => {
                return Err(match (one.another_version(what), one.said()) {
                    (Some(other), _) => other,
                    (None, Some(line)) => failure.todo(format!("its QEMU said: {line}")),
                    (None, None) => failure,
                });
            }
        }
    }
    if !rehearse {
        // From here on they go on without us, whatever they are called.
        let own = waiting.iter_mut().filter_map(|one| Some((one.name.clone(), one.own.take()?)));
        let own: Vec<(String, Own)> = own.collect();
        waiting.into_iter().for_each(Waiting::let_go);
        guest_identity::give(socket, &own, net, what);
    }
    Ok(alive)
}

/// Has the daemon fill a guest. A worker that dies over it may have gone so far that the
/// guest is to have this QEMU and no other: the next one knows, and ends what was begun.
fn filled(socket: &Path, mut request: Request, what: &str) -> Result<Reply> {
    let until = Instant::now() + NEXT_WORKER_WITHIN;
    loop {
        let mut meter = Meter::new();
        let reply = ask_watching(socket, &request, &mut |progress| meter.update(progress));
        drop(meter);
        match reply {
            Ok(Reply::Error { message, hint }) => return Err(refused(what, &message, &hint)),
            Ok(reply) => return Ok(reply),
            Err(none) if Instant::now() > until => return Err(none.failure(what, socket)),
            Err(_) => {}
        }
        if let Request::GuestFill { again, .. } = &mut request {
            *again = true;
        }
        std::thread::sleep(ASK_EVERY);
    }
}

/// Starts one QEMU, which waits; the clone of that number, if it is a clone.
fn start(
    socket: &Path,
    snapshot: &SnapshotRef,
    (name, rollback, number): (Option<String>, bool, u32),
    (net, servers): (&GuestNet, Servers),
    what: &str,
) -> Result<Waiting> {
    let request = Request::GuestAgain { snapshot: snapshot.clone(), name, rollback };
    let Reply::GuestAgain { name, environment, directory, guest, warnings } =
        long(socket, &request, what)?
    else {
        return Err(misunderstood(what));
    };
    warnings.iter().for_each(|warning| run::warn(warning));
    let directory = PathBuf::from(directory);
    let is_clone = name != snapshot.tenant;
    let mut own = is_clone.then(|| Own::new(net, number, what)).transpose()?;
    let networks = match &own {
        Some(own) => Networks::Clone(own.networks(net)),
        None => Networks::Back { beside: rollback },
    };
    if guest.libvirt.is_some() {
        let mut domain = guest_domain::start(&name, &guest, &environment, networks, what)?;
        let consoles = std::mem::take(&mut domain.consoles);
        let taps = std::mem::take(&mut domain.taps);
        own = own.map(|own| own.with_taps(taps));
        let (domain, log) = (Some(domain), PathBuf::new());
        return Ok(Waiting { child: None, domain, name, log, consoles, own, qemu: None });
    }
    let launch = guest.launch.as_ref().ok_or_else(|| misunderstood(what))?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let first: OsString = launch.command.first().ok_or_else(|| misunderstood(what))?.into();
    let program = program::examine(&first, &path, Caller::this())?;
    // Asking the program takes as long as half of its start does.
    let version = strata_vm::Version::written(&launch.version);
    let version = version.ok_or_else(|| misunderstood(what))?;
    let here = Path::new(&launch.directory);
    let (disks, images) = disks_again(&launch.disks, here, &others(&guest))
        .map_err(|why| vm::refusal_of(what, why))?;
    let mut exports = Exports::start_again(&disks, servers, socket, what)?;
    if let Some(bytes) = launch.swap_bytes {
        exports.add_swap(ByteSize(bytes), &name, socket, what)?;
    }
    exports.serve_in(&directory, what)?;
    let own_directory = File::open(&directory).map_err(|error| Failure::new(what, error))?;
    // The next one of its name gets this path, and this QEMU connects anew when it likes.
    let sockets = PathBuf::from(format!("/proc/self/fd/{}", own_directory.as_raw_fd()));
    let served = Disks { disks, images, sockets };
    let place = (&*directory, networks);
    let (words, second) = line(&name, &guest, launch, version, place, served, what)?;
    own = own.map(|own| own.with_taps(second.taps));
    let library = place::installed(run::LIBRARY);
    let preload = std::env::var_os(run::LD_PRELOAD);
    let mut environment = run::environment(environment, library, preload)?;
    environment.push((ENV_GUEST.into(), directory.clone().into()));
    let log = directory.join(LOG_NAME);
    let failed = |error: std::io::Error| {
        Failure::new(what, format!("{} cannot be started: {error}", first.display()))
            .todo("see to the file, or to its directory")
    };
    let out = File::create(&log).map_err(failed)?;
    let mut command = Command::new(&program.path);
    command
        .arg0(&first)
        .args(words)
        .envs(environment)
        .current_dir(&launch.directory)
        .stdin(Stdio::null())
        .stdout(out.try_clone().map_err(failed)?)
        .stderr(out)
        // Not the terminal's: it stays when whoever asked has gone.
        .process_group(0);
    let child = exports.end_with(own_directory, what, || command.spawn())?;
    let (child, consoles) = (Some(child), second.consoles);
    let qemu = Some((program, launch.version.clone()));
    Ok(Waiting { child, domain: None, name, log, consoles, own, qemu })
}

/// What a guest has in the place of its disks.
struct Disks {
    /// Those that are read through pools.
    disks: Vec<PoolDisk>,
    /// Images of its command line.
    images: Vec<OtherDisk>,
    /// Where its QEMU sees the sockets of what is served to it.
    sockets: PathBuf,
}

/// QEMU's words for a guest that waits, and what of it is not as it was.
fn line(
    name: &str,
    guest: &GuestSpec,
    launch: &Launch,
    version: strata_vm::Version,
    (directory, networks): (&Path, Networks<'_>),
    Disks { disks, images, sockets }: Disks,
    what: &str,
) -> Result<(Vec<OsString>, Again)> {
    let words: Vec<OsString> = launch.command.iter().skip(1).map(Into::into).collect();
    let here = Path::new(&launch.directory);
    let second = again(&words, name, directory, (here, &images), networks);
    let second = second.map_err(|why| vm::refusal_of(what, why))?;
    let written = directory.to_string_lossy();
    // Of one that takes another's place: it gets that one's directory.
    let later = written.trim_end_matches('~');
    for note in &second.notes {
        eprintln!("strata: {name}: {}", printable(&note.replace(&*written, later)));
    }
    let first = OsString::from(&launch.command[0]);
    let wish = (Some(name), Some(ByteSize(guest.memory_bytes)));
    let mut plan = vm::planned(&first, &second.words, wish, version, here, what)?;
    (plan.disks, plan.sockets) = (disks, Some(sockets));
    plan.swap = launch.swap_bytes.is_some();
    // Those of earlier versions have it with a balloon alone that follows its guest.
    plan.agent = guest.agent || guest.self_balloon.is_some();
    if guest.self_balloon.is_some() {
        plan.balloon_by_itself().map_err(|why| vm::refusal_of(what, why))?;
    }
    let mut words = vm::words(&plan, directory, what)?;
    words.extend(["-incoming".into(), "defer".into()]);
    Ok((words, second))
}

/// What stands in the places of the images of its command line, or its domain.
pub(crate) fn others(guest: &GuestSpec) -> Vec<OtherDisk> {
    let other = |disk: &GuestDisk| OtherDisk {
        said: PathBuf::from(&disk.said),
        path: disk.opened.clone(),
        format: disk.format.clone(),
        layers: disk.layers.clone(),
    };
    guest.disks.iter().map(other).collect()
}

/// Refuses what only programs' clones can be.
pub(crate) fn only_for_programs(is_asked: bool, option: &str, what: &str) -> Result<()> {
    if !is_asked {
        return Ok(());
    }
    let why = format!("{option} is for clones of programs, and this is a guest");
    Err(refused(what, &why, "leave it out"))
}
