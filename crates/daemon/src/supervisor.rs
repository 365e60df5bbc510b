//! The supervisor: one thread that holds every descriptor and replaces a worker
//! that dies. It touches no tenant.
//!
//! The worker is cloned, never executed, and shares the descriptor table, so
//! whatever the worker opened is open here too and is found by the next one.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use strata_api::{AGENT_SOCKET_NAME, POOL_SOCKET_NAME};
use strata_pager::Registry;
use strata_sys::{
    Pidfd, Priority, SIGHUP, SIGKILL, SeqPacketListener, Signal, WorkerExit, adopt_orphans,
    block_signals, collect_child, ended_children, forbid_core_dumps, kill_process, lock_memory,
    log, open_fds, raise_descriptor_limit, spawn_sharing_files, wait_for_signal, wait_worker,
};
use strata_units::wire;

use crate::config::Config;
use crate::reload::Reread;
use crate::takeover::{Before, Place, Taken};
use crate::{control, holder, places, tier, upgrade, worker};

/// A worker that lived shorter than this is replaced only after a pause.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// That pause: a worker that cannot start must not take a CPU for itself.
const PAUSE: Duration = Duration::from_millis(500);
/// How often to look whether the holder that was killed has ended.
const HOLDER_ENDS: Duration = Duration::from_millis(1);
/// How long one has that was taken over from and killed.
const HOLDER_ENDS_WITHIN: Duration = Duration::from_secs(5);
/// Short lives in a row before the pause is made.
const SHORT_LIVES: u32 = 20;

/// Everything that a worker starts with.
#[derive(Debug)]
pub(crate) struct Inheritance {
    pub(crate) config: Config,
    /// Where it was read; none: the default place.
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) private: bool,
    pub(crate) registry: Arc<Registry>,
    pub(crate) control: UnixListener,
    pub(crate) agents: SeqPacketListener,
    pub(crate) agent_socket: PathBuf,
    /// Where agents come that cannot reach that path any more, and what they know
    /// it by (`wire::back_name`); none: the name is taken.
    pub(crate) back: Option<(SeqPacketListener, u64)>,
    /// Descriptors that were open before the first worker.
    pub(crate) own_fds: Vec<RawFd>,
    pub(crate) supervisor_pid: u32,
    /// The supervisor whose tenants these are, where that one died.
    pub(crate) taken_from: Option<u32>,
}

/// Serves until a worker ends in good order.
pub(crate) fn run(
    config: Config,
    private: bool,
    config_file: Option<PathBuf>,
) -> anyhow::Result<ExitCode> {
    block_signals();
    adopt_orphans();
    raise_descriptor_limit();
    // Before there is anything to be kept; worker and holder inherit it.
    if let Err(error) = forbid_core_dumps() {
        log(
            Priority::Warning,
            format_args!("core dumps of stratad may hold pages of its tenants: {error}"),
        );
    }
    // Before anything is made there, and once more when nobody can make it any more.
    places::check(&config)?;
    make_directory(&config.socket_dir, private)?;
    places::check(&config)?;
    let mut place = Place::enter(&config.socket_dir)?;
    let home = home_of(&config.socket_dir).context("cannot look at the sockets' directory")?;
    let taken = begin(&mut place, &config, home)?;
    let doors = listen(&config, private)?;
    if let Err(error) = lock_memory() {
        log(Priority::Warning, format_args!("the supervisor may be swapped out: {error}"));
    }
    // Without CAP_SYS_RESOURCE this is refused; then it is as any other.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let own = Pidfd::open(std::process::id()).context("cannot open its own process")?;
    let (registry, of_before, before) = match taken {
        Some(Taken { registry, numbers, from, holder }) => {
            registry.reported().store(0, Ordering::Relaxed);
            (registry, numbers, Some((from, holder)))
        }
        None => {
            let registry = Registry::create().context("cannot make the registry")?;
            registry.settle(home);
            (registry, HashSet::new(), None)
        }
    };
    let registry = Arc::new(registry);
    let mut holder =
        holder::start(&registry, &own, &config.socket_dir).context("cannot make a holder")?;
    let socket_dir = config.socket_dir.clone();
    if let Err(error) = place.mark(holder, registry.descriptor().as_raw_fd()) {
        // What was taken over, the old holder has still.
        end_holder(holder);
        return Err(error).with_context(|| format!("cannot write to {}", socket_dir.display()));
    }
    // Who begins now is refused.
    drop(place);
    let taken_from = before.map(|(from, old_holder)| {
        old_holder.signal(SIGKILL);
        if !old_holder.exits_within(HOLDER_ENDS_WITHIN) {
            log(Priority::Warning, "the holder of the stratad before does not end");
        }
        from
    });
    let before = (of_before, taken_from);
    let outcome =
        serve((config, config_file), private, doors, &registry, &own, &mut holder, before);
    if outcome.is_err() && !registry.tenants().is_empty() {
        // The holder keeps what they need until another daemon takes over.
        log(Priority::Error, "its tenants wait in the holder until stratad is started again");
        return outcome;
    }
    end_holder(holder);
    Place::leave(&socket_dir);
    outcome
}

