//! What stands beside the kernel: memory nodes, devices, and the programs that
//! Strata works with.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::snapshots::{self, criu_named};

use super::kernel::release;
use super::{Files, Finding, Presence, guests, node};

/// For a program to tell its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);
/// More than any version text.
const MAX_VERSION_BYTES: u64 = 4096;

pub(super) fn findings(
    files: &Files,
    criu_set: Option<&Path>,
    needs: &guests::Needs,
) -> Vec<Finding> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut findings = vec![numa(files)];
    findings.extend(node::findings(files));
    findings.extend([dax(files), criu(files, criu_set, &path), helper()]);
    findings.extend(guests::findings(files, needs, &path));
    findings
}

/// Nodes with memory and without a CPU: CXL, or persistent memory as RAM.
fn numa(files: &Files) -> Finding {
    let (count, without_cpu) = node::nodes(files);
    let without_cpu = without_cpu.len();
    let detail = format!("{count} node(s), {without_cpu} of them without a CPU");
    Finding::yes_or_no("NUMA", without_cpu > 0, detail).without("the node tier (CXL, PMEM as RAM)")
}

fn dax(files: &Files) -> Finding {
    let mut devices = files.names("/sys/bus/dax/devices");
    devices.extend(files.names("/sys/block").into_iter().filter(|name| name.starts_with("pmem")));
    let detail = if devices.is_empty() { "no device".to_owned() } else { devices.join(" ") };
    Finding::yes_or_no("DAX", !devices.is_empty(), detail)
        .without("persistent memory as a file tier")
}

/// The one that is used: of the configuration, of the environment, or in `PATH`.
fn criu(files: &Files, set: Option<&Path>, path: &OsStr) -> Finding {
    let mut finding = match criu_named(set) {
        Some(named) => version_finding("CRIU", &named),
        None => program_finding("CRIU", "criu", path),
    };
    let kernel = files.read("/proc/sys/kernel/osrelease").as_deref().and_then(release);
    let version = finding.detail.split_once("Version: ").and_then(|(_, text)| release(text));
    if let (Some(kernel), Some(version)) = (kernel, version)
        && kernel >= (6, 16)
        && version < (4, 2)
    {
        finding.presence = Presence::Partly;
        finding.detail += ": too old for this kernel, 4.2 works";
    }
    if finding.presence == Presence::Yes
        && files.read("/proc/self/mounts").is_some_and(|mounts| !has_tmpfs(&mounts, "/run"))
    {
        // It keeps what it has found out about the kernel on nothing else.
        finding.detail += "; /run is no tmpfs: every snapshot and restore takes it longer to start";
    }
    finding.without("snapshots, rollback and clones of programs")
}

/// Ours, which is installed beside the daemon or not at all.
fn helper() -> Finding {
    match snapshots::helper() {
        Ok(path) => Finding::new("strata-clone", Presence::Yes, path.display().to_string()),
        Err(why) => Finding::new("strata-clone", Presence::No, why),
    }
    .without("rollback, restore and clones of programs")
}

/// Whether the text of `/proc/mounts` has a tmpfs at `place`.
pub(super) fn has_tmpfs(mounts: &str, place: &str) -> bool {
    mounts.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        fields.next() == Some(place) && fields.next() == Some("tmpfs")
    })
}

pub(super) fn program_finding(name: &'static str, file: &str, path: &OsStr) -> Finding {
    let Some(program) = in_path(file, path) else {
        return Finding::new(name, Presence::No, format!("no {file} in PATH"));
    };
    version_finding(name, &program)
}

fn version_finding(name: &'static str, program: &Path) -> Finding {
    match first_line(program, &["--version"]) {
        Ok(line) => Finding::new(name, Presence::Yes, line),
        Err(why) => Finding::new(name, Presence::No, format!("{}: {why}", program.display())),
    }
}

pub(super) fn in_path(file: &str, path: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|place| place.join(file)).find(|candidate| candidate.is_file())
}

/// First line of what a program prints that ends at once, as with `--version`.
pub(super) fn first_line(program: &Path, words: &[&str]) -> Result<String, String> {
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let deadline = Instant::now() + VERSION_TIMEOUT;
    // A version fits in the pipe, so the program can end before it is read.
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(None) | Err(_) => {
                // Ours, by its handle; it may have ended just now.
                let _ = child.kill();
                let _ = child.wait();
                return Err("does not tell its version".to_owned());
            }
        }
    };
    let mut text = Vec::new();
    if let Some(output) = child.stdout.take() {
        output.take(MAX_VERSION_BYTES).read_to_end(&mut text).map_err(|error| error.to_string())?;
    }
    let text = String::from_utf8_lossy(&text);
    match text.lines().next() {
        Some(line) if status.success() => Ok(line.trim().to_owned()),
        _ => Err(format!("does not run ({status})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_path_and_asked() {
        let path = OsStr::new("/no/such/place:/usr/bin:/bin");
        let shell = in_path("sh", path).expect("a shell");
        assert!(shell.is_absolute());
        assert_eq!(in_path("no-such-program", path), None);
        let finding = program_finding("x", "no-such-program", path);
        assert_eq!(finding.presence, Presence::No);
        // `false --version` of coreutils prints; a file that is no program
        // does not even start.
        first_line(Path::new("/etc/passwd"), &["--version"]).expect_err("not executable");
    }
}
