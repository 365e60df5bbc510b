//! Tests of the findings: made-up machines, and this one.

use super::*;

/// A made-up machine, removed at the end.
struct Tree(Files);

impl Tree {
    fn new(name: &str, texts: &[(&str, &str)]) -> Self {
        let root = std::env::temp_dir().join(format!("strata-{name}-{}", std::process::id()));
        let files = Files { root };
        for (path, text) in texts {
            let path = files.path(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
            std::fs::write(path, text).expect("file");
        }
        Self(files)
    }

    fn finding(&self, name: &str) -> Finding {
        let mut all = kernel::findings(&self.0);
        all.extend(machine::findings(&self.0, None, &guests::Needs::of(None)));
        all.into_iter().find(|finding| finding.name == name).expect("a finding")
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0.root).expect("clean up");
    }
}

#[test]
fn a_rich_machine() {
    let tree = Tree::new(
        "rich",
        &[
            ("/proc/sys/kernel/osrelease", "6.8.0-generic\n"),
            ("/proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000080000\n"),
            ("/proc/pressure/memory", "some avg10=0.00\n"),
            ("/proc/swaps", "Filename\n/dev/zram0 partition 1048576 0 100\n"),
            ("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n"),
            ("/sys/kernel/mm/ksm/run", "1\n"),
            ("/sys/kernel/mm/page_idle/bitmap", ""),
            ("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "0\n"),
            ("/sys/module/zswap/parameters/enabled", "Y\n"),
            ("/sys/module/zswap/parameters/compressor", "lz4\n"),
            ("/sys/block/zram0/size", "1\n"),
            ("/sys/block/pmem0/size", "1\n"),
            ("/sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("/sys/devices/system/node/node1/cpulist", "\n"),
            ("/sys/devices/system/node/possible", "0-1\n"),
            ("/dev/kvm", ""),
            ("/proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vmx svm\n"),
        ],
    );
    for (name, detail) in [
        ("kernel", "Linux 6.8.0-generic"),
        ("privileges", "uid 0, with CAP_SYS_PTRACE"),
        ("PSI", "memory pressure is told"),
        ("swap", "1.0 GiB on"),
        ("huge pages", "always"),
        ("KSM", "running"),
        ("idle page tracking", "there"),
        ("DAMON", "there"),
        ("zswap", "on, lz4"),
        ("zram", "1 device(s)"),
        ("DAX", "pmem0"),
        ("NUMA", "2 node(s), 1 of them without a CPU"),
        ("KVM", "/dev/kvm opens"),
    ] {
        let finding = tree.finding(name);
        assert_eq!((finding.presence, finding.detail.as_str()), (Presence::Yes, detail), "{name}");
        assert_eq!(finding.lost, "", "{name}");
    }
}

#[test]
fn a_poor_machine_says_what_is_lost() {
    let tree = Tree::new(
        "poor",
        &[
            ("/proc/sys/kernel/osrelease", "6.1.0\n"),
            ("/proc/self/status", "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0\n"),
            ("/sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ],
    );
    for name in [
        "kernel",
        "privileges",
        "memory cgroup",
        "PSI",
        "swap",
        "huge pages",
        "KSM",
        "idle page tracking",
        "DAMON",
        "zswap",
        "zram",
        "DAX",
        "NUMA",
        "KVM",
    ] {
        let finding = tree.finding(name);
        assert_eq!(finding.presence, Presence::No, "{name}: {}", finding.detail);
        assert_ne!(finding.lost, "", "{name}");
    }
}

#[test]
fn what_lies_on_run_is_told() {
    let mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /run/lock tmpfs rw 0 0\n";
    assert!(!machine::has_tmpfs(mounts, "/run"));
    assert!(!machine::has_tmpfs("none /run ext4 rw 0 0\n", "/run"));
    assert!(machine::has_tmpfs(&format!("{mounts}tmpfs /run tmpfs rw,nosuid 0 0\n"), "/run"));
}

#[test]
fn a_node_tier_says_who_else_moves_pages() {
    let tree = |name, capabilities, balancing, demotion| {
        Tree::new(
            name,
            &[
                ("/proc/self/status", capabilities),
                ("/sys/devices/system/node/node0/cpulist", "0-3\n"),
                ("/sys/devices/system/node/node1/cpulist", "\n"),
                ("/proc/sys/kernel/numa_balancing", balancing),
                ("/sys/kernel/mm/numa/demotion_enabled", demotion),
            ],
        )
    };
    let quiet = tree("quiet", "CapEff:\t0000000000080000\n", "0\n", "false\n");
    let busy = tree("busy", "CapEff:\t0000000000800000\n", "2\n", "true\n");
    for (name, word, other) in [
        ("node tier", "node1, with CAP_SYS_PTRACE", "without CAP_SYS_PTRACE"),
        ("NUMA balancing", "off", "tiering"),
        ("kernel demotion", "off", "on"),
    ] {
        let finding = quiet.finding(name);
        assert_eq!(finding.presence, Presence::Yes, "{name}");
        assert!(finding.detail.starts_with(word), "{name}: {}", finding.detail);
        let finding = busy.finding(name);
        assert_ne!(finding.presence, Presence::Yes, "{name}");
        assert!(finding.detail.contains(other), "{name}: {}", finding.detail);
        assert_ne!(finding.lost, "", "{name}");
    }
}

#[test]
fn whose_damon_is_is_told() {
    const DAMON: &str = "/sys/kernel/mm/damon/admin/kdamonds";
    let tree = |name, count, sample_us: &str, operations| {
        let context = format!("{DAMON}/0/contexts/0");
        Tree::new(
            name,
            &[
                (&format!("{DAMON}/nr_kdamonds"), count),
                (&format!("{context}/avail_operations"), operations),
                (&format!("{context}/monitoring_attrs/intervals/sample_us"), sample_us),
            ],
        )
    };
    let theirs = tree("damon-theirs", "1\n", "5000\n", "paddr\n");
    let finding = theirs.finding("DAMON");
    let detail = "there: paddr, used by somebody else: Strata leaves it alone";
    assert_eq!((finding.presence, finding.detail.as_str()), (Presence::Partly, detail));
    assert_ne!(finding.lost, "");
    let ours = tree("damon-ours", "1\n", "49937\n", "vaddr\nfvaddr\npaddr\n");
    let finding = ours.finding("DAMON");
    let detail = "there: vaddr fvaddr paddr, in use by Strata";
    assert_eq!((finding.presence, finding.detail.as_str()), (Presence::Yes, detail));
    // A daemon that rests between two looks holds the lock.
    let resting = Tree::new("damon-resting", &[(&format!("{DAMON}/nr_kdamonds"), "0\n")]);
    let lock = std::fs::File::open(resting.0.path(&format!("{DAMON}/nr_kdamonds"))).expect("there");
    assert!(strata_sys::try_lock(std::os::fd::AsFd::as_fd(&lock)).expect("locked"));
    let finding = resting.finding("DAMON");
    assert_eq!(
        (finding.presence, finding.detail.as_str()),
        (Presence::Yes, "there: in use by Strata")
    );
}

#[test]
fn only_what_is_essential_blocks() {
    let optional = Finding::new("a", Presence::No, "x").without("y");
    let partly = Finding::new("b", Presence::Partly, "x").without("y").essential();
    let report = Report::new(vec![optional.clone(), partly]);
    assert!(report.ready);
    assert!(report.to_string().ends_with("Programs can be managed here.\n"));
    let blocking = Finding::new("c", Presence::No, "x").without("z").essential();
    let report = Report::new(vec![optional, blocking]);
    assert!(!report.ready);
    let text = report.to_string();
    assert!(text.contains("✗ c  x\n     lost: z\n"), "{text}");
    assert!(text.ends_with("for want of: c.\n"), "{text}");
}

#[test]
fn this_machine_is_examined_and_left_as_it_was() {
    let report = examine();
    for finding in &report.findings {
        assert_eq!(finding.presence == Presence::Yes, finding.lost.is_empty(), "{finding:?}");
        assert!(!finding.detail.is_empty(), "{finding:?}");
    }
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).expect("JSON");
    assert_eq!(json["ready"], report.ready);
    assert_eq!(json["findings"].as_array().map(Vec::len), Some(report.findings.len()));
    let left: Vec<PathBuf> = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"]
        .iter()
        .map(|place| Path::new(place).join(format!("strata-doctor-{}", std::process::id())))
        .filter(|group| group.exists())
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_daemon_is_told_what_keeps_it_from_managing_anything() {
    let kernel = |presence| {
        Finding::new(kernel::NAME, presence, "Linux 6.1.0").without("moving came with Linux 6.8")
    };
    let privileges = |presence| Finding::new(kernel::PRIVILEGES, presence, "uid 5").essential();
    let moving = |presence| Finding::new("UFFDIO_MOVE", presence, "not offered").essential();
    let of = |kernel_is, privileges_are, moving_is| {
        let all = vec![kernel(kernel_is), privileges(privileges_are), moving(moving_is)];
        Report::new(all).obstacle()
    };
    let (yes, no) = (Presence::Yes, Presence::No);
    // A kernel with an old number and everything needed will do.
    assert_eq!(of(no, yes, yes), None);
    assert_eq!(of(no, no, no).as_deref(), Some("privileges: uid 5; run stratad as root"));
    let old = "Linux 6.1.0: moving came with Linux 6.8; strata doctor tells more";
    assert_eq!(of(no, yes, no).as_deref(), Some(old));
    let strange = "UFFDIO_MOVE: not offered; strata doctor tells more";
    assert_eq!(of(yes, yes, no).as_deref(), Some(strange));
}