/// What a daemon that died in this directory has left, if one has.
fn begin(place: &mut Place, config: &Config, home: u64) -> anyhow::Result<Option<Taken>> {
    match place.before()? {
        Before::Nobody => Ok(None),
        Before::Living(pid) => {
            let control = config.control_socket();
            let taken =
                format!("{} is in use by another stratad (process {pid})", control.display());
            Err(cannot_listen(&control, &io::Error::new(io::ErrorKind::AddrInUse, taken)))
        }
        Before::Gone(pid) => {
            log(
                Priority::Error,
                format_args!(
                    "stratad (process {pid}) died here, and the process that held its tenants' memory, too: programs of it that still run wait for ever at pages that were evicted, and must be killed"
                ),
            );
            Ok(None)
        }
        Before::Held(held) => {
            let taken = place.take(held, home)?;
            // Their listeners may be gone, the names of the sockets are there.
            for socket in [config.control_socket(), config.socket_dir.join(AGENT_SOCKET_NAME)] {
                let _ = fs::remove_file(socket);
            }
            Ok(taken)
        }
    }
}

/// Ends a holder whose descriptors are not needed, and collects it: who adopts this
/// process's children may not expect one.
fn end_holder(holder: u32) {
    kill_process(holder, 9);
    while wait_worker(holder) == WorkerExit::Running {
        std::thread::sleep(HOLDER_ENDS);
    }
}

/// Where commands and agents come.
fn listen(config: &Config, private: bool) -> anyhow::Result<(UnixListener, SeqPacketListener)> {
    let control_socket = config.control_socket();
    let agent_socket = config.socket_dir.join(AGENT_SOCKET_NAME);
    let open_to_all = if private { 0o600 } else { 0o666 };
    let control = control::bind(&control_socket, open_to_all)
        .map_err(|error| cannot_listen(&control_socket, &error))?;
    // The control socket is ours alone now, so this one is left over, if there.
    let _ = fs::remove_file(&agent_socket);
    let agents = SeqPacketListener::bind(&agent_socket)
        .map_err(|error| cannot_listen(&agent_socket, &error))?;
    fs::set_permissions(&agent_socket, fs::Permissions::from_mode(open_to_all))?;
    Ok((control, agents))
}

