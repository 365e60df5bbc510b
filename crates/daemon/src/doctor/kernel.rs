//! What the kernel offers: userfaultfd, privileges, control groups, and what
//! tells about memory.

use std::io;
use std::path::{Path, PathBuf};

use strata_sys::probe::{self, Way, feature};
use strata_sys::{Damon, DamonOwner, DamonRefusal, FEATURES_REQUIRED};

use super::{Files, Finding, Presence};

pub(super) const NAME: &str = "kernel";
pub(super) const PRIVILEGES: &str = "privileges";

/// Those among which is everything that nothing works without.
pub(super) fn essentials(files: &Files) -> Vec<Finding> {
    let mut findings = vec![kernel(files), privileges(files)];
    findings.extend(userfaultfd(files));
    findings
}

pub(super) fn findings(files: &Files) -> Vec<Finding> {
    let mut findings = essentials(files);
    findings.push(control_group(files));
    findings.extend([
        psi(files),
        transparent_huge_pages(files),
        io_uring(),
        swap(files),
        zram(files),
        zswap(files),
        same_page_merging(files),
        damon(files),
        idle_pages(files),
    ]);
    findings
}

/// Major and minor number of a release like `6.18.44-amd64`.
pub(super) fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn kernel(files: &Files) -> Finding {
    let text = files.read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let new_enough = release(&text).is_some_and(|version| version >= (6, 8));
    Finding::yes_or_no(NAME, new_enough, format!("Linux {text}"))
        .without("moving pages out of a program (UFFDIO_MOVE) came with Linux 6.8")
}

fn privileges(files: &Files) -> Finding {
    let status = files.read("/proc/self/status").unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let uid = uids.and_then(|uids| uids.split_whitespace().nth(1)).unwrap_or("?");
    let (ptrace, said) = may_ptrace(files);
    Finding::yes_or_no(PRIVILEGES, ptrace, format!("uid {uid}, {said}"))
        .without("a daemon of your own (a system stratad serves you all the same: sudo systemctl start stratad)")
        .essential()
}

/// Whether this process may read others and move their pages, and how that is said.
pub(super) fn may_ptrace(files: &Files) -> (bool, &'static str) {
    /// Bit of `CAP_SYS_PTRACE`.
    const BIT: u64 = 1 << 19;
    let status = files.read("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    match bits & BIT != 0 {
        true => (true, "with CAP_SYS_PTRACE"),
        false => (false, "without CAP_SYS_PTRACE"),
    }
}

fn userfaultfd(files: &Files) -> Vec<Finding> {
    let device = probe::userfaultfd_features(Way::Device, 0);
    let device_finding = match &device {
        Ok(_) => Finding::new("/dev/userfaultfd", Presence::Yes, "opens"),
        Err(error) if files.exists("/dev/userfaultfd") => {
            Finding::new("/dev/userfaultfd", Presence::No, format!("there, but: {error}"))
        }
        Err(error) => Finding::new("/dev/userfaultfd", Presence::No, error.to_string()),
    }
    .without("programs of users other than root");
    let system_call = probe::userfaultfd_features(Way::SystemCall, 0);
    let user_mode = probe::userfaultfd_features(Way::UserModeOnly, 0);
    let (features, way) = match (&device, &system_call, &user_mode) {
        (Ok(features), _, _) => (*features, Some((Way::Device, "through /dev/userfaultfd"))),
        (_, Ok(features), _) => (*features, Some((Way::SystemCall, "through the system call"))),
        (_, _, Ok(features)) => (*features, None),
        (_, Err(error), Err(_)) => {
            let missing = Finding::new("userfaultfd", Presence::No, error.to_string());
            let lost = "everything: no page can be brought back on demand";
            return vec![missing.without(lost).essential(), device_finding];
        }
    };
    let detail = match way {
        Some((_, name)) => format!("{name}, features {features:#x}"),
        None => format!("for faults from user mode only, features {features:#x}"),
    };
    let mut findings = vec![
        Finding::yes_or_no("userfaultfd", way.is_some(), detail)
            .without("system calls that touch an evicted page would fail")
            .essential(),
        device_finding,
        fork_events(way.map(|(way, _)| way), features),
    ];
    findings.extend(FEATURES.iter().map(|offer| offer.finding(features)));
    findings
}

