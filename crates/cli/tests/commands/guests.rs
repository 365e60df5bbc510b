//! `strata vm`: what it asks, what it says, and how the program that it becomes is told.

use std::os::unix::fs::MetadataExt;
use strata_api::{
    GuestSpec, GuestStats, Identified, Identity, Launch, Reply, Request, RevivedTenant,
    SnapshotInfo, Stats,
};

use crate::fake::{Daemon, Directory, complaint, stats, stdout};
use crate::snapshots::snapshot;
use crate::some_library;

/// Prints a version as QEMU does; else what it was told.
const QEMU: &str = "#!/bin/sh\n\
    if [ \"$1\" = --version ]; then echo 'QEMU emulator version 7.2.22 (x)'; exit; fi\n\
    echo \"$STRATA_GUEST_DIR\"; echo \"$*\"\n";

/// A daemon that gives tenants, and guests that directory.
fn granting(directory: &str) -> Daemon {
    let (library, directory) = (some_library(), directory.to_owned());
    Daemon::new(move |request| match request {
        Request::Guest { .. } => Reply::Guest { directory: directory.clone() },
        _ => Reply::Run {
            name: "web1".into(),
            dram_bytes: 1 << 30,
            environment: vec![("LD_PRELOAD".into(), library.clone())],
            warnings: vec![],
        },
    })
}

#[test]
fn a_guest_is_a_tenant_with_a_directory() {
    let place = Directory::new();
    let path = place.0.to_str().expect("text");
    let daemon = granting(path);
    let qemu = place.put("qemu-system-x86_64", QEMU.as_bytes(), 0o755);
    let qemu = qemu.to_str().expect("text");
    let arguments = [
        "vm", "run", "--name", "web1", "--memory", "1GiB", "--", qemu, "-M", "q35", "-accel", "tcg",
    ];
    let output = daemon.run(&arguments);
    assert!(output.status.success(), "{output:?}");
    let said = stdout(&output);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], path);
    assert!(lines[1].starts_with("-M q35 -accel tcg -object memory-backend-file,"), "{said}");
    assert!(lines[1].contains(&format!("mem-path={path}/strata-ram")), "{said}");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let told: Vec<&str> = told.lines().collect();
    let first = "strata: web1: QEMU 7.2, q35, 1.0 GiB promised; TCG, as the command line says";
    assert_eq!((told.len(), told[0]), (2, first));
    assert!(told[1].starts_with("strata: web1: added: -object memory-backend-file,"), "{told:?}");
    let requests = daemon.all_requests();
    let [Request::Run { name, dram_bytes, command }, guest] = &requests[..] else {
        panic!("{requests:?}")
    };
    assert_eq!((name.as_deref(), *dram_bytes), (Some("web1"), None));
    assert_eq!(command[..], arguments[7..]);
    let here = std::env::current_dir().expect("a directory");
    let spec = GuestSpec {
        memory_bytes: 1 << 30,
        machine: "q35".into(),
        balloon: Some("strata-balloon".into()),
        launch: Some(Launch {
            command: command.clone(),
            directory: here.to_str().expect("text").into(),
            version: "7.2".into(),
            disks: Vec::new(),
            swap_bytes: None,
        }),
        disks: Vec::new(),
        self_balloon: None,
        libvirt: None,
        agent: true,
    };
    assert_eq!(*guest, Request::Guest { name: "web1".into(), guest: Box::new(spec) });
}

#[test]
fn what_cannot_be_a_guest_is_one_line_and_no_tenant() {
    let place = Directory::new();
    let daemon = granting(place.0.to_str().expect("text"));
    let qemu = place.put("qemu-system-x86_64", QEMU.as_bytes(), 0o755);
    let old = QEMU.replace("7.2.22", "4.2.1");
    let old = place.put("old", old.as_bytes(), 0o755);
    let (qemu, old) = (qemu.to_str().expect("text"), old.to_str().expect("text"));
    for (words, why) in [
        (&["--name", "x", "--", qemu][..], "the guest has no memory; give --memory"),
        (&["--memory", "1GiB", "--", qemu], "the guest has no name; give --name"),
        (&["--", qemu, "-m", "1G", "-name", "a b"], "it is called a b, and a name consists of"),
        (&["--name", "x", "--", qemu, "-m", "1G", "-device", "vfio-pci"], "VFIO"),
        (&["--name", "x", "--", old, "-m", "1G"], "QEMU 4.2, which is too old"),
        (&["--name", "x", "--", "true", "-m", "1G"], "does not say that it is QEMU"),
        (&["--name", "x", "--", "no-such-qemu"], "command not found"),
    ] {
        let arguments: Vec<&str> = ["vm", "run"].into_iter().chain(words.iter().copied()).collect();
        let line = complaint(&daemon.run(&arguments), 1);
        assert!(line.contains(why), "{line} is not {why}");
    }
    assert_eq!(daemon.last_request(), None);
    let hidden = granting("/no/such/directory");
    let output = hidden.run(&["vm", "run", "--name", "x", "--", qemu, "-m", "1G"]);
    let line = complaint(&output, 1);
    assert!(line.contains("/no/such/directory is not to be seen from here"), "{line}");
}

