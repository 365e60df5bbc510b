//! What the host has the agent do when the guest has become another machine: a program of
//! the guest's does it, the hook, and how that ended is answered.
//!
//! One order at a time: a new one ends the hook of the one before, which was a machine's that
//! this one is no more (a clone of a clone).

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use strata_units::order::{Answer, MAX_CARDS, Mac, Order, State, Step, is_host_name};

/// The hook, unless the command line names another.
pub(crate) const HOOK: &str = "/usr/lib/strata/clone-hook";
/// How long it may take: the host waits somewhat longer.
const HOOK_WITHIN: Duration = Duration::from_secs(30);
/// What it says last, of which the reason is made.
const MAX_SAID_BYTES: usize = 4096;
/// What is read of it at one time, in pieces of so many bytes: one that never stops talking is
/// ended when its time is up all the same.
const MOST_PIECES: usize = 64;
/// The hook is no less likely to be ended than others when memory is short.
const ORDINARY: &str = "0";

/// What is known of the machine.
struct Places {
    interfaces: PathBuf,
    host_name: PathBuf,
}

/// A hook that runs.
struct Running {
    order: Order,
    child: Child,
    said: UnixStream,
    text: Vec<u8>,
    since: Instant,
}

/// Orders, and the last answer.
pub(crate) struct Orders {
    hook: PathBuf,
    places: Places,
    running: Option<Running>,
    /// What was ordered last, and how far that is.
    answer: Option<Answer>,
    is_said: bool,
}

impl Orders {
    pub(crate) fn new(hook: PathBuf) -> Self {
        let places = Places {
            interfaces: "/sys/class/net".into(),
            host_name: "/proc/sys/kernel/hostname".into(),
        };
        Self { hook, places, running: None, answer: None, is_said: true }
    }

    /// Takes an order; one that was taken already is answered again.
    pub(crate) fn take(&mut self, order: Order) {
        self.is_said = false;
        if self.answer.as_ref().is_some_and(|answer| answer.number == order.number) {
            return;
        }
        if let Some(mut before) = self.running.take() {
            let _ = before.child.kill();
            let _ = before.child.wait();
        }
        let number = order.number;
        let state = match self.start(order) {
            Ok(running) => {
                self.running = Some(running);
                State::Runs
            }
            Err(why) => State::Failed(why),
        };
        self.answer = Some(Answer { number, state });
    }

    fn start(&self, order: Order) -> Result<Running, String> {
        let shown = self.hook.display();
        let failed = |error: std::io::Error| format!("{shown} cannot be run: {error}");
        let (said, its) = UnixStream::pair().map_err(failed)?;
        said.set_nonblocking(true).map_err(failed)?;
        let also = its.try_clone().map_err(failed)?;
        let cards = self.places.cards();
        let mut command = Command::new(&self.hook);
        match &order.step {
            Step::Identity { host_name, macs } => {
                let pairs = cards.iter().zip(macs).map(|(card, mac)| format!("{card}={mac}"));
                let pairs: Vec<String> = pairs.collect();
                command.arg("identity").env("STRATA_HOST_NAME", host_name);
                command.env("STRATA_MACS", pairs.join(" "));
            }
            Step::Network => drop(command.arg("network")),
        }
        let child = command
            .env("STRATA_INTERFACES", cards.join(" "))
            .stdin(Stdio::null())
            .stdout(Stdio::from(OwnedFd::from(its)))
            .stderr(Stdio::from(OwnedFd::from(also)))
            .spawn()
            .map_err(failed)?;
        // The agent itself is spared.
        let _ = fs::write(format!("/proc/{}/oom_score_adj", child.id()), ORDINARY);
        Ok(Running { order, child, said, text: Vec::new(), since: Instant::now() })
    }

