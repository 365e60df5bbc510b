//! How a tenant's keeper starts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::map::lock;
use crate::tenant::Tenant;

impl Tenant {
    /// Starts the keeper, unless there is one or was one.
    pub(crate) fn start_keeper(self: &Arc<Self>) {
        let mut keeper = lock(&self.keeper);
        if keeper.is_some() || self.has_ended() || lock(&self.inbox).closed {
            return;
        }
        let tenant = Arc::clone(self);
        let started = std::thread::Builder::new()
            .name(format!("keeper-{}", self.id))
            .spawn(move || super::run(&tenant));
        match started {
            Ok(thread) => *keeper = Some(thread),
            Err(error) => self.log(&format!("no thread to keep its budget: {error}")),
        }
    }

    /// This tenant is there for its snapshots: without any it ends, also if it
    /// never had a process.
    pub fn is_for_snapshots(self: &Arc<Self>) {
        self.had_space.store(true, Ordering::Relaxed);
        self.start_keeper();
    }
}
