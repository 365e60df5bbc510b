//! Requests and replies as they go over the wire, and names as users type them.

use super::*;

#[test]
fn names_that_can_and_cannot_be() {
    for name in ["db", "redis-1", "a.b_c", "_x", &"n".repeat(MAX_NAME_BYTES)] {
        assert_eq!(name_problem(name), None, "{name}");
    }
    for name in ["", ".", "..", "-x", "a/b", "a b", "ä", "a\n", &"n".repeat(MAX_NAME_BYTES + 1)] {
        assert!(name_problem(name).is_some(), "{name:?}");
    }
}

/// A request for clones that nothing is wrong with.
fn clone_request() -> Request {
    Request::Clone {
        snapshot: "db@3".parse().expect("a snapshot"),
        count: 2,
        name: None,
        net: Net::New,
        forwards: vec![PortForward { host: 7000, guest: 6379 }],
        tcp: Tcp::Close,
        copy_dirs: vec!["/srv/db".into()],
    }
}

#[test]
fn what_cannot_be_asked_of_a_clone() {
    assert_eq!(clone_request().snapshot_problem(), None);
    type Change = fn(&mut Request);
    /// Changes one field.
    macro_rules! with {
        ($field:ident = $value:expr) => {{
            let change: Change = |request| {
                let Request::Clone { $field, .. } = request else { unreachable!() };
                *$field = $value;
            };
            change
        }};
    }
    let wrong: [(Change, &str); 14] = [
        (with!(count = 0), "1 to 256"),
        (with!(count = MAX_CLONES + 1), "1 to 256"),
        (with!(name = Some("n".repeat(MAX_NAME_BYTES - 1))), "too long"),
        (with!(net = Net::Shared), "network of its own"),
        (with!(forwards = vec![PortForward { host: 1, guest: 0 }]), "no port 0"),
        (with!(forwards = vec![PortForward { host: 65535, guest: 1 }]), "beyond 65535"),
        (
            with!(
                forwards = vec![
                    PortForward { host: 7000, guest: 1 },
                    PortForward { host: 7001, guest: 2 }
                ]
            ),
            "both take port 7001",
        ),
        (with!(forwards = vec![PortForward { host: 0, guest: 1 }; MAX_FORWARDS + 1]), "at most 64"),
        (with!(copy_dirs = vec!["srv".into()]), "not absolute"),
        (with!(copy_dirs = vec!["/srv/../etc".into()]), "\"..\""),
        (with!(copy_dirs = vec!["/".into()]), "everything"),
        (with!(copy_dirs = vec!["/srv/db".into(), "/srv/db".into()]), "lies in"),
        (with!(copy_dirs = vec!["/srv/db/".into(), "/srv".into()]), "lies in"),
        (with!(copy_dirs = (0..=MAX_COPY_DIRS).map(|n| format!("/{n}")).collect()), "at most 16"),
    ];
    for (change, why) in wrong {
        let mut request = clone_request();
        change(&mut request);
        let problem = request.snapshot_problem();
        assert!(problem.as_ref().is_some_and(|text| text.contains(why)), "{why}: {problem:?}");
    }
    let right: [Change; 5] = [
        with!(name = Some("n".repeat(MAX_NAME_BYTES - 2))),
        with!(forwards = vec![PortForward { host: 65534, guest: 1 }]),
        with!(forwards = vec![PortForward { host: 0, guest: 1 }; 2]),
        with!(copy_dirs = vec!["/srv/db".into(), "/srv/db2".into()]),
        with!(forwards = vec![]),
    ];
    for change in right {
        let mut request = clone_request();
        change(&mut request);
        assert_eq!(request.snapshot_problem(), None, "{request:?}");
    }
}

#[test]
fn connections_are_kept_by_one_clone_on_the_old_network() {
    let asked = |count, net| Request::Clone {
        snapshot: "db@3".parse().expect("a snapshot"),
        count,
        name: None,
        net,
        forwards: vec![],
        tcp: Tcp::Keep,
        copy_dirs: vec![],
    };
    assert_eq!(asked(1, Net::Shared).snapshot_problem(), None);
    assert!(asked(2, Net::Shared).snapshot_problem().is_some_and(|p| p.contains("one clone")));
    // There each has its own.
    assert_eq!(asked(2, Net::New).snapshot_problem(), None);
}

#[test]
fn labels_and_paths_of_requests_are_looked_at() {
    let path = |path: &str| Request::SnapshotImport {
        path: path.into(),
        name: None,
        any_cpu: false,
        trust: false,
        dry_run: false,
    };
    assert_eq!(path("/tmp/a").snapshot_problem(), None);
    assert!(path("a").snapshot_problem().is_some());
    assert!(path("/a\0b").snapshot_problem().is_some());
    assert!(path(&"/a".repeat(MAX_PATH_BYTES)).snapshot_problem().is_some());
    let labelled = |label: &str| Request::Snapshot {
        name: "db".into(),
        label: Some(label.into()),
        persist: false,
    };
    assert_eq!(labelled("good").snapshot_problem(), None);
    assert!(labelled("12").snapshot_problem().is_some());
    let own = |label: &str| Request::SnapshotSelf { label: Some(label.into()) };
    assert_eq!(own("good").snapshot_problem(), None);
    assert!(own("12").snapshot_problem().is_some());
}

#[test]
fn requests_survive_the_wire_and_unknown_fields_do_not() {
    let request = Request::Run {
        name: Some("db".into()),
        dram_bytes: Some(1 << 30),
        command: vec!["redis-server".into()],
    };
    let line = serde_json::to_string(&request).expect("serialise");
    assert_eq!(serde_json::from_str::<Request>(&line).expect("parse"), request);
    let line = r#"{"request":"stats","name":"db","force":true}"#;
    assert!(serde_json::from_str::<Request>(line).is_err());
    let request = clone_request();
    let line = serde_json::to_string(&request).expect("serialise");
    assert!(line.starts_with(r#"{"request":"clone","snapshot":"db@3","count":2"#), "{line}");
    assert_eq!(serde_json::from_str::<Request>(&line).expect("parse"), request);
    let line = r#"{"request":"snapshot_remove","snapshot":"db@../x"}"#;
    assert!(serde_json::from_str::<Request>(line).is_err());
}