/// Features of userfaultfd that the kernel lists.
struct Offer {
    name: &'static str,
    bits: u64,
    lost: &'static str,
}

const FEATURES: [Offer; 6] = [
    Offer {
        name: "UFFDIO_MOVE",
        bits: feature::MOVE,
        lost: "evicting private memory: nothing can be managed",
    },
    Offer {
        name: "mapping events",
        bits: feature::EVENT_REMAP | feature::EVENT_UNMAP | feature::EVENT_REMOVE,
        lost: "following what a program does to its mappings",
    },
    Offer { name: "thread ids", bits: feature::THREAD_ID, lost: "telling who waits for a page" },
    Offer {
        name: "UFFDIO_POISON",
        bits: feature::POISON,
        lost: "telling a reader that its page is lost, instead of giving it wrong bytes",
    },
    Offer { name: "write-protect", bits: feature::WRITE_PROTECT, lost: "snapshots" },
    Offer {
        name: "minor faults",
        bits: feature::MINOR_SHMEM,
        lost: "guest RAM in shared files, and with it snapshots of VMs",
    },
];

impl Offer {
    fn finding(&self, features: u64) -> Finding {
        let there = features & self.bits == self.bits;
        let detail = if there { "offered" } else { "not offered" };
        let finding = Finding::yes_or_no(self.name, there, detail).without(self.lost);
        // The pager's own list decides what nothing works without.
        if self.bits & FEATURES_REQUIRED != 0 { finding.essential() } else { finding }
    }
}

/// The kernel lists fork events for everybody and grants them to the privileged,
/// so this one is asked for.
fn fork_events(way: Option<Way>, features: u64) -> Finding {
    let granted = match way {
        _ if features & feature::EVENT_FORK == 0 => Err("not offered".to_owned()),
        None => Err("not without CAP_SYS_PTRACE".to_owned()),
        Some(way) => probe::userfaultfd_features(way, feature::EVENT_FORK)
            .map_err(|error: io::Error| format!("refused: {error}")),
    };
    let (yes, detail) = match granted {
        Ok(_) => (true, "granted".to_owned()),
        Err(why) => (false, why),
    };
    Finding::yes_or_no("fork events", yes, detail)
        .without("a child of a managed program would read zeroes where pages are evicted")
        .essential()
}

/// The hierarchy that has the memory controller, and whether it is version 2.
fn memory_hierarchy(mounts: &str) -> Option<(PathBuf, bool)> {
    let mut unified = None;
    for line in mounts.lines() {
        let mut words = line.split_whitespace();
        let (Some(_), Some(place), Some(kind), Some(options)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        match kind {
            // Where version 1 holds the controller, version 2 cannot.
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                return Some((place.into(), false));
            }
            "cgroup2" => unified = Some((place.into(), true)),
            _ => {}
        }
    }
    unified
}

fn control_group(files: &Files) -> Finding {
    let lost = "the backstop: a program that allocates faster than Strata looks may exceed its budget for a moment";
    let mounts = files.read("/proc/self/mounts").unwrap_or_default();
    let Some((place, unified)) = memory_hierarchy(&mounts) else {
        return Finding::new("memory cgroup", Presence::No, "no cgroup file system").without(lost);
    };
    let version = if unified { "v2" } else { "v1" };
    let place = files.path(&place.display().to_string());
    match try_group(&place, unified) {
        Ok(()) => Finding::new("memory cgroup", Presence::Yes, format!("{version}, can be made")),
        Err(why) => Finding::new("memory cgroup", Presence::No, format!("{version}: {why}")),
    }
    .without(lost)
}

