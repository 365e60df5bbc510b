//! What this machine allows and what is lost without each thing: the findings of
//! `strata doctor`. Everything is tried where trying is harmless; the rest is
//! read from `/proc` and `/sys`. Nothing is left changed.
//!
//! Probes are in `doctor/`: the kernel's own services in `kernel.rs`, devices
//! and programs beside it in `machine.rs`, what guests need in `guests.rs`.

mod guests;
mod kernel;
mod machine;
mod node;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::config::{Config, Machine};

/// Whether a thing is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Presence {
    /// As Strata wants it.
    Yes,
    /// There, with less than Strata could use.
    Partly,
    /// Not there, or not for us.
    No,
}

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Finding {
    /// What.
    pub(crate) name: &'static str,
    /// Whether it is there.
    pub(crate) presence: Presence,
    /// What was found.
    pub(crate) detail: String,
    /// What Strata cannot do without it; empty when it is there.
    pub(crate) lost: &'static str,
    /// Without it no program can be managed at all.
    pub(crate) essential: bool,
}

impl Finding {
    fn new(name: &'static str, presence: Presence, detail: impl Into<String>) -> Self {
        Self { name, presence, detail: detail.into(), lost: "", essential: false }
    }

    fn yes_or_no(name: &'static str, yes: bool, detail: impl Into<String>) -> Self {
        Self::new(name, if yes { Presence::Yes } else { Presence::No }, detail)
    }

    /// Says what is lost when the thing is missing or less than wanted.
    fn without(mut self, lost: &'static str) -> Self {
        if self.presence != Presence::Yes {
            self.lost = lost;
        }
        self
    }

    fn essential(mut self) -> Self {
        self.essential = true;
        self
    }
}

/// All findings.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Report {
    /// Whether programs can be managed here at all, by whoever asked.
    pub(crate) ready: bool,
    /// In the order in which they are shown.
    pub(crate) findings: Vec<Finding>,
}

impl Report {
    fn new(findings: Vec<Finding>) -> Self {
        let blocks = |finding: &Finding| finding.essential && finding.presence == Presence::No;
        Self { ready: !findings.iter().any(blocks), findings }
    }

    /// Why no program can be managed, and what to do; None when some can.
    fn obstacle(&self) -> Option<String> {
        let missing = |finding: &&Finding| finding.presence == Presence::No;
        let essential = self.findings.iter().find(|f| f.essential && missing(f))?;
        // A kernel that is too old is what a missing feature means.
        let old = self.findings.iter().find(|f| f.name == kernel::NAME && missing(f));
        let (finding, todo) = match (essential.name, old) {
            (kernel::PRIVILEGES, _) => (essential, "run stratad as root"),
            (_, Some(old)) => (old, "strata doctor tells more"),
            (_, None) => (essential, "strata doctor tells more"),
        };
        let Finding { name, detail, lost, .. } = finding;
        Some(match finding.essential {
            true => format!("{name}: {detail}; {todo}"),
            false => format!("{detail}: {lost}; {todo}"),
        })
    }

    /// For programs.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("findings are plain text")
    }
}

/// For people: one line a finding, a second one for what is lost.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
        for Finding { name, presence, detail, lost, .. } in &self.findings {
            let mark = match presence {
                Presence::Yes => '✓',
                Presence::Partly => '~',
                Presence::No => '✗',
            };
            writeln!(f, "{mark} {name:width$}  {detail}")?;
            if !lost.is_empty() {
                writeln!(f, "  {:width$}  lost: {lost}", "")?;
            }
        }
        if self.ready {
            return writeln!(f, "Programs can be managed here.");
        }
        let blocking: Vec<&str> = self
            .findings
            .iter()
            .filter(|finding| finding.essential && finding.presence == Presence::No)
            .map(|finding| finding.name)
            .collect();
        writeln!(f, "Programs cannot be managed here, for want of: {}.", blocking.join(", "))
    }
}

/// The files of a machine: the real ones, or a made-up tree in tests.
struct Files {
    root: PathBuf,
}

impl Files {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The trimmed text of a file; None when it cannot be read.
    fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Names in a directory, sorted; none when it cannot be read.
    fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

/// What keeps a daemon here from managing anything, if something does.
pub(crate) fn obstacle() -> Option<String> {
    let files = Files { root: Path::new("/").to_owned() };
    Report::new(kernel::essentials(&files)).obstacle()
}

/// Examines this machine.
pub(crate) fn examine() -> Report {
    let files = Files { root: Path::new("/").to_owned() };
    // The system's daemon's. Where it is wrong, `config-check` says so.
    let config = Machine::this().ok().and_then(|machine| Config::load(None, &machine).ok());
    let criu = config.as_ref().and_then(|config| config.criu.as_deref());
    let mut findings = kernel::findings(&files);
    findings.extend(machine::findings(&files, criu, &guests::Needs::of(config.as_ref())));
    findings.extend(config.and_then(|config| file_tier(&config)));
    Report::new(findings)
}

/// What the file tier lies on, if there is one.
fn file_tier(config: &Config) -> Option<Finding> {
    let directory = config.tier_path.as_deref()?;
    Some(Finding::new("file tier", Presence::Yes, crate::tier::describe(directory)))
}

#[cfg(test)]
mod tests;
