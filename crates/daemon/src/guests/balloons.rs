//! Balloons that follow their guests (`strata vm run --self-balloon`): what the agent in a
//! guest says is heard, or, where none ever spoke, what its balloon's driver says; the policy
//! says what the guest is to have; its monitor is told.
//!
//! All of it is the guest's word, and a guest that has taken over its QEMU speaks for that,
//! too. So lines are bounded, and a reading is as old as the question that it answers, by
//! this daemon's clock; whoever answers must be a process of the tenant. Where nothing fresh
//! is heard the guest gets everything back: that is also the first thing that a new worker
//! does.
//!
//! Where DRAM is shared out, a guest's budget bounds its balloon, and what a guest would
//! have beyond that is told to whoever shares out ([`Lack`]).

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_api::{BalloonStats, SelfBalloon};
use strata_pager::Tenant;
use strata_policy::balloon::{Past, Seen, Settings, Target, Why, decide};
use strata_sys::{Priority, connect_now, log};
use strata_units::PAGE_SIZE;
use strata_units::reading::Reading;
use strata_vm::agent_port::PORT_SOCKET_NAME;
use strata_vm::self_balloon::{Held, held, set};

use super::channel::Channel;
use super::monitor::who_answers;
use super::{CONVERSATION, Guests, HEARD_PREFIX, folder, lock};

/// How often it is looked what agents say, where there are guests of this kind.
const LISTEN_EVERY: Duration = Duration::from_millis(200);
/// And where there are none.
const IDLE: Duration = Duration::from_secs(1);
/// How often a guest that says nothing new is looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// How often a port that cannot be reached is tried.
const CONNECT_AGAIN: Duration = Duration::from_secs(1);
/// How often at last a monitor is talked to that does not answer.
const SELDOM: Duration = Duration::from_secs(8);
/// For so long nobody but an agent is expected to speak for a guest.
const AGENT_WITHIN: Duration = Duration::from_secs(15);
/// An order is given again if nothing came of it for so long.
const ORDER_AGAIN: Duration = Duration::from_secs(10);
/// Looks at the balloon that are remembered.
const MOST_HELD: usize = 64;
/// Part of a tenant's budget that no balloon fills: its guest grows into it, without
/// something having to leave.
const SPARE_PART: u64 = 16;
/// Balloons are set in such steps.
const STEP_BYTES: u64 = 1 << 20;

/// What a guest is, for this.
struct Wish {
    folder: String,
    made: Instant,
    memory_bytes: u64,
    balloon: String,
    settings: SelfBalloon,
}

/// What a guest would have beyond what its balloon leaves it, and what it suffers without.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Lack {
    pub bytes: u64,
    /// Part of the time in which some of its tasks waited for memory.
    pub stall: f64,
    /// What it read again in a second.
    pub returned_bytes: f64,
}

/// Who speaks for a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    Nobody,
    Agent,
    Driver,
}

/// A balloon that follows its guest.
struct Following {
    made: Instant,
    since: Instant,
    memory_bytes: u64,
    settings: Settings,
    channel: Option<Channel>,
    connect_at: Instant,
    /// An agent has spoken: no other word counts any more.
    has_agent: bool,
    /// The newest reading, and what it is not older than.
    reading: Option<(Reading, Instant)>,
    is_new: bool,
    /// When the driver's figures were last seen to be others, and which.
    told: Option<(u64, Instant)>,
    past: Past,
    decided_at: Option<Instant>,
    look_at: Instant,
    pause: Duration,
    /// What the balloon left the guest, and when it was looked at.
    held: VecDeque<(Instant, u64)>,
    ordered: Option<(u64, Instant)>,
    lack: Option<Lack>,
    /// What of its tenant's had been evicted when that was last looked at, in bytes.
    evicted: Option<u64>,
    stats: BalloonStats,
}

