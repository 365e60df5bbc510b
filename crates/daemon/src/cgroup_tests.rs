use super::*;

#[test]
fn what_is_in_use_stays_also_while_it_is_empty() {
    let root = std::env::temp_dir().join(format!("strata-cgroup-{}", std::process::id()));
    let groups = Cgroups {
        hierarchy: Some(Hierarchy::V1(root.clone())),
        group: "strata-1".into(),
        used: Mutex::default(),
        left: Mutex::default(),
        groups: Mutex::default(),
    };
    let web = groups.make(7, "web", None, 0).expect("a directory");
    let other = groups.make(7, "other", None, 0).expect("a directory");
    // The first one's successor comes before it has been taken down.
    assert_eq!(groups.make(7, "web", None, 0).expect("the same"), web);
    let of_another = groups.make(0, "7-web", None, 0).expect("a directory");
    let of_a_third = groups.make(70, "web", None, 0).expect("a directory");
    assert!(of_another != web && of_a_third != web && of_another != of_a_third);
    groups.release(&of_another);
    groups.release(&of_a_third);
    groups.release(&web);
    assert!(web.is_dir() && other.is_dir());
    groups.release(&web);
    assert!(!web.is_dir() && other.is_dir());
    groups.release(&other);
    assert!(!root.join("strata-1").exists());
    fs::remove_dir(root).expect("nothing is left in it");
}

#[test]
fn another_daemon_does_not_sweep_what_was_taken_over() {
    let root = std::env::temp_dir().join(format!("strata-sweep-{}", std::process::id()));
    let begin = || Cgroups {
        hierarchy: Some(Hierarchy::V1(root.clone())),
        group: "strata-2".into(),
        used: Mutex::default(),
        left: Mutex::default(),
        groups: Mutex::default(),
    };
    // No process has this number: the supervisor that made it is gone.
    let web = root.join(format!("strata-{}/0-web", i32::MAX));
    fs::create_dir_all(&web).expect("a directory");
    let next = begin();
    next.hold(&web);
    begin().remove_orphans(&[]);
    assert!(web.is_dir(), "it is in use, and empty");
    next.release(&web);
    assert!(!web.exists());
    fs::create_dir_all(&web).expect("a directory");
    begin().remove_orphans(&[]);
    assert!(!web.exists(), "it is nobody's");
    fs::remove_dir(root).expect("nothing is left in it");
}

#[test]
fn a_stranger_goes_back_to_where_it_was() {
    let root = std::env::temp_dir().join(format!("strata-back-{}", std::process::id()));
    let directory = root.join("strata-1/web");
    for place in [&directory, &root.join("a/b"), &root.join("c"), &root.join("other")] {
        fs::create_dir_all(place).expect("a directory");
        fs::write(place.join("cgroup.procs"), "").expect("a file");
    }
    fs::write(root.join("cgroup.procs"), "").expect("a file");
    let put = |places: [&str; 2]| {
        put_back(&directory, 7, places);
        let mut found = ["a/b", "c", "other", "strata-1/web", "."].map(|place| {
            let file = root.join(place).join("cgroup.procs");
            let text = fs::read_to_string(&file).expect("a file");
            fs::write(&file, "").expect("a file");
            (text, place)
        });
        found.sort();
        found.into_iter().filter(|(text, _)| text == "7").map(|(_, place)| place).collect()
    };
    let back: [Vec<&str>; 4] = [
        put(["5:cpu:/other\n9:memory:/a/b\n", "9:memory:/c\n"]),
        // It was read when it was here already: where its parent is, then.
        put(["9:memory:/strata-1/web\n", "0::/c\n"]),
        put(["9:memory:/gone\n", ""]),
        put(["", "5:cpu:/c\n"]),
    ];
    fs::remove_dir_all(&root).expect("removed");
    assert_eq!(back, [["a/b"], ["c"], ["."], ["."]]);
}

#[test]
fn who_has_ended_is_put_into_no_group() {
    let directory = std::env::temp_dir().join(format!("strata-none-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let mut child = std::process::Command::new("true").spawn().expect("a program");
    let pidfd = Pidfd::open(child.id()).expect("a child");
    child.wait().expect("it ends");
    // Its number is this process's by now.
    Cgroups::adopt(&directory, std::process::id(), &pidfd).expect_err("it has ended");
    assert!(!directory.join("cgroup.procs").exists());
    fs::remove_dir_all(&directory).expect("removed");
}

#[test]
fn a_process_is_in_a_group_by_its_whole_name() {
    let directory = Path::new("/sys/fs/cgroup/memory/strata-71/web");
    let v1 = "9:memory:/strata-71/web\n5:cpu,cpuacct:/\n0::/\n";
    assert!(is_among(directory, v1));
    assert!(is_among(directory, "0::/user.slice/strata-71/web\n"));
    for other in [
        "",
        "0::/\n",
        "0::/strata-71/web-2\n",
        "0::/xstrata-71/web\n",
        "0::/strata-71/web/below\n",
        "0::/web\n",
        "broken",
    ] {
        assert!(!is_among(directory, other), "{other:?}");
    }
}

#[test]
fn a_group_is_that_of_its_controller() {
    let both = "9:memory:/strata-71/0-web\n5:cpu,cpuacct:/x\n0::/y:z\n";
    assert_eq!(group_of(both, Some("memory")), Some(Path::new("/strata-71/0-web")));
    assert_eq!(group_of(both, Some("cpuacct")), Some(Path::new("/x")));
    assert_eq!(group_of(both, None), Some(Path::new("/y:z")));
    assert_eq!(group_of("broken\n1:memory\n", Some("memory")), None);
}

#[test]
fn the_memory_controller_is_found() {
    let hybrid = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
        cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
        cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
    assert_eq!(hierarchy_in(hybrid), Some(Hierarchy::V1("/sys/fs/cgroup/memory".into())));
    let unified = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
    assert_eq!(hierarchy_in(unified), Some(Hierarchy::V2("/sys/fs/cgroup".into())));
    assert_eq!(hierarchy_in("proc /proc proc rw 0 0\n"), None);
}
