//! What ends a keeper's rest, and how long one is.

use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use strata_sys::{ControlBlock, Range, SeqPacket};

use super::*;
use crate::tenant::Hail;
use crate::testing;

/// Longer than a busy machine keeps a thread from running.
const HANGS: Duration = Duration::from_secs(60);

/// A tenant of one process that sleeps.
fn asleep() -> Option<(Arc<Tenant>, Child)> {
    asleep_of(testing::tenant())
}

fn asleep_of(tenant: Arc<Tenant>) -> Option<(Arc<Tenant>, Child)> {
    let uffd = testing::userfaultfd()?;
    let mut command = Command::new("sleep");
    let child = command.arg("1000").stdout(Stdio::null()).stderr(Stdio::null());
    let child = child.spawn().expect("a child");
    let begun = Instant::now();
    while !sleeps(child.id()) {
        assert!(begun.elapsed() < HANGS, "it does not begin to sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (socket, _) = UnixDatagram::pair().expect("sockets");
    let own = Range { start: 0, end: 0 };
    let process = Arc::new(Process::open(child.id()).expect("a child"));
    let hail = Hail { process, transfer: 4096, own, restart: 0, library: 0 };
    let block = ControlBlock::create(strata_units::wire::MAGIC).expect("a control block");
    tenant.attach_unkept(uffd, block, SeqPacket::adopt(socket.into()), hail).expect("a space");
    Some((tenant, child))
}

/// Whether it has come to that: until then it still changes, and may wait for a processor
/// in between. A kernel that does not tell where a process waits says 0.
fn sleeps(pid: u32) -> bool {
    let waits_in = std::fs::read_to_string(format!("/proc/{pid}/wchan")).expect("its wchan");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its stat");
    stat.contains(") S ") && (waits_in == "0" || waits_in.contains("nanosleep"))
}

fn is_unchanged(keeper: &Keeper<'_>) -> bool {
    keeper.state.as_ref().is_some_and(|state| state.is_unchanged(keeper.tenant))
}

/// Notes what a tenant is like, and again until it does not change by itself.
fn settle(keeper: &mut Keeper<'_>) {
    let begun = Instant::now();
    loop {
        keeper.note_state();
        std::thread::sleep(Duration::from_millis(5));
        if is_unchanged(keeper) {
            return;
        }
        assert!(begun.elapsed() < HANGS, "a sleeping process changes");
    }
}

#[test]
fn whatever_may_need_the_keeper_ends_a_rest() {
    let Some((tenant, mut child)) = asleep() else { return };
    let mut keeper = Keeper::new(&tenant);
    let space = tenant.space_list().remove(0);
    let rest = NextLook { after: Duration::from_micros(100), at_rest: HANGS * 2 };
    let mut ends = |cause: &dyn Fn()| {
        settle(&mut keeper);
        // By the keeper itself, then by the idle watcher.
        (0..2).all(|turn| {
            lock(&tenant.inbox).woken = false;
            keeper.left_out = turn * OWN_READS;
            if turn == 0 {
                cause();
            }
            let begun = Instant::now();
            keeper.wait(rest);
            begun.elapsed() < HANGS
        })
    };
    let agent = space.agent().expect("attached");
    assert!(ends(&|| assert!(agent.control.control().hints.push(4096, 8192))), "a hint");
    assert!(
        ends(&|| {
            tenant.counters.add(Counter::PolicyTime, 1);
        }),
        "a page came"
    );
    let other = testing::userfaultfd().map(|uffd| testing::space(&tenant, uffd));
    assert!(ends(&|| tenant.adopt_space(other.clone().expect("as before"))), "a process more");
    tenant.bury(&other.expect("as before"));
    assert!(ends(&|| space.has_strays.store(true, Ordering::Release)), "pages on their way");
    space.has_strays.store(false, Ordering::Release);
    let pid = child.id();
    let killed = || assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().is_ok());
    assert!(ends(&killed), "its process has ended");
    child.wait().expect("it was killed");
    keeper.note_state();
    assert!(keeper.state.is_none(), "of nobody");
}

#[test]
fn who_has_nothing_registered_rests_longer_each_time() {
    let Some((tenant, mut child)) = asleep() else { return };
    let mut keeper = Keeper::new(&tenant);
    let lengths = [0, 1, 2, 6, 60].map(|rests| {
        keeper.rests = rests;
        keeper.longest_rest() / 100
    });
    let expected = [1, 2, 4, 64, 64].map(Duration::from_millis);
    assert_eq!(lengths, expected);
    tenant.under_pressure.store(true, Ordering::Relaxed);
    assert_eq!(keeper.longest_rest(), LONGEST);
    // An order ends the count, a whole rest goes on with it.
    settle(&mut keeper);
    keeper.rests = 3;
    lock(&tenant.inbox).woken = true;
    let rest = NextLook { after: Duration::from_millis(1), at_rest: Duration::from_millis(20) };
    keeper.wait(rest);
    assert_eq!(keeper.rests, 0);
    child.kill().expect("it sleeps");
    child.wait().expect("it was killed");
}

#[test]
fn who_has_an_alarm_rests_until_it_goes_off_or_something_runs() {
    let nowhere = testing::tenant_in("/nonexistent");
    let Some((tenant, mut child)) = asleep_of(nowhere) else { return };
    let mut keeper = Keeper::new(&tenant);
    let path = std::env::temp_dir().join(format!("strata-charged-{}", std::process::id()));
    std::fs::write(&path, "4096\n").expect("file");
    let rest = NextLook { after: Duration::from_millis(1), at_rest: HANGS * 2 };
    let signal = |name: &str| {
        let status = Command::new("kill").args([name, child.id().to_string().as_str()]).status();
        assert!(status.is_ok());
    };
    let other = testing::userfaultfd().map(|uffd| testing::space(&tenant, uffd));
    let causes: [(&(dyn Fn() + Sync), bool); 3] = [
        (&|| signal("-STOP"), true),
        (&|| tenant.adopt_space(other.clone().expect("as before")), false),
        (&|| idle_watch::alarmed(idle_watch::key(&tenant)), false),
    ];
    for (number, (cause, goes_on)) in causes.into_iter().enumerate() {
        keeper.alarm = Some(Alarm::of_file(&path, 8192));
        settle(&mut keeper);
        let runs = |keeper: &Keeper<'_>| {
            let mut clocks = keeper.state.as_ref().expect("noted").clocks();
            clocks.any(|(clock, before)| clock.read() != Some(before))
        };
        while runs(&keeper) {
            settle(&mut keeper);
        }
        assert_eq!(keeper.longest_rest(), LONGEST_STILL);
        (keeper.left_out, keeper.rests) = (OWN_READS, TOGETHER_AFTER);
        lock(&tenant.inbox).woken = false;
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !tenant.stands_still.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                cause();
            });
            keeper.wait(rest);
        });
        assert!(begun.elapsed() < HANGS, "{number}");
        assert!(!tenant.stands_still.load(Ordering::Relaxed));
        let goes = keeper.left_out >= OWN_READS && keeper.rests >= TOGETHER_AFTER;
        assert_eq!(goes, goes_on, "{number}");
        assert_eq!(keeper.alarm.is_some(), number < 2, "{number}");
        if number == 1 {
            tenant.bury(other.as_ref().expect("as before"));
        }
    }
    std::fs::remove_file(&path).expect("file");
    child.kill().expect("it sleeps");
    child.wait().expect("it was killed");
}