impl Following {
    fn new(wish: &Wish, has_agent: bool, now: Instant) -> Self {
        Self {
            made: wish.made,
            since: now,
            memory_bytes: wish.memory_bytes,
            settings: settings(&wish.settings),
            channel: None,
            connect_at: now,
            has_agent,
            reading: None,
            is_new: false,
            told: None,
            past: Past::default(),
            decided_at: None,
            look_at: now,
            pause: LOOK_AGAIN,
            held: VecDeque::new(),
            ordered: None,
            lack: None,
            evicted: None,
            stats: BalloonStats::default(),
        }
    }

    /// Hears what the agent says, and asks it. True: it has spoken for the first time.
    fn listen(&mut self, connect: &mut dyn FnMut() -> Option<UnixStream>, now: Instant) -> bool {
        if self.channel.is_none() && now >= self.connect_at {
            self.connect_at = now + CONNECT_AGAIN;
            self.channel = connect().and_then(|stream| Channel::new(stream).ok());
        }
        let Some(channel) = &mut self.channel else { return false };
        let outcome = channel.hear().and_then(|heard| {
            let answered = heard.or(self.reading).map(|(_, at)| at);
            channel.ask(answered, now).map(|()| heard)
        });
        match outcome {
            Ok(None) => false,
            Ok(Some(heard)) => {
                self.reading = Some(heard);
                self.is_new = true;
                !std::mem::replace(&mut self.has_agent, true)
            }
            Err(_) => {
                self.channel = None;
                self.connect_at = now + CONNECT_AGAIN;
                false
            }
        }
    }

    fn by(&self, now: Instant) -> By {
        if self.has_agent {
            By::Agent
        } else if now >= self.since + AGENT_WITHIN {
            By::Driver
        } else {
            By::Nobody
        }
    }

    /// Whether the guest's monitor is to be talked to.
    fn is_due(&self, now: Instant) -> bool {
        now >= self.look_at || (self.is_new && self.pause == LOOK_AGAIN)
    }

    /// Its monitor did not answer.
    fn failed(&mut self, why: String, now: Instant) {
        self.pause = (self.pause * 2).min(SELDOM);
        self.look_at = now + self.pause;
        self.ordered = None;
        self.lack = None;
        self.stats.target_bytes = None;
        self.stats.why = why;
    }

    /// What the balloon is to be told, if anything, by what its monitor says.
    /// `room_bytes`: what its tenant may have more, less than nothing where it must have
    /// less; none: no bound.
    fn decide(&mut self, held: &Held, room_bytes: Option<i64>, now: Instant) -> Option<u64> {
        self.pause = LOOK_AGAIN;
        self.look_at = now + LOOK_AGAIN;
        self.is_new = false;
        let balloon_bytes = match held.balloon_bytes {
            Some(bytes) if held.runs => bytes,
            _ => {
                // What stands still says nothing, and takes and gives nothing.
                self.held.clear();
                self.lack = None;
                self.stats.target_bytes = None;
                self.stats.why =
                    if held.runs { "its balloon does not answer" } else { "it does not run" }
                        .into();
                return None;
            }
        };
        let by = self.by(now);
        if by == By::Driver {
            self.take_statistics(held, now);
        }
        self.held.push_back((now, balloon_bytes));
        if self.held.len() > MOST_HELD {
            self.held.pop_front();
        }
        let reading = self
            .reading
            .map(|(reading, at)| (reading, now.saturating_duration_since(at).as_secs_f64()));
        let seen = Seen {
            memory_bytes: self.memory_bytes,
            balloon_bytes,
            had_bytes: self.had_since(self.reading.map_or(now, |(_, at)| at)),
            seconds: self
                .decided_at
                .map_or(0.0, |at| now.saturating_duration_since(at).as_secs_f64()),
            reading,
            fits_bytes: room_bytes.map(|room| balloon_bytes.saturating_add_signed(room)),
        };
        self.decided_at = Some(now);
        let target = decide(&self.settings, &mut self.past, &seen);
        self.lack = self.past.wish().map(|wish| Lack {
            bytes: wish.bytes.saturating_sub(balloon_bytes),
            stall: wish.stall,
            returned_bytes: wish.returned_bytes,
        });
        let bytes = target.bytes.checked_next_multiple_of(STEP_BYTES);
        let bytes = bytes.unwrap_or(u64::MAX).min(self.memory_bytes);
        self.show(target, bytes, balloon_bytes, by);
        let is_ordered =
            self.ordered.is_some_and(|(ordered, at)| ordered == bytes && now < at + ORDER_AGAIN);
        if bytes == balloon_bytes || is_ordered {
            return None;
        }
        self.ordered = Some((bytes, now));
        Some(bytes)
    }

