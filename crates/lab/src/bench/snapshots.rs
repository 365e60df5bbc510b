//! Snapshots: how long a program stands still, how soon it is back, what
//! clones cost; Strata beside plain CRIU and Redis's own reload.
//!
//! Wiring only: which subject runs when. What is done with each lies in
//! `snapshots/tenant.rs`, `plain.rs` and `clones.rs`, what is made of the
//! figures in `snapshots/rows.rs`.

mod clones;
mod criu;
mod observe;
mod place;
mod plain;
mod rows;
mod tenant;

use super::{Bench, report::PartResults};
use crate::{
    interrupt,
    keys::scramble,
    process,
    progress::Progress,
    random::mix,
    records::Records,
    redis::{
        expect::Expect,
        load::{Client, Moment, key_name},
        resp::Endpoint,
        tally::WrongValues,
    },
};
use anyhow::{Context, Result, bail};
use observe::Seen;
use rows::{Column, Figures, Measure};
use std::{
    env,
    path::{Path, PathBuf},
    time::Duration,
};
use strata_snapshot::Criu;
use strata_units::ByteSize;

/// What a record costs Redis with its key, entry and table, in bytes: says how
/// many make a server of a size. What it really has is measured.
const RECORD_COST_BYTES: u64 = 1400;
/// The clones are of this much; the size nearest to it is cloned.
const CLONED_BYTES: u64 = 1_000_000_000;

/// What of this part can be chosen.
#[derive(clap::Args)]
pub(super) struct Sizes {
    /// Of the part `snapshots`: sizes of the Redis that is snapshotted
    #[arg(long, value_delimiter = ',', default_value = "1GB,4GB")]
    sizes: Vec<ByteSize>,
}

/// What is run once in a repetition, for a size.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    /// Under Strata, far from its budget.
    Resident,
    /// Under Strata with half of its size as budget.
    Half,
    /// Without Strata: CRIU, and the reload of a dump of its own.
    Plain,
    /// Clones of one under Strata.
    Clones,
}

impl Subject {
    const fn name(self) -> &'static str {
        match self {
            Self::Resident => "Strata, all resident",
            Self::Half => "Strata, half resident",
            Self::Plain => "CRIU and reload",
            Self::Clones => "Strata, clones",
        }
    }

    /// In names of tenants and directories.
    const fn word(self) -> &'static str {
        match self {
            Self::Resident => "all",
            Self::Half => "half",
            Self::Plain => "plain",
            Self::Clones => "clones",
        }
    }
}

/// One server of one repetition.
struct Trial<'a> {
    bench: &'a Bench,
    criu: &'a Criu,
    progress: &'a Progress,
    /// Of this repetition and size.
    name: String,
    size_bytes: u64,
    /// What every key holds.
    expect: Expect,
    subject: Subject,
    repetition: usize,
    figures: &'a mut Figures,
    /// What is known beside the figures; goes into the raw results.
    notes: serde_json::Map<String, serde_json::Value>,
}

impl Trial<'_> {
    fn put(&mut self, column: Column, measure: Measure, value: f64) {
        self.figures.put(measure, self.size_bytes, column, value);
    }

    /// What a client saw over a whole snapshot.
    fn put_seen(&mut self, column: Column, seen: &Seen) {
        self.put(column, Measure::DuringP99, seen.p99_ms);
        self.put(column, Measure::DuringLongest, seen.longest_ms);
    }

    /// Sets every key, as the client of all other parts.
    fn load(&self, client: &Client) -> Result<()> {
        self.progress.part("loading");
        client.load(&self.expect, &mut |moment| self.show(moment)).context("load")?;
        Ok(())
    }

    /// Reads every value, in the first repetition.
    fn verify(&self, client: &Client) -> Result<()> {
        if self.repetition == 0 {
            self.progress.part("verifying every value");
            client.verify(&self.expect, &mut |moment| self.show(moment)).context("verify")?;
        }
        Ok(())
    }

    fn show(&self, moment: Moment) {
        if let Moment::Tick { done, operations } = moment {
            self.progress.set(done, format!("{operations}"));
        }
    }

    fn client(&self, endpoint: Endpoint) -> Client {
        let plan = &self.bench.plan;
        Client {
            endpoint,
            connections: plan.connections,
            pipeline: plan.pipeline,
            core: plan.client_core,
        }
    }

    /// A key and its value: a reply with it is right.
    fn known(&self, index: u64) -> (Vec<u8>, Vec<u8>) {
        let mut value = Vec::new();
        self.expect.current(index, &mut value);
        (key_name(index).to_vec(), value)
    }

    /// Somewhere among the keys, another in each repetition: what it is in need
    /// not have been touched lately.
    fn some_index(&self, salt: u64) -> u64 {
        scramble(mix(self.repetition as u64) ^ salt, self.expect.count())
    }

    /// The server to its core, as in the other parts.
    fn pin(&self, pid: u32) -> Result<()> {
        self.bench.plan.server_core.map_or(Ok(()), |core| process::pin_process(pid, core))
    }

    fn note(&mut self, word: &str, value: impl Into<serde_json::Value>) {
        self.notes.insert(word.to_owned(), value.into());
    }

    /// A step whose failure is said and does not end the trial: what does not
    /// build on it goes on. None: it failed.
    fn step<T>(
        &mut self,
        what: &str,
        step: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        interrupt::check()?;
        self.progress.part(what);
        match step(self) {
            Ok(value) => Ok(Some(value)),
            Err(error) if interrupt::requested() || error.is::<WrongValues>() => Err(error),
            Err(error) => {
                let reason = format!("{}: {what}: {error:#}", self.title());
                eprintln!("  not measured: {reason}");
                self.figures.fail(reason);
                Ok(None)
            }
        }
    }

    fn title(&self) -> String {
        let size = rows::size_name(self.size_bytes);
        format!("{size}, {} ({})", self.subject.name(), self.repetition + 1)
    }

    /// How long clients are watched with nothing going on.
    const fn quiet(&self) -> Duration {
        if self.bench.quick { Duration::from_millis(700) } else { Duration::from_secs(3) }
    }
}

