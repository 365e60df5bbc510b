//! The worker: takes over what an earlier one left, then serves agents,
//! commands and metrics. It may be killed at any moment.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_pager::{ReleaseRefused, Tenant};
use strata_sys::{
    Priority, SIGKILL, Signal, Urgent, adopt_orphans, close_fd, collect_child, ended_children,
    is_living_userfaultfd, kill_process, log, wait_for_signal,
};

use crate::commands::Commands;
use crate::control::{ControlServer, Limits};
use crate::current::Current;
use crate::guests::Guests;
use crate::metrics::{self, Metrics};
use crate::pools::Pools;
use crate::pulse::Pulse;
use crate::reload::Followers;
use crate::shares::Shares;
use crate::snapshots::schedules::Schedules;
use crate::snapshots::{Snapshots, open_page_file, ready};
use crate::supervisor::Inheritance;
use crate::tenants::Tenants;
use crate::watcher::Watcher;
use crate::{agents, statistics, surveyor, takeover, upgrade};

/// Exit status: nothing is left to do.
pub(crate) const DONE: i32 = 0;
/// Exit status: the first worker could not start; another could not either.
pub(crate) const CANNOT_START: i32 = 3;
/// How often ended tenants are looked for.
const TIDY_EVERY: Duration = Duration::from_millis(100);
/// With so many tenants; with more as much less often, but once a second at least.
const TIDY_TENANTS: usize = 50;
const MOST_TIDY_PAUSES: usize = 10;
/// How long a daemon that is told to end waits for tenants whose last process has
/// ended and that it has not taken down yet.
const JUST_ENDED: Duration = Duration::from_millis(400);
/// A child that has ended and that nobody has collected for so long is nobody's.
const UNCOLLECTED: Duration = Duration::from_secs(4);
/// A private daemon that gets no tenant ends after this.
const PRIVATE_IDLE: Duration = Duration::from_secs(10);

/// How long a worker that is to make room waits for snapshots and what comes of them.
const MAKING_ROOM: Duration = Duration::from_secs(60);
/// And how long for answers.
const ANSWERS: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Runs the worker; returns its exit status.
pub(crate) fn run(inheritance: &Inheritance) -> i32 {
    strata_sys::keep_little_heap();
    inheritance.registry.worker_pid().store(std::process::id(), Ordering::Release);
    let first = inheritance.registry.workers().fetch_add(1, Ordering::AcqRel) == 0;
    match start(inheritance) {
        Ok(()) => DONE,
        Err(error) => {
            log(Priority::Error, format_args!("{error:#}"));
            if first { CANNOT_START } else { 1 }
        }
    }
}

