//! The commands about snapshots: what is sent, what is printed, what is refused.

use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::Duration;

use strata_api::{
    Claim, Net, PortForward, Progress, Reply, Request, RevivedTenant, SnapshotInfo, SnapshotState,
    Tcp, Unit,
};

use crate::fake::{Daemon, Directory, complaint, output, stats, stdout};

pub(crate) fn snapshot(id: &str, parent: Option<&str>, label: Option<&str>) -> SnapshotInfo {
    let id: strata_api::SnapshotId = id.parse().expect("an identity");
    SnapshotInfo {
        tenant: id.tenant.clone(),
        id,
        label: label.map(str::to_owned),
        parent: parent.map(|parent| parent.parse().expect("an identity")),
        scheduled: false,
        state: SnapshotState::Usable,
        reason: String::new(),
        taken: 1.0,
        size_unique_bytes: 3 << 20,
        size_shared_bytes: 1 << 30,
        file_bytes: 0,
        pages: 262_144,
        copied_pages: 0,
        guest: false,
        libvirt: false,
        disks: Vec::new(),
        servers: 0,
        processes: 1,
        uid: 0,
        command: vec!["server".into()],
        budget_bytes: 1 << 30,
        freeze_us: 0,
        capture_us: 0,
    }
}

fn kept() -> Vec<SnapshotInfo> {
    vec![
        snapshot("db@2", None, Some("good")),
        snapshot("db@10", Some("db@2"), None),
        snapshot("db@11", Some("db@2"), None),
        snapshot("web@1", Some("web@9"), None),
    ]
}

/// A daemon with the tenants db, web and rm, and with [`kept`].
fn daemon() -> Daemon {
    Daemon::new(answer)
}

fn answer(request: &Request) -> Reply {
    match request {
        Request::List { .. } => {
            Reply::List { tenants: vec![stats("db"), stats("rm"), stats("web")], next: None }
        }
        Request::Snapshots { name, .. } => {
            let mut snapshots = kept();
            snapshots.retain(|info| name.as_ref().is_none_or(|name| *name == info.tenant));
            Reply::Snapshots { snapshots }
        }
        Request::SnapshotImport { dry_run: true, .. } => {
            let claim = |text: &str, is_beyond| Claim { text: text.into(), is_beyond };
            let claims = vec![claim("process 7: user 1", false), claim("process 7:\u{1b}[m", true)];
            Reply::Claims { owner: Some(1000), claims }
        }
        Request::Snapshot { .. }
        | Request::SnapshotPersist { .. }
        | Request::SnapshotImport { .. } => Reply::Snapshot {
            snapshot: Box::new(snapshot("db@12", Some("db@11"), None)),
            warnings: vec!["it is\nlate".into()],
        },
        Request::Rollback { .. } | Request::Restore { .. } | Request::Clone { .. } => {
            let revived =
                |name: &str, forwards| RevivedTenant { name: name.into(), pid: 7, forwards };
            let forwards = vec![PortForward { host: 7001, guest: 6379 }];
            Reply::Revived {
                tenants: vec![revived("a", vec![]), revived("b", forwards)],
                warnings: vec![],
            }
        }
        _ => Reply::Done { note: "so it is".into() },
    }
}

/// A clone of db@10 as it is asked without options.
fn plain_clone() -> Request {
    Request::Clone {
        snapshot: "db@10".parse().expect("a snapshot"),
        count: 1,
        name: None,
        net: Net::Shared,
        forwards: vec![],
        tcp: Tcp::Close,
        copy_dirs: vec![],
    }
}

#[test]
fn each_command_sends_its_request() {
    let daemon = daemon();
    let named = |text: &str| text.parse().expect("a snapshot");
    let take = |name: &str, label: Option<&str>, persist| Request::Snapshot {
        name: name.into(),
        label: label.map(str::to_owned),
        persist,
    };
    let rollback =
        |snapshot: &str| Request::Rollback { name: "db".into(), snapshot: named(snapshot) };
    let restore = |name: Option<&str>| Request::Restore {
        snapshot: named("db@2"),
        name: name.map(str::to_owned),
    };
    for (arguments, request) in [
        (&["snapshot", "db"][..], take("db", None, false)),
        (&["snapshot", "db", "--label", "v1", "--persist"], take("db", Some("v1"), true)),
        // A tenant called like a command.
        (&["snapshot", "--", "rm"], take("rm", None, false)),
        (&["snapshot", "--label=v1", "rm"], take("rm", Some("v1"), false)),
        (&["snapshot", "rm", "db@2"], Request::SnapshotRemove { snapshot: named("db@2") }),
        // Labels are sent as numbers: they cannot come to mean another snapshot.
        (&["snapshot", "rm", "db@good"], Request::SnapshotRemove { snapshot: named("db@2") }),
        (&["snapshot", "persist", "db@10"], Request::SnapshotPersist { snapshot: named("db@10") }),
        (&["rollback", "db", "11"], rollback("db@11")),
        (&["rollback", "db", "good"], rollback("db@2")),
        (&["rollback", "db", "web@1"], rollback("web@1")),
        (&["restore", "db@good"], restore(None)),
        (&["restore", "db@2", "--name", "db2"], restore(Some("db2"))),
        (&["clone", "db@10"], plain_clone()),
    ] {
        let output = daemon.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        assert_eq!(daemon.last_request(), Some(request), "{arguments:?}");
    }
}

