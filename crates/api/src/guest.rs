//! Guests: tenants that are virtual machines.

use serde::{Deserialize, Serialize};

use strata_units::is_swap_size;

use crate::{BalloonStats, SelfBalloon, name_problem};

/// Longest name of a machine, an accelerator or a device.
const MAX_WORD_BYTES: usize = 256;

/// What a guest is, as whoever starts it says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestSpec {
    /// The memory that it is promised.
    pub memory_bytes: u64,
    /// Its machine, as QEMU names it.
    pub machine: String,
    /// Its balloon device's id; none: it has no balloon.
    pub balloon: Option<String>,
    /// How it is started once more; none: it cannot be (its command line is no text).
    #[serde(default)]
    pub launch: Option<Launch>,
    /// Images that it has in the place of those of its command line: it came from a
    /// snapshot. Said by the daemon; of whoever starts a guest it takes none.
    #[serde(default)]
    pub disks: Vec<GuestDisk>,
    /// How its balloon follows what it says of its memory; none: it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub self_balloon: Option<SelfBalloon>,
    /// Of a guest of libvirt's, the XML of its domain as it ran; libvirt starts it. Said by
    /// the daemon, and in snapshots alone whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<String>,
    /// It has a port for an agent in it.
    #[serde(default, skip_serializing_if = "is_not")]
    pub agent: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_not(flag: &bool) -> bool {
    !flag
}

/// What a clone is to be known by from now on, inside of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Its host name.
    pub host_name: String,
    /// The addresses of its network cards, in their order.
    pub macs: Vec<String>,
}

/// What a guest's agent says that its guest is known by.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Identified {
    /// Its host name; none: it has none that can be said.
    pub host_name: Option<String>,
    /// The addresses of its network cards.
    pub macs: Vec<String>,
}

/// A disk that a guest writes to, which came from a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestDisk {
    /// The image that the command line names: an absolute path.
    pub said: String,
    /// The image that the guest writes to.
    pub path: String,
    /// The name by which its QEMU opens that: it has its own when the guest runs.
    pub opened: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// It goes when the guest has ended.
    pub temporary: bool,
    /// Files that it stands on.
    pub needs: Vec<String>,
    /// Of a disk that is read through a pool: the images that it is over, the nearest first.
    /// The last one is read through the pool; none: the image itself is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
}

/// How a guest was started: the user's own words, which a clone's are made of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    /// QEMU, as it was named, and its words.
    pub command: Vec<String>,
    /// What relative paths are relative to.
    pub directory: String,
    /// QEMU's version.
    pub version: String,
    /// Disks beside those of the command line that are read through pools, as `--disk` says
    /// them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<String>,
    /// The size of its swap disk; none: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap_bytes: Option<u64>,
}

/// Most bytes of a command line that is kept.
const MAX_LAUNCH_BYTES: usize = 64 << 10;

impl GuestSpec {
    /// What is wrong with it; None when nothing is.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        let is_word =
            |text: &str| text.len() <= MAX_WORD_BYTES && text.chars().all(|c| c.is_ascii_graphic());
        if self.memory_bytes == 0 {
            Some("a guest has memory")
        } else if !is_word(&self.machine) {
            Some("a machine's name is one short word")
        } else if self.balloon.as_deref().is_some_and(|id| name_problem(id).is_some()) {
            Some("a device's id consists of letters, digits, '.', '_' and '-'")
        } else if self.launch.as_ref().is_some_and(|launch| launch.bytes() > MAX_LAUNCH_BYTES) {
            Some("its command line is longer than 64 KiB")
        } else if self.launch.as_ref().is_some_and(Launch::has_odd_swap) {
            Some("a swap disk has 1 MiB to 256 GiB, in whole pages")
        } else if let Some(settings) = &self.self_balloon {
            match self.balloon {
                None => Some("without a balloon there is none to follow it"),
                Some(_) => settings.problem(self.memory_bytes),
            }
        } else {
            None
        }
    }
}

