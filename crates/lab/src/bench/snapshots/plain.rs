//! The same Redis without Strata: plain CRIU's dumps and restores, and Redis's
//! own reload of what it saved.

use super::{
    Trial, criu, near_storage,
    observe::watched,
    place::{Place, collect_sibling, first_right, kill_hard},
    rows::{Column, Measure},
};
use crate::{
    janitor::Undo,
    process,
    redis::{resp::Connection, server::Wrapping},
};
use anyhow::{Result, bail};
use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Images are a little larger than the memory in them.
const IMAGES_PERCENT: u64 = 130;
/// Until the server has noticed that its clients are gone.
const PARTING: Duration = Duration::from_millis(200);

/// All of one server.
pub(super) fn run(trial: &mut Trial<'_>) -> Result<()> {
    let janitor = &trial.bench.janitor;
    let place = Place::make(janitor, &trial.name, true)?;
    let images_bytes = trial.size_bytes * IMAGES_PERCENT / 100;
    let near = near_storage(&format!("images-{}", trial.name), images_bytes, trial.size_bytes);
    trial.note("images in memory", near.starts_with("/dev/shm"));
    let _images = janitor.register(Undo::RemoveFiles { path: near.clone() })?;
    let pid = place.start(&Wrapping::default(), &[])?;
    place.wait_until_up(pid)?;
    trial.pin(pid)?;
    trial.load(&trial.client(place.unix()))?;
    trial.put(Column::Criu, Measure::Size, process::memory(pid).anonymous_bytes as f64 / 1e6);
    trial.step("saving", |_| save(&place))?;
    let (lazy, full) = (near.join("lazy"), near.join("full"));
    trial.step("dumps while a client waits", |trial| dumps(trial, &place, pid, (&lazy, &full)))?;
    for column in [Column::Lazy, Column::Criu] {
        trial.step("crash", |trial| crash(trial, column, &place, pid, &near))?;
    }
    trial.step("reload", |trial| reload(trial, &place, pid))?;
    Ok(())
}

/// To the file that Redis reads when it starts here again.
fn save(place: &Place) -> Result<()> {
    Connection::open(&place.unix())?.call(&[b"SAVE"])?;
    Ok(())
}

fn dumps(
    trial: &mut Trial<'_>,
    place: &Place,
    pid: u32,
    (lazy, full): (&Path, &Path),
) -> Result<()> {
    thread::sleep(PARTING);
    let endpoint = place.tcp()?;
    let plan = &trial.bench.plan;
    let (janitor, core) = (&trial.bench.janitor, plan.client_core);
    let quiet = trial.quiet();
    let criu = trial.criu;
    let ((), seen) = watched(&endpoint, &trial.expect, core, || {
        thread::sleep(quiet);
        Ok(())
    })?;
    trial.note("client, quiet", serde_json::to_value(seen)?);
    for (column, images) in [(Column::Lazy, lazy), (Column::Criu, full)] {
        let ((frozen_ms, took), seen) = watched(&endpoint, &trial.expect, core, || {
            let begin = Instant::now();
            let frozen_ms = match column {
                Column::Lazy => criu::dump_lazily(janitor, criu, pid, images)?,
                _ => criu::dump_all(janitor, criu, pid, images)?,
            };
            Ok((frozen_ms, begin.elapsed()))
        })?;
        trial.put(column, Measure::Freeze, frozen_ms);
        trial.put(column, Measure::Took, took.as_secs_f64());
        trial.put_seen(column, &seen);
        trial.note(&format!("client, {}", column.name()), serde_json::to_value(seen)?);
    }
    Ok(())
}

/// Kills the server, or what was restored of it, if it is there.
fn end(pid: u32) -> Result<Option<Duration>> {
    process::times(pid).map(|_| kill_hard(pid)).transpose()
}

fn crash(
    trial: &mut Trial<'_>,
    column: Column,
    place: &Place,
    pid: u32,
    near: &Path,
) -> Result<()> {
    let images = near.join("full");
    if !images.join("inventory.img").exists() {
        bail!("there is no dump to come back to");
    }
    if let Some(gone) = end(pid)? {
        trial.put(column, Measure::Gone, gone.as_secs_f64() * 1e3);
    }
    let (key, value) = trial.known(trial.some_index(1));
    let known = (&key[..], &value[..]);
    let work = near.join(if column == Column::Lazy { "back-lazily" } else { "back" });
    let (endpoint, criu) = (place.unix(), trial.criu);
    let janitor = &trial.bench.janitor;
    let ((replied, ended), daemon) = if column == Column::Lazy {
        let found = criu::restore_lazily(janitor, criu, &images, &work, &endpoint, known)?;
        trial.note("start of CRIU's lazy-pages daemon, ms", found.daemon_start.as_secs_f64() * 1e3);
        (found.times, Some(found.daemon))
    } else {
        (criu::restore_all(criu, &images, &work, &endpoint, known)?, None)
    };
    collect_sibling(pid);
    trial.put(column, Measure::Crash, replied.as_secs_f64() * 1e3);
    trial.note(&format!("restore command, {}, ms", column.name()), ended.as_secs_f64() * 1e3);
    trial.verify(&trial.client(endpoint))?;
    // The server goes first, or it would wait for pages for ever.
    end(pid)?;
    drop(daemon);
    Ok(())
}

fn reload(trial: &mut Trial<'_>, place: &Place, pid: u32) -> Result<()> {
    end(pid)?;
    if !place.directory().join("dump.rdb").exists() {
        bail!("there is no saved file to read");
    }
    let (key, value) = trial.known(trial.some_index(1));
    let begin = Instant::now();
    let pid = place.start(&Wrapping::default(), &[])?;
    let replied = first_right(&place.unix(), (&key, &value), begin, || {
        if process::times(pid).is_none() {
            bail!("redis-server ended");
        }
        Ok(())
    })?;
    trial.put(Column::Reload, Measure::Crash, replied.as_secs_f64() * 1e3);
    Ok(())
}
