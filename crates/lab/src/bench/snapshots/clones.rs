//! Eight clones of one Redis: until all of them answer, and what they cost
//! before they write.

use super::{
    Trial,
    place::first_right,
    rows::{Column, Measure},
    tenant::Tenant,
};
use crate::{interrupt, process, redis::resp::Endpoint, strata::total_bytes};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// As the issue asks.
const CLONES: usize = 8;
/// Memory is at rest when what is available changed by less than this over the
/// time: what was only needed for the making has been given back, and nobody
/// packs what has been captured denser.
const STEADY_BYTES: u64 = 2_000_000;
const STEADY: Duration = Duration::from_secs(2);
/// It is waited for no longer.
const REST_PATIENCE: Duration = Duration::from_secs(120);

/// All of it.
pub(super) fn run(trial: &mut Trial<'_>) -> Result<()> {
    // Without a port: clones on the original's network cannot listen on it too.
    let origin = Tenant::start(trial, trial.size_bytes * 2, false)?;
    let taken = origin.snapshot()?;
    let id = taken.info.id.to_string();
    trial.progress.part("waiting for memory to rest");
    let before_bytes = available_at_rest()?;
    let one_bytes = total_bytes(&origin.strata.stats(&origin.name)?);
    let origin_pid = origin.pid()?;

    let base = format!("{}-c", trial.name);
    let names: Vec<String> = (1..=CLONES).map(|index| format!("{base}-{index}")).collect();
    // Whoever ends first, the clones are ended.
    let stopping = names.iter().map(|name| origin.strata.stopping(&trial.bench.janitor, name));
    let stopping = stopping.collect::<Result<Vec<_>>>()?;
    let directory = origin.place.directory().to_string_lossy().into_owned();
    let (key, value) = trial.known(trial.some_index(3));
    trial.progress.part("cloning");
    let begin = Instant::now();
    let count = CLONES.to_string();
    origin.strata.ask(&[
        "clone",
        &id,
        "--count",
        &count,
        "--name",
        &base,
        "--copy-dir",
        &directory,
    ])?;
    let command = begin.elapsed();
    let sockets = sockets(origin_pid, &origin.place.socket())?;
    let answered = answered(&sockets, (&key, &value), begin)?;
    trial.put(Column::Resident, Measure::Clones, answered.as_secs_f64());
    trial.note("clone command, s", command.as_secs_f64());

    let after_bytes = available_at_rest()?;
    // Of what all refer to the original pays less than before.
    let mut together_bytes = total_bytes(&origin.strata.stats(&origin.name)?);
    for name in &names {
        let stats = origin.strata.stats(name)?;
        together_bytes += total_bytes(&stats);
        trial.note(name, serde_json::to_value(&stats)?);
    }
    let account_bytes = together_bytes.saturating_sub(one_bytes);
    let percent = |bytes: u64| bytes as f64 * 100.0 / one_bytes as f64;
    // Less than none was given back by somebody else.
    match before_bytes.checked_sub(after_bytes) {
        Some(taken_bytes) if taken_bytes > 0 => {
            trial.put(Column::Resident, Measure::ClonesDram, percent(taken_bytes));
        }
        _ => trial.figures.fail(format!(
            "{}: DRAM by the kernel: {} MB more were available after cloning than before",
            trial.title(),
            (after_bytes - before_bytes) / 1_000_000
        )),
    }
    trial.put(Column::Resident, Measure::ClonesAccount, percent(account_bytes));
    trial.note("one, bytes", one_bytes);
    trial.note("available before, bytes", before_bytes);
    trial.note("available with clones, bytes", after_bytes);
    trial.note("clones, bytes by Strata", account_bytes);
    if trial.repetition == 0 {
        // One has its pages like the original, and then the others still do.
        trial.verify(&trial.client(sockets[0].clone()))?;
    }
    drop(stopping);
    Ok(())
}

/// What the kernel says is available, and has on lists of its CPUs, once that has
/// stopped changing.
fn available_at_rest() -> Result<u64> {
    let available = || anyhow::Ok(process::available_bytes()? + process::listed_bytes()?);
    let begin = Instant::now();
    let mut last_bytes = available()?;
    loop {
        interrupt::check()?;
        thread::sleep(STEADY);
        let bytes = available()?;
        if bytes.abs_diff(last_bytes) < STEADY_BYTES {
            return Ok(bytes);
        }
        if begin.elapsed() >= REST_PATIENCE {
            bail!("available memory still changes after {} s", REST_PATIENCE.as_secs());
        }
        last_bytes = bytes;
    }
}

/// The clones' sockets, seen through their own mount namespaces: to themselves
/// all of them have the original's number and path.
fn sockets(origin: u32, socket: &Path) -> Result<Vec<Endpoint>> {
    let wanted = origin.to_string();
    let is_clone = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let numbers: Vec<&str> = numbers.unwrap_or_default().split_ascii_whitespace().collect();
        numbers.len() > 1 && numbers.last() == Some(&wanted.as_str())
    };
    let within = socket.strip_prefix("/").context("the socket's path is absolute")?;
    let found: Vec<Endpoint> = process::all()
        .into_iter()
        .filter(is_clone)
        .map(|pid| Endpoint::Unix(Path::new(&format!("/proc/{pid}/root")).join(within)))
        .collect();
    if found.len() != CLONES {
        bail!("{} processes are clones of {origin}, not {CLONES}", found.len());
    }
    Ok(found)
}

/// From `begin` until the last of them has answered a GET right; they are asked
/// at the same time.
fn answered(sockets: &[Endpoint], known: (&[u8], &[u8]), begin: Instant) -> Result<Duration> {
    let times = thread::scope(|scope| {
        let asked: Vec<_> = sockets
            .iter()
            .map(|socket| scope.spawn(move || first_right(socket, known, begin, || Ok(()))))
            .collect();
        let times = asked.into_iter().map(|one| one.join().expect("a client thread panicked"));
        times.collect::<Result<Vec<_>>>()
    })?;
    times.into_iter().max().context("there are clones")
}
