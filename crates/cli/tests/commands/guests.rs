//! `strata vm`: what it asks, what it says, and how the program that it becomes is told.

use std::os::unix::fs::MetadataExt;
use strata_api::{GuestSpec, GuestStats, Launch, Reply, Request, Stats};

use crate::fake::{Daemon, Directory, complaint, stats, stdout};
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
        }),
        disks: Vec::new(),
        self_balloon: None,
        libvirt: None,
    };
    assert_eq!(*guest, Request::Guest { name: "web1".into(), guest: spec });
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
