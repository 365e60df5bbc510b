//! Where connections wait until they have said something. A silent one costs a
//! descriptor here and no thread: one thread listens to all of them. Who has spoken is
//! served by a thread of its own as soon as its user may have one more, all within one
//! deadline. A user who has too many waiting loses the oldest silent one: who means it
//! has spoken by then.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use strata_sys::{EventFd, poll_all};

use crate::admission::{Deadline, Gate, Place, Room};

/// Pause after a connection could not be taken, for want of descriptors, say: not to spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long the lobby sleeps at most where nobody waits.
const NOBODY_WAITS: Duration = Duration::from_secs(60);

/// What may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Connections that wait, in all and of one user.
    pub(crate) waiting: usize,
    pub(crate) waiting_per_user: usize,
    /// Connections that are served.
    pub(crate) served: Room,
    /// From the connection to its end.
    pub(crate) patience: Duration,
    pub(crate) stack_bytes: usize,
}

/// What is listened at, and who serves.
pub(crate) trait House: Send + Sync + 'static {
    /// A connection.
    type Guest: AsFd + Send + 'static;
    /// Where connections come.
    fn doors(&self) -> Vec<BorrowedFd<'_>>;
    /// The one that has come at a door, and whose it is. None: it is not let in.
    fn accept(&self, door: usize) -> io::Result<Option<(Self::Guest, u32)>>;
    /// Serves one that has said something.
    fn serve(&self, guest: Self::Guest, door: usize, deadline: Deadline);
    /// One was thrown out, and why.
    fn thrown_out(&self, uid: u32, why: &str);
    /// Nobody is to come any more, though some are still served.
    fn close(&self) {}
}

struct Waiting<G> {
    guest: G,
    door: usize,
    uid: u32,
    deadline: Deadline,
    has_spoken: bool,
}

struct Lobby<H: House> {
    house: Arc<H>,
    rules: Rules,
    gate: Arc<Gate>,
    /// Somebody's place is free again.
    left: Arc<EventFd>,
    /// In the order in which they came.
    waiting: Vec<Waiting<H::Guest>>,
}

/// One that is kept.
pub(crate) struct Kept {
    ended: Arc<AtomicBool>,
    left: Arc<EventFd>,
    thread: JoinHandle<()>,
}

impl Kept {
    /// Nobody comes in any more; those who are served are served to the end.
    pub(crate) fn end(self) {
        self.ended.store(true, Ordering::Release);
        self.left.ring();
        // It panics as everything does: the process is gone then.
        let _ = self.thread.join();
    }
}

/// Serves `house` in a thread called `name`, until it is ended or the process ends.
pub(crate) fn keep<H: House>(name: &str, house: H, rules: Rules) -> io::Result<Kept> {
    let left = Arc::new(EventFd::new()?);
    let gate = Gate::new(rules.served);
    let ended = Arc::new(AtomicBool::new(false));
    let (told, rung) = (Arc::clone(&ended), Arc::clone(&left));
    let mut lobby = Lobby { house: Arc::new(house), rules, gate, left, waiting: Vec::new() };
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
        while !told.load(Ordering::Acquire) {
            lobby.once();
        }
        lobby.house.close();
    })?;
    Ok(Kept { ended, left: rung, thread })
}

impl<H: House> Lobby<H> {
    /// Waits for whatever comes, and acts on it.
    fn once(&mut self) {
        let house = Arc::clone(&self.house);
        let doors = house.doors();
        let silent: Vec<usize> = self.indices(|one| !one.has_spoken);
        let mut watched = doors.clone();
        watched.push(self.left.as_fd());
        watched.extend(silent.iter().map(|&index| self.waiting[index].guest.as_fd()));
        let nearest = self.waiting.iter().map(|one| one.deadline).min();
        let patience = nearest.map_or(NOBODY_WAITS, |until| until.left().unwrap_or_default());
        let Ok(ready) = poll_all(&watched, Some(patience)) else {
            std::thread::sleep(ACCEPT_PAUSE);
            return;
        };
        self.left.clear();
        let (at_doors, rest) = ready.split_at(doors.len());
        for (&index, polled) in silent.iter().zip(&rest[1..]) {
            self.waiting[index].has_spoken = polled.readable || polled.hangup;
        }
        self.serve_some();
        self.throw_out_late();
        for (door, polled) in at_doors.iter().enumerate() {
            if polled.readable {
                self.let_in(door);
            }
        }
    }

    fn indices(&self, which: impl Fn(&Waiting<H::Guest>) -> bool) -> Vec<usize> {
        (0..self.waiting.len()).filter(|&index| which(&self.waiting[index])).collect()
    }