#[test]
fn a_clone_has_its_choices() {
    let daemon = daemon();
    let directory = Directory::new();
    let data = directory.0.join("data");
    std::fs::create_dir(&data).expect("directory");
    symlink(&data, directory.0.join("link")).expect("link");
    // A relative path, through a link: the daemon is told the place itself.
    let mut command = daemon.command(&[
        "clone",
        "db@good",
        "--count",
        "8",
        "--name",
        "w",
        "--net",
        "new",
        "--forward",
        "7000:6379",
        "--forward",
        "0:80",
        "--tcp",
        "close",
        "--copy-dir",
        "link",
    ]);
    let output = output(command.current_dir(&directory.0));
    assert!(output.status.success(), "{output:?}");
    let expected = Request::Clone {
        snapshot: "db@2".parse().expect("a snapshot"),
        count: 8,
        name: Some("w".into()),
        net: Net::New,
        forwards: vec![PortForward { host: 7000, guest: 6379 }, PortForward { host: 0, guest: 80 }],
        tcp: Tcp::Close,
        copy_dirs: vec![data.display().to_string()],
    };
    assert_eq!(daemon.last_request(), Some(expected));
    assert_eq!(stdout(&output), "a\nb 127.0.0.1:7001->6379\n");
}

#[test]
fn identities_go_to_standard_output_and_warnings_do_not() {
    let output = daemon().run(&["snapshot", "db"]);
    assert_eq!(stdout(&output), "db@12\n");
    let warnings = String::from_utf8_lossy(&output.stderr);
    assert_eq!(warnings, "strata: warning: it is?late\n");
}

#[test]
fn the_list_is_a_tree_or_json() {
    let daemon = daemon();
    let text = stdout(&daemon.run(&["snapshots"]));
    let first: Vec<&str> = text.lines().map(|line| &line[..line.find("  ").unwrap_or(0)]).collect();
    assert_eq!(first, ["SNAPSHOT", "db@2", "├─ db@10", "└─ db@11", "web@1"], "{text}");
    assert!(text.lines().nth(1).is_some_and(|line| line.contains(" good ")), "{text}");
    let parse = |text: &str| serde_json::from_str::<Vec<SnapshotInfo>>(text).expect("JSON");
    assert_eq!(parse(&stdout(&daemon.run(&["snapshots", "--json"]))), kept());
    assert_eq!(daemon.last_request(), Some(Request::Snapshots { name: None, brief: false }));
    assert_eq!(parse(&stdout(&daemon.run(&["snapshots", "web", "--json"]))), kept()[3..]);
    let of_web = Request::Snapshots { name: Some("web".into()), brief: false };
    assert_eq!(daemon.last_request(), Some(of_web));
    assert_eq!(stdout(&daemon.run(&["snapshots", "nobody"])).lines().count(), 1);
}