fn start(inheritance: &Inheritance) -> anyhow::Result<()> {
    close_litter(inheritance);
    adopt_orphans();
    let current = Current::new(inheritance.config.clone());
    let tenants = Arc::new(Tenants::new(inheritance, &current));
    let recovered = Tenant::recover_all(&inheritance.registry, open_page_file);
    if let Some(from) = inheritance.taken_from {
        takeover::report(&inheritance.registry, inheritance.supervisor_pid, from, &recovered);
    }
    for (name, recovered) in recovered {
        match recovered {
            Ok(tenant) => tenants.adopt(&tenant),
            // Its programs wait for ever, which is not a wrong byte.
            Err(error) => {
                log(Priority::Error, format_args!("{name} cannot be taken over: {error}"))
            }
        }
    }
    agents::serve(inheritance, &tenants, &current)?;
    let guests = Guests::start(&inheritance.config.socket_dir, &tenants)?;
    let pools = Pools::start(inheritance, &tenants, &current)?;
    let snapshots = Arc::new(Snapshots::new(&current, &tenants, &guests));
    ready::start(&snapshots)?;
    let schedules = Schedules::new(&snapshots, &current);
    let shares = Shares::new(&current, &tenants, &guests);
    let commands = Commands::new(
        Arc::clone(&tenants),
        Arc::clone(&snapshots),
        Arc::clone(&guests),
        Arc::clone(&pools),
        Arc::clone(&shares),
        &current,
        inheritance,
    );
    let listener = inheritance.doors.control.try_clone()?;
    let observed = Arc::clone(&tenants);
    let metrics = Metrics::new(move || {
        let mut tenants = statistics::all(&observed);
        for stats in &mut tenants {
            guests.add(stats);
            pools.add(stats);
        }
        metrics::Seen { tenants, pools: pools.all(0) }
    });
    let mut limits = Limits::default();
    limits.room.per_user = current.get().quota.connections as usize;
    let control = ControlServer::start(listener, limits, Arc::new(commands))?;
    let followers = Followers {
        control: &control,
        metrics: &metrics,
        schedules: &schedules,
        shares: &shares,
        snapshots: &snapshots,
    };
    followers.follow(&current.get());
    surveyor::start(&tenants)?;
    strata_pager::start_alarms()?;
    let watcher = watcher(inheritance, &tenants).map(Arc::new);
    let (tidied, kept) = (Arc::clone(&tenants), Arc::clone(&snapshots));
    let private = inheritance.private;
    let watched = watcher.clone();
    std::thread::Builder::new()
        .name("tidy".into())
        .spawn(move || tidy(&tidied, &kept, private, watched.as_deref()))?;
    let pulse = pulse(inheritance);
    let is_replaced = loop {
        let signal = match wait_for_signal() {
            // With nobody to take over, all pages come back.
            Signal::HandOver if !hands_over(inheritance) => Signal::Terminate,
            signal => signal,
        };
        match signal {
            Signal::Terminate
                if terminate(&tenants, &snapshots, current.get().release_patience) =>
            {
                break false;
            }
            Signal::Hangup
                if inheritance.registry.upgrades().load(Ordering::Acquire) == 0
                    && followers.read_again(inheritance, &current) =>
            {
                if let Some(pulse) = &pulse {
                    pulse.now();
                }
            }
            Signal::Hangup | Signal::HandOver => break true,
            _ => {}
        }
    };
    if !is_replaced {
        if let Some(watcher) = &watcher {
            watcher.end();
        }
        tenants.finish();
    }
    // What it asks is answered until it ends, and nothing of it waits at the socket after.
    match pulse {
        Some(pulse) if is_replaced => pulse.makes_room(),
        Some(pulse) => pulse.end(),
        None => {}
    }
    let under_way = control.counter();
    if let Err(error) = control.stop() {
        // Somebody removed it: nobody comes any more either.
        log(Priority::Warning, format_args!("its socket is gone: {error}"));
    }
    if is_replaced {
        make_room(&snapshots, under_way);
    }
    Ok(())
}

/// Tells the supervisor that this worker answers, where anybody wants to know.
fn pulse(inheritance: &Inheritance) -> Option<Pulse> {
    let socket = inheritance.config.control_socket();
    Pulse::start(inheritance.supervisor_pid, socket, inheritance.pulse?)
        .inspect_err(|error| {
            let line = format_args!("the service manager will not hear that it answers: {error}");
            log(Priority::Error, line);
        })
        .ok()
}

/// Leaves everything to the stratad that is started next, if the one that is installed can
/// take over.
fn hands_over(inheritance: &Inheritance) -> bool {
    match upgrade::check(inheritance.config_file.as_deref(), inheritance.private) {
        Ok(_) => {
            inheritance.registry.upgrades().store(upgrade::ANOTHER, Ordering::Release);
            true
        }
        Err(why) => {
            let what = "the stratad that is installed cannot take over, so all pages come back";
            log(Priority::Warning, format_args!("{what}: {why:#}"));
            false
        }
    }
}

/// Ends, so that a worker with another configuration, or another stratad, takes over: when
/// those who have asked are answered (who comes now waits for the next worker), and nothing
/// is in the middle that would have to be begun anew.
fn make_room(snapshots: &Snapshots, under_way: impl Fn() -> usize) {
    let began = Instant::now();
    while (under_way() > 0 && began.elapsed() < ANSWERS)
        || (snapshots.is_busy() && began.elapsed() < MAKING_ROOM)
    {
        std::thread::sleep(LOOK_EVERY);
    }
    Urgent::end_soon();
    kill_process(std::process::id(), SIGKILL);
}

