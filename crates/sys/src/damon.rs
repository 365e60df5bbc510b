//! DAMON, the kernel's access monitor: which parts of a process's memory are used,
//! seen by samples of the page tables' accessed bits
//! (`Documentation/admin-guide/mm/damon/usage.rst`).
//!
//! The machine has one such directory for everybody, and no owner is written there.
//! So a [`Damon`] takes it for one look at one process, only where nobody is, and
//! gives it back after the look; what it makes carries a mark, an interval that
//! nobody else has, by which the next one knows what a killed one has left. What has
//! no such mark it leaves alone.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Range, try_lock};

const ADMIN: &str = "/sys/kernel/mm/damon/admin/kdamonds";
const COUNT: &str = "nr_kdamonds";
const STATE: &str = "0/state";
const CONTEXT_COUNT: &str = "0/contexts/nr_contexts";
const OPERATIONS: &str = "0/contexts/0/avail_operations";
const SAMPLE_US: &str = "0/contexts/0/monitoring_attrs/intervals/sample_us";
const PID: &str = "0/contexts/0/targets/0/pid_target";
const TRIED: &str = "0/contexts/0/schemes/0/tried_regions";
/// Watches what it is told, and not all of a process.
const FIXED: &str = "fvaddr";

/// Time between two samples, and the mark: no round number, so nobody else's. A page
/// that is used a few times in a second is seen by some of the samples.
const MARK_US: u64 = 49_937;
/// Samples that are counted together: the most that [`DamonRange::hits`] can be.
pub const DAMON_SAMPLES: u32 = 20;
/// How long they take.
pub const DAMON_PERIOD: Duration = Duration::from_micros(MARK_US * DAMON_SAMPLES as u64);
/// Ranges of one look: each is two files to write, and a page looked at twice in each
/// sample.
pub const DAMON_RANGES: usize = 512;
/// Into so many the kernel may divide them: a bound on the processor time.
const MOST_PARTS: usize = 2 * DAMON_RANGES;
/// The kernel wants room for so many.
const LEAST_PARTS: usize = 3;
/// Ranges that are read of a snapshot. The kernel keeps to `MOST_PARTS` in the long run.
const MOST_READ: usize = 4 * MOST_PARTS;
/// The kernel answers "busy" while anybody at all reads or writes there. A snapshot
/// that somebody else takes lasts for two of their periods.
const PATIENCE: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// Whose DAMON is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DamonOwner {
    /// The kernel has none.
    Absent,
    /// We may not look.
    Unseen,
    /// Nobody's.
    Nobody,
    /// It carries the mark: a Strata's that lives, or has died.
    Strata,
    /// Somebody else's.
    Other,
}

/// Why nothing can be watched.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DamonRefusal {
    /// The kernel has none.
    Absent,
    /// No right to it.
    Forbidden,
    /// Somebody else uses it.
    Taken,
    /// Another Strata does.
    Shared,
    /// The kernel's cannot watch a part of a process.
    Unable,
    /// The kernel refused a step: the file, and its reason.
    Refused(String, String),
}

impl fmt::Display for DamonRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("not in this kernel"),
            Self::Forbidden => f.write_str("not permitted (run stratad as root)"),
            Self::Taken => f.write_str("used by somebody else"),
            Self::Shared => f.write_str("used by another stratad"),
            Self::Unable => f.write_str("this kernel's cannot watch virtual addresses"),
            Self::Refused(file, why) => write!(f, "the kernel refused {file}: {why}"),
        }
    }
}

/// What was seen of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DamonRange {
    /// Where; the kernel divides and joins the ranges that it was given.
    pub range: Range,
    /// In how many of [`DAMON_SAMPLES`] a page of it, another one each time, had been
    /// used since the sample before.
    pub hits: u32,
}

/// The kernel's files, or a test's.
trait Files: Send {
    fn read(&self, path: &str) -> io::Result<String>;
    fn write(&mut self, path: &str, text: &str) -> io::Result<()>;
    /// Keeps others of our kind away for as long as this lives. False: another is here.
    fn lock(&mut self) -> io::Result<bool>;
    fn pause(&self);
}

struct Sysfs {
    root: PathBuf,
    /// Held open: the lock. It is on the count itself, which is never made anew, and
    /// which only root can open.
    lock: Option<File>,
}

impl Files for Sysfs {
    fn read(&self, path: &str) -> io::Result<String> {
        std::fs::read_to_string(self.root.join(path))
    }

    fn write(&mut self, path: &str, text: &str) -> io::Result<()> {
        // Never made: what is not there is not offered.
        let mut file = File::options().write(true).open(self.root.join(path))?;
        io::Write::write_all(&mut file, text.as_bytes())
    }

    fn lock(&mut self) -> io::Result<bool> {
        if self.lock.is_none() {
            let file = File::open(self.root.join(COUNT))?;
            if try_lock(file.as_fd())? {
                self.lock = Some(file);
            }
        }
        Ok(self.lock.is_some())
    }