/// Has a worker serve until one ends in good order. `before`: the numbers of descriptors
/// that were taken over, and from which supervisor.
fn serve(
    (config, config_file): (Config, Option<PathBuf>),
    private: bool,
    (control, agents): (UnixListener, SeqPacketListener),
    registry: &Arc<Registry>,
    own: &Pidfd,
    holder: &mut u32,
    before: (HashSet<RawFd>, Option<u32>),
) -> anyhow::Result<ExitCode> {
    let (control_socket, agent_socket) =
        (config.control_socket(), config.socket_dir.join(AGENT_SOCKET_NAME));
    let (of_before, taken_from) = before;
    let back = listen_for_the_returning(&config.socket_dir)
        .inspect_err(|error| {
            eprintln!(
                "stratad: children of programs that change their user or root directory will not be managed: cannot listen for them: {error}"
            );
        })
        .ok();
    let pool_socket = config.socket_dir.join(POOL_SOCKET_NAME);
    let tier_mark = config.tier_path.as_deref().map(claim_tier).transpose()?;
    let mut inheritance = Inheritance {
        config,
        config_file,
        private,
        registry: Arc::clone(registry),
        control,
        agents,
        agent_socket: agent_socket.clone(),
        back,
        own_fds: Vec::new(),
        supervisor_pid: std::process::id(),
        taken_from,
    };
    inheritance.own_fds = open_fds().context("cannot list open descriptors")?;
    inheritance.own_fds.retain(|fd| !of_before.contains(fd));
    log(Priority::Notice, beginning(&inheritance));
    let code = watch(&mut inheritance, own, holder)?;
    // Until here: it says that the directory is in use.
    drop(tier_mark);
    for socket in [agent_socket, control_socket, pool_socket] {
        let _ = fs::remove_file(socket);
    }
    Ok(code)
}

/// Which directory it is, whatever path leads there.
fn home_of(directory: &Path) -> io::Result<u64> {
    let of = fs::metadata(directory)?;
    Ok(back_key(b"", of.dev(), of.ino()))
}

/// The socket for agents that know the daemon already, and its key. That is the
/// same for every daemon of this directory, so that a process that is restored
/// under a later one finds it; and, as long as the directory exists, nobody
/// else's: another container may have one of the same path.
fn listen_for_the_returning(directory: &Path) -> io::Result<(SeqPacketListener, u64)> {
    let of = fs::metadata(directory)?;
    let key = back_key(directory.as_os_str().as_bytes(), of.dev(), of.ino());
    Ok((SeqPacketListener::bind_abstract(&wire::back_name(key))?, key))
}

/// FNV-1a over all three, and never 0.
fn back_key(path: &[u8], device: u64, inode: u64) -> u64 {
    let numbers = [device.to_le_bytes(), inode.to_le_bytes()];
    let bytes = path.iter().chain(numbers.iter().flatten());
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.fold(0xcbf2_9ce4_8422_2325, step).max(1)
}

/// The first line that a daemon logs.
fn beginning(inheritance: &Inheritance) -> String {
    let Config { socket_dir, default_dram, manage, snapshot_dir, .. } = &inheritance.config;
    let kind = if inheritance.private { ", private" } else { "" };
    format!(
        "starts: version {}, process {}{kind}, sockets in {}, snapshots in {}, {default_dram} for a tenant that names no budget, {} rules",
        env!("CARGO_PKG_VERSION"),
        inheritance.supervisor_pid,
        socket_dir.display(),
        snapshot_dir.display(),
        manage.len()
    )
}

fn claim_tier(directory: &Path) -> anyhow::Result<fs::File> {
    let mark = tier::claim(directory, |line| log(Priority::Info, line))?;
    log(Priority::Info, format_args!("file tier in {}", tier::describe(directory)));
    Ok(mark)
}

fn make_directory(directory: &Path, private: bool) -> anyhow::Result<()> {
    let mode = if private { 0o700 } else { 0o755 };
    fs::DirBuilder::new().recursive(true).mode(mode).create(directory).map_err(|error| {
        let todo = "name another socket_dir, or run stratad as root";
        anyhow::anyhow!("cannot make {}: {error}; {todo}", directory.display())
    })
}

fn cannot_listen(socket: &Path, error: &io::Error) -> anyhow::Error {
    let todo = match error.kind() {
        io::ErrorKind::AddrInUse => "stop that one first, or name another socket_dir",
        io::ErrorKind::PermissionDenied => "run stratad as root, or name another socket_dir",
        _ => "name another socket_dir",
    };
    anyhow::anyhow!("cannot listen on {}: {error}; {todo}", socket.display())
}