    /// Looks how far the hook is.
    pub(crate) fn look(&mut self, now: Instant) {
        let Some(running) = &mut self.running else { return };
        running.hear();
        let state = match running.child.try_wait() {
            Ok(None) if now < running.since + HOOK_WITHIN => return,
            Ok(None) => {
                let _ = running.child.kill();
                let _ = running.child.wait();
                let seconds = HOOK_WITHIN.as_secs();
                State::Failed(format!("{} did not end in {seconds} s", self.hook.display()))
            }
            Ok(Some(status)) if status.success() => self.places.now(),
            Ok(Some(status)) => {
                running.hear();
                let how = format!("{} ended with {status}", self.hook.display());
                State::Failed(match running.last_line() {
                    Some(line) => format!("{line} ({how})"),
                    None => how,
                })
            }
            Err(error) => State::Failed(error.to_string()),
        };
        self.answer = Some(Answer { number: running.order.number, state });
        self.running = None;
        self.is_said = false;
    }

    /// The answer that is to be said; it is said again if this is not followed by
    /// [`Self::was_said`].
    pub(crate) fn to_say(&self) -> Option<&Answer> {
        self.answer.as_ref().filter(|_| !self.is_said)
    }

    pub(crate) fn was_said(&mut self) {
        self.is_said = true;
    }
}

impl Running {
    /// Takes in what the hook has said; the last of it is kept.
    fn hear(&mut self) {
        let mut piece = [0; MAX_SAID_BYTES];
        for _ in 0..MOST_PIECES {
            let Ok(count @ 1..) = self.said.read(&mut piece) else { return };
            self.text.extend_from_slice(&piece[..count]);
            let surplus = self.text.len().saturating_sub(MAX_SAID_BYTES);
            self.text.drain(..surplus);
        }
    }

    fn last_line(&self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.text);
        text.lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned)
    }
}

impl Places {
    /// Its network cards, as they are plugged in: interfaces that have a device.
    fn cards(&self) -> Vec<String> {
        let card = |entry: fs::DirEntry| {
            let device = entry.path().join("device").canonicalize().ok()?;
            Some((device, entry.file_name().into_string().ok()?))
        };
        let entries = fs::read_dir(&self.interfaces).into_iter().flatten().flatten();
        let mut cards: Vec<_> = entries.filter_map(card).collect();
        cards.sort();
        cards.into_iter().map(|(_, name)| name).take(MAX_CARDS).collect()
    }