    /// What the driver said counts from when it is first seen.
    fn take_statistics(&mut self, held: &Held, now: Instant) {
        let Some(told) = held.statistics else { return };
        match self.told {
            Some((told_s, _)) if told_s == told.told_s => {}
            // The first one may be of any age.
            None => self.told = Some((told.told_s, now)),
            Some(_) => {
                self.told = Some((told.told_s, now));
                // It is not older than the look before, which did not see it.
                let before = self.held.back().map_or(now, |(at, _)| *at);
                self.reading = Some((told.reading, before));
            }
        }
    }

    /// The most that the balloon left the guest since then.
    fn had_since(&self, then: Instant) -> u64 {
        let before = self.held.iter().rev().find(|(at, _)| *at <= then);
        let after = self.held.iter().filter(|(at, _)| *at > then);
        let first = self.held.front();
        before.or(first).into_iter().chain(after).map(|(_, bytes)| *bytes).max().unwrap_or(0)
    }

    fn show(&mut self, target: Target, bytes: u64, balloon_bytes: u64, by: By) {
        let was = self.stats.target_bytes.unwrap_or(balloon_bytes);
        self.stats.by = match (by, target.why) {
            (_, Why::Silent | Why::Stale) | (By::Nobody, _) => "",
            (By::Agent, _) => "agent",
            (By::Driver, _) => "driver",
        }
        .to_owned();
        // Each time once, however long it takes.
        if target.why.gives_back() && was < bytes {
            self.stats.given_back_total += 1;
            target.why.text().clone_into(&mut self.stats.given_back_why);
        }
        self.stats.target_bytes = Some(bytes);
        target.why.text().clone_into(&mut self.stats.why);
    }
}

/// As the policy takes them.
fn settings(wish: &SelfBalloon) -> Settings {
    Settings {
        floor_bytes: wish.floor_bytes,
        headroom_bytes: wish.headroom_bytes,
        headroom_percent: wish.headroom_percent,
        committed_percent: wish.committed_percent,
        hysteresis_bytes: wish.hysteresis_bytes,
        up_bytes: wish.up_bytes,
        down_bytes: wish.down_bytes,
        some_percent: wish.some_percent,
        full_percent: wish.full_percent,
        swap_in_bytes: wish.swap_in_bytes.max(PAGE_SIZE as u64),
        low_percent: wish.low_percent,
        refault_bytes: wish.refault_bytes.max(PAGE_SIZE as u64),
        calm_s: wish.calm_s,
        remember_s: wish.remember_s,
        stale_s: wish.stale_s,
    }
}

impl Guests {
    /// Begins to look after all of them.
    pub(super) fn follow(self: &Arc<Self>) -> io::Result<()> {
        let guests = Arc::clone(self);
        let work = move || {
            let mut all = BTreeMap::new();
            loop {
                guests.follow_once(&mut all);
                std::thread::sleep(if all.is_empty() { IDLE } else { LISTEN_EVERY });
            }
        };
        std::thread::Builder::new().name("balloons".into()).spawn(work).map(drop)
    }

    fn follow_once(&self, all: &mut BTreeMap<String, Following>) {
        let wishes = self.wishes();
        all.retain(|folder, following| {
            wishes.iter().any(|wish| wish.folder == *folder && wish.made == following.made)
        });
        for wish in &wishes {
            let now = Instant::now();
            let following = all.entry(wish.folder.clone()).or_insert_with(|| {
                Following::new(wish, self.heard_mark(&wish.folder).exists(), now)
            });
            self.follow_one(wish, following);
        }
    }