fn watch(inheritance: &mut Inheritance, own: &Pidfd, holder: &mut u32) -> anyhow::Result<ExitCode> {
    let mut short_lives = 0;
    loop {
        let born = Instant::now();
        // What the next worker is to have.
        let mut reread = None;
        let worker = spawn_sharing_files(|| worker::run(inheritance))
            .context("cannot make a worker process")?;
        let died = loop {
            match wait_for_signal() {
                Signal::Terminate => kill_process(worker, 15),
                Signal::Hangup => {
                    reread = read_again(inheritance).or(reread);
                    if reread.is_some() {
                        kill_process(worker, SIGHUP);
                    }
                }
                Signal::Child => match wait_worker(worker) {
                    WorkerExit::Running => {
                        if wait_worker(*holder) != WorkerExit::Running {
                            *holder = another_holder(inheritance, own)?;
                        }
                        // Restored processes of an earlier worker's time.
                        let others = ended_children().into_iter().filter(|&pid| pid != worker);
                        others.for_each(collect_child);
                    }
                    other => break other,
                },
            }
        };
        let upgrades = inheritance.registry.upgrades().swap(0, Ordering::AcqRel) != 0;
        if upgrades && died != WorkerExit::Status(worker::DONE) {
            upgrade::become_it();
        }
        let has_made_room = reread.is_some();
        if let Some(Reread { config, .. }) = reread {
            inheritance.config = config;
        }
        match died {
            WorkerExit::Killed(_) if has_made_room => {
                log(Priority::Notice, "a worker with the new configuration takes over");
            }
            WorkerExit::Status(worker::DONE) => {
                log(Priority::Notice, "stops");
                return Ok(ExitCode::SUCCESS);
            }
            WorkerExit::Status(worker::CANNOT_START) => return Ok(ExitCode::FAILURE),
            other => log(
                Priority::Error,
                format_args!("the worker died ({other:?}); another takes over"),
            ),
        }
        short_lives = if born.elapsed() < SHORT_LIFE { short_lives + 1 } else { 0 };
        if short_lives > SHORT_LIVES {
            std::thread::sleep(PAUSE);
        }
    }
}

/// The configuration as it is now; none: it is not to be used, and the log says why.
fn read_again(inheritance: &Inheritance) -> Option<Reread> {
    let Inheritance { config, config_file, private, .. } = inheritance;
    match Reread::of(config_file.as_deref(), *private, config) {
        Ok(reread) => {
            log(Priority::Notice, reread.note());
            Some(reread)
        }
        Err(error) => {
            let text = format!("SIGHUP: {error:#}");
            text.lines().for_each(|line| log(Priority::Error, line));
            log(Priority::Error, "stratad goes on with the configuration that it had");
            None
        }
    }
}

/// Makes a holder in the place of one that ended, and marks it.
fn another_holder(inheritance: &Inheritance, own: &Pidfd) -> anyhow::Result<u32> {
    let Inheritance { registry, config, .. } = inheritance;
    let holder =
        holder::start(registry, own, &config.socket_dir).context("cannot make a holder")?;
    let marked = Place::enter(&config.socket_dir)
        .and_then(|place| Ok(place.mark(holder, registry.descriptor().as_raw_fd())?));
    if let Err(error) = marked {
        log(
            Priority::Error,
            format_args!(
                "another stratad will not find the new holder, process {holder}: {error:#}"
            ),
        );
    }
    Ok(holder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directory_has_its_own_way_back() {
        let key = back_key(b"/run/strata", 1, 2);
        assert_eq!(key, back_key(b"/run/strata", 1, 2));
        let others = [(&b"/run/other"[..], 1, 2), (b"/run/strata", 2, 2), (b"/run/strata", 1, 3)];
        for (path, device, inode) in others {
            assert_ne!(key, back_key(path, device, inode));
        }
    }
}
