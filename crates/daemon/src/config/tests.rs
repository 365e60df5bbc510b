//! Tests of the configuration.

use super::*;

fn machine() -> Machine {
    Machine { memory: ByteSize(8 << 30), user_id: |name| Ok((name == "postgres").then_some(105)) }
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
tier_limit = "20GiB"
uffd_users = ["postgres", "1000"]
preload = "/bin/sh"
stop_grace = "250ms"

[[manage]]
name = "db"
exe = "/usr/lib/postgresql/15/bin/postgres"
user = "postgres"
dram = "2GiB"
tier_limit = "1000001B"

[[manage]]
name = "cache"
cgroup = "/system.slice/redis.service/"
"#;

#[test]
fn every_key_is_read_and_printing_it_reads_the_same() {
    let config = parse(FULL).expect("valid");
    assert_eq!(config.default_dram, ByteSize(3 << 29));
    assert_eq!(config.stop_grace, Duration::from_millis(250));
    assert_eq!(config.uffd_users[0], User { name: "postgres".into(), uid: 105 });
    assert_eq!(config.uffd_users[1].uid, 1000);
    assert_eq!(config.manage[0].tier_limit, Some(ByteSize(1_000_001)));
    assert_eq!(config.manage[1].cgroup.as_deref(), Some("/system.slice/redis.service"));
    assert_eq!(config.manage[1].dram, config.default_dram);
    let defaults = Config::defaults(&machine());
    for config in [config, defaults] {
        let printed = config.resolved();
        assert_eq!(parse(&printed).expect(&printed), config, "{printed}");
    }
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
        ("stop_grace = \"18446744073709551615min\"", "longer than a day"),
        ("socket_dir = \"run\"", "not an absolute path"),
        ("tier_path = \"/no/such/directory\"", "cannot write to /no/such/directory"),
        ("tier_path = \"/proc\"", "cannot write to /proc"),
        ("tier_limit = \"1GiB\"", "there is no file tier to limit; set tier_path"),
        ("uffd_users = \"postgres\"", "write a list of users"),
        (
            "uffd_users = [\n  \"postgres\",\n  \"nobody-here\",\n]",
            "t.toml:3: uffd_users: there is no",
        ),
        ("preload = \"/no/libstrata.so\"", "is not a file"),
        ("preload = \"/tmp/a b\"", "has a blank or a colon"),
        ("[[manage]]\nexe = \"a\"", "t.toml:1: manage: a rule needs a name"),
        ("[[manage]]\nname = \"a\"", "a rule without a condition would manage every program"),
        ("[[manage]]\nname = \"a/b\"\nexe = \"a\"", "t.toml:2: name: a name consists of"),
        ("[[manage]]\nname = \"a\"\nexe = \"b/c\"", "neither a path nor a name"),
        ("[[manage]]\nname = \"a\"\nuser = \"nobody-here\"", "t.toml:3: user: there is no user"),
        ("[[manage]]\nname = \"a\"\ncgroup = \"x\"", "is not a control group"),
        ("[[manage]]\nname = \"a\"\ncgroup = \"/a/../b\"", "is not a control group"),
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
    let missing = |problem: &Problem| matches!(problem.key.as_str(), "tier_path" | "preload");
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
