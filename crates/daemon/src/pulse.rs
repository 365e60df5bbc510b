//! A worker's sign that it answers: where a service manager wants to know, a thread asks the
//! control socket as `strata` would, and tells the supervisor of each answer by a signal. A
//! worker that does not answer gives no sign.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use strata_api::Request;
use strata_sys::{Pidfd, SIGUSR2, connect_now, parent_of};

use crate::lock::lock;

/// How often, unless the manager is impatient.
const EVERY: Duration = Duration::from_secs(1);
/// So many signs in the time that the manager waits for one.
const SIGNS: u32 = 4;
/// For an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often a manager is told that ends a service which says nothing for `watchdog`.
pub(crate) fn period(watchdog: Option<Duration>) -> Duration {
    watchdog.map_or(EVERY, |time| EVERY.min(time / SIGNS))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// It serves: a sign is an answer.
    Serves,
    /// It waits for what is under way, and answers nobody any more; that it waits is a sign.
    MakesRoom,
    Ended,
}

struct Shared {
    /// And how often a sign was asked for out of turn.
    phase: Mutex<(Phase, u64)>,
    changed: Condvar,
}

/// The thread.
pub(crate) struct Pulse {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl Pulse {
    /// Has `supervisor`, the parent of this process, be told each `period` that `socket`
    /// answers.
    ///
    /// # Errors
    /// It is no more, or there is no thread.
    pub(crate) fn start(supervisor: u32, socket: PathBuf, period: Duration) -> io::Result<Self> {
        let parent = Pidfd::open(supervisor)?;
        // Its number could be another's by now, whom the signal would end.
        if parent_of(std::process::id()) != Some(supervisor) {
            return Err(io::Error::from(io::ErrorKind::NotFound));
        }
        let shared =
            Arc::new(Shared { phase: Mutex::new((Phase::Serves, 0)), changed: Condvar::new() });
        let told = Arc::clone(&shared);
        let tell = move || {
            parent.signal(SIGUSR2);
        };
        let thread = std::thread::Builder::new()
            .name("pulse".into())
            .spawn(move || beat(&told, period, || answers(&socket).is_ok(), tell))?;
        Ok(Self { shared, thread })
    }

    /// A sign now, if it answers.
    pub(crate) fn now(&self) {
        lock(&self.shared.phase).1 += 1;
        self.shared.changed.notify_all();
    }

    /// The worker answers no more, but waits for what is under way.
    pub(crate) fn makes_room(&self) {
        self.shared.enter(Phase::MakesRoom);
    }

    /// No more signs: when this returns, nothing waits at the socket for an answer.
    pub(crate) fn end(self) {
        self.shared.enter(Phase::Ended);
        // It panics as everything does: the worker is gone then.
        let _ = self.thread.join();
    }
}

impl Shared {
    fn enter(&self, phase: Phase) {
        lock(&self.phase).0 = phase;
        self.changed.notify_all();
    }

    /// How it is, once that is another than `seen`, or `period` later.
    fn after(&self, seen: (Phase, u64), period: Duration) -> (Phase, u64) {
        let phase = lock(&self.phase);
        let waited = self.changed.wait_timeout_while(phase, period, |phase| *phase == seen);
        *waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }
}

fn beat(shared: &Shared, period: Duration, answers: impl Fn() -> bool, tell: impl Fn()) {
    let mut phase = *lock(&shared.phase);
    while phase.0 != Phase::Ended {
        if phase.0 == Phase::MakesRoom || answers() {
            tell();
        }
        phase = shared.after(phase, period);
    }
}

/// Asks whether anyone is there. That there is no room for a request is an answer, too.
fn answers(socket: &Path) -> io::Result<()> {
    let mut stream = connect_now(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(&Request::Ping).map_err(io::Error::other)?;
    line.push(b'\n');
    // Who is refused for want of room is answered before it asks.
    let written = stream.write_all(&line);
    match stream.read(&mut [0; 64])? {
        0 => written.and(Err(io::ErrorKind::UnexpectedEof.into())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    use super::*;

    const OFTEN: Duration = Duration::from_millis(1);
    const NEVER: Duration = Duration::from_secs(3600);

    fn shared(phase: Phase) -> Shared {
        Shared { phase: Mutex::new((phase, 0)), changed: Condvar::new() }
    }

    #[test]
    fn a_sign_is_an_answer_until_room_is_made() {
        let shared = shared(Phase::Serves);
        let (tell, told) = mpsc::channel();
        let (ask, asked) = mpsc::channel();
        std::thread::scope(|scope| {
            let silent = || {
                let _ = ask.send(());
                false
            };
            let tell = move || {
                let _ = tell.send(());
            };
            let shared = &shared;
            let _beat = scope.spawn(move || beat(shared, OFTEN, silent, tell));
            for _ in 0..3 {
                asked.recv().expect("asked");
            }
            assert!(told.try_recv().is_err(), "nobody answers");
            shared.enter(Phase::MakesRoom);
            told.recv().expect("a sign");
            shared.enter(Phase::Ended);
        });
    }

    #[test]
    fn it_ends_at_once() {
        let shared = shared(Phase::Serves);
        std::thread::scope(|scope| {
            let (told, tell) = mpsc::channel();
            let shared = &shared;
            let _beat = scope.spawn(move || {
                beat(shared, NEVER, || true, move || told.send(()).expect("heard"));
            });
            tell.recv().expect("the first sign needs no waiting");
            shared.enter(Phase::Ended);
        });
    }

    #[test]
    fn who_listens_and_says_nothing_does_not_answer() {
        let name = format!("strata-pulse-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).expect("bound");
        std::thread::scope(|scope| {
            let _server = scope.spawn(|| {
                // One hangs up, one answers.
                drop(listener.accept().expect("a client"));
                let (mut client, _) = listener.accept().expect("a client");
                client.write_all(b"{}\n").expect("written");
            });
            assert!(answers(&path).is_err());
            answers(&path).expect("an answer");
        });
        std::fs::remove_file(&path).expect("removed");
        assert!(answers(&path).is_err(), "nobody listens");
    }

    #[test]
    fn an_impatient_manager_is_told_often() {
        assert_eq!(period(None), EVERY);
        assert_eq!(period(Some(Duration::from_secs(30))), EVERY);
        assert_eq!(period(Some(Duration::from_secs(2))), Duration::from_millis(500));
    }
}