impl Launch {
    /// Programs that serve disks to it.
    #[must_use]
    pub fn servers(&self) -> u32 {
        self.disks.len() as u32 + u32::from(self.swap_bytes.is_some())
    }

    fn has_odd_swap(&self) -> bool {
        self.swap_bytes.is_some_and(|bytes| !is_swap_size(bytes))
    }

    fn bytes(&self) -> usize {
        let said = self.command.iter().chain(&self.disks);
        let words: usize = said.map(|word| word.len() + 1).sum();
        words + self.directory.len() + self.version.len()
    }
}

/// What is known of a guest beside what is known of every tenant. What it says itself is
/// not to be trusted.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct GuestStats {
    /// The memory that it is promised.
    pub memory_bytes: u64,
    /// Its machine, as QEMU names it.
    pub machine: String,
    /// Who executes it: `kvm` or `tcg`; empty: not yet known.
    pub accelerator: String,
    /// `running`, `paused` and so on, as its monitor says; empty: not yet known.
    pub status: String,
    /// Why its monitor was not asked just now; empty: it was.
    pub trouble: String,
    /// Whose its monitor is, where it is not Strata's and is not asked; empty: Strata's.
    #[serde(default)]
    pub monitor: String,
    /// What its balloon leaves it; none: not known.
    pub balloon_bytes: Option<u64>,
    /// What it has free, as its balloon's driver says; none: it has none.
    pub free_bytes: Option<u64>,
    /// What it could use without swapping, from the same.
    pub available_bytes: Option<u64>,
    /// Its swap disk, as the process that serves it says; none: it has none, or it has said
    /// nothing yet.
    #[serde(default)]
    pub swap: Option<SwapStats>,
    /// Its balloon, where that follows what it says; none: it does not.
    #[serde(default)]
    pub self_balloon: Option<BalloonStats>,
}

/// What is in a guest's swap disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SwapStats {
    /// Its size.
    pub size_bytes: u64,
    /// Pages in it that are not zero, as the guest sees them.
    pub page_bytes: u64,
    /// What they cost.
    pub cost_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_described_in_plain_words() {
        let spec = GuestSpec {
            memory_bytes: 1,
            machine: "pc-q35-7.2".into(),
            balloon: None,
            launch: None,
            disks: Vec::new(),
            self_balloon: None,
            libvirt: None,
            agent: true,
        };
        assert_eq!(spec.problem(), None);
        let named = |id: &str| GuestSpec { balloon: Some(id.into()), ..spec.clone() };
        assert_eq!(named("strata-balloon").problem(), None);
        assert!(named("../x").problem().is_some() && named("").problem().is_some());
        let launch = |word: &str| Launch {
            command: vec!["qemu".into(), word.into()],
            directory: "/".into(),
            version: "7.2".into(),
            disks: Vec::new(),
            swap_bytes: Some(1 << 20),
        };
        let started = |word: &str| GuestSpec { launch: Some(launch(word)), ..spec.clone() };
        assert_eq!(started("-S").problem(), None);
        assert!(started(&"x".repeat(MAX_LAUNCH_BYTES)).problem().is_some());
        let swaps = Launch { swap_bytes: Some(1), ..launch("-S") };
        assert!(GuestSpec { launch: Some(swaps), ..spec.clone() }.problem().is_some());
        let follows = |memory, balloon| GuestSpec {
            balloon,
            self_balloon: Some(SelfBalloon::for_memory(memory)),
            memory_bytes: 1 << 30,
            ..spec.clone()
        };
        assert_eq!(follows(1 << 30, Some("b".into())).problem(), None);
        assert!(follows(1 << 30, None).problem().is_some());
        assert!(follows(1 << 40, Some("b".into())).problem().is_some());
        assert!(GuestSpec { memory_bytes: 0, ..spec.clone() }.problem().is_some());
        for machine in ["q35\n", &"x".repeat(MAX_WORD_BYTES + 1)] {
            assert!(GuestSpec { machine: machine.into(), ..spec.clone() }.problem().is_some());
        }
    }
}
