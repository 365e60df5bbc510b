//! The load generator: fills a server, drives it, checks all it returns.
//!
//! One thread per connection, all blocking and all on the client's core: the
//! thread that waits costs nothing, and a reply's time is the time it was read.
//! Every value of every GET is checked while the load runs; a wrong one ends
//! the run as a failure, whatever the throughput.

use super::{
    expect::Expect,
    outcome::{Jump, Outcome},
    resp::{Connection, Endpoint, Reply, encode},
    tally::Tally,
};
use crate::{
    interrupt,
    keys::{KeyStream, Keys, Pattern},
    process,
    random::mix,
};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// How to talk to the server.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub endpoint: Endpoint,
    pub connections: usize,
    /// Requests under way per connection; 1: each waits for its reply.
    pub pipeline: usize,
    /// Core for the client's threads; none: wherever the kernel puts them.
    pub core: Option<usize>,
}

/// What to ask of it.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub pattern: Pattern,
    /// Share of GETs, 0 to 1; the rest are SETs of the next version.
    pub reads: f64,
    /// Not measured: lets caches and policies settle.
    pub warmup: Duration,
    /// Requests under way per connection until then, if that is more than usual.
    pub warmup_pipeline: usize,
    pub duration: Duration,
    pub seed: u64,
}

/// What the caller is told while a pass runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moment {
    /// About every [`TICK`]: how much is done (0 to 1) and operations so far.
    Tick { done: f64, operations: u64 },
    /// The warm-up is over.
    MeasureBegins,
    /// The measured time is over.
    MeasureEnds,
}

/// Time between two [`Moment::Tick`]s.
const TICK: Duration = Duration::from_millis(250);
/// The same in [`Client::run_until`], whose callers look for short dents.
const FINE_TICK: Duration = Duration::from_millis(10);
/// Draws that a writer makes to hit one of its own keys before it gives up and
/// reads instead; with 64 connections one in 60 million writes gives up.
const OWNED_DRAWS: usize = 1024;
/// Speed of scan-hot's walk in keys: a slow server is not given less of it, or
/// what the walk does to the hot set would depend on who is measured.
const SCAN_PER_SECOND: f64 = 40_000.0;
/// A walk that falls further behind than this does not catch up.
const SCAN_DEBT: Duration = Duration::from_millis(50);
/// When a jump comes, as a share of the measured time.
const JUMP_AT: f64 = 1.0 / 3.0;

/// Result of a pass over all keys.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Pass {
    pub operations: u64,
    pub seconds: f64,
    pub wrong_values: u64,
    pub missing_values: u64,
}

#[derive(Default)]
struct Shared {
    /// 0 warm-up, 1 measured, 2 stop.
    stage: AtomicU8,
    failed: AtomicBool,
    /// The hot set of a jump has moved.
    jumped: AtomicBool,
    operations: AtomicU64,
    next_index: AtomicU64,
    total: Mutex<Tally>,
}

/// The key of an index: fixed width, as ids usually are.
pub(crate) fn key_name(index: u64) -> [u8; 15] {
    let mut name = *b"record:00000000";
    let mut rest = index;
    for digit in name[7..].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    name
}

impl Client {
    /// Sets every key to its current version, in order of index.
    pub(crate) fn load(&self, expect: &Expect, tell: &mut dyn FnMut(Moment)) -> Result<Pass> {
        self.pass(expect, tell, true)
    }

    /// Gets every key and compares it with its current version.
    pub(crate) fn verify(&self, expect: &Expect, tell: &mut dyn FnMut(Moment)) -> Result<Pass> {
        self.pass(expect, tell, false)
    }

    fn pass(&self, expect: &Expect, tell: &mut dyn FnMut(Moment), write: bool) -> Result<Pass> {
        let shared = Shared::default();
        let started = Instant::now();
        self.threads(
            &shared,
            |connection, _| self.pass_thread(connection, expect, &shared, write),
            || {
                while shared.operations.load(Relaxed) < expect.count()
                    && !shared.failed.load(Relaxed)
                {
                    if interrupt::requested() {
                        shared.failed.store(true, Relaxed);
                    }
                    thread::sleep(TICK / 5);
                    let operations = shared.operations.load(Relaxed);
                    tell(Moment::Tick {
                        done: operations as f64 / expect.count() as f64,
                        operations,
                    });
                }
            },
        )?;
        let tally = shared.total.into_inner().expect("no thread panicked");
        tally.refuse_wrong()?;
        Ok(Pass {
            operations: tally.operations,
            seconds: started.elapsed().as_secs_f64(),
            wrong_values: tally.wrong,
            missing_values: tally.missing,
        })
    }

