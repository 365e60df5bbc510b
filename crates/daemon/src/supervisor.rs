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
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use strata_api::POOL_SOCKET_NAME;
use strata_pager::Registry;
use strata_sys::{
    HandedSockets, Notifier, Pidfd, Priority, SIGHUP, SIGKILL, SIGTERM, SIGUSR1, SeqPacketListener,
    Signal, Urgent, WorkerExit, adopt_orphans, block_signals, collect_child, ended_children,
    forbid_core_dumps, kill_process, lock_memory, log, open_fds, raise_descriptor_limit,
    spawn_sharing_files, wait_for_signal, wait_worker,
};
use strata_units::{fnv1a, wire};

use crate::config::Config;
use crate::doors::{self, Doors};
use crate::manager::Manager;
use crate::reload::{self, Reread};
use crate::takeover::{Before, Place, Taken};
use crate::{holder, places, pulse, tier, upgrade, worker};

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

/// How the daemon was started.
#[derive(Debug)]
pub(crate) struct Origin {
    /// Where the configuration was read; none: the default place.
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) private: bool,
    /// Whom it tells how it is.
    pub(crate) notifier: Notifier,
    pub(crate) handed: HandedSockets,
}

/// How it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// In good order: nobody is managed any more.
    Done,
    /// Its first worker could not start.
    CannotStart,
    /// Whoever is managed waits for the next daemon.
    HandedOver,
}

/// Everything that a worker starts with.
#[derive(Debug)]
pub(crate) struct Inheritance {
    pub(crate) config: Config,
    /// Where it was read; none: the default place.
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) private: bool,
    pub(crate) registry: Arc<Registry>,
    pub(crate) doors: Doors,
    /// How often to tell the supervisor that it answers, if anybody wants to know.
    pub(crate) pulse: Option<Duration>,
    /// Where agents come that cannot reach that path any more, and what they know
    /// it by (`wire::back_name`); none: the name is taken.
    pub(crate) back: Option<(SeqPacketListener, u64)>,
    /// Descriptors that were open before the first worker.
    pub(crate) own_fds: Vec<RawFd>,
    /// Those that were open when this worker was made. What the supervisor, which has the
    /// same table, opens from then on is not among them.
    pub(crate) fds_before: Vec<RawFd>,
    pub(crate) supervisor_pid: u32,
    /// The supervisor whose tenants these are, where that one died.
    pub(crate) taken_from: Option<u32>,
}

/// Serves until a worker ends in good order.
pub(crate) fn run(config: Config, origin: Origin) -> anyhow::Result<ExitCode> {
    let Origin { config_file, private, notifier, mut handed } = origin;
    // There may be programs that wait for the first worker.
    let urgent = Urgent::begin();
    // Before the registry is mapped.
    if let Err(error) = lock_memory() {
        log(Priority::Warning, format_args!("the supervisor may be swapped out: {error}"));
    }
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
    let taken = begin(&mut place, &config, home, &mut handed)?;
    let doors = Doors::open(&config, private, handed)?;
    let mut manager = Manager::new(notifier).context("cannot open a socket")?;
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
    let before = (of_before, taken_from, urgent);
    let outcome = serve(
        (config, config_file),
        private,
        doors,
        (&registry, &own),
        &mut holder,
        &mut manager,
        before,
    );
    let has_tenants = !registry.tenants().is_empty();
    let stays = matches!(outcome, Ok(End::HandedOver)) || (outcome.is_err() && has_tenants);
    if stays {
        // Closed here it would be closed for the holder, too, whose table is this one.
        std::mem::forget(Arc::clone(&registry));
    }
    match &outcome {
        // The holder keeps what they need until another daemon takes over.
        Err(_) if has_tenants => {
            log(Priority::Error, "its tenants wait in the holder until stratad is started again");
        }
        Ok(End::HandedOver) => {
            let what = "ends; what it manages waits in the holder until stratad is started again";
            log(Priority::Notice, what);
        }
        _ => {
            end_holder(holder);
            Place::leave(&socket_dir);
        }
    }
    outcome.map(|end| match end {
        End::Done | End::HandedOver => ExitCode::SUCCESS,
        End::CannotStart => ExitCode::FAILURE,
    })
}