    fn let_in(&mut self, door: usize) {
        match self.house.accept(door) {
            Ok(Some((guest, uid))) => {
                self.make_room(uid);
                let deadline = Deadline::after(self.rules.patience);
                self.waiting.push(Waiting { guest, door, uid, deadline, has_spoken: false });
            }
            Ok(None) => {}
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
    }

    /// Has one more of user `uid` have room, at the cost of the oldest silent one: of that
    /// user, or of anybody but root. One that has spoken is never thrown out for another:
    /// without a silent one the last that came goes.
    fn make_room(&mut self, uid: u32) {
        let own = self.indices(|one| one.uid == uid);
        let (among, why) = if own.len() >= self.rules.waiting_per_user {
            (own, "too many connections of one user wait")
        } else if self.waiting.len() >= self.rules.waiting {
            (self.indices(|one| one.uid != 0), "too many connections wait")
        } else {
            return;
        };
        let silent = among.iter().find(|&&index| !self.waiting[index].has_spoken);
        if let Some(&index) = silent.or(among.last()) {
            let out = self.waiting.remove(index);
            self.house.thrown_out(out.uid, why);
        }
    }

    /// Has those who have spoken served, as far as their users may.
    fn serve_some(&mut self) {
        let mut index = 0;
        while let Some(one) = self.waiting.get(index) {
            if one.has_spoken
                && let Ok(place) = self.gate.admit(one.uid)
            {
                let one = self.waiting.remove(index);
                self.serve(one, place);
            } else {
                index += 1;
            }
        }
    }

    fn serve(&self, one: Waiting<H::Guest>, place: Place) {
        let (house, left) = (Arc::clone(&self.house), Arc::clone(&self.left));
        // Without a thread it is closed.
        let _ = std::thread::Builder::new()
            .name("serving".into())
            .stack_size(self.rules.stack_bytes)
            .spawn(move || {
                house.serve(one.guest, one.door, one.deadline);
                drop(place);
                left.ring();
            });
    }

    fn throw_out_late(&mut self) {
        let house = &self.house;
        self.waiting.retain(|one| {
            let in_time = one.deadline.left().is_some();
            if !in_time {
                house.thrown_out(one.uid, "nothing came in time");
            }
            in_time
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::sync::Mutex;

    /// Long enough to be a hang.
    const HANG: Duration = Duration::from_secs(60);

    /// The first byte that a guest sends is its user; answered with the same.
    struct Echo {
        listener: UnixListener,
        /// Users of those who will come, in order.
        coming: Mutex<Vec<u32>>,
        out: Mutex<Vec<u32>>,
    }

    impl House for Arc<Echo> {
        type Guest = UnixStream;
        fn doors(&self) -> Vec<BorrowedFd<'_>> {
            vec![self.listener.as_fd()]
        }
        fn accept(&self, _: usize) -> io::Result<Option<(UnixStream, u32)>> {
            let (stream, _) = self.listener.accept()?;
            Ok(Some((stream, self.coming.lock().expect("unharmed").remove(0))))
        }
        fn serve(&self, mut guest: UnixStream, _: usize, deadline: Deadline) {
            let _ = guest.set_read_timeout(deadline.left());
            let mut byte = [0];
            // The second byte ends it.
            if guest.read_exact(&mut byte).is_ok() && guest.write_all(&byte).is_ok() {
                let _ = guest.read(&mut byte);
            }
        }
        fn thrown_out(&self, uid: u32, _: &str) {
            self.out.lock().expect("unharmed").push(uid);
        }
    }

    struct Fixture {
        echo: Arc<Echo>,
        address: SocketAddr,
    }

    fn fixture(name: &str, rules: Rules) -> Fixture {
        let name = format!("strata-lobby-{name}-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("address");
        let listener = UnixListener::bind_addr(&address).expect("bind");
        let (coming, out) = (Mutex::default(), Mutex::default());
        let echo = Arc::new(Echo { listener, coming, out });
        keep("lobby", Arc::clone(&echo), rules).expect("a thread");
        Fixture { echo, address }
    }

    impl Fixture {
        fn come(&self, uid: u32) -> UnixStream {
            self.echo.coming.lock().expect("unharmed").push(uid);
            let stream = UnixStream::connect_addr(&self.address).expect("connect");
            stream.set_read_timeout(Some(HANG)).expect("timeout");
            stream
        }
    }

    fn answer(stream: &mut UnixStream) -> bool {
        let mut byte = [0];
        stream.write_all(b"x").is_ok() && stream.read_exact(&mut byte).is_ok()
    }

    fn is_closed(stream: &mut UnixStream) -> bool {
        matches!(stream.read(&mut [0]), Ok(0) | Err(_))
    }

    const RULES: Rules = Rules {
        waiting: 10,
        waiting_per_user: 4,
        served: Room { all: 8, for_root: 2, per_user: 3 },
        patience: HANG,
        stack_bytes: 128 << 10,
    };

    #[test]
    fn the_silent_keep_nobody_waiting_and_the_oldest_of_one_user_goes() {
        let house = fixture("silent", RULES);
        let mut silent: Vec<UnixStream> = (0..100).map(|_| house.come(7)).collect();
        // Another user and root are served at once, and so is one of the same who speaks.
        let mut others: Vec<UnixStream> = [8, 0, 7].map(|uid| house.come(uid)).into();
        assert!(others.iter_mut().all(answer));
        assert!(silent[..90].iter_mut().all(is_closed));
        let out = house.echo.out.lock().expect("unharmed");
        assert!(out.len() >= 96 && out.iter().all(|&uid| uid == 7), "{out:?}");
    }

    #[test]
    fn who_has_spoken_waits_for_a_place_of_its_users() {
        let house = fixture("places", RULES);
        let mut first: Vec<UnixStream> = (0..3).map(|_| house.come(7)).collect();
        assert!(first.iter_mut().all(answer));
        let mut fourth = house.come(7);
        fourth.write_all(b"x").expect("written");
        assert!(answer(&mut house.come(8)), "another user's places are free");
        // One of the first leaves.
        drop(first.pop());
        fourth.read_exact(&mut [0]).expect("an answer");
    }

    #[test]
    fn who_says_nothing_is_thrown_out_in_the_end() {
        let rules = Rules { patience: Duration::from_millis(50), ..RULES };
        let house = fixture("late", rules);
        assert!(is_closed(&mut house.come(0)));
        assert_eq!(*house.echo.out.lock().expect("unharmed"), [0]);
    }
}