#[test]
fn printing_starts_nothing() {
    let place = Directory::new();
    let daemon = granting("/nowhere");
    let qemu = place.put("qemu-system-x86_64", QEMU.as_bytes(), 0o755);
    let qemu = qemu.to_str().expect("text");
    let arguments =
        ["vm", "run", "--name", "web1", "--print", "--", qemu, "-m", "1G", "-append", "a b"];
    let output = daemon.run(&arguments);
    let said = stdout(&output);
    assert!(output.status.success() && said.lines().count() == 1, "{output:?}");
    assert!(said.starts_with(&format!("{qemu} -m 1G -append 'a b' -object ")), "{said}");
    let uid = std::fs::metadata(&daemon.directory.0).expect("its directory").uid();
    let directory = daemon.directory.0.join(format!("guests/{uid}.web1"));
    assert!(said.contains(&format!("mem-path={}/strata-ram", directory.display())), "{said}");
    assert_eq!(daemon.last_request(), None);
}

#[test]
fn only_guests_are_listed() {
    let guest = GuestStats { memory_bytes: 4 << 30, ..GuestStats::default() };
    let web1 = Stats { guest: Some(guest), ..stats("web1") };
    let daemon = Daemon::with(vec![stats("db"), web1.clone()]);
    let said = stdout(&daemon.run(&["vm", "ls"]));
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(said.contains("web1") && said.contains("4.0 GiB"), "{said}");
    let json = stdout(&daemon.run(&["vm", "ls", "--json"]));
    assert_eq!(
        serde_json::from_str::<Vec<Stats>>(&json).expect("JSON"),
        std::slice::from_ref(&web1)
    );
    let json = stdout(&daemon.run(&["vm", "stats", "web1", "--json"]));
    assert_eq!(serde_json::from_str::<Stats>(&json).expect("JSON"), web1);
    let said = stdout(&daemon.run(&["vm", "stats", "web1"]));
    assert!(said.contains("memory promised     4.0 GiB"), "{said}");
    let line = complaint(&daemon.run(&["vm", "stats", "db"]), 1);
    assert!(line.contains("db is no guest"), "{line}");
}

/// A daemon with the snapshot `web1@1` of a guest of that command line, whose clones' agents
/// answer so.
fn cloning(
    directory: &str,
    command: &[&str],
    answer: impl Fn(&Identity) -> Reply + Send + 'static,
) -> Daemon {
    let (library, directory) = (some_library(), directory.to_owned());
    let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
    let spec = GuestSpec {
        memory_bytes: 1 << 30,
        machine: "q35".into(),
        balloon: None,
        launch: Some(Launch {
            command,
            directory: "/".into(),
            version: "7.2".into(),
            disks: Vec::new(),
            swap_bytes: None,
        }),
        disks: Vec::new(),
        self_balloon: None,
        libvirt: None,
        agent: true,
    };
    let nobody = Identified { host_name: None, macs: Vec::new() };
    Daemon::new(move |request| match request {
        Request::Snapshots { .. } => {
            let info = SnapshotInfo { guest: true, ..snapshot("web1@1", None, None) };
            Reply::Snapshots { snapshots: vec![info] }
        }
        Request::GuestAgain { name, .. } => Reply::GuestAgain {
            name: name.clone().unwrap_or_else(|| "web1-clone-1".into()),
            environment: vec![("LD_PRELOAD".into(), library.clone())],
            directory: directory.clone(),
            guest: Box::new(spec.clone()),
            warnings: vec![],
        },
        Request::GuestFill { name, pid, .. } => Reply::Revived {
            tenants: vec![RevivedTenant { name: name.clone(), pid: *pid, forwards: vec![] }],
            warnings: vec![],
        },
        Request::GuestOrder { identity: Some(identity), .. } => answer(identity),
        Request::GuestOrder { .. } => Reply::GuestOrdered { identified: nobody.clone() },
        _ => Reply::Done { note: String::new() },
    })
}

