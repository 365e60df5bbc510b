//! The published benchmark of transcendent memory, in form: guests whose memory together
//! exceeds the host's share build a C project at the same time. In the same DRAM: plain
//! guests with a fixed part each; guests of twice that under Strata, without balloons, and with
//! balloons that follow what they need; the same with a pool each; the same with one pool. What QEMU itself
//! takes counts in Strata's budgets: so the DRAM is what the plain guests' processes were
//! measured to take in the same repetition. And plain guests of twice that in as much DRAM
//! as they take: nothing that divides memory can be faster than those.
//!
//! Every build compares its sources and what comes of them with the checksums on the disk.
//! A trial that is done is kept in a file beside the programs: a bench that was interrupted
//! goes on there.

mod said;

use self::said::{said, series};
use super::{Bench, report::PartResults};
use crate::{
    guest::{
        machine::{Disks, Guest, Shape, Under},
        site::Site,
        words::Order,
    },
    interrupt,
    machine::Provenance,
    process,
    progress::Progress,
    strata::{Strata, total_bytes},
    subject::scratch,
};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};
use strata_api::{PoolStats, Stats};

const GUESTS: usize = 4;
/// What a plain guest has.
const FIXED_MIB: u64 = 128;
/// What a guest is promised where memory moves.
const MEMORY_MIB: u64 = 256;
/// Part of the DRAM that is a pool's: of one guest, and of all of them. There is room for
/// what a guest reads.
const OWN_POOL_MIB: u64 = 32;
const ONE_POOL_MIB: u64 = 40;
const SWAP_MIB: u64 = 512;
/// Small, as it is QEMU's own and in nobody's account.
const ACCELERATOR: &str = "tcg,thread=multi,tb-size=32";
const PATIENCE: Duration = Duration::from_secs(900);
const POOL: &str = "compile";
/// Balloons as the published ones: they follow at once, a build is short. The standard
/// settings wait half a minute before they take anything.
const BALLOON: &str = "--self-balloon=calm=3,remember=10,down=32MiB";
/// Between booting and building, for the balloons.
const SETTLING: Duration = Duration::from_secs(10);
/// Repetitions of the configurations in between; the first and the last have all.
const BETWEEN: usize = 2;

/// Readies the guest's swap disk, and its agent where it has one.
const READY: &str = "mkdir -p /dev/shm; \
    grep -q SWAPSPACE2 <(head -c 4096 /dev/vdb) || mkswap /dev/vdb >/dev/null; \
    echo 0 >/sys/block/vdb/queue/rotational; swapon --discard /dev/vdb; \
    if [ -x /strata/strata-guest-agent ]; then \
    /strata/strata-guest-agent </dev/null >/run/agent.log 2>&1 & fi";

/// Builds the project, and says what that took: [`Built`].
const BUILD: &str = r#"set -e
disk() { set -- $(cat /sys/block/$1/stat); echo "[$3, $7]"; }
balloon() { awk '/^balloon_(in|de)flate/ { n += $2 } END { print n + 0 }' /proc/vmstat; }
sync; a=$(disk vda) b=$(disk vdb) c=$(balloon) began=$(date +%s%N)
for round in $(seq $ROUNDS); do /src/build 2 check >/dev/null; done
sync
echo "{\"seconds\": $(($(date +%s%N) - began))e-9, \
\"disk\": [$a, $(disk vda)], \"swap\": [$b, $(disk vdb)], \
\"balloon_pages\": $(($(balloon) - c))}""#;

/// How the memory is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Division {
    /// Plain guests with all that the others are promised, and DRAM for it.
    Whole,
    /// A plain guest each with its part: nothing moves.
    Fixed,
    /// Budgets move, and balloons do not.
    Moving,
    /// Balloons follow their guests, too.
    Ballooning,
    /// And each guest has a pool of its own, and its swap disk in memory.
    OwnPools,
    /// One pool for all of them, each content once.
    OnePool,
}

impl Division {
    const ALL: [Self; 6] =
        [Self::Whole, Self::Fixed, Self::Moving, Self::Ballooning, Self::OwnPools, Self::OnePool];

