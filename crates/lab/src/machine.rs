//! Where figures come from: the machine, the kernel, the commit, the command.
//! Every result file carries this.

use serde::Serialize;
use std::{fs, process::Command};

/// The provenance of a result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Provenance {
    pub cpu: String,
    pub cores: usize,
    pub memory_bytes: u64,
    pub kernel: String,
    pub system: String,
    /// Of the source tree; "-dirty" when files differ from it.
    pub commit: String,
    pub command: Vec<String>,
    pub seconds_since_epoch: u64,
}

impl Provenance {
    pub(crate) fn now() -> Self {
        let field = |file: &str, name: &str, separator: char| {
            let text = fs::read_to_string(file).unwrap_or_default();
            text.lines()
                .filter_map(|line| line.split_once(separator))
                .find(|(key, _)| key.trim() == name)
                .map_or_else(
                    || "unknown".to_owned(),
                    |(_, value)| value.trim().trim_matches('"').to_owned(),
                )
        };
        let memory = field("/proc/meminfo", "MemTotal", ':');
        let memory_kib = memory.trim_end_matches("kB").trim().parse().unwrap_or(0u64);
        // The path of the binary says nothing to a reader.
        let mut command: Vec<String> = std::env::args().collect();
        if let Some(program) = command.first_mut() {
            "strata-lab".clone_into(program);
        }
        Self {
            cpu: field("/proc/cpuinfo", "model name", ':'),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory_kib * 1024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            system: field("/etc/os-release", "PRETTY_NAME", '='),
            commit: commit(),
            command,
            seconds_since_epoch: std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }

    /// One line for a caption.
    pub(crate) fn line(&self) -> String {
        let gib = self.memory_bytes as f64 / f64::from(1 << 30);
        format!(
            "{} × {}, {gib:.0} GiB, Linux {}, commit {}",
            self.cores, self.cpu, self.kernel, self.commit
        )
    }
}

fn commit() -> String {
    Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=10"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map_or_else(
            || "unknown".to_owned(),
            |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        )
}