    fn wishes(&self) -> Vec<Wish> {
        let known = lock(&self.known);
        let wishes = known.iter().filter_map(|(folder, guest)| {
            Some(Wish {
                folder: folder.clone(),
                made: guest.made,
                memory_bytes: guest.spec.memory_bytes,
                balloon: guest.spec.balloon.clone()?,
                settings: guest.spec.self_balloon?,
            })
        });
        wishes.collect()
    }

    /// There where an agent has spoken for the guest.
    pub(super) fn heard_mark(&self, folder: &str) -> PathBuf {
        self.directory.join(format!("{HEARD_PREFIX}{folder}"))
    }

    fn follow_one(&self, wish: &Wish, following: &mut Following) {
        let Some(tenant) = self.tenant(&wish.folder) else { return };
        if lock(&self.ordering).contains(&wish.folder) {
            // The port has one at its other side: it is somebody else's for a moment.
            following.channel = None;
            return;
        }
        let directory = self.directory(&tenant);
        let port = directory.join(PORT_SOCKET_NAME);
        let mut connect = || {
            let stream = connect_now(&port).ok()?;
            who_answers(&tenant, &stream, "its agent's port").ok().map(|_| stream)
        };
        if following.listen(&mut connect, Instant::now()) {
            // Without it a driver's word would count for the next worker. It is said again.
            following.has_agent = fs::write(self.heard_mark(&wish.folder), []).is_ok();
        }
        if !following.is_due(Instant::now()) {
            return;
        }
        // Its monitor hears one at a time.
        let Some(_alone) = self.alone_now(&wish.folder) else { return };
        let with_statistics = following.by(Instant::now()) == By::Driver;
        let given_back = following.stats.given_back_total;
        let room = room(&tenant, &mut following.evicted);
        let outcome = self.talk(&tenant, &directory, CONVERSATION).and_then(|mut talk| {
            let held = held(&mut talk.monitor, &wish.balloon, with_statistics)
                .map_err(|error| error.to_string())?;
            match following.decide(&held, room, Instant::now()) {
                Some(bytes) => set(&mut talk.monitor, bytes).map_err(|error| error.to_string()),
                None => Ok(()),
            }
        });
        if let Err(why) = outcome {
            following.failed(why, Instant::now());
        }
        let stats = &following.stats;
        if stats.given_back_total > given_back {
            let (name, why) = (&tenant.record().name, &stats.given_back_why);
            log(Priority::Notice, format_args!("{name} gets all of its memory back: {why}"));
        }
        if let Some(guest) = lock(&self.known).get_mut(&wish.folder) {
            guest.self_balloon = Some(stats.clone());
            guest.lack = following.lack;
        }
    }

    /// What a guest would have beyond what its balloon leaves it; none: it is no guest whose
    /// balloon follows it, or nothing is heard from it.
    pub(crate) fn lack(&self, tenant: &Tenant) -> Option<Lack> {
        let record = tenant.record();
        lock(&self.known).get(&folder(record.uid, &record.name))?.lack
    }
}

/// What is free of a tenant's budget, less some room and what had to leave since `evicted`,
/// which is what had left by the last time. What has left before counts for nothing: it is
/// cold, and has a place. None: its budget is its own affair, as whoever set it may want
/// guests that have more than their DRAM.
fn room(tenant: &Tenant, evicted: &mut Option<u64>) -> Option<i64> {
    tenant.claim()?;
    let (demand, budget) = (tenant.demand(), tenant.budget_bytes());
    let before = evicted.replace(demand.evicted_bytes).unwrap_or(demand.evicted_bytes);
    let left = demand.evicted_bytes.saturating_sub(before);
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let taken = demand.used_bytes.saturating_add(budget / SPARE_PART).saturating_add(left);
    Some(signed(budget).saturating_sub(signed(taken)))
}

#[cfg(test)]
#[path = "balloons_tests.rs"]
mod tests;
