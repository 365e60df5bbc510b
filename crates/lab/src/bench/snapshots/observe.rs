//! What clients see: one that waits for each reply, and many at full speed.
//! What happens meanwhile is the caller's.

use crate::{
    keys::{Keys, Pattern},
    process,
    random::mix,
    redis::{
        expect::Expect,
        load::{Client, Workload, key_name},
        resp::{Connection, Endpoint, Reply, encode},
        tally::Tally,
    },
};
use anyhow::{Result, bail};
use serde::Serialize;
use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

/// What one unpipelined client saw of GETs of uniform keys.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Seen {
    pub operations: u64,
    pub seconds: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// The longest time that a reply was waited for.
    pub longest_ms: f64,
}

/// A client asks, one key at a time, while `during` runs.
pub(super) fn watched<T>(
    endpoint: &Endpoint,
    expect: &Expect,
    core: Option<usize>,
    during: impl FnOnce() -> Result<T>,
) -> Result<(T, Seen)> {
    let stop = AtomicBool::new(false);
    let connection = Connection::open(endpoint)?;
    let begin = Instant::now();
    let (done, watched) = thread::scope(|scope| {
        let watcher = scope.spawn(|| ask_until(&stop, connection, expect, core));
        // It is at it when the thing begins.
        thread::sleep(Duration::from_millis(50));
        let done = during();
        stop.store(true, Relaxed);
        (done, watcher.join().expect("a client thread panicked"))
    });
    let (tally, longest) = watched?;
    tally.refuse_wrong()?;
    let seen = Seen {
        operations: tally.operations,
        seconds: begin.elapsed().as_secs_f64(),
        p50_ms: tally.latency.quantile_us(0.5) / 1e3,
        p99_ms: tally.latency.quantile_us(0.99) / 1e3,
        longest_ms: longest.as_secs_f64() * 1e3,
    };
    Ok((done?, seen))
}

fn ask_until(
    stop: &AtomicBool,
    mut connection: Connection,
    expect: &Expect,
    core: Option<usize>,
) -> Result<(Tally, Duration)> {
    if let Some(core) = core {
        process::pin_self(core)?;
    }
    let mut stream = Keys::new(Pattern::Uniform, expect.count()).stream(mix(0x5a4b));
    let mut tally = Tally::default();
    let mut longest = Duration::ZERO;
    let mut request = Vec::new();
    while !stop.load(Relaxed) {
        let index = stream.draw();
        let oldest = expect.confirmed(index);
        request.clear();
        encode(&mut request, &[b"GET", &key_name(index)]);
        let sent = Instant::now();
        connection.send(&request)?;
        let reply = connection.receive(|| ())?;
        let took = sent.elapsed();
        match reply {
            Reply::Bulk(range) => {
                tally.check(expect.admits(index, oldest, connection.bytes(range)), index);
            }
            Reply::Nil => tally.missing += 1,
            other => bail!("unexpected reply {other:?}"),
        }
        tally.latency.record(took.as_nanos() as u64, 1);
        tally.operations += 1;
        longest = longest.max(took);
    }
    Ok((tally, longest))
}

/// Operations done by a moment, every few milliseconds.
pub(super) struct Course {
    ticks: Vec<(Instant, u64)>,
}

impl Course {
    /// Operations per second between two moments, from the ticks around them.
    pub(super) fn rate(&self, from: Instant, to: Instant) -> f64 {
        let seconds = to.saturating_duration_since(from).as_secs_f64();
        if seconds > 0.0 { (self.done_by(to) - self.done_by(from)) / seconds } else { 0.0 }
    }

    fn done_by(&self, moment: Instant) -> f64 {
        let after = self.ticks.partition_point(|(at, _)| *at <= moment);
        let (Some(&(left, less)), next) =
            (after.checked_sub(1).and_then(|last| self.ticks.get(last)), self.ticks.get(after))
        else {
            return 0.0;
        };
        let Some(&(right, more)) = next else { return less as f64 };
        let share = (moment - left).as_secs_f64() / (right - left).as_secs_f64();
        (more - less) as f64 * share + less as f64
    }

    /// The time after `from` at which the rate over the next `window` is first
    /// at least `wanted`. None: not in what was seen.
    pub(super) fn reaches(&self, from: Instant, window: Duration, wanted: f64) -> Option<Duration> {
        let last = self.ticks.last()?.0;
        let whole = |at: &Instant| *at >= from && *at + window <= last;
        let mut moments = self.ticks.iter().map(|(at, _)| *at).filter(whole);
        moments.find(|&at| self.rate(at, at + window) >= wanted).map(|at| at - from)
    }
}

/// All clients at full speed while `during` runs.
pub(super) fn at_full_speed<T>(
    client: &Client,
    workload: &Workload,
    expect: &Expect,
    during: impl FnOnce() -> Result<T>,
) -> Result<(T, Course)> {
    let stop = AtomicBool::new(false);
    let mut ticks = Vec::new();
    let (done, driven) = thread::scope(|scope| {
        let tell = |operations| ticks.push((Instant::now(), operations));
        let driver = scope.spawn(|| client.run_until(workload, expect, &stop, tell));
        let done = during();
        stop.store(true, Relaxed);
        (done, driver.join().expect("a client thread panicked"))
    });
    driven?;
    Ok((done?, Course { ticks }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_come_from_the_ticks_around_a_window() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        // 1000 a second, then for half a second nothing, then 2000.
        let ticks = vec![(at(0), 0), (at(1000), 1000), (at(1500), 1000), (at(2500), 3000)];
        let course = Course { ticks };
        assert!((course.rate(at(100), at(900)) - 1000.0).abs() < 1e-6);
        assert!((course.rate(at(1000), at(1500))).abs() < 1e-6);
        assert!((course.rate(at(500), at(2000)) - 1000.0).abs() < 1e-6);
        assert!((course.rate(at(1500), at(2500)) - 2000.0).abs() < 1e-6);
        assert!((course.rate(at(500), at(500))).abs() < 1e-6);
        let window = Duration::from_millis(500);
        assert_eq!(course.reaches(at(1000), window, 1900.0), Some(window));
        assert_eq!(course.reaches(at(0), window, 900.0), Some(Duration::ZERO));
        assert_eq!(course.reaches(at(0), window, 2500.0), None);
    }
}
