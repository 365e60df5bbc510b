//! Who is let in at a socket, and for how long: as many connections at a time as a user
//! may have, as many as there may be in all, a part of them for root alone; one deadline
//! for all of an exchange. Every socket of the daemon has a [`Gate`] of its own.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What all connections together, and one user's, may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Room {
    /// Connections at a time.
    pub(crate) all: usize,
    /// Part of `all` that only root gets, so that users who fill theirs cannot lock the
    /// administrator out.
    pub(crate) for_root: usize,
    /// Connections at a time of one user. Root has no limit of its own.
    pub(crate) per_user: usize,
}

/// Why somebody is not let in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Full {
    /// The user has as many as may be.
    User,
    /// All together have.
    Everybody,
}

impl Full {
    /// For who is refused.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::User => "you have too many connections",
            Self::Everybody => "stratad has too many connections",
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Gate {
    inside: Mutex<Inside>,
}

#[derive(Debug)]
struct Inside {
    room: Room,
    all: usize,
    by_user: HashMap<u32, usize>,
}

/// A place of those inside; given back when dropped, whatever happens.
#[derive(Debug)]
pub(crate) struct Place {
    gate: Arc<Gate>,
    uid: u32,
}

impl Gate {
    pub(crate) fn new(room: Room) -> Arc<Self> {
        let inside = Inside { room, all: 0, by_user: HashMap::new() };
        Arc::new(Self { inside: Mutex::new(inside) })
    }

    /// From now on so many of one user may be inside; those who are stay.
    pub(crate) fn admit_of_each(&self, per_user: usize) {
        self.inside().room.per_user = per_user;
    }

    /// The counters are valid at any moment, whoever panicked.
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one more connection of user `uid` in.
    pub(crate) fn admit(self: &Arc<Self>, uid: u32) -> Result<Place, Full> {
        let mut inside = self.inside();
        let own = inside.by_user.get(&uid).copied().unwrap_or(0);
        let room = inside.room;
        let free = room.all.saturating_sub(inside.all);
        match uid {
            0 if free == 0 => return Err(Full::Everybody),
            0 => {}
            _ if own >= room.per_user => return Err(Full::User),
            _ if free <= room.for_root => return Err(Full::Everybody),
            _ => {}
        }
        inside.all += 1;
        inside.by_user.insert(uid, own + 1);
        Ok(Place { gate: Arc::clone(self), uid })
    }

    /// How many are inside.
    pub(crate) fn count(&self) -> usize {
        self.inside().all
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inside = self.gate.inside();
        inside.all -= 1;
        let own = inside.by_user.get_mut(&self.uid).expect("whoever leaves was let in");
        *own -= 1;
        if *own == 0 {
            inside.by_user.remove(&self.uid);
        }
    }
}

/// When an exchange has to be over: the clock does not start anew with each byte.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// `time` from now.
    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// What is left of it; none when it is over. (Zero would mean "wait for ever" to the
    /// kernel.)
    pub(crate) fn left(self) -> Option<Duration> {
        self.0.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// The same; an error when it is over.
    pub(crate) fn time_left(self) -> io::Result<Duration> {
        self.left().ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_share_the_room_and_root_keeps_a_place() {
        let gate = Gate::new(Room { all: 10, for_root: 2, per_user: 5 });
        let mut places: Vec<Place> = Vec::new();
        let mut admit = |uid, times: usize| {
            let before = places.len();
            places.extend((0..times).filter_map(|_| gate.admit(uid).ok()));
            places.len() - before
        };
        assert_eq!(admit(1, 10), 5);
        assert_eq!(gate.admit(1).expect_err("as many as it may"), Full::User);
        assert_eq!(admit(2, 10), 3);
        assert_eq!(gate.admit(3).expect_err("root's are left"), Full::Everybody);
        assert_eq!(admit(0, 10), 2);
        assert_eq!(gate.admit(0).expect_err("nothing is left"), Full::Everybody);
        // One of user 1 and both of root leave.
        places.remove(0);
        places.truncate(places.len() - 2);
        assert!(gate.admit(3).is_ok() && gate.admit(1).is_ok());
        places.clear();
        assert!(gate.count() == 0 && gate.inside().by_user.is_empty());
    }

    #[test]
    fn a_deadline_is_over_once() {
        let over = Deadline::after(Duration::ZERO);
        assert!(over.left().is_none());
        assert_eq!(over.time_left().expect_err("over").kind(), io::ErrorKind::TimedOut);
        assert!(Deadline::after(Duration::from_secs(1000)).left().is_some());
    }
}