/// All of the part.
pub(super) fn snapshots(bench: &Bench, sizes: &Sizes, results: &mut PartResults) -> Result<()> {
    let criu = find_criu()?;
    let mut figures = Figures::default();
    let ended = all(bench, sizes, &criu, &mut figures, results);
    let version = criu.version();
    results.raw.push(serde_json::json!({ "criu": version, "figures": figures.all() }));
    results.text = figures.markdown(version);
    ended?;
    if let Some(first) = figures.failures().first() {
        bail!("{} not measured, first: {first}", figures.failures().len());
    }
    Ok(())
}

/// As the product finds it, or what `scripts/setup.sh criu` fetched.
fn find_criu() -> Result<Criu> {
    let named = env::var_os("STRATA_CRIU").filter(|path| !path.is_empty()).map(PathBuf::from);
    let fetched = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".cache")))
        .map(|cache| cache.join("strata-lab/criu/criu"))
        .filter(|path| path.is_file());
    Criu::find(named.as_deref())
        .or_else(|error| match &fetched {
            Some(path) if named.is_none() => Criu::find(Some(path)),
            _ => Err(error),
        })
        .context("skipped: no CRIU (scripts/setup.sh criu fetches one; STRATA_CRIU names another)")
}

fn all(
    bench: &Bench,
    sizes: &Sizes,
    criu: &Criu,
    figures: &mut Figures,
    results: &mut PartResults,
) -> Result<()> {
    let to_clone = sizes.sizes.iter().min_by_key(|size| size.0.abs_diff(CLONED_BYTES));
    for repetition in bench.repetitions() {
        for size in &sizes.sizes {
            let mut subjects = vec![Subject::Resident, Subject::Half, Subject::Plain];
            // Who comes first may have the better machine.
            subjects.rotate_left(repetition % 3);
            if Some(size) == to_clone {
                subjects.push(Subject::Clones);
            }
            for subject in subjects {
                interrupt::check()?;
                one(bench, criu, (size.0, subject, repetition), figures, results)?;
            }
        }
    }
    Ok(())
}

fn one(
    bench: &Bench,
    criu: &Criu,
    (size_bytes, subject, repetition): (u64, Subject, usize),
    figures: &mut Figures,
    results: &mut PartResults,
) -> Result<()> {
    let count = (size_bytes / RECORD_COST_BYTES).max(1000);
    let word = subject.word();
    let progress = Progress::start("starting");
    let mut trial = Trial {
        bench,
        criu,
        progress: &progress,
        name: format!("snap-{}-{repetition}-{word}-{}", std::process::id(), size_bytes >> 20),
        size_bytes,
        expect: Expect::new(Records::new(mix(bench.plan.workload.seed)), count),
        subject,
        repetition,
        figures,
        notes: serde_json::Map::new(),
    };
    let title = trial.title();
    let ended = match subject {
        Subject::Resident => tenant::run(&mut trial, Column::Resident, size_bytes * 2),
        Subject::Half => tenant::run(&mut trial, Column::Half, size_bytes / 2),
        Subject::Plain => plain::run(&mut trial),
        Subject::Clones => clones::run(&mut trial),
    };
    let notes = std::mem::take(&mut trial.notes);
    progress.finish(&title);
    results.raw.push(serde_json::json!({
        "subject": subject.name(),
        "size_bytes": size_bytes,
        "records": count,
        "repetition": repetition,
        "seen": notes,
    }));
    match ended {
        Err(error) if interrupt::requested() || error.is::<WrongValues>() => Err(error),
        Err(error) => {
            let reason = format!("{title}: {error:#}");
            eprintln!("  not measured: {reason}");
            figures.fail(reason);
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// A directory for images, in memory if there is room for them beside a server
/// of the size: they are then as near as they can be.
fn near_storage(name: &str, images_bytes: u64, size_bytes: u64) -> PathBuf {
    let memory = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(memory).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    let available = process::available_bytes().unwrap_or(0);
    let has_room = room > images_bytes && available > images_bytes + size_bytes * 3 / 2;
    let base = if has_room { memory.to_owned() } else { env::temp_dir() };
    base.join(format!("strata-lab-{}-{name}", std::process::id()))
}
