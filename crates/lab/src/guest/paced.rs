//! A load on Redis at a fixed rate: requests are due by the clock, whether the
//! ones before have been answered or not, and their latency counts from then.

use super::words::{Drive, LATE_MS, Served};
use crate::{
    histogram::Histogram,
    keys::{KeyStream, Keys, Pattern},
    random::mix,
    redis::{
        expect::Expect,
        load::key_name,
        resp::{Connection, Endpoint, Reply, encode},
    },
};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::{
    thread,
    time::{Duration, Instant},
};

/// Each asks for one thing at a time.
const CONNECTIONS: u64 = 2;

/// Draws that a writer makes to hit one of its own keys before it reads instead.
const DRAWS: usize = 64;

/// What one connection saw.
#[derive(Default)]
struct Seen {
    answered: u64,
    late: u64,
    latency: Histogram,
}

impl Seen {
    fn add(&mut self, other: &Self) {
        self.answered += other.answered;
        self.late += other.late;
        self.latency.merge(&other.latency);
    }

    fn answer(&mut self, took: Duration) {
        self.answered += 1;
        self.late += u64::from(took > Duration::from_millis(LATE_MS));
        self.latency.record(took.as_nanos() as u64, 1);
    }
}

/// Runs the load; a value that is not what was written is an error.
pub(crate) fn drive(endpoint: &Endpoint, expect: &Expect, load: &Drive) -> Result<Served> {
    let pattern = Pattern::from_str(&load.pattern, true)
        .map_err(|_| anyhow::anyhow!("no pattern is called {}", load.pattern))?;
    let keys = Keys::new(pattern, expect.count());
    let began = Instant::now();
    let seen: Vec<Result<Seen>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|number| {
                let stream = keys.stream(mix(load.seed) ^ number);
                scope.spawn(move || one(endpoint, expect, load, stream, number, began))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("it did not panic")).collect()
    });
    let mut all = Seen::default();
    for seen in seen {
        all.add(&seen?);
    }
    let due = if load.per_second == 0 { all.answered } else { load.per_second * load.seconds };
    Ok(Served {
        due,
        answered: all.answered,
        per_second: all.answered as f64 / load.seconds.max(1) as f64,
        p50_us: all.latency.quantile_us(0.5),
        p99_us: all.latency.quantile_us(0.99),
        late: all.late,
    })
}

/// Connections take turns: the place of one's request among those of all.
const fn turn(sent_count: u64, number: u64) -> u64 {
    sent_count * CONNECTIONS + number
}

fn one(
    endpoint: &Endpoint,
    expect: &Expect,
    load: &Drive,
    mut stream: KeyStream,
    number: u64,
    began: Instant,
) -> Result<Seen> {
    let mut connection = Connection::open(endpoint).context("connect to Redis")?;
    let mut seen = Seen::default();
    let (mut request, mut record) = (Vec::new(), Vec::new());
    let end = began + Duration::from_secs(load.seconds);
    let mut sent_count = 0;
    loop {
        let now = Instant::now();
        let due = match load.per_second {
            0 => now,
            // Connections take turns.
            rate => began + Duration::from_secs_f64(turn(sent_count, number) as f64 / rate as f64),
        };
        if due >= end || now >= end {
            return Ok(seen);
        }
        thread::sleep(due.saturating_duration_since(now));
        sent_count += 1;
        // Each key has one writer, or nobody could say what it holds.
        let owned = (!stream.chance(load.reads))
            .then(|| (0..DRAWS).map(|_| stream.draw()).find(|key| key % CONNECTIONS == number))
            .flatten();
        let writes = owned.is_some();
        let index = owned.unwrap_or_else(|| stream.draw());
        request.clear();
        let oldest = expect.confirmed(index);
        if writes {
            expect.begin_write(index, &mut record);
            encode(&mut request, &[b"SET", &key_name(index), &record]);
        } else {
            encode(&mut request, &[b"GET", &key_name(index)]);
        }
        connection.send(&request)?;
        match connection.receive(|| ())? {
            Reply::Status if writes => expect.confirm_write(index),
            Reply::Bulk(range)
                if !writes && expect.admits(index, oldest, connection.bytes(range.clone())) => {}
            Reply::Bulk(_) => bail!("wrong value: record {index} is not what was written"),
            Reply::Nil => bail!("wrong value: record {index} is gone"),
            other => bail!("unexpected reply {other:?}"),
        }
        let answered = Instant::now();
        if answered < end {
            seen.answer(answered - due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_late_is_counted() {
        let ms = Duration::from_millis;
        let (mut seen, mut other) = (Seen::default(), Seen::default());
        seen.answer(ms(LATE_MS));
        other.answer(ms(LATE_MS + 1));
        other.answer(ms(1));
        seen.add(&other);
        assert_eq!((seen.answered, seen.late), (3, 1));
    }

    #[test]
    fn every_turn_is_somebodys_and_nobody_elses() {
        let mut turns: Vec<u64> =
            (0..CONNECTIONS).flat_map(|number| (0..50).map(move |n| turn(n, number))).collect();
        turns.sort_unstable();
        assert_eq!(turns, (0..50 * CONNECTIONS).collect::<Vec<_>>());
    }
}