    const fn name(self) -> &'static str {
        match self {
            Self::Whole => "all memory",
            Self::Fixed => "fixed parts",
            Self::Moving => "moving shares alone",
            Self::Ballooning => "+ self-ballooning",
            Self::OwnPools => "+ a pool each",
            Self::OnePool => "+ one pool for all",
        }
    }

    const fn is_managed(self) -> bool {
        !matches!(self, Self::Whole | Self::Fixed)
    }

    const fn has_pools(self) -> bool {
        matches!(self, Self::OwnPools | Self::OnePool)
    }

    const fn pool_mebibytes(self) -> u64 {
        match self {
            Self::OnePool => ONE_POOL_MIB,
            _ => OWN_POOL_MIB,
        }
    }

    fn pool(self, guest: usize) -> String {
        match self {
            Self::OnePool => POOL.to_owned(),
            _ => format!("{POOL}-{guest}"),
        }
    }
}

/// What a guest says of its builds: sectors read and written, before and after, and what its
/// balloon took and gave meanwhile.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Built {
    seconds: f64,
    disk: [[f64; 2]; 2],
    swap: [[f64; 2]; 2],
    balloon_pages: u64,
}

/// One trial.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trial {
    commit: String,
    division: Division,
    repetition: usize,
    /// Until the last guest was done.
    seconds: f64,
    guests: Vec<Built>,
    /// By QEMU and what serves its disks, from and to the host's disk.
    read_bytes: f64,
    written_bytes: f64,
    /// At the end: of plain guests what the kernel says, else the tenants' accounts.
    dram_bytes: u64,
    /// Processor time of QEMU and what serves its disks meanwhile, and of the daemon.
    guest_seconds: f64,
    daemon_seconds: f64,
    tenants: Vec<Stats>,
    pools: Vec<PoolStats>,
}

impl Trial {
    fn sectors(&self, of: impl Fn(&Built) -> [[f64; 2]; 2], which: usize) -> f64 {
        self.guests.iter().map(|guest| of(guest)[1][which] - of(guest)[0][which]).sum()
    }

    fn pool_bytes(&self, of: impl Fn(&PoolStats) -> u64) -> f64 {
        self.pools.iter().map(of).sum::<u64>() as f64
    }
}

/// All trials that are not done yet, in turn.
pub(super) fn compile(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let site = Site::that_compiles(&bench.plan.binaries)?;
    let kept = bench.plan.binaries.join("compile-trials.jsonl");
    let commit = Provenance::now().commit;
    let mut trials = done_before(&kept, &commit);
    if !trials.is_empty() {
        eprintln!("  {} trials of this commit are done ({})", trials.len(), kept.display());
    }
    for repetition in 0..bench.repetitions {
        for division in Division::ALL {
            let in_between = !matches!(division, Division::Fixed | Division::OnePool);
            let is_done =
                trials.iter().any(|one| one.division == division && one.repetition == repetition);
            if is_done || (in_between && repetition >= BETWEEN) {
                continue;
            }
            interrupt::check()?;
            let fixed = trials
                .iter()
                .find(|one| one.division == Division::Fixed && one.repetition == repetition);
            let dram_bytes = fixed.map(|trial| trial.dram_bytes).filter(|_| division.is_managed());
            let mut trial = tried(bench, &site, division, dram_bytes)
                .with_context(|| format!("{}, repetition {repetition}", division.name()))?;
            trial.repetition = repetition;
            trial.commit.clone_from(&commit);
            let mut file = File::options().create(true).append(true).open(&kept)?;
            writeln!(file, "{}", serde_json::to_string(&trial)?).context("keep a trial")?;
            trials.push(trial);
        }
    }
    results.series = series(&trials);
    results.text = said(&trials);
    for trial in trials {
        results.raw.push(serde_json::to_value(trial)?);
    }
    // The next bench of this commit measures again.
    fs::remove_file(&kept).context("forget the trials")
}

fn done_before(kept: &Path, commit: &str) -> Vec<Trial> {
    let text = fs::read_to_string(kept).unwrap_or_default();
    let all = text.lines().filter_map(|line| serde_json::from_str::<Trial>(line).ok());
    all.filter(|trial| trial.commit == commit).collect()
}