#[test]
fn files_are_made_and_read_only_where_they_can_be() {
    let daemon = daemon();
    let directory = Directory::new();
    let run = |arguments: &[&str]| output(daemon.command(arguments).current_dir(&directory.0));
    let path = |name: &str| directory.0.join(name).display().to_string();
    directory.put("there", b"x", 0o600);
    symlink("nowhere", directory.0.join("dangling")).expect("link");

    assert!(run(&["snapshot", "export", "db@good", "new"]).status.success());
    let expected =
        Request::SnapshotExport { snapshot: "db@2".parse().expect("named"), path: path("new") };
    assert_eq!(daemon.last_request(), Some(expected));
    assert!(run(&["snapshot", "core", "db@good", "7", "new"]).status.success());
    let snapshot = "db@2".parse().expect("named");
    let expected = Request::SnapshotCore { snapshot, pid: 7, path: path("new") };
    assert_eq!(daemon.last_request(), Some(expected));
    assert!(run(&["snapshot", "import", "there", "--name", "db2"]).status.success());
    let expected = Request::SnapshotImport {
        path: path("there"),
        name: Some("db2".into()),
        any_cpu: false,
        trust: false,
        dry_run: false,
    };
    assert_eq!(daemon.last_request(), Some(expected));

    assert!(run(&["snapshot", "import", "there", "--any-cpu"]).status.success());
    let expected = Request::SnapshotImport {
        path: path("there"),
        name: None,
        any_cpu: true,
        trust: false,
        dry_run: false,
    };
    assert_eq!(daemon.last_request(), Some(expected));
    let shown = run(&["snapshot", "import", "there", "--trust", "--dry-run"]);
    assert!(shown.status.success());
    let lines: Vec<String> = stdout(&shown).lines().map(str::to_owned).collect();
    assert_eq!(lines[0], "process 7: user 1");
    assert!(lines[1].ends_with("; more than user 1000 may") && !lines[1].contains('\u{1b}'));
    let expected = Request::SnapshotImport {
        path: path("there"),
        name: None,
        any_cpu: false,
        trust: true,
        dry_run: true,
    };
    assert_eq!(daemon.last_request(), Some(expected));

    for (arguments, why) in [
        (["snapshot", "export", "db@2", "there"], "there is a file of this name already"),
        (["snapshot", "export", "db@2", "dangling"], "there is a file of this name already"),
        (["snapshot", "export", "db@2", "no/new"], "there is no directory"),
        (["snapshot", "import", "missing", "--name=a"], "No such file"),
        (["snapshot", "import", ".", "--name=a"], "it is not a file"),
        (["clone", "db@2", "--copy-dir", "missing"], "No such file"),
        (["clone", "db@2", "--copy-dir", "there"], "it is not a directory"),
        (["clone", "db@2", "--copy-dir", "/"], "the root directory is everything"),
    ] {
        let line = complaint(&run(&arguments), 1);
        assert!(line.contains(why), "{line}");
    }
    let line = complaint(&run(&["snapshot", "core", "db@2", "7", "there"]), 1);
    assert!(line.contains("there is a file of this name already"), "{line}");
    assert_eq!(daemon.last_request(), None, "refused before anyone is asked");
}

#[test]
fn what_is_typed_wrong_is_not_asked() {
    let daemon = daemon();
    for arguments in [
        &["snapshot"][..],
        &["snapshot", "rm"],
        &["snapshot", "db", "--label", "12"],
        &["snapshot", "db", "--label", "a b"],
        &["snapshot", "db", "extra"],
        &["snapshot", "rm", "db"],
        &["snapshot", "rm", "db@"],
        &["snapshot", "persist"],
        &["snapshot", "export", "db@2"],
        &["snapshot", "core", "db@2", "new"],
        &["snapshot", "core", "db@2", "x", "new"],
        &["snapshots", "a/b"],
        &["rollback", "db"],
        &["rollback", "db", "0"],
        &["rollback", "db", "x@"],
        &["restore", "db"],
        &["restore", "db@2", "--name", "a/b"],
        &["clone", "db@2", "--count", "0"],
        &["clone", "db@2", "--count", "257"],
        &["clone", "db@2", "--net", "old"],
        &["clone", "db@2", "--forward", "7000:6379"],
        &["clone", "db@2", "--net", "new", "--forward", "7000"],
        &["clone", "db@2", "--net", "new", "--forward", "+7:8"],
        &["clone", "db@2", "--net", "new", "--forward", "7:0"],
        &["clone", "db@2", "--net", "new", "--forward", "7:8", "--forward", "7:9"],
        &["clone", "db@2", "--count", "2", "--tcp", "keep"],
    ] {
        complaint(&daemon.run(arguments), 2);
    }
    assert_eq!(daemon.last_request(), None);
}

#[test]
fn a_snapshot_that_is_not_there_is_answered_with_those_that_are() {
    let daemon = daemon();
    for (arguments, why) in [
        (&["restore", "db@7"][..], "no snapshot is named db@7: db has db@11, db@10, db@2 (good);"),
        (&["restore", "db@bad"], "no snapshot is named db@bad: db has"),
        (&["rollback", "web", "good"], "no snapshot is named web@good: web has web@1;"),
        (&["snapshot", "rm", "dc@1"], "no snapshot is named dc@1: dc has none;"),
        (&["rollback", "dc", "1"], "no tenant is named dc"),
        (&["snapshot", "dc"], "no tenant is named dc"),
    ] {
        let line = complaint(&daemon.run(arguments), 1);
        assert!(line.contains(why), "{line}");
    }
}