    fn pass_thread(
        &self,
        connection: &mut Connection,
        expect: &Expect,
        shared: &Shared,
        write: bool,
    ) -> Result<()> {
        let mut tally = Tally::default();
        let (mut requests, mut record) = (Vec::new(), Vec::new());
        let depth = self.pipeline as u64;
        while !shared.failed.load(Relaxed) {
            let first = shared.next_index.fetch_add(depth, Relaxed);
            let indices = first..(first + depth).min(expect.count());
            if indices.is_empty() {
                break;
            }
            requests.clear();
            for index in indices.clone() {
                let key = key_name(index);
                if write {
                    expect.current(index, &mut record);
                    encode(&mut requests, &[b"SET", &key, &record]);
                } else {
                    encode(&mut requests, &[b"GET", &key]);
                }
            }
            connection.send(&requests)?;
            for index in indices.clone() {
                match connection.receive(|| ())? {
                    Reply::Bulk(range) if !write => {
                        expect.current(index, &mut record);
                        tally.check(connection.bytes(range) == record, index);
                    }
                    Reply::Nil if !write => tally.missing += 1,
                    Reply::Status if write => {}
                    other => bail!("unexpected reply {other:?}"),
                }
            }
            let done = indices.end - indices.start;
            tally.operations += done;
            shared.operations.fetch_add(done, Relaxed);
        }
        shared.total.lock().expect("no thread panicked").merge(&tally);
        Ok(())
    }

    /// Drives the server for a time.
    pub(crate) fn run(
        &self,
        workload: &Workload,
        expect: &Expect,
        tell: &mut dyn FnMut(Moment),
    ) -> Result<Outcome> {
        if workload.pattern == Pattern::ScanHot && self.connections < 2 {
            bail!("scan-hot needs a connection for its walk and one for its hot set");
        }
        let shared = Shared::default();
        let keys = Keys::new(workload.pattern, expect.count());
        let mut timeline = Vec::new();
        let mut conducted = Conducted::default();
        self.threads(
            &shared,
            |connection, number| {
                let seed = mix(workload.seed) ^ number as u64;
                if workload.pattern == Pattern::ScanHot && number + 1 == self.connections {
                    let walk = keys.walk(seed);
                    return self.walk_thread(connection, walk, expect, &shared);
                }
                let stream = keys.stream(seed);
                self.run_thread(connection, workload, stream, number, expect, &shared)
            },
            || conducted = conduct(workload, &shared, &mut timeline, tell),
        )?;
        let tally = shared.total.into_inner().expect("no thread panicked");
        tally.refuse_wrong()?;
        let begin = workload.warmup.as_secs_f64();
        let jump = conducted.jump_seconds.and_then(|at| Jump::read(&timeline, begin, at));
        Ok(Outcome::new(&tally, conducted.measured, timeline, jump))
    }

    /// Drives the server until `stop` is set; `tell` hears the number of
    /// operations so far every [`FINE_TICK`]. Warm-up and duration of the
    /// workload are the caller's business.
    pub(crate) fn run_until(
        &self,
        workload: &Workload,
        expect: &Expect,
        stop: &AtomicBool,
        mut tell: impl FnMut(u64),
    ) -> Result<()> {
        let shared = Shared::default();
        let keys = Keys::new(workload.pattern, expect.count());
        self.threads(
            &shared,
            |connection, number| {
                let stream = keys.stream(mix(workload.seed) ^ number as u64);
                self.run_thread(connection, workload, stream, number, expect, &shared)
            },
            || {
                while !stop.load(Relaxed) && !shared.failed.load(Relaxed) && !interrupt::requested()
                {
                    tell(shared.operations.load(Relaxed));
                    thread::sleep(FINE_TICK);
                }
                shared.stage.store(2, Relaxed);
            },
        )?;
        let tally = shared.total.into_inner().expect("no thread panicked");
        tally.refuse_wrong()?;
        Ok(())
    }