/// Boots all guests, has them build, and ends them; under Strata, in that much DRAM.
fn tried(bench: &Bench, site: &Site, division: Division, dram_bytes: Option<u64>) -> Result<Trial> {
    let progress = Progress::start(division.name());
    let (directory, _files) = scratch(&bench.janitor, "compile")?;
    let mut strata = None;
    if let Some(dram) = dram_bytes {
        let (pools, each) = (pools_of(division), division.pool_mebibytes());
        let left = (dram >> 20).saturating_sub(each * pools.len() as u64);
        let lines = format!("dram = \"{left}MiB\"\n");
        let started = Strata::start_with(&bench.janitor, &bench.plan.binaries, &[], Some(&lines))?;
        for pool in pools {
            started.ask(&["pool", "create", &pool, "--limit", &format!("{each}MiB")])?;
        }
        strata = Some(started);
    }
    let mut guests = Vec::new();
    for number in 0..GUESTS {
        guests.push(started(bench, site, division, number, &directory, strata.as_ref())?);
    }
    progress.set(0.1, "booting".into());
    let mut names = Vec::new();
    for (number, guest) in guests.iter_mut().enumerate() {
        guest.up()?;
        let _: String = guest.ask(&Order::Run { line: READY.into() }, PATIENCE)?;
        names.push(name_of(number));
    }
    progress.set(0.3, "settling".into());
    settle()?;
    progress.set(0.4, "building".into());
    let rounds = if bench.quick { 1 } else { 2 };
    let before = moved(&guests);
    let daemon = || processor_seconds(strata.iter().flat_map(Strata::pids));
    let (daemon_before, guests_before) = (daemon(), guests_worked(&guests));
    let began = Instant::now();
    for guest in &mut guests {
        guest.tell(&Order::Run { line: format!("ROUNDS={rounds}\n{BUILD}") })?;
    }
    let mut built = Vec::new();
    for guest in &mut guests {
        let text: String = guest.hear(PATIENCE)?;
        built.push(serde_json::from_str(&text).with_context(|| format!("understand {text:?}"))?);
    }
    let seconds = began.elapsed().as_secs_f64();
    let after = moved(&guests);
    let daemon_seconds = daemon() - daemon_before;
    let guest_seconds = guests_worked(&guests) - guests_before;
    let (mut tenants, mut pools) = (Vec::new(), Vec::new());
    let mut dram_bytes = 0;
    if let Some(strata) = &strata {
        for name in &names {
            let stats = strata.stats(name)?;
            dram_bytes += total_bytes(&stats) + stats.swap_bytes;
            tenants.push(stats);
        }
        if division.has_pools() {
            pools = serde_json::from_str(&strata.ask(&["pool", "ls", "--json"])?)
                .context("read what strata pool ls printed")?;
            pools.retain(|pool: &PoolStats| pool.guest.is_none());
        }
        dram_bytes += pools.iter().map(|pool| pool.cost_bytes).sum::<u64>();
    } else {
        let all = guests.iter().flat_map(Guest::pids).map(process::memory);
        dram_bytes = all.map(|memory| memory.anonymous_bytes + memory.shared_bytes).sum();
    }
    for guest in guests {
        guest.end()?;
    }
    if let Some(strata) = strata {
        strata.stop()?;
    }
    progress.finish(&format!("{}: {seconds:.0} s", division.name()));
    Ok(Trial {
        commit: String::new(),
        division,
        repetition: 0,
        seconds,
        guests: built,
        read_bytes: after.0 - before.0,
        written_bytes: after.1 - before.1,
        dram_bytes,
        guest_seconds,
        daemon_seconds,
        tenants,
        pools,
    })
}

