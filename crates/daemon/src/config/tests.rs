//! Tests of the configuration.

use super::*;
use crate::groups;

fn machine() -> Machine {
    Machine {
        memory: ByteSize(8 << 30),
        user_id: |name| {
            let users = [("root", 0), ("postgres", 105), ("redis", 106)];
            Ok(users.iter().find(|(known, _)| *known == name).map(|(_, uid)| *uid))
        },
        nodes: || {
            let node = |number, gib: u64, has_cpus| MemoryNode {
                number,
                total_bytes: gib << 30,
                free_bytes: 0,
                has_cpus,
            };
            vec![node(0, 8, true), node(2, 4, false), node(3, 16, false), node(4, 0, false)]
        },
        home_of: |_| Some(0),
    }
}

fn parse(text: &str) -> Result<Config, Problems> {
    Config::parse(text, "t.toml", &machine())
}

/// The only complaint about `text`.
fn complaint(text: &str) -> String {
    let problems = parse(text).expect_err(text);
    assert_eq!(problems.0.len(), 1, "{problems}");
    let line = problems.to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

#[test]
fn an_empty_file_serves() {
    let config = parse("# nothing\n").expect("defaults");
    assert_eq!(config, Config::defaults(&machine()));
    assert_eq!(config.default_dram, ByteSize(4 << 30));
    assert_eq!(config.control_socket(), Path::new(strata_api::DEFAULT_SOCKET));
}

const FULL: &str = r#"
socket_dir = "/run/other"
default_dram = "1.5GiB"
metrics = "127.0.0.1:9464"
tier_path = "/tmp"
tier_limit = "20MiB"
node = 2
node_limit = "3GiB"
node_bandwidth = "200MiB"
tier_order = ["compressed", "node", "file"]
uffd_users = ["postgres", "1000"]
preload = "/bin/sh"
stop_grace = "250ms"
release_patience = "1min"
snapshot_dir = "/no/such/directory/yet"
snapshot_limit = "3GiB"
criu = "/bin/sh"

[quota]
tenants = 3
log_lines = 0x10

[groups]
caches = ["cache-*", "postgres:db"]
all-of-1000 = ["1000:*"]

[[manage]]
name = "db"
exe = "/usr/lib/postgresql/15/bin/postgres"
user = "postgres"
dram = "2GiB"
tier_limit = "1000001B"
tier_order = ["file"]
required = true

[[manage]]
name = "cache-{unit}"
cgroup = "/system.slice/redis.service/"

[[snapshot]]
name = "db"
every = "5m"
keep = 0x10
persist = true

[[snapshot]]
name = "cache"
every = "90s"
"#;

#[test]
fn every_key_is_read_and_printing_it_reads_the_same() {
    let config = parse(FULL).expect("valid");
    assert_eq!(config.default_dram, ByteSize(3 << 29));
    assert_eq!(config.stop_grace, Duration::from_millis(250));
    assert_eq!(config.release_patience, Duration::from_secs(60));
    assert_eq!(config.uffd_users[0], User { name: "postgres".into(), uid: 105 });
    assert_eq!(config.uffd_users[1].uid, 1000);
    let (limit, bandwidth) = (ByteSize(3 << 30), ByteSize(200 << 20));
    assert_eq!(config.node, Some(Node { number: 2, home: 0, limit, bandwidth }));
    assert_eq!(config.manage[0].tier_limit, Some(ByteSize(1_000_001)));
    let order = |names: [&'static str; 3]| TierOrder::of_names(names).expect("an order");
    assert_eq!(config.tier_order, order(["compressed", "node", "file"]));
    assert_eq!(config.manage[0].tier_order, Some(order(["file", "node", "compressed"])));
    assert_eq!(config.manage[1].tier_order, None);
    assert_eq!(config.manage[0].user.uid, 105);
    let group = |uid, name| groups::of(&config.groups, uid, name);
    assert_eq!((group(0, "cache-1"), group(105, "db")), (Some("caches"), Some("caches")));
    assert_eq!((group(1000, "x"), group(0, "db")), (Some("all-of-1000"), None));
    // One that names nobody is root's.
    assert_eq!((config.manage[1].user.uid, config.manage[1].required), (0, false));
    assert!(config.manage[0].required);
    let quota = Quota { tenants: 3, log_lines: 16, ..Quota::default() };
    assert_eq!(config.quota, quota);
    assert_eq!(config.manage[1].cgroup.as_deref(), Some("/system.slice/redis.service"));
    assert_eq!(config.manage[1].dram, config.default_dram);
    let [db, cache] = &config.snapshot[..] else { panic!("{:?}", config.snapshot) };
    let every = Duration::from_secs(300);
    assert_eq!(*db, Schedule { name: "db".into(), every, keep: 16, persist: true });
    assert_eq!((cache.every, cache.keep, cache.persist), (Duration::from_secs(90), 12, false));
    assert_eq!(config.snapshot_limit, ByteSize(3 << 30));
    let defaults = Config::defaults(&machine());
    assert_eq!(defaults.snapshot_limit, ByteSize(2 << 30));
    for config in [config, defaults] {
        let printed = config.resolved();
        assert_eq!(parse(&printed).expect(&printed), config, "{printed}");
    }
}

#[test]
fn a_directory_can_be_tried_by_several_at_once_and_after_one_that_was_killed() {
    let directory = std::env::temp_dir().join(format!("strata-probed-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("a directory");
    let left = directory.join(format!(".strata-check-{}-0", std::process::id()));
    std::fs::write(&left, "").expect("a file");
    let text = format!("tier_path = {directory:?}\ntier_limit = \"20MiB\"");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..200).for_each(|_| drop(parse(&text).expect("writable"))));
        }
    });
    std::fs::remove_file(&left).expect("the file is still there");
    std::fs::remove_dir(&directory).expect("nothing else is");
}