#[test]
fn a_rest_has_an_end() {
    let Some((tenant, mut child)) = asleep() else { return };
    let mut keeper = Keeper::new(&tenant);
    settle(&mut keeper);
    // First by itself, then by the idle watcher. A rest of which another process had all is
    // over before its first look.
    let rest = NextLook { after: Duration::from_millis(1), at_rest: Duration::from_millis(20) };
    lock(&tenant.inbox).woken = false;
    for own in [0, OWN_READS] {
        let (begun, before) = (Instant::now(), keeper.quiet_rounds);
        while keeper.quiet_rounds == before {
            keeper.left_out = own;
            assert!(keeper.wait(rest).is_empty());
            assert!(is_unchanged(&keeper) && keeper.left_out >= own, "it slept");
            assert!(begun.elapsed() < HANGS, "no look was left out");
        }
    }
    child.kill().expect("it sleeps");
    child.wait().expect("it was killed");
}

#[test]
fn a_gauge_tells_memory_that_came() {
    let path = std::env::temp_dir().join(format!("strata-gauge-{}", std::process::id()));
    std::fs::write(&path, "4096\n").expect("file");
    let gauge = Gauge::open(path.to_str().expect("a name").into(), None).expect("it was written");
    assert_eq!(gauge.read().as_ref(), Some(&gauge.said));
    std::fs::write(&path, "8192\n").expect("file");
    assert_ne!(gauge.read().as_ref(), Some(&gauge.said));
    let gauge = gauge.again().expect("it is there");
    assert_eq!(gauge.read().as_ref(), Some(&gauge.said));
    std::fs::write(&path, "").expect("file");
    assert!(gauge.read().is_none() && gauge.again().is_none(), "it says nothing");
    std::fs::remove_file(&path).expect("file");
    assert!(Gauge::open(path.to_str().expect("a name").into(), None).is_none());
}