    /// Gets all keys in order, round and round, at [`SCAN_PER_SECOND`].
    fn walk_thread(
        &self,
        connection: &mut Connection,
        mut walk: KeyStream,
        expect: &Expect,
        shared: &Shared,
    ) -> Result<()> {
        let mut tally = Tally::default();
        let mut requests = Vec::new();
        let mut batch: Vec<(u64, u32)> = Vec::with_capacity(self.pipeline);
        let pause = Duration::from_secs_f64(self.pipeline as f64 / SCAN_PER_SECOND);
        let mut next = Instant::now();
        while shared.stage.load(Relaxed) != 2 && !shared.failed.load(Relaxed) {
            let now = Instant::now();
            thread::sleep(next.saturating_duration_since(now));
            next = (next + pause).max(now.checked_sub(SCAN_DEBT).unwrap_or(now));
            requests.clear();
            batch.clear();
            for _ in 0..self.pipeline {
                let index = walk.draw();
                batch.push((index, expect.confirmed(index)));
                encode(&mut requests, &[b"GET", &key_name(index)]);
            }
            connection.send(&requests)?;
            for &(index, oldest) in &batch {
                match connection.receive(|| ())? {
                    Reply::Bulk(range) => {
                        tally.check(expect.admits(index, oldest, connection.bytes(range)), index);
                    }
                    Reply::Nil => tally.missing += 1,
                    other => bail!("unexpected reply {other:?}"),
                }
            }
            let done = batch.len() as u64;
            if shared.stage.load(Relaxed) == 1 {
                tally.operations += done;
                tally.reads += done;
                tally.scanned += done;
            }
            shared.operations.fetch_add(done, Relaxed);
        }
        shared.total.lock().expect("no thread panicked").merge(&tally);
        Ok(())
    }

    fn run_thread(
        &self,
        connection: &mut Connection,
        workload: &Workload,
        mut stream: KeyStream,
        number: usize,
        expect: &Expect,
        shared: &Shared,
    ) -> Result<()> {
        let mut tally = Tally::default();
        let (mut requests, mut record) = (Vec::new(), Vec::new());
        // Index, and for a read the version confirmed before it was sent.
        let mut batch: Vec<(u64, Option<u32>)> = Vec::with_capacity(self.pipeline);
        let mut jumped = false;
        loop {
            let stage = shared.stage.load(Relaxed);
            if stage == 2 || shared.failed.load(Relaxed) {
                break;
            }
            if !jumped && shared.jumped.load(Relaxed) {
                stream.jump();
                jumped = true;
            }
            requests.clear();
            batch.clear();
            let warmup_pipeline = if stage == 0 { workload.warmup_pipeline } else { 0 };
            for _ in 0..self.pipeline.max(warmup_pipeline) {
                let write = !stream.chance(workload.reads);
                // Each key has one writer, or nobody could say what it holds.
                let owned = write.then(|| self.draw_owned(&mut stream, number)).flatten();
                if let Some(index) = owned {
                    expect.begin_write(index, &mut record);
                    encode(&mut requests, &[b"SET", &key_name(index), &record]);
                    batch.push((index, None));
                } else {
                    let index = stream.draw();
                    batch.push((index, Some(expect.confirmed(index))));
                    encode(&mut requests, &[b"GET", &key_name(index)]);
                }
            }
            let sent = Instant::now();
            connection.send(&requests)?;
            let mut latency_ns = 0;
            for &(index, read) in &batch {
                let reply = connection.receive(|| latency_ns = sent.elapsed().as_nanos() as u64)?;
                match (reply, read) {
                    (Reply::Bulk(range), Some(oldest)) => {
                        tally.check(expect.admits(index, oldest, connection.bytes(range)), index);
                    }
                    (Reply::Nil, Some(_)) => tally.missing += 1,
                    (Reply::Status, None) => expect.confirm_write(index),
                    (other, _) => bail!("unexpected reply {other:?}"),
                }
                if stage == 1 {
                    tally.latency.record(latency_ns, 1);
                }
            }
            // Counted when the replies are in and the window is still open, so
            // that operations and seconds cover the same time.
            if shared.stage.load(Relaxed) == 1 {
                tally.operations += batch.len() as u64;
                tally.reads += batch.iter().filter(|(_, read)| read.is_some()).count() as u64;
            }
            shared.operations.fetch_add(batch.len() as u64, Relaxed);
        }
        shared.total.lock().expect("no thread panicked").merge(&tally);
        Ok(())
    }