#[test]
fn each_slip_is_named_with_its_line_and_its_cure() {
    for (text, expected) in [
        ("\nmetrcis = \"127.0.0.1:1\"", "t.toml:2: metrcis: unknown key; did you mean metrics?"),
        ("[daemon]\nsocket_dir = \"/run\"", "t.toml:1: daemon: unknown key"),
        ("default_dram = \"64GiB\"", "t.toml:1: default_dram: 64.0 GiB is more than this machine"),
        ("default_dram = \"512\"", "t.toml:1: default_dram: \"512\" is not a size; write"),
        ("default_dram = 512", "t.toml:1: default_dram: is of the type integer; write a size"),
        ("default_dram = \"-1GiB\"", "is not a size"),
        ("metrics = \"localhost\"", "is not an address; write an address and a port"),
        ("stop_grace = \"10\"", "is not a time; write a time with its unit"),
        ("stop_grace = \"99999999999999999999s\"", "is not a time"),
        ("stop_grace = \"18446744073709551615min\"", "is too long; at most \"1d\""),
        ("stop_grace = \"25h\"", "is too long; at most \"1d\""),
        ("snapshot_dir = \"snapshots\"", "not an absolute path"),
        ("snapshot_dir = \"/proc\"", "cannot write to /proc"),
        ("snapshot_dir = \"/bin/sh\"", "cannot write to /bin/sh"),
        ("snapshot_limit = \"9GiB\"", "9.0 GiB is more than this machine has (8.0 GiB); name a"),
        ("snapshot_limit = \"25%\"", "is not a size"),
        ("criu = \"criu\"", "not an absolute path"),
        ("criu = \"/etc/passwd\"", "is not a program"),
        ("snapshots = 3", "did you mean snapshot?"),
        ("snapshot = 3", "write [[snapshot]] schedules"),
        ("[[snapshot]]\nevery = \"5m\"", "t.toml:1: snapshot: a schedule needs the key name; add"),
        ("[[snapshot]]\nname = \"db\"", "needs the key every; add every = \"5m\""),
        ("[[snapshot]]\nname = \"a/b\"\nevery = \"5m\"", "t.toml:2: name: a name consists of"),
        (
            "[[snapshot]]\nname = \"db\"\nevery = \"900ms\"",
            "\"900ms\" is too often; a snapshot stops",
        ),
        ("[[snapshot]]\nname = \"db\"\nevery = \"32d\"", "is too long; at most \"31d\""),
        ("[[snapshot]]\nname = \"db\"\nevery = 5", "of the type integer; write a time"),
        ("[[snapshot]]\nname = \"db\"\nevery = \"5m\"\nkeep = 0", "t.toml:4: keep: 0 cannot be"),
        ("[[snapshot]]\nname = \"db\"\nevery = \"5m\"\nkeep = -1", "-1 cannot be kept"),
        ("[[snapshot]]\nname = \"db\"\nevery = \"5m\"\nkeep = 1001", "1001 cannot be kept"),
        ("[[snapshot]]\nname = \"db\"\nevery = \"5m\"\nkeep = \"3\"", "write how many to keep"),
        ("[[snapshot]]\nname = \"db\"\nevery = \"5m\"\npersist = 1", "write true or false"),
        ("[[snapshot]]\nname = \"db\"\nevery = \"5m\"\nkep = 3", "did you mean keep?"),
        (
            "[[snapshot]]\nname = \"db\"\nevery = \"5m\"\ncriu = \"/bin/sh\"",
            "put it before the first [[snapshot]]",
        ),
        (
            "[[snapshot]]\nname = \"a\"\nevery = \"5m\"\n[[snapshot]]\nname = \"a\"\nevery = \"1h\"",
            "t.toml:5: name: \"a\" has a schedule already",
        ),
        ("socket_dir = \"run\"", "not an absolute path"),
        ("tier_path = \"/no/such/directory\"", "cannot write to /no/such/directory"),
        ("tier_path = \"/proc\"", "cannot write to /proc"),
        ("tier_limit = \"1GiB\"", "there is no file tier to limit; set tier_path"),
        ("node = 0", "node 0 has processors: it is plain DRAM; such nodes are here: 2, 3"),
        ("node = 1", "node 1 is not there, or offline; such nodes are here: 2, 3"),
        ("node = 4", "node 4 has no memory online"),
        ("node = -1", "is no node's number"),
        ("node = \"dax0.0\"", "\"dax0.0\" is no node; such nodes"),
        ("node = [2]", "is of the type array; write the number of a node"),
        ("node = 2\nnode_limit = \"5GiB\"", "5.0 GiB is more than node 2 has (4.0 GiB)"),
        ("node = 2\nnode_bandwidth = \"1KiB\"", "1.0 KiB a second is too little"),
        ("node_limit = \"1GiB\"", "there is no node tier; set node"),
        ("tier_order = \"file\"", "is of the type string; write each tier once"),
        ("tier_order = [\"dram\", \"file\"]", "\"dram\" is no tier below DRAM; write each"),
        ("tier_order = [\"file\", \"file\"]", "names \"file\" twice; write each tier once"),
        ("tier_order = [1]", "is of the type integer; write each tier once"),
        (
            "tier_path = \"/tmp\"\ntier_limit = \"900000TiB\"",
            "is more than the file system at /tmp has",
        ),
        ("uffd_users = \"postgres\"", "write a list of users"),
        ("quota = 3", "write a table"),
        ("[quota]\ntenants = 0", "t.toml:2: tenants: 0 is no quota"),
        ("[quota]\ntenant = 1", "did you mean tenants?"),
        ("groups = 3", "write a table"),
        ("[groups]\na = \"web\"", "t.toml:2: a: is of the type string; write a list of tenants"),
        ("[groups]\na = [\"we*b\"]", "t.toml:2: a: a name consists of"),
        ("[groups]\n\"a/b\" = []", "t.toml:2: groups: a name consists of"),
        ("[groups]\na = [\"nobody-here:b\"]", "there is no user \"nobody-here\""),
        (
            "[groups]\na = [\"web*\"]\nb = [\"db\", \"web1\"]",
            "t.toml:3: b: a tenant could be of the group a as well",
        ),
        (
            "uffd_users = [\n  \"postgres\",\n  \"nobody-here\",\n]",
            "t.toml:3: uffd_users: there is no",
        ),
        ("preload = \"/no/libstrata.so\"", "is not a file"),
        ("preload = \"/tmp/a b\"", "has a blank or a colon"),
        ("[[manage]]\nexe = \"a\"", "t.toml:1: manage: a rule needs a name"),
        ("[[manage]]\nname = \"a\"", "a rule without a condition would manage every program"),
        ("[[manage]]\nname = \"a/b\"\nexe = \"a\"", "t.toml:2: name: a name consists of"),
        (
            "[[manage]]\nname = \"vm-{gest}\"\nexe = \"a\"",
            "t.toml:2: name: unknown placeholder {gest}; did you mean {guest}?",
        ),
        ("[[manage]]\nname = \"{unit\"\nexe = \"a\"", "a placeholder without an end; close it"),
        ("[[snapshot]]\nname = \"{unit}\"\nevery = \"5m\"", "t.toml:2: name: a name consists of"),
        ("[[manage]]\nname = \"a\"\nexe = \"b/c\"", "neither a path nor a name"),
        ("[[manage]]\nname = \"a\"\nuser = \"nobody-here\"", "t.toml:3: user: there is no user"),
        ("[[manage]]\nname = \"a\"\ncgroup = \"x\"", "is not a control group"),
        ("[[manage]]\nname = \"a\"\ncgroup = \"/a/../b\"", "is not a control group"),
        ("[[manage]]\nname = \"a\"\ncgroup = \"/a/./b\"", "is not a control group"),
        ("[[manage]]\nname = \"a\"\ncgroup = \"/system.slice/*.service\"", "is a pattern"),
        ("[[manage]]\nname = \"a\"\ncgroup = \"/sys/fs/cgroup/a\"", "is where groups are mounted"),
        ("[[manage]]\nname = \"a\"\nexe = \"a-name-of-16-byt\"", "longer than the 15 bytes"),
        (
            "[[manage]]\nname = \"a\"\nexe = \"a\"\ndram = \"9GiB\"",
            "t.toml:4: dram: 9.0 GiB is more",
        ),
        (
            "[[manage]]\nname = \"a\"\nexe = \"a\"\nbudget = \"1GiB\"",
            "t.toml:4: budget: unknown key",
        ),
        (
            "[[manage]]\nname = \"a\"\nexe = \"a\"\nstop_grace = \"1s\"",
            "put it before the first [[manage]]",
        ),
        (
            "[[manage]]\nname = \"a\"\nexe = \"a\"\n[[manage]]\nname = \"a\"\nexe = \"b\"",
            "t.toml:5: name: a rule named \"a\" is there already",
        ),
        ("manage = 3", "write [[manage]] rules"),
        ("uffd_users = []\nuffd_users = []", "t.toml:2"),
        ("x = ", "t.toml:1"),
        ("metrics = \"127", "t.toml:1"),
    ] {
        let line = complaint(text);
        assert!(line.contains(expected), "{text:?}: {line}");
        assert!(line.contains("; "), "no cure: {line}");
    }
}