    /// What it is called, and its cards' addresses.
    fn now(&self) -> State {
        let name = fs::read_to_string(&self.host_name).unwrap_or_default();
        let host_name = Some(name.trim().to_owned()).filter(|name| is_host_name(name));
        let address = |card: String| -> Option<Mac> {
            let path = self.interfaces.join(Path::new(&card)).join("address");
            fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        State::Done { host_name, macs: self.cards().into_iter().filter_map(address).collect() }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct Machine(PathBuf);

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// With the cards `b` and `a`, plugged in in this order, and a loopback interface.
    fn machine(test: &str, hook: &str) -> (Machine, Orders) {
        let name = format!("strata-orders-{test}-{}", std::process::id());
        let place = Machine(std::env::temp_dir().join(name));
        for (card, device) in [("b", "pci1"), ("a", "pci2"), ("lo", "")] {
            let card = place.0.join("net").join(card);
            fs::create_dir_all(&card).expect("made");
            fs::write(card.join("address"), "02:00:00:00:00:07\n").expect("written");
            if !device.is_empty() {
                fs::create_dir_all(place.0.join(device)).expect("made");
                symlink(place.0.join(device), card.join("device")).expect("linked");
            }
        }
        fs::write(place.0.join("name"), "first\n").expect("written");
        let (text, path) = (place.0.join("text"), place.0.join("hook"));
        fs::write(&text, format!("#!/bin/sh\ncd {}\n{hook}\n", place.0.display())).expect("hook");
        fs::set_permissions(&text, PermissionsExt::from_mode(0o755)).expect("set");
        // By another process: a child of another test's would have it open for writing until it
        // executes its program, and what is open for writing is not executed.
        let copied = Command::new("cp").arg("-p").arg(text).arg(&path).status().expect("cp");
        assert!(copied.success());
        let mut orders = Orders::new(path);
        orders.places = Places { interfaces: place.0.join("net"), host_name: place.0.join("name") };
        (place, orders)
    }

    fn identity(number: u64) -> Order {
        let macs = vec![Mac::of_clone([1, 2, 3, 4], 0), Mac::of_clone([1, 2, 3, 4], 1)];
        Order { number, step: Step::Identity { host_name: "second".into(), macs } }
    }

    /// The last answer, when it is there.
    fn answered(orders: &mut Orders) -> State {
        let until = Instant::now() + HOOK_WITHIN;
        loop {
            orders.look(Instant::now());
            match orders.to_say() {
                Some(Answer { state: State::Runs, .. }) | None if Instant::now() < until => {
                    orders.was_said();
                    std::thread::sleep(Duration::from_millis(5));
                }
                answer => return answer.expect("answered").state.clone(),
            }
        }
    }

    #[test]
    fn the_hook_does_it_and_what_came_of_it_is_answered() {
        let (_place, mut orders) = machine(
            "does",
            "echo $1 >>steps; [ $1 = network ] && exit 0\n\
             echo $STRATA_HOST_NAME >name\n\
             for pair in $STRATA_MACS; do echo ${pair#*=} >net/${pair%%=*}/address; done",
        );
        assert!(orders.to_say().is_none());
        orders.take(identity(5));
        let macs = vec![Mac::of_clone([1, 2, 3, 4], 0), Mac::of_clone([1, 2, 3, 4], 1)];
        let done = State::Done { host_name: Some("second".into()), macs };
        assert_eq!(answered(&mut orders), done);
        orders.was_said();
        // It is heard again, and done once.
        orders.take(identity(5));
        assert_eq!(answered(&mut orders), done);
        orders.take(Order { number: 6, step: Step::Network });
        assert_eq!(answered(&mut orders), done);
        let steps = fs::read_to_string(_place.0.join("steps")).expect("read");
        assert_eq!(steps, "identity\nnetwork\n");
    }

    #[test]
    fn a_hook_that_fails_says_why() {
        let (_place, mut orders) = machine("fails", "echo one; echo two words >&2; exit 3");
        orders.take(identity(5));
        let State::Failed(why) = answered(&mut orders) else { panic!("done") };
        assert!(why.starts_with("two words (") && why.contains("status: 3"), "{why}");
        orders.hook = "/nonexistent/hook".into();
        orders.take(identity(6));
        let State::Failed(why) = answered(&mut orders) else { panic!("done") };
        assert!(why.starts_with("/nonexistent/hook cannot be run: "), "{why}");
    }

    #[test]
    fn a_hook_that_does_not_end_is_ended() {
        let (_place, mut orders) = machine("hangs", "exec sleep 1000");
        orders.take(identity(5));
        orders.look(Instant::now());
        assert_eq!(orders.to_say().map(|answer| &answer.state), Some(&State::Runs));
        orders.look(Instant::now() + HOOK_WITHIN);
        let State::Failed(why) = answered(&mut orders) else { panic!("done") };
        assert!(why.contains("did not end in 30 s"), "{why}");
        let (_talks, mut orders) = machine("talks", "while :; do echo talks; done");
        orders.take(identity(5));
        std::thread::sleep(Duration::from_millis(50));
        orders.look(Instant::now() + HOOK_WITHIN);
        let State::Failed(why) = answered(&mut orders) else { panic!("done") };
        assert!(why.contains("did not end in 30 s"), "{why}");
        // Another order ends the one before.
        orders.take(identity(6));
        orders.hook = "/nonexistent/hook".into();
        orders.take(identity(7));
        assert!(orders.running.is_none());
    }
}