#[test]
fn what_can_be_removed_is_whatever_cannot() {
    let daemon = daemon();
    let output = daemon.run(&["snapshot", "rm", "db@7", "db@2", "db@8", "web@1"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let named: Vec<bool> =
        text.lines().zip(["db@7", "db@8"]).map(|(line, name)| line.contains(name)).collect();
    assert_eq!((named, text.lines().count()), (vec![true, true], 2), "{text}");
    let removed: Vec<Request> = daemon
        .all_requests()
        .into_iter()
        .filter(|request| matches!(request, Request::SnapshotRemove { .. }))
        .collect();
    let remove = |name: &str| Request::SnapshotRemove { snapshot: name.parse().expect("named") };
    assert_eq!(removed, [remove("db@2"), remove("web@1")]);
}

#[test]
fn whoever_names_a_snapshot_does_not_wait_for_sizes() {
    let daemon = daemon();
    for arguments in [&["restore", "db@2"][..], &["rollback", "db", "2"], &["clone", "db@2"]] {
        stdout(&daemon.run(arguments));
        let lists: Vec<_> = daemon
            .all_requests()
            .into_iter()
            .filter(|request| matches!(request, Request::Snapshots { .. }))
            .collect();
        assert_eq!(lists, [Request::Snapshots { name: Some("db".into()), brief: true }]);
    }
}

#[test]
fn refusals_and_silence_are_one_line() {
    let refusing = Daemon::new(|request| match request {
        Request::List { .. } | Request::Snapshots { .. } => answer(request),
        _ => Reply::Error { message: "a device is open".into(), hint: "close it".into() },
    });
    for (arguments, what) in [
        (&["snapshot", "db"][..], "cannot take a snapshot of db"),
        (&["snapshot", "persist", "db@2"], "cannot persist db@2"),
        (&["snapshot", "rm", "db@2"], "cannot remove db@2"),
        (&["snapshot", "export", "db@2", "/tmp/strata-no-such-file"], "cannot export db@2 to"),
        (&["snapshot", "import", "/proc/self/status"], "cannot import /proc/self/status"),
        (&["rollback", "db", "2"], "cannot roll db back to db@2"),
        (&["restore", "db@2"], "cannot restore db@2"),
        (&["clone", "db@2"], "cannot clone db@2"),
    ] {
        let line = complaint(&refusing.run(arguments), 1);
        assert!(line.starts_with(&format!("strata: {what}")), "{line}");
        assert!(line.ends_with(": a device is open; close it\n"), "{line}");
    }
    let confused = Daemon::new(|request| match request {
        Request::List { .. } | Request::Snapshots { .. } => answer(request),
        _ => Reply::List { tenants: vec![], next: None },
    });
    let line = complaint(&confused.run(&["restore", "db@2"]), 1);
    assert!(line.contains("stratad answered something else"), "{line}");
}

fn progress(what: &str, done: u64) -> String {
    let total = Some(4 << 30);
    let progress = Progress { what: what.into(), done, total, unit: Unit::Bytes };
    serde_json::to_string(&progress).expect("serialise")
}

/// One that shows its progress for more than a second.
fn slow_daemon() -> Daemon {
    Daemon::speaking(|request, say| {
        if matches!(request, Request::Snapshot { .. }) {
            say(&progress("capturing", 0));
            std::thread::sleep(Duration::from_millis(1100));
            say(&progress("capturing", 1 << 30));
        }
        answer(request)
    })
}

#[test]
fn progress_is_not_for_logs() {
    let output = slow_daemon().run(&["snapshot", "db"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(stdout(&output), "db@12\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "strata: warning: it is?late\n");
}

#[test]
fn progress_is_a_line_on_a_terminal_that_goes_again() {
    let strata = format!("{} snapshot db", crate::STRATA);
    let daemon = slow_daemon();
    // util-linux's `script` gives its command a terminal.
    if Command::new("script").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: there is no script (util-linux) to make a terminal");
        return;
    }
    let mut command = Command::new("script");
    command.args(["-qec", &strata, "/dev/null"]).stdin(Stdio::null());
    let output = output(command.env("STRATA_SOCKET", daemon.directory.0.join("s")));
    assert!(output.status.success(), "{output:?}");
    let text = stdout(&output);
    let drawn = text.find("\r\u{1b}[Kcapturing: 25 % (1.0 GiB of 4.0 GiB)").expect(&text);
    let result = text.find("db@12").expect(&text);
    let erased = text[drawn + 1..].find("\r\u{1b}[K").expect(&text) + drawn + 1;
    assert!(drawn < erased && erased < result, "{text:?}");
}

#[test]
fn only_long_work_may_be_preceded_by_progress() {
    let chatty = Daemon::speaking(|request, say| {
        say(&progress("capturing", 0));
        answer(request)
    });
    let line = complaint(&chatty.run(&["snapshots"]), 1);
    assert!(line.contains("its reply is not understood"), "{line}");
}

#[test]
fn nonsense_in_the_middle_is_told() {
    let garbled = Daemon::speaking(|request, say| {
        if matches!(request, Request::Snapshot { .. }) {
            say(&progress("capturing", 0));
            say("nonsense");
        }
        answer(request)
    });
    let line = complaint(&garbled.run(&["snapshot", "db"]), 1);
    assert!(line.contains("its reply is not understood"), "{line}");
}