#[test]
fn a_clone_has_its_network_and_is_told_who_it_is() {
    let place = Directory::new();
    let path = place.0.to_str().expect("text");
    let qemu = place.put("qemu-system-x86_64", QEMU.as_bytes(), 0o755);
    let qemu = qemu.to_str().expect("text");
    let command = [qemu, "-m", "1G", "-accel", "tcg", "-nic", "user,hostfwd=tcp::22-:22"];
    let daemon = cloning(path, &command, |identity| {
        let host_name = Some(identity.host_name.clone());
        let identified = Identified { host_name, macs: identity.macs[..1].to_vec() };
        Reply::GuestOrdered { identified }
    });
    let clone = ["clone", "web1@1", "--name", "a_b"];
    let with = |more: &[&str]| daemon.run(&[&clone[..], more].concat());
    let output = with(&["--net", "new", "--forward", "7001:22"]);
    assert_eq!(stdout(&output), "a_b 127.0.0.1:7001->22\n", "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let [dropped, answers] = told.lines().collect::<Vec<_>>()[..] else { panic!("{told}") };
    assert_eq!(dropped, "strata: a_b: its network has no hostfwd, which is the first guest's");
    let mac = answers.strip_prefix("strata: a_b: it answers as a-b, with the address ");
    let mac = mac.expect(answers).to_owned();
    let requests = daemon.all_requests();
    let orders = requests.iter().filter_map(|request| match request {
        Request::GuestOrder { name, identity } => Some((name.as_str(), identity.is_some())),
        _ => None,
    });
    assert_eq!(orders.collect::<Vec<_>>(), [("a_b", true), ("a_b", false)]);
    // It writes what it was told when it likes to.
    let log = place.0.join("qemu.log");
    let read = || std::fs::read_to_string(&log).unwrap_or_default();
    let words = std::iter::repeat_with(read).find(|words| words.contains("-incoming"));
    let words = words.expect("it says what it was told");
    let nic = format!("-nic type=user,mac={mac},hostfwd=tcp:127.0.0.1:7001-:22");
    assert!(words.contains(&nic) && words.contains("org.strata.memory.0"), "{words}");
    for (more, why) in [
        (&["--net", "shared"][..], "--net shared is for clones of programs"),
        (&["--tcp", "keep"], "--tcp keep is for clones of programs"),
        (&["--net", "bridge=no-such-one"], "there is no bridge here that is called no-such-one"),
    ] {
        let line = complaint(&with(more), 1);
        assert!(line.contains(why) || line.contains("ip is not there"), "{line} is not {why}");
    }
    for wrong in ["bridge=", "bridge=a/b", "bridge=-b", "tap", "bridge=abcdefghijklmnop"] {
        assert_eq!(with(&["--net", wrong]).status.code(), Some(2), "{wrong}");
    }
    // Ports lead to clones with a network of their own, whichever way they are asked for.
    let forward = ["--forward", "7001:22"];
    for command in [&clone[..], &["vm", "clone", "web1@1"]] {
        for more in [&[][..], &["--net", "bridge=br0"]] {
            let words = [command, &forward, more].concat();
            let line = complaint(&daemon.run(&words), 2);
            assert!(line.contains("only to a clone with a network of its own"), "{line}");
        }
    }
}

#[test]
fn what_a_clone_keeps_of_the_first_one_is_said_and_it_lives() {
    let place = Directory::new();
    let path = place.0.to_str().expect("text");
    let qemu = place.put("qemu-system-x86_64", QEMU.as_bytes(), 0o755);
    let command = [qemu.to_str().expect("text"), "-m", "1G", "-accel", "tcg"];
    let daemon = cloning(path, &command, |_| Reply::Error {
        message: "web1-clone-1: no agent answers in it".into(),
        hint: String::new(),
    });
    let output = daemon.run(&["clone", "web1@1"]);
    assert_eq!(stdout(&output), "web1-clone-1\n");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let expected = "strata: warning: web1-clone-1: it keeps the first guest's host name and address: no agent answers in it\n";
    assert_eq!(told, expected);
}
