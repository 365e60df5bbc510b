//! A server for tests that speaks enough of the protocol, and can be told to
//! misbehave: the load generator must notice every kind of misbehaviour.

use super::{
    expect::Expect,
    load::{Client, Workload},
    outcome::Outcome,
    resp::Endpoint,
    tally::WrongValues,
};
use crate::{keys::Pattern, records::Records};
use anyhow::Result;
use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// How the server lies, at its 100th occasion.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    /// One bit of a value is wrong.
    FlippedBit,
    /// A write is confirmed and forgotten, and so are all later ones of that key:
    /// one that is overwritten before anyone reads it harms nobody.
    LostWrite,
    /// A key is said not to exist.
    MissingKey,
    /// A value of another key is returned.
    OtherKey,
}

const OCCASION: u64 = 100;
const RECORDS: u64 = 500;

#[derive(Default)]
struct Store {
    values: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    gets: AtomicU64,
    overwrites: AtomicU64,
    forgotten: Mutex<Option<Vec<u8>>>,
}

fn read_command(input: &mut impl BufRead) -> Option<Vec<Vec<u8>>> {
    let number = |input: &mut dyn BufRead| -> Option<usize> {
        let mut line = String::new();
        input.read_line(&mut line).ok()?;
        line.trim().get(1..)?.parse().ok()
    };
    let count = number(input)?;
    (0..count)
        .map(|_| {
            let mut bytes = vec![0; number(input)? + 2];
            input.read_exact(&mut bytes).ok()?;
            bytes.truncate(bytes.len() - 2);
            Some(bytes)
        })
        .collect()
}

impl Store {
    fn answer(&self, command: &[Vec<u8>], lie: Lie) -> Vec<u8> {
        let mut values = self.values.lock().expect("not poisoned");
        match command {
            [name, key, value] if name == b"SET" => {
                let known = values.contains_key(key);
                let mut forgotten = self.forgotten.lock().expect("not poisoned");
                if known && self.overwrites.fetch_add(1, SeqCst) == OCCASION {
                    *forgotten = Some(key.clone());
                }
                if !(lie == Lie::LostWrite && forgotten.as_ref() == Some(key)) {
                    values.insert(key.clone(), value.clone());
                }
                b"+OK\r\n".to_vec()
            }
            [name, key] if name == b"GET" => {
                let occasion = self.gets.fetch_add(1, SeqCst) == OCCASION;
                let other = values.keys().find(|other| *other != key).cloned();
                let key = match other {
                    Some(other) if occasion && lie == Lie::OtherKey => other,
                    _ => key.clone(),
                };
                match values.get(&key) {
                    Some(value) if !(occasion && lie == Lie::MissingKey) => {
                        let mut value = value.clone();
                        if occasion && lie == Lie::FlippedBit {
                            value[600] ^= 4;
                        }
                        let mut out = format!("${}\r\n", value.len()).into_bytes();
                        out.extend_from_slice(&value);
                        out.extend_from_slice(b"\r\n");
                        out
                    }
                    _ => b"$-1\r\n".to_vec(),
                }
            }
            _ => b"-ERR unknown command\r\n".to_vec(),
        }
    }
}

fn serve(stream: &UnixStream, store: &Store, lie: Lie) {
    let mut input = BufReader::new(stream);
    while let Some(command) = read_command(&mut input) {
        let mut output = stream;
        if output.write_all(&store.answer(&command, lie)).is_err() {
            break;
        }
    }
}

fn start(lie: Lie) -> PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, SeqCst);
    let path =
        std::env::temp_dir().join(format!("strata-lab-fake-{}-{number}", std::process::id()));
    let listener = UnixListener::bind(&path).expect("bound");
    let store = Arc::new(Store::default());
    // Ends with the test process; a connection ends with its client.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let store = Arc::clone(&store);
            thread::spawn(move || serve(&stream, &store, lie));
        }
    });
    path
}

/// Loads, runs half writes and half reads, and verifies.
fn exercise(lie: Lie, pattern: Pattern) -> Result<Outcome> {
    let path = start(lie);
    let client =
        Client { endpoint: Endpoint::Unix(path.clone()), connections: 3, pipeline: 8, core: None };
    let expect = Expect::new(Records::new(5), RECORDS);
    let workload = Workload {
        pattern,
        reads: 0.5,
        warmup: Duration::from_millis(100),
        warmup_pipeline: 1,
        duration: Duration::from_millis(300),
        seed: 2,
    };
    let result = client
        .load(&expect, &mut |_| ())
        .and_then(|_| client.run(&workload, &expect, &mut |_| ()))
        .and_then(|outcome| client.verify(&expect, &mut |_| ()).map(|_| outcome));
    std::fs::remove_file(path).expect("removed");
    result
}

#[test]
fn an_honest_server_passes() {
    for pattern in [Pattern::Uniform, Pattern::Zipf] {
        let outcome = exercise(Lie::None, pattern).expect("all values right");
        assert!(outcome.operations > 0 && outcome.verified_values > 0);
        let reads = outcome.reads as f64 / outcome.operations as f64;
        assert!((0.4..0.6).contains(&reads), "{reads}");
        assert!(outcome.p50_us > 0.0 && outcome.p50_us <= outcome.p99_us);
    }
}

#[test]
fn a_walk_is_counted_apart_and_a_jump_is_seen() {
    let scan = exercise(Lie::None, Pattern::ScanHot).expect("all values right");
    assert!(scan.scan_operations > 0 && scan.scan_operations < scan.operations);
    assert!(scan.asked_per_second() < scan.operations_per_second && scan.jump.is_none());
    // Too short a run to say what the jump did; not too short for it to come.
    exercise(Lie::None, Pattern::Jump).expect("all values right");
    assert!(exercise(Lie::FlippedBit, Pattern::Jump).is_err());
}

#[test]
fn every_lie_is_noticed() {
    for (name, lie) in [
        ("flipped bit", Lie::FlippedBit),
        ("lost write", Lie::LostWrite),
        ("missing key", Lie::MissingKey),
        ("other key", Lie::OtherKey),
    ] {
        let error = exercise(lie, Pattern::Uniform).expect_err(name);
        assert!(error.is::<WrongValues>(), "{name}: {error:#}");
    }
}