/// Makes a group, looks for what the daemon needs in it, removes it. (With
/// version 2 the daemon switches the controller on for its own groups.)
fn try_group(place: &Path, unified: bool) -> Result<(), String> {
    let group = place.join(format!("strata-doctor-{}", std::process::id()));
    std::fs::create_dir(&group).map_err(|error| format!("no group can be made: {error}"))?;
    let controlled = if unified {
        std::fs::read_to_string(place.join("cgroup.controllers"))
            .is_ok_and(|list| list.split_whitespace().any(|name| name == "memory"))
    } else {
        group.join("memory.usage_in_bytes").exists()
    };
    std::fs::remove_dir(&group)
        .map_err(|error| format!("{} cannot be removed: {error}", group.display()))?;
    if controlled { Ok(()) } else { Err("without the memory controller".into()) }
}

fn psi(files: &Files) -> Finding {
    let there = files.read("/proc/pressure/memory").is_some();
    Finding::yes_or_no("PSI", there, if there { "memory pressure is told" } else { "not told" })
        .without("seeing how much the machine as a whole suffers")
}

/// The chosen one of a list like `always [madvise] never`.
fn chosen(list: &str) -> &str {
    list.split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
        .unwrap_or(list)
}

fn transparent_huge_pages(files: &Files) -> Finding {
    let text = files.read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let mode = if text.is_empty() { "not in this kernel" } else { chosen(&text) };
    Finding::yes_or_no("huge pages", matches!(mode, "always" | "madvise"), mode)
        .without("fast hand-backs of pools' memory; and programs far from their budgets run without huge pages")
}

fn io_uring() -> Finding {
    match probe::io_uring() {
        Ok(()) => Finding::new("io_uring", Presence::Yes, "can be made"),
        Err(error) => Finding::new("io_uring", Presence::No, error.to_string()),
    }
    .without("reads of the file tier that take no thread each")
}

/// Total KiB of the swap devices in `/proc/swaps`.
fn swap_kib(swaps: &str) -> u64 {
    let sizes = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().nth(2));
    sizes.filter_map(|size| size.parse::<u64>().ok()).sum()
}

fn swap(files: &Files) -> Finding {
    let kib = swap_kib(&files.read("/proc/swaps").unwrap_or_default());
    let size = strata_units::ByteSize(kib << 10);
    let detail = if kib > 0 { format!("{size} on") } else { "none on".to_owned() };
    Finding::yes_or_no("swap", kib > 0, detail)
        .without("nothing of Strata's: the kernel cannot swap what is not managed")
}

fn zram(files: &Files) -> Finding {
    let control = files.exists("/sys/class/zram-control");
    let devices = files.names("/sys/block").iter().filter(|name| name.starts_with("zram")).count();
    let detail = match (control, devices) {
        (false, 0) => "not in this kernel, or not loaded".to_owned(),
        (_, count) => format!("{count} device(s)"),
    };
    Finding::yes_or_no("zram", control || devices > 0, detail)
        .without("benches against it: it is the rival, not a part")
}

fn zswap(files: &Files) -> Finding {
    let parameter = |name: &str| files.read(&format!("/sys/module/zswap/parameters/{name}"));
    match parameter("enabled") {
        None => Finding::new("zswap", Presence::No, "not in this kernel"),
        Some(on) => {
            let compressor = parameter("compressor").unwrap_or_default();
            let state = if on == "Y" { "on" } else { "off" };
            Finding::new("zswap", Presence::Yes, format!("{state}, {compressor}"))
        }
    }
    .without("benches against it: it is the rival, not a part")
}

fn same_page_merging(files: &Files) -> Finding {
    let run = files.read("/sys/kernel/mm/ksm/run");
    let detail = match run.as_deref() {
        None => "not in this kernel",
        Some("1") => "running",
        Some(_) => "there, not running",
    };
    Finding::yes_or_no("KSM", run.is_some(), detail)
        .without("merging the resident pages of VMs (stored pages are deduplicated without it)")
}

