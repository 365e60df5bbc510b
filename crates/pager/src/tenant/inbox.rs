//! A tenant's keeper from outside: its letter box, and its end.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::map::lock;
use crate::tenant::Tenant;
use crate::tenant::orders::Order;

/// The keeper's letter box.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) orders: Vec<Order>,
    pub(crate) woken: bool,
    /// There is no keeper any more.
    pub(crate) closed: bool,
}

impl Tenant {
    /// Takes the tenant down once its processes are gone, or at once when they
    /// are none of its business any more.
    pub fn end(self: &Arc<Self>) {
        self.begin_to_end();
        let keeper = lock(&self.keeper).take();
        if let Some(keeper) = keeper {
            // A keeper only waits for agents with a limit; it always ends.
            let _ = keeper.join();
        }
        self.registry.remove_tenant(self.id);
    }

    /// Has the keeper begin with that: whoever takes several tenants down waits for all
    /// of them at once, and not for one after the other.
    pub fn begin_to_end(self: &Arc<Self>) {
        let keeper = lock(&self.keeper);
        if keeper.is_some() {
            self.order(Order::End);
            return;
        }
        // Nobody ever attached, so that there is nothing to bury.
        self.close_inbox();
        self.ended.store(true, Ordering::Release);
    }

    /// Leaves an order for the keeper. One that has ended takes none, nor those that
    /// came before it ended: whoever waits for an answer is disconnected.
    pub(crate) fn order(&self, order: Order) {
        let mut inbox = lock(&self.inbox);
        if !inbox.closed {
            inbox.orders.push(order);
        }
        drop(inbox);
        self.wake_keeper();
    }

    /// The keeper ends.
    pub(crate) fn close_inbox(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.closed = true;
        inbox.orders.clear();
    }

    pub(crate) fn wake_keeper(&self) {
        let mut inbox = lock(&self.inbox);
        if !inbox.woken {
            inbox.woken = true;
            self.inbox_filled.notify_one();
        }
    }
}
