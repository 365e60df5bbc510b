//! A door that one goes through at a time: root before others, and no user twice in a row
//! while another one waits. For work that many can ask for and that keeps others waiting.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct State {
    is_busy: bool,
    /// Who went through last.
    last: Option<u32>,
    /// Who wait, as numbers that count up, and whose they are, in the order in which
    /// they came. As many as there can be requests at a time.
    waiting: Vec<(u64, u32)>,
    next_number: u64,
}

impl State {
    /// Whose turn is next.
    fn next(&self) -> Option<u64> {
        let first = |fits: &dyn Fn(u32) -> bool| {
            self.waiting.iter().find(|(_, uid)| fits(*uid)).map(|(number, _)| *number)
        };
        first(&|uid| uid == 0)
            .or_else(|| first(&|uid| Some(uid) != self.last))
            .or_else(|| first(&|_| true))
    }
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct Turnstile {
    state: Mutex<State>,
    moved: Condvar,
}

/// The right to be inside, until it is dropped.
pub(crate) struct Turn<'a>(&'a Turnstile);

impl Turnstile {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it is the turn of somebody of user `uid`.
    pub(crate) fn enter(&self, uid: u32) -> Turn<'_> {
        let mut state = self.lock();
        let number = state.next_number;
        state.next_number += 1;
        state.waiting.push((number, uid));
        while state.is_busy || state.next() != Some(number) {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.retain(|(waiting, _)| *waiting != number);
        state.is_busy = true;
        state.last = Some(uid);
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().is_busy = false;
        self.0.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_goes_first_and_users_take_turns() {
        let turnstile = Turnstile::default();
        let order = Mutex::new(Vec::new());
        let inside = turnstile.enter(7);
        std::thread::scope(|scope| {
            for uid in [7, 7, 7, 8, 8, 0] {
                let before = turnstile.lock().waiting.len();
                let (turnstile, order) = (&turnstile, &order);
                scope.spawn(move || {
                    let _turn = turnstile.enter(uid);
                    order.lock().expect("unharmed").push(uid);
                });
                while turnstile.lock().waiting.len() == before {
                    std::thread::yield_now();
                }
            }
            drop(inside);
        });
        assert_eq!(*order.lock().expect("unharmed"), [0, 7, 8, 7, 8, 7]);
    }
}