/// What it can watch is listed only where it is set up: that is done for a moment where
/// nobody uses it, and a daemon of ours that does has it locked.
fn damon(files: &Files) -> Finding {
    let lost = "seeing what is used on a node tier: probes find it, later";
    let mut damon = Damon::at(&files.path("/sys/kernel/mm/damon/admin/kdamonds"));
    let owner = damon.owner();
    if owner == DamonOwner::Absent {
        return Finding::new("DAMON", Presence::No, "not in this kernel").without(lost);
    }
    let listed = damon.try_operations();
    let in_use = owner == DamonOwner::Strata || listed == Err(DamonRefusal::Shared);
    let by = match owner {
        _ if in_use => "in use by Strata",
        DamonOwner::Other => "used by somebody else: Strata leaves it alone",
        DamonOwner::Unseen => "only root may look",
        _ => "",
    };
    let names = listed.unwrap_or_default();
    let can = names.is_empty() || names.iter().any(|name| name == "fvaddr");
    let names = names.join(" ");
    let detail = match (names.as_str(), by) {
        ("", "") => "there".to_owned(),
        (said, "") | ("", said) => format!("there: {said}"),
        (names, by) => format!("there: {names}, {by}"),
    };
    let ours = in_use || owner == DamonOwner::Nobody;
    let presence = if can && ours { Presence::Yes } else { Presence::Partly };
    Finding::new("DAMON", presence, detail).without(lost)
}

fn idle_pages(files: &Files) -> Finding {
    let there = files.exists("/sys/kernel/mm/page_idle/bitmap");
    let detail = if there { "there" } else { "not in this kernel" };
    Finding::yes_or_no("idle page tracking", there, detail)
        .without("a cheap accessed bit per page; Strata judges by faults")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_pager_requires_is_essential_here() {
        let examined = FEATURES.iter().fold(feature::EVENT_FORK, |bits, offer| bits | offer.bits);
        assert_eq!(examined & FEATURES_REQUIRED, FEATURES_REQUIRED);
        for offer in &FEATURES {
            // All or nothing: an essential finding says nothing about an extra.
            let required = offer.bits & FEATURES_REQUIRED;
            assert!(required == 0 || required == offer.bits, "{}", offer.name);
            assert_eq!(offer.finding(0).essential, required != 0, "{}", offer.name);
        }
    }

    #[test]
    fn texts_of_the_kernel() {
        assert_eq!(release("6.18.44-fc"), Some((6, 18)));
        assert_eq!(release("5.10"), Some((5, 10)));
        assert_eq!(release("x"), None);
        assert_eq!(chosen("always [madvise] never"), "madvise");
        let swaps =
            "Filename Type Size Used Priority\n/dev/a partition 1024 0 -2\n/b file 10 0 -3\n";
        assert_eq!(swap_kib(swaps), 1034);
    }

    #[test]
    fn the_memory_controller_is_where_it_is_mounted() {
        let hybrid = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n";
        assert_eq!(memory_hierarchy(hybrid), Some(("/sys/fs/cgroup/memory".into(), false)));
        let unified = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(memory_hierarchy(unified), Some(("/sys/fs/cgroup".into(), true)));
        assert_eq!(memory_hierarchy("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn a_group_is_tried_and_removed() {
        let place = std::env::temp_dir().join(format!("strata-groups-{}", std::process::id()));
        std::fs::create_dir(&place).expect("directory");
        // An ordinary directory makes no control files.
        for unified in [true, false] {
            let why = try_group(&place, unified).expect_err("no control files");
            assert_eq!(why, "without the memory controller");
        }
        let controllers = place.join("cgroup.controllers");
        std::fs::write(&controllers, "cpu memory pids\n").expect("file");
        try_group(&place, true).expect("a controller");
        std::fs::remove_file(&controllers).expect("file");
        std::fs::remove_dir(&place).expect("nothing is left behind");
        let why = try_group(&place, true).expect_err("no such place");
        assert!(why.contains("no group can be made"), "{why}");
    }
}
