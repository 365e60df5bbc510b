//! A rival in user space: memtierd (github.com/intel/memtierd), which tracks a
//! program's accesses with what the kernel offers and swaps out what is idle.
//! Finds out which of its trackers can see anything here, and runs it beside a
//! server. Where its program comes from is `scripts/memtierd.sh`'s business.

use crate::{
    janitor::{Janitor, Registered, Undo, write},
    process::Pagemap,
    subject::{Subject, last_line, scratch},
};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{
    fmt::Write as _,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use strata_units::PAGE_SIZE;

/// Ways in which it can see that a page is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Tracker {
    /// The kernel's idle page flags.
    Idlepage,
    /// DAMON on the program's addresses.
    Damon,
    /// Soft-dirty bits: writes only.
    Softdirty,
    /// None: every range is reported, no access is.
    Finder,
}

/// Best first.
const TRACKERS: [Tracker; 4] =
    [Tracker::Idlepage, Tracker::Damon, Tracker::Softdirty, Tracker::Finder];

/// A built memtierd and the best tracker for a load here.
#[derive(Clone, Debug)]
pub(crate) struct Tool {
    program: PathBuf,
    pub tracker: Tracker,
    /// Why the better ones were not taken, as observed.
    pub refused: Vec<String>,
}

impl Tracker {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Idlepage => "idlepage",
            Self::Damon => "damon",
            Self::Softdirty => "softdirty",
            Self::Finder => "finder",
        }
    }

    /// Why it sees nothing here; Ok when it does.
    fn probe(self, janitor: &Janitor, load_writes: bool) -> Result<()> {
        match self {
            Self::Idlepage => {
                let bitmap = "/sys/kernel/mm/page_idle/bitmap";
                File::open(bitmap).map(|_| ()).with_context(|| format!("open {bitmap}"))
            }
            Self::Damon => probe_damon(janitor),
            Self::Softdirty if !load_writes => bail!("it sees writes, and this load only reads"),
            Self::Softdirty => probe_soft_dirty(),
            Self::Finder => Ok(()),
        }
    }

    /// Its part of the configuration, after memtierd's own samples.
    fn configuration(self) -> &'static [&'static str] {
        match self {
            Self::Idlepage | Self::Softdirty => {
                &["pagesinregion: 256", "scanintervalms: 1000", "regionsupdatems: 1000"]
            }
            Self::Damon => &[
                "connection: perf",
                "interface: 1",
                "nrkdamonds: 1",
                "kdamondslist: [0]",
                "samplingus: 1000",
                "aggregationus: 1000000",
                "regionsupdateus: 1000000",
                "maxtargetregions: 2000",
            ],
            Self::Finder => &["regionsupdatems: 1000"],
        }
    }
}

/// DAMON must offer the operations for virtual addresses. It lists them in a
/// context, so one is made for the moment if there is none.
fn probe_damon(janitor: &Janitor) -> Result<()> {
    let admin = Path::new("/sys/kernel/mm/damon/admin/kdamonds");
    let offered = admin.join("0/contexts/0/avail_operations");
    let read =
        |path: &Path| fs::read_to_string(path).with_context(|| format!("read {}", path.display()));
    let mut made = None;
    if !offered.exists() {
        let count = admin.join("nr_kdamonds");
        let value = read(&count)?.trim().to_owned();
        if value != "0" {
            bail!("DAMON is set up by someone else");
        }
        made = Some(janitor.register(Undo::WriteBack { path: count.clone(), value })?);
        write(&count, "1")?;
        write(&admin.join("0/contexts/nr_contexts"), "1")?;
    }
    let text = read(&offered)?;
    made.map_or(Ok(()), Registered::undo)?;
    let found: Vec<&str> = text.split_whitespace().collect();
    if !found.contains(&"vaddr") {
        bail!("DAMON here offers {} and not vaddr", found.join(", "));
    }
    Ok(())
}

/// A page that has just been written must be marked in `/proc/self/pagemap`.
fn probe_soft_dirty() -> Result<()> {
    const SOFT_DIRTY: u64 = 1 << 55;
    let written = vec![1u8; 2 * PAGE_SIZE];
    let address = std::hint::black_box(&written).as_ptr() as usize + PAGE_SIZE;
    if Pagemap::open()?.entry(address)? & SOFT_DIRTY == 0 {
        bail!("a page just written is not marked soft-dirty in /proc/self/pagemap");
    }
    Ok(())
}

impl Tool {
    /// Looks at what the kernel offers for a load that writes or does not.
    pub(crate) fn find(janitor: &Janitor, program: &Path, load_writes: bool) -> Result<Self> {
        if !program.exists() {
            bail!("memtierd is not built: scripts/memtierd.sh builds it and says why if it cannot");
        }
        let mut refused = Vec::new();
        for tracker in TRACKERS {
            match tracker.probe(janitor, load_writes) {
                Ok(()) => {
                    return Ok(Self { program: program.to_owned(), tracker, refused });
                }
                Err(error) => refused.push(format!("{}: {error:#}", tracker.name())),
            }
        }
        bail!("no tracker works here: {}", refused.join("; "))
    }
}

/// What it swaps out is what its tracker has not seen used for this long. Twice
/// the interval at which its age policy looks.
const SWAP_OUT_MS: u32 = 2000;
const INTERVAL_MS: u32 = 1000;
/// MB/s of its mover, as in its samples.
const MOVER_BANDWIDTH: u32 = 200;

fn configuration(pid: u32, tracker: Tracker) -> String {
    let mut out = format!(
        "policy:\n  name: age\n  config: |\n    intervalms: {INTERVAL_MS}\n    pidwatcher:\n      \
         name: pidlist\n      config: |\n        pids:\n          - {pid}\n    \
         swapoutms: {SWAP_OUT_MS}\n    tracker:\n      name: {}\n      config: |\n",
        tracker.name()
    );
    for line in tracker.configuration() {
        writeln!(out, "        {line}").expect("a String takes all");
    }
    write!(out, "    mover:\n      intervalms: 20\n      bandwidth: {MOVER_BANDWIDTH}\n")
        .expect("a String takes all");
    out
}

/// memtierd at work on one process.
pub(crate) struct Memtierd {
    subject: Subject,
    log: PathBuf,
}

impl Memtierd {
    pub(crate) fn start(janitor: &Janitor, tool: &Tool, pid: u32) -> Result<Self> {
        let (directory, files) = scratch(janitor, "memtierd")?;
        let settings = directory.join("memtierd.yaml");
        fs::write(&settings, configuration(pid, tool.tracker)).context("configure memtierd")?;
        let log = directory.join("log");
        let output = File::create(&log).context("make memtierd's log")?;
        let mut command = Command::new(&tool.program);
        command
            .arg("-config")
            .arg(&settings)
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("share memtierd's log")?)
            .stderr(output);
        Ok(Self { subject: Subject::spawn(janitor, &mut command)?.with(files), log })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.subject.pid()
    }

    /// An error with its last words when it has ended on its own.
    pub(crate) fn check(&mut self) -> Result<()> {
        let Some(status) = self.subject.child().try_wait().context("look at memtierd")? else {
            return Ok(());
        };
        bail!("memtierd ended ({status}): {}", last_line(&self.log))
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.subject.stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_names_process_and_tracker() {
        let text = configuration(42, Tracker::Finder);
        assert!(text.contains("          - 42\n"), "{text}");
        assert!(text.contains("      name: finder\n"), "{text}");
        // A block scalar inside a block scalar: every line is indented.
        assert!(text.lines().skip(3).all(|line| line.starts_with("    ")), "{text}");
    }
}