#[test]
fn all_slips_are_shown_at_once_in_order() {
    let problems =
        parse("stop_grace = \"10\"\nfoo = 1\ndefault_dram = \"9GiB\"\n").expect_err("three");
    let lines: Vec<usize> = problems.0.iter().map(|problem| problem.line).collect();
    assert_eq!(lines, [1, 2, 3], "{problems}");
}

#[test]
fn checking_leaves_nothing_in_the_tier() {
    let directory = std::env::temp_dir().join(format!("strata-tier-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("directory");
    let text = format!("tier_path = {:?}", directory.display().to_string());
    parse(&text).expect("writable");
    std::fs::remove_dir(&directory).expect("empty");
}

#[test]
fn times_are_printed_as_they_are_read() {
    for (ms, text) in [
        (0, "\"0ms\""),
        (1500, "\"1500ms\""),
        (90_000, "\"90s\""),
        (300_000, "\"5min\""),
        (7_200_000, "\"2h\""),
        (172_800_000, "\"2d\""),
    ] {
        assert_eq!(exact_time(Duration::from_millis(ms)), text);
    }
}

#[test]
fn a_missing_file_is_a_problem_only_when_it_was_named() {
    let missing = Path::new("/no/such/stratad.toml");
    let line = Config::load(Some(missing), &machine()).expect_err("named").to_string();
    assert!(line.starts_with("/no/such/stratad.toml: cannot be read"), "{line}");
    if !Path::new(DEFAULT_FILE).exists() {
        let config = Config::load(None, &machine()).expect("defaults");
        assert_eq!(config, Config::defaults(&machine()));
    }
}

#[test]
fn the_packaged_example_is_valid_and_changes_nothing() {
    let example = include_str!("../../../../packaging/stratad.toml");
    assert_eq!(parse(example).expect("valid"), Config::defaults(&machine()));
    // With every comment sign before a key removed it is valid too, but for
    // what the machine must provide.
    let all: String = example
        .lines()
        .map(|line| line.strip_prefix("#:").unwrap_or(line).trim_start().to_owned() + "\n")
        .collect();
    let missing =
        |problem: &Problem| matches!(problem.key.as_str(), "tier_path" | "preload" | "criu");
    if let Err(problems) = parse(&all) {
        assert!(problems.0.iter().all(missing), "{problems}");
    }
    for key in read::KEYS {
        assert!(all.contains(key), "the example does not show {key}");
    }
}

#[test]
fn this_machine_has_memory_and_users() {
    let machine = Machine::this().expect("/proc/meminfo");
    assert!(machine.memory > ByteSize(1 << 20));
    assert_eq!((machine.user_id)("root").expect("users"), Some(0));
}