    fn pause(&self) {
        std::thread::sleep(PAUSE);
    }
}

/// See the module's text.
pub struct Damon {
    files: Box<dyn Files>,
    /// What is being watched.
    pid: Option<u32>,
}

impl Default for Damon {
    fn default() -> Self {
        Self::at(Path::new(ADMIN))
    }
}

impl fmt::Debug for Damon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Damon").field("pid", &self.pid).finish_non_exhaustive()
    }
}

impl Damon {
    /// That of a directory of `kdamonds`: this machine's ([`Damon::default`]), or a
    /// made-up one.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self { files: Box::new(Sysfs { root: root.to_owned(), lock: None }), pid: None }
    }

    /// Whose it is now. Changes nothing.
    #[must_use]
    pub fn owner(&self) -> DamonOwner {
        match self.read(COUNT) {
            Err(DamonRefusal::Absent) => DamonOwner::Absent,
            Err(_) => DamonOwner::Unseen,
            Ok(count) if count == "0" => DamonOwner::Nobody,
            Ok(count) if count == "1" && self.is_marked() => DamonOwner::Strata,
            Ok(_) => DamonOwner::Other,
        }
    }

    fn is_marked(&self) -> bool {
        let number = self.read(SAMPLE_US).ok().and_then(|text| text.parse().ok());
        number == Some(MARK_US)
    }

    /// What it can watch, if somebody has set it up. (The kernel lists it only there.)
    #[must_use]
    pub fn operations(&self) -> Option<Vec<String>> {
        let text = self.read(OPERATIONS).ok()?;
        Some(text.split_whitespace().map(str::to_owned).collect())
    }

    /// As [`Damon::operations`], asked by setting it up for a moment where nobody has.
    ///
    /// # Errors
    /// It cannot be asked now, or is somebody's who has not set it up so far.
    pub fn try_operations(&mut self) -> Result<Vec<String>, DamonRefusal> {
        if let Some(operations) = self.operations() {
            return Ok(operations);
        }
        self.take()?;
        let operations = self.operations();
        self.give_back()?;
        operations.ok_or(DamonRefusal::Unable)
    }

    /// Begins to watch `ranges` of a process: at most [`DAMON_RANGES`], in order, apart
    /// from each other. Whatever comes of it, [`Damon::give_back`] ends it.
    ///
    /// # Errors
    /// Why it does not.
    pub fn watch(&mut self, pid: u32, ranges: &[Range]) -> Result<(), DamonRefusal> {
        assert!(ranges.len() <= DAMON_RANGES, "more ranges than can be watched");
        self.take()?;
        if !self.operations().is_some_and(|list| list.iter().any(|name| name == FIXED)) {
            return Err(DamonRefusal::Unable);
        }
        let context = |name: &str| format!("0/contexts/0/{name}");
        let parts = ranges.len().max(LEAST_PARTS);
        self.write(&context("operations"), FIXED)?;
        // Parts that are used alike are joined up to the size that they have now.
        self.write(&context("monitoring_attrs/nr_regions/min"), parts)?;
        self.write(&context("monitoring_attrs/nr_regions/max"), MOST_PARTS)?;
        self.write(&context("targets/nr_targets"), 1)?;
        self.write(PID, pid)?;
        self.write(&context("targets/0/regions/nr_regions"), ranges.len())?;
        for (number, range) in ranges.iter().enumerate() {
            let region = context(&format!("targets/0/regions/{number}"));
            self.write(&format!("{region}/start"), range.start)?;
            self.write(&format!("{region}/end"), range.end)?;
        }
        // Everything that it sees is counted, and nothing done to it.
        self.write(&context("schemes/nr_schemes"), 1)?;
        self.write(&context("schemes/0/action"), "stat")?;
        for (name, most) in
            [("sz", u64::MAX), ("nr_accesses", u32::MAX.into()), ("age", u32::MAX.into())]
        {
            self.write(&context(&format!("schemes/0/access_pattern/{name}/min")), 0)?;
            self.write(&context(&format!("schemes/0/access_pattern/{name}/max")), most)?;
        }
        self.write(STATE, "on")?;
        self.pid = Some(pid);
        // Until it ran, somebody could have changed all of it; now nobody can.
        if self.watches(pid) { Ok(()) } else { Err(DamonRefusal::Taken) }
    }

    /// What has been seen in the last [`DAMON_PERIOD`]. Waits for up to two of them.
    ///
    /// # Errors
    /// Nothing can be said; the process has ended, most likely.
    pub fn seen(&mut self) -> Result<Vec<DamonRange>, DamonRefusal> {
        self.write(STATE, "update_schemes_tried_regions")?;
        if !self.pid.is_some_and(|pid| self.watches(pid)) {
            return Err(DamonRefusal::Taken);
        }
        let mut seen = Vec::new();
        for number in 0..MOST_READ {
            let number_in = |name: &str| self.number(&format!("{TRIED}/{number}/{name}"));
            let (start, end, hits) = match number_in("start") {
                Err(DamonRefusal::Absent) => break,
                start => (start, number_in("end"), number_in("nr_accesses")),
            };
            // What cannot be read is as what was not seen.
            let (Ok(start), Ok(end), Ok(hits)) = (start, end, hits) else { continue };
            if start < end {
                let hits = u32::try_from(hits).unwrap_or(u32::MAX).min(DAMON_SAMPLES);
                seen.push(DamonRange { range: Range { start, end }, hits });
            }
        }
        Ok(seen)
    }

    /// Ends whatever carries the mark, left by a dead one of us or made by this one, and
    /// leaves the directory empty. What does not carry it stays as it is, and so does
    /// that of another Strata that lives.
    ///
    /// # Errors
    /// Something is left: the next look tries again.
    pub fn give_back(&mut self) -> Result<(), DamonRefusal> {
        self.pid = None;
        if !matches!(self.files.lock(), Ok(true)) {
            return Ok(());
        }
        let mut refused = Ok(());
        for _ in 0..PATIENCE {
            if self.owner() != DamonOwner::Strata {
                return Ok(());
            }
            // Refused if it does not run: that the count is 0 is what counts.
            let _ = self.files.write(STATE, "off");
            match self.files.write(COUNT, "0") {
                Ok(()) => return Ok(()),
                Err(error) => refused = Err(refusal(COUNT, &error)),
            }
            self.files.pause();
        }
        refused
    }

    /// Takes the directory, if it is nobody's or left over, and marks it.
    fn take(&mut self) -> Result<(), DamonRefusal> {
        match self.files.lock() {
            Ok(true) => {}
            Ok(false) => return Err(DamonRefusal::Shared),
            Err(error) => return Err(refusal(COUNT, &error)),
        }
        // The lock is ours: whoever left the mark is dead, or it is our own.
        self.give_back()?;
        match self.owner() {
            DamonOwner::Nobody => {}
            DamonOwner::Absent => return Err(DamonRefusal::Absent),
            DamonOwner::Unseen => return Err(DamonRefusal::Forbidden),
            DamonOwner::Strata | DamonOwner::Other => return Err(DamonRefusal::Taken),
        }
        self.write(COUNT, 1)?;
        let marked = self
            .write(CONTEXT_COUNT, 1)
            .and_then(|()| self.write(SAMPLE_US, MARK_US))
            .and_then(|()| {
                let period = "0/contexts/0/monitoring_attrs/intervals/aggr_us";
                self.write(period, MARK_US * u64::from(DAMON_SAMPLES))
            });
        if marked.is_err() && !self.is_marked() {
            // Made by us a moment ago; later it could not be told from somebody else's.
            // (One that runs by now the kernel keeps.)
            let _ = self.files.write(COUNT, "0");
        }
        marked
    }

    fn watches(&self, pid: u32) -> bool {
        self.owner() == DamonOwner::Strata && self.number(PID) == Ok(u64::from(pid))
    }

    fn number(&self, path: &str) -> Result<u64, DamonRefusal> {
        let text = self.read(path)?;
        text.parse().map_err(|_| DamonRefusal::Refused(path.into(), format!("says {text:?}")))
    }

    fn read(&self, path: &str) -> Result<String, DamonRefusal> {
        let text = patiently(|| self.files.read(path), || self.files.pause());
        text.map(|text| text.trim().to_owned()).map_err(|error| refusal(path, &error))
    }

    fn write(&mut self, path: &str, value: impl fmt::Display) -> Result<(), DamonRefusal> {
        let value = value.to_string();
        let mut left = PATIENCE;
        loop {
            match self.files.write(path, &value) {
                Err(error) if is_busy(&error) && left > 0 => {
                    left -= 1;
                    self.files.pause();
                }
                Err(error) if path != COUNT && error.kind() == io::ErrorKind::NotFound => {
                    return Err(DamonRefusal::Refused(path.into(), "it is not there".into()));
                }
                written => return written.map_err(|error| refusal(path, &error)),
            }
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}

fn patiently<T>(mut step: impl FnMut() -> io::Result<T>, pause: impl Fn()) -> io::Result<T> {
    for _ in 0..PATIENCE {
        match step() {
            Err(error) if is_busy(&error) => pause(),
            done => return done,
        }
    }
    step()
}

fn refusal(path: &str, error: &io::Error) -> DamonRefusal {
    match error.kind() {
        io::ErrorKind::NotFound => DamonRefusal::Absent,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            DamonRefusal::Forbidden
        }
        _ => DamonRefusal::Refused(path.into(), error.to_string()),
    }
}

#[cfg(test)]
#[path = "damon_tests.rs"]
mod tests;