    fn draw_owned(&self, stream: &mut KeyStream, number: usize) -> Option<u64> {
        (0..OWNED_DRAWS)
            .map(|_| stream.draw())
            .find(|index| index % self.connections as u64 == number as u64)
    }

    /// Runs `work` on one thread per connection and `conduct` on this one.
    fn threads(
        &self,
        shared: &Shared,
        work: impl Fn(&mut Connection, usize) -> Result<()> + Sync,
        conduct: impl FnOnce(),
    ) -> Result<()> {
        let mut connections = (0..self.connections)
            .map(|_| Connection::open(&self.endpoint))
            .collect::<Result<Vec<_>>>()?;
        let work = &work;
        let result = thread::scope(|scope| {
            let handles: Vec<_> = connections
                .iter_mut()
                .enumerate()
                .map(|(number, connection)| {
                    scope.spawn(move || {
                        let result = match self.core {
                            Some(core) => process::pin_self(core),
                            None => Ok(()),
                        }
                        .and_then(|()| work(connection, number));
                        if result.is_err() {
                            shared.failed.store(true, Relaxed);
                        }
                        result
                    })
                })
                .collect();
            conduct();
            handles
                .into_iter()
                .map(|handle| handle.join().expect("a client thread panicked"))
                .collect::<Result<Vec<()>>>()
        });
        interrupt::check()?;
        result.map(|_| ()).with_context(|| format!("load on {}", self.endpoint))
    }
}

/// When things happened in a run.
#[derive(Clone, Copy, Default)]
struct Conducted {
    measured: Duration,
    /// Since the start of the load.
    jump_seconds: Option<f64>,
}

/// Moves a run through its stages.
fn conduct(
    workload: &Workload,
    shared: &Shared,
    timeline: &mut Vec<(f64, f64)>,
    tell: &mut dyn FnMut(Moment),
) -> Conducted {
    let jump_after =
        (workload.pattern == Pattern::Jump).then(|| workload.duration.mul_f64(JUMP_AT));
    let mut jump_seconds = None;
    let started = Instant::now();
    let whole = workload.warmup + workload.duration;
    let mut measuring: Option<Instant> = None;
    let (mut last_time, mut last_operations) = (started, 0);
    loop {
        thread::sleep(TICK.min(whole / 20));
        let now = Instant::now();
        let operations = shared.operations.load(Relaxed);
        let rate = (operations - last_operations) as f64 / (now - last_time).as_secs_f64();
        timeline.push(((now - started).as_secs_f64(), rate));
        (last_time, last_operations) = (now, operations);
        let done = (now - started).as_secs_f64() / whole.as_secs_f64();
        tell(Moment::Tick { done: done.min(1.0), operations });
        if interrupt::requested() {
            shared.failed.store(true, Relaxed);
        }
        if shared.failed.load(Relaxed) {
            break;
        }
        match measuring {
            None if now - started >= workload.warmup => {
                tell(Moment::MeasureBegins);
                measuring = Some(Instant::now());
                shared.stage.store(1, Relaxed);
            }
            Some(since) if since.elapsed() >= workload.duration => break,
            Some(since)
                if jump_seconds.is_none()
                    && jump_after.is_some_and(|after| since.elapsed() >= after) =>
            {
                shared.jumped.store(true, Relaxed);
                jump_seconds = Some(started.elapsed().as_secs_f64());
            }
            _ => {}
        }
    }
    shared.stage.store(2, Relaxed);
    let measured = measuring.map_or(Duration::ZERO, |since| since.elapsed());
    tell(Moment::MeasureEnds);
    Conducted { measured, jump_seconds }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_fixed_width() {
        assert_eq!(&key_name(0), b"record:00000000");
        assert_eq!(&key_name(799_999), b"record:00799999");
    }
}