/// Who watches what is used on the node, where there is one to be watched.
fn watcher(inheritance: &Inheritance, tenants: &Arc<Tenants>) -> Option<Watcher> {
    inheritance.config.node?;
    Watcher::start(tenants)
        .inspect_err(|error| {
            log(Priority::Warning, format_args!("no thread to watch the node: {error}"))
        })
        .ok()
}

/// Closes what a dead worker opened and no record names. A userfaultfd whose
/// process lives stays open: were it the last one, missing pages would read as
/// zero.
fn close_litter(inheritance: &Inheritance) {
    let mut known: HashSet<_> = inheritance.own_fds.iter().copied().collect();
    known.extend(inheritance.registry.claimed_fds());
    for &fd in &inheritance.fds_before {
        if !known.contains(&fd) && !is_living_userfaultfd(fd) {
            close_fd(fd);
        }
    }
}

/// Ends tenants whose processes are gone; a private daemon with the last of
/// them.
fn tidy(tenants: &Tenants, snapshots: &Snapshots, private: bool, watcher: Option<&Watcher>) {
    let mut busy = Instant::now();
    let mut had_tenant = false;
    let (mut ended, mut looked) = (Vec::new(), Instant::now());
    snapshots.remove_copies();
    loop {
        // The more tenants there are the longer a look at all of them takes.
        let many = (tenants.count() / TIDY_TENANTS).clamp(1, MOST_TIDY_PAUSES);
        std::thread::sleep(TIDY_EVERY * many as u32);
        if looked.elapsed() >= UNCOLLECTED {
            // Whoever started a child collects it; what stays from one look to the
            // next is a restored process, or one that lost its parent.
            let before = std::mem::replace(&mut ended, ended_children());
            ended.iter().filter(|pid| before.contains(pid)).for_each(|&pid| collect_child(pid));
            // What a QEMU had open when nothing stood on it any more.
            snapshots.sweep_disks();
            looked = Instant::now();
        }
        if tenants.end_finished() {
            snapshots.remove_copies();
            had_tenant = true;
            busy = Instant::now();
        }
        snapshots.keep_limit();
        if !tenants.is_empty() {
            had_tenant = true;
            busy = Instant::now();
        }
        let idle = if had_tenant { TIDY_EVERY * 2 } else { PRIVATE_IDLE };
        if private && tenants.is_empty() && busy.elapsed() > idle && tenants.close_if_empty() {
            if let Some(watcher) = watcher {
                watcher.end();
            }
            tenants.finish();
            std::process::exit(DONE);
        }
    }
}

/// Gives everything back. False: some tenant's pages do not fit into DRAM, or another host
/// needs them, so the daemon goes on.
fn terminate(tenants: &Tenants, snapshots: &Snapshots, patience: Duration) -> bool {
    let mut all = true;
    for tenant in tenants.list() {
        if let Some(why) = snapshots.is_lent(&tenant) {
            log(Priority::Warning, format_args!("{why}; stratad goes on"));
            all = false;
            continue;
        }
        let released = tenant.release(patience);
        // One that has ended meanwhile has nothing to be given back.
        if let Err(refused) = released
            && refused != ReleaseRefused::Ended
        {
            log(
                Priority::Warning,
                format_args!(
                    "{} cannot be released ({refused:?}): stop it first, or free memory; stratad goes on",
                    tenant.record().name
                ),
            );
            all = false;
        }
    }
    // Nobody looks after this what those left that have just ended.
    let until = Instant::now() + JUST_ENDED;
    let has_ended = |tenant: &Arc<Tenant>| !tenant.has_released_process();
    while all && tenants.list().iter().any(has_ended) && Instant::now() < until {
        tenants.end_finished();
        std::thread::sleep(JUST_ENDED / 20);
    }
    all
}
