//! The thread that has the kernel watch what is used of the memory on the node: it goes
//! round the tenants, one process at a time, takes DAMON for a look and gives it back,
//! and tells each tenant what was seen. What comes of it is the pager's.
//!
//! All of it may fail, at any time: then probes find what is hot, as without it.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use strata_pager::{Counter, Seen, Watch};
use strata_sys::{DAMON_PERIOD, DAMON_RANGES, Damon, DamonRefusal, Priority, log};

use crate::tenants::Tenants;

/// Between two rounds, of which the last has brought pages back...
const REST: Duration = Duration::from_millis(250);
/// ...or none: the kernel's work is bounded by that.
const LONG_REST: Duration = Duration::from_secs(4);
/// How often it is looked whether anybody has anything on the node.
const NOTHING_THERE: Duration = Duration::from_secs(1);
/// After a refusal.
const REFUSED_FOR: Duration = Duration::from_secs(10);
/// So many steps refused in a row are no process that has just ended.
const OFTEN: u32 = 3;

/// Told once; whoever waits hears it at once.
#[derive(Default)]
struct End {
    told: Mutex<bool>,
    changed: Condvar,
}

impl End {
    fn tell(&self) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for so long; whether it was told.
    fn wait(&self, time: Duration) -> bool {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(told, time, |told| !*told);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// See the module's text.
pub(crate) struct Watcher {
    end: Arc<End>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Watcher {
    pub(crate) fn start(tenants: &Arc<Tenants>) -> io::Result<Self> {
        let end = Arc::new(End::default());
        let (tenants, told) = (Arc::clone(tenants), Arc::clone(&end));
        let thread = std::thread::Builder::new().name("damon".into()).spawn(move || {
            Round { damon: Damon::default(), told, refused: 0, said: None }.run(&tenants);
        })?;
        Ok(Self { end, thread: Mutex::new(Some(thread)) })
    }

    /// Ends it, DAMON given back. A snapshot that the kernel is taking lasts two seconds.
    pub(crate) fn end(&self) {
        self.end.tell();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It panics as everything does: the worker is gone then.
            let _ = thread.join();
        }
    }
}

struct Round {
    damon: Damon,
    told: Arc<End>,
    /// Looks refused in a row.
    refused: u32,
    /// What the log says: that it works, or why it does not.
    said: Option<Result<(), String>>,
}

impl Round {
    fn run(mut self, tenants: &Tenants) {
        // An earlier worker may have died in a look. What cannot be removed now is
        // before the next look.
        let _ = self.damon.give_back();
        let mut promoted = 0;
        loop {
            let rest = self.once(tenants);
            let list = tenants.list();
            let now = list.iter().map(|tenant| tenant.counters.get(Counter::DamonPromotions)).sum();
            let came = std::mem::replace(&mut promoted, now) != now;
            if self.told.wait(if came { REST.min(rest) } else { rest }) {
                return;
            }
        }
    }

    /// A look at a process of each tenant; how long to rest.
    fn once(&mut self, tenants: &Tenants) -> Duration {
        let mut rest = NOTHING_THERE;
        for tenant in tenants.list() {
            let Some(watch) = tenant.next_watch(DAMON_RANGES) else { continue };
            let looked = self.look(&watch);
            let left = self.damon.give_back();
            match looked.and_then(|seen| left.map(|()| seen)) {
                Ok(Some(seen)) => {
                    self.refused = 0;
                    self.say(Ok(()));
                    tenant.was_watched(&watch, seen);
                    rest = LONG_REST;
                }
                Ok(None) => return Duration::ZERO,
                Err(refusal) => {
                    self.refused += 1;
                    // A process that ends meanwhile is refused, too.
                    if !matches!(refusal, DamonRefusal::Refused(..)) || self.refused >= OFTEN {
                        self.say(Err(refusal.to_string()));
                        return REFUSED_FOR;
                    }
                }
            }
        }
        rest
    }

    /// What is seen; none: it was told to end.
    fn look(&mut self, watch: &Watch) -> Result<Option<Vec<Seen>>, DamonRefusal> {
        // By its number, which it has while it lives: looked at before and after, and what
        // a stranger's memory would show is dropped.
        let watched = watch.process.by_number(|pid| self.damon.watch(pid, &watch.ranges));
        let gone = || DamonRefusal::Refused("pid_target".into(), "the process has ended".into());
        watched.ok_or_else(gone)??;
        // For a while the kernel divides what is not used alike.
        if self.told.wait(DAMON_PERIOD) {
            return Ok(None);
        }
        let seen = self.damon.seen()?;
        Ok(Some(seen.iter().map(|part| Seen { range: part.range, hits: part.hits }).collect()))
    }

    fn say(&mut self, now: Result<(), String>) {
        if self.said.as_ref() == Some(&now) {
            return;
        }
        match &now {
            Ok(()) => log(Priority::Info, format_args!("DAMON shows what is used on the node")),
            Err(why) => log(
                Priority::Warning,
                format_args!("DAMON: {why}; probes alone find what is used on the node"),
            ),
        }
        self.said = Some(now);
    }
}