/// What a daemon that died in this directory has left, if one has.
fn begin(
    place: &mut Place,
    config: &Config,
    home: u64,
    handed: &mut HandedSockets,
) -> anyhow::Result<Option<Taken>> {
    match place.before()? {
        Before::Nobody => Ok(None),
        Before::Living(pid) => {
            let control = config.control_socket();
            let taken =
                format!("{} is in use by another stratad (process {pid})", control.display());
            Err(doors::cannot_listen(&control, &io::Error::new(io::ErrorKind::AddrInUse, taken)))
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
            let nobody_listens = handed.sockets.is_empty();
            if nobody_listens {
                doors::leave_to_manager(config, held.supervisor())?;
            }
            let taken = place.take(held, home, &mut handed.sockets)?;
            if nobody_listens {
                // Their listeners may be gone, the names of the sockets are there.
                doors::remove_names(config);
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

/// Has a worker serve until one ends in good order. `before`: the numbers of descriptors
/// that were taken over, from which supervisor, and how urgent the first worker is.
fn serve(
    (config, config_file): (Config, Option<PathBuf>),
    private: bool,
    doors: Doors,
    (registry, own): (&Arc<Registry>, &Pidfd),
    holder: &mut u32,
    manager: &mut Manager,
    before: (HashSet<RawFd>, Option<u32>, Option<Urgent>),
) -> anyhow::Result<End> {
    let (of_before, taken_from, urgent) = before;
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
        doors,
        pulse: manager.notifier().is_heard().then(|| pulse::period(manager.notifier().watchdog())),
        back,
        own_fds: Vec::new(),
        fds_before: Vec::new(),
        supervisor_pid: std::process::id(),
        taken_from,
    };
    inheritance.own_fds = open_fds().context("cannot list open descriptors")?;
    inheritance.own_fds.retain(|fd| !of_before.contains(fd));
    log(Priority::Notice, beginning(&inheritance));
    let end = watch(&mut inheritance, own, holder, manager, urgent)?;
    // Until here: it says that the directory is in use.
    drop(tier_mark);
    if end != End::HandedOver {
        let _ = fs::remove_file(pool_socket);
        inheritance.doors.close(&inheritance.config);
    }
    Ok(end)
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

/// Of all three, and never 0.
fn back_key(path: &[u8], device: u64, inode: u64) -> u64 {
    let numbers = [device.to_le_bytes(), inode.to_le_bytes()];
    fnv1a(path.iter().chain(numbers.iter().flatten()).copied()).max(1)
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

fn watch(
    inheritance: &mut Inheritance,
    own: &Pidfd,
    holder: &mut u32,
    manager: &mut Manager,
    mut urgent: Option<Urgent>,
) -> anyhow::Result<End> {
    let mut short_lives = 0;
    loop {
        let born = Instant::now();
        inheritance.fds_before = open_fds().unwrap_or_else(|error| {
            let what = "what its worker before has left open stays so";
            log(
                Priority::Warning,
                format_args!("cannot list open descriptors, so {what}: {error}"),
            );
            Vec::new()
        });
        reload::begins_with_it(&inheritance.registry);
        let worker = spawn_sharing_files(|| worker::run(inheritance))
            .context("cannot make a worker process")?;
        manager.worker_begins();
        drop(urgent.take());
        let died = loop {
            match wait_for_signal() {
                Signal::Terminate => {
                    manager.is_at("Gives all pages back, to end.");
                    kill_process(worker, SIGTERM);
                }
                Signal::HandOver => kill_process(worker, SIGUSR1),
                Signal::Hangup => {
                    manager.reloads("Reads its configuration again.");
                    if let Some(config) = read_again(inheritance) {
                        reload::tell(&inheritance.registry, &config);
                        inheritance.config = config;
                        kill_process(worker, SIGHUP);
                    } else if reload::is_followed(&inheritance.registry) {
                        manager.goes_on("Goes on with the configuration that it had.");
                    }
                }
                Signal::Well(pid) if pid == worker => {
                    let registry = &inheritance.registry;
                    let stays = reload::is_followed(registry);
                    manager.worker_answers(registry.tenants().len(), stays);
                }
                Signal::Well(_) => {}
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
        urgent = Urgent::begin();
        let successor = inheritance.registry.upgrades().swap(0, Ordering::AcqRel);
        if died == WorkerExit::Status(worker::DONE) {
            log(Priority::Notice, "stops");
            manager.stops("Has given all pages back.");
            return Ok(End::Done);
        }
        if successor == upgrade::ANOTHER {
            manager.stops("What it managed waits for the next stratad.");
            return Ok(End::HandedOver);
        }
        if successor == upgrade::THIS {
            manager.reloads("Becomes the stratad that is installed now.");
            // It begins as urgently itself.
            drop(urgent.take());
            upgrade::become_it(&inheritance.doors, inheritance.private, manager.notifier());
        }
        let has_made_room = !reload::is_followed(&inheritance.registry);
        match died {
            WorkerExit::Killed(_) if has_made_room => {
                log(Priority::Notice, "a worker with the new configuration takes over");
            }
            WorkerExit::Status(worker::CANNOT_START) => return Ok(End::CannotStart),
            other => {
                manager.is_at("Its worker died; another takes over.");
                let line = format_args!("the worker died ({other:?}); another takes over");
                log(Priority::Error, line);
            }
        }
        short_lives = if born.elapsed() < SHORT_LIFE { short_lives + 1 } else { 0 };
        if short_lives > SHORT_LIVES {
            std::thread::sleep(PAUSE);
        }
    }
}

/// The configuration as it is now; none: it is not to be used, and the log says why.
fn read_again(inheritance: &Inheritance) -> Option<Config> {
    let Inheritance { config, config_file, private, .. } = inheritance;
    match Reread::of(config_file.as_deref(), *private, config) {
        Ok(reread) => {
            log(Priority::Notice, reread.note());
            Some(reread.config)
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