fn settle() -> Result<()> {
    let until = Instant::now() + SETTLING;
    while Instant::now() < until {
        interrupt::check()?;
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn name_of(number: usize) -> String {
    format!("builder-{number}")
}

fn pools_of(division: Division) -> Vec<String> {
    match division {
        Division::Whole | Division::Fixed | Division::Moving | Division::Ballooning => Vec::new(),
        Division::OwnPools => (0..GUESTS).map(|guest| division.pool(guest)).collect(),
        Division::OnePool => vec![division.pool(0)],
    }
}

fn started(
    bench: &Bench,
    site: &Site,
    division: Division,
    number: usize,
    directory: &Path,
    strata: Option<&Strata>,
) -> Result<Guest> {
    let own = |what: &str| directory.join(format!("{what}-{number}"));
    let name = name_of(number);
    let memory = if division == Division::Fixed { FIXED_MIB } else { MEMORY_MIB };
    let overlay = own("overlay");
    let mut shape = Shape::new(&name, memory);
    let mut words: Vec<String> = Vec::new();
    if division != Division::Moving {
        words.push(BALLOON.into());
    }
    if division.has_pools() {
        shape.disks = Disks::Images(Vec::new());
        words.extend(["--disk".into(), disk(site, &division.pool(number), &overlay)]);
        words.extend(["--swap".into(), format!("{SWAP_MIB}MiB")]);
    } else {
        over(&site.disk, &overlay)?;
        let swap = own("swap");
        let file = File::create(&swap).context("make a swap disk")?;
        file.set_len(SWAP_MIB << 20).context("make a swap disk")?;
        shape.disks = Disks::Images(vec![(overlay, "qcow2"), (swap, "raw,discard=unmap")]);
    }
    if strata.is_some() {
        shape.programs = &["strata-guest-agent"];
    }
    let under = strata.map_or(Under::Nothing, |strata| Under::Strata(strata, &words));
    Guest::start(&bench.janitor, site, &shape, ACCELERATOR, under)
}

/// As `strata vm run --disk` takes it.
fn disk(site: &Site, pool: &str, overlay: &Path) -> String {
    format!("{},cache={pool},overlay={}", site.disk.display(), overlay.display())
}

fn over(base: &Path, overlay: &Path) -> Result<()> {
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .args([base, overlay])
        .output()
        .context("run qemu-img")?;
    if !made.status.success() {
        bail!("qemu-img: {}", String::from_utf8_lossy(&made.stderr).trim());
    }
    Ok(())
}

fn processor_seconds(pids: impl Iterator<Item = u32>) -> f64 {
    pids.filter_map(process::times).map(|times| times.cpu_ns).sum::<u64>() as f64 / 1e9
}

fn guests_worked(guests: &[Guest]) -> f64 {
    processor_seconds(guests.iter().flat_map(Guest::pids))
}

/// What all processes of the guests have read from the host's disk, and written.
fn moved(guests: &[Guest]) -> (f64, f64) {
    let mut sum = (0.0, 0.0);
    for pid in guests.iter().flat_map(Guest::pids) {
        let (read, written) = process::moved_bytes(pid);
        sum = (sum.0 + read as f64, sum.1 + written as f64);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn trial(division: Division, repetition: usize) -> Trial {
        let built = Built {
            seconds: 2.0,
            disk: [[10.0, 1.0], [110.0, 3.0]],
            swap: [[0.0, 0.0], [8.0, 0.0]],
            balloon_pages: 256,
        };
        Trial {
            commit: "abc".into(),
            division,
            repetition,
            seconds: 3.0,
            guests: vec![built; GUESTS],
            read_bytes: 5120.0,
            written_bytes: 0.0,
            dram_bytes: 1,
            guest_seconds: 1.5,
            daemon_seconds: 0.0,
            tenants: Vec::new(),
            pools: Vec::new(),
        }
    }

    #[test]
    fn only_trials_of_this_commit_count_as_done() {
        let path = std::env::temp_dir().join(format!("strata-lab-kept-{}", std::process::id()));
        let line = serde_json::to_string(&trial(Division::Ballooning, 1)).expect("said");
        // The last one was cut off.
        fs::write(&path, format!("{line}\n{}", &line[..20])).expect("written");
        let found = done_before(&path, "abc");
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].division, found[0].repetition), (Division::Ballooning, 1));
        assert!(done_before(&path, "abd").is_empty());
        fs::remove_file(&path).expect("removed");
    }
}
