//! Keeps the house: who may depend on whom, where `unsafe` may be, what the
//! documents promise. It reads the repository and knows nothing of its code.
#![forbid(unsafe_code)]
#![cfg(test)]

mod rooms;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use self::rooms::ROOMS;

/// The floor of each crate; a crate depends on lower floors only. (See
/// `ARCHITECTURE.md`, which draws them.)
const FLOORS: [(&str, u32); 16] = [
    ("house", 0),
    ("units", 0),
    ("sys", 1),
    ("api", 2),
    ("client", 2),
    ("policy", 2),
    ("store", 2),
    ("pager", 3),
    ("guest", 4),
    ("snapshot", 4),
    ("vm", 4),
    ("cli", 5),
    ("daemon", 5),
    ("guest-agent", 5),
    ("lab", 5),
    ("preload", 5),
];
/// Crates that may depend on less than their floor allows: the command line talks
/// to the daemon through api alone (and has QEMU's command line completed by vm, before
/// there is a daemon to ask), and the library inside programs stays small.
const NARROW: [(&str, &[&str]); 5] = [
    ("cli", &["api", "units", "vm"]),
    ("client", &["sys", "units"]),
    ("guest-agent", &["units"]),
    ("preload", &["units"]),
    ("vm", &["units"]),
];
/// Crates that may contain `unsafe`.
const UNSAFE: [&str; 2] = ["preload", "sys"];
/// Lines of a source file, tests in it included, that need no reason, and of a file that
/// has tests alone.
const MAX_LINES: usize = 500;
const MAX_TEST_LINES: usize = 700;
/// What is read in the time that CONTRIBUTING.md promises.
const MOST_WORDS: usize = 2500;
/// Longer files, with the reason.
const LONG_FILES: [(&str, &str); 1] =
    [("crates/snapshot/src/claims/schema.rs", "a table: which fields CRIU's images may have")];

fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().expect("the repository")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn manifest(path: &str) -> Table {
    read(path).parse().unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Names of the crates' directories.
fn crates() -> Vec<String> {
    let entries = std::fs::read_dir(root().join("crates")).expect("crates");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry"))
        .filter(|entry| entry.path().join("Cargo.toml").is_file())
        .map(|entry| entry.file_name().into_string().expect("a plain name"))
        .collect();
    names.sort();
    names
}

/// All dependencies in a manifest, of every kind and for every target.
fn dependencies(table: &Table) -> Vec<(String, Value)> {
    const KINDS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];
    let mut found = Vec::new();
    for (key, value) in table {
        let Some(inner) = value.as_table() else { continue };
        if KINDS.contains(&key.as_str()) {
            found.extend(inner.iter().map(|(name, value)| (name.clone(), value.clone())));
        } else if key == "target" {
            for platform in inner.values().filter_map(Value::as_table) {
                found.extend(dependencies(platform));
            }
        }
    }
    found
}

fn floor(name: &str) -> u32 {
    let found = FLOORS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("the crate {name} has no floor; give it one in FLOORS")).1
}

/// What is wrong with the dependencies of a crate.
fn trespasses(name: &str, manifest: &Table) -> Vec<String> {
    let mut wrong = Vec::new();
    for (dependency, _) in dependencies(manifest) {
        let Some(other) = dependency.strip_prefix("strata-") else { continue };
        if floor(other) >= floor(name) {
            wrong.push(format!(
                "{name} (floor {}) reaches {other} ({})",
                floor(name),
                floor(other)
            ));
        }
        let narrow = NARROW.iter().find(|(crate_name, _)| *crate_name == name);
        if narrow.is_some_and(|(_, allowed)| !allowed.contains(&other)) {
            wrong.push(format!("{name} may not depend on {other}"));
        }
    }
    wrong
}

#[test]
fn no_crate_reaches_its_own_floor_or_a_higher_one() {
    let names = crates();
    assert!(names.len() > 5, "{names:?}");
    let wrong: Vec<String> = names
        .iter()
        .flat_map(|name| trespasses(name, &manifest(&format!("crates/{name}/Cargo.toml"))))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_trespass_would_be_seen() {
    let parse = |text: &str| text.parse::<Table>().expect("TOML");
    for (name, text) in [
        ("store", "[dependencies]\nstrata-policy = { workspace = true }"),
        ("sys", "[dev-dependencies]\nstrata-pager = { path = \"../pager\" }"),
        ("api", "[target.'cfg(unix)'.dependencies]\nstrata-store = \"1\""),
        ("cli", "[dependencies]\nstrata-sys = { workspace = true }"),
        ("preload", "[build-dependencies]\nstrata-sys = { workspace = true }"),
    ] {
        assert_eq!(trespasses(name, &parse(text)).len(), 1, "{name}");
    }
    let fine = parse("[dependencies]\nstrata-sys = { workspace = true }\nserde = \"1\"");
    assert!(trespasses("store", &fine).is_empty());
}

#[test]
fn every_crate_obeys_the_workspaces_lints_and_versions() {
    for name in crates() {
        let manifest = manifest(&format!("crates/{name}/Cargo.toml"));
        let lints = manifest.get("lints").and_then(|lints| lints.get("workspace"));
        assert_eq!(lints, Some(&Value::Boolean(true)), "{name}: [lints] workspace = true");
        for (dependency, value) in dependencies(&manifest) {
            let inherited = value.get("workspace") == Some(&Value::Boolean(true));
            assert!(inherited, "{name}: {dependency} is not taken from the workspace's table");
        }
    }
}

/// Files of the repository under `directory` with one of the endings, by their
/// path from the root.
fn files(directory: &str, endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut waiting = vec![root().join(directory)];
    while let Some(directory) = waiting.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                // A build directory, should there be one inside.
                if path.file_name().is_some_and(|name| name != "target") {
                    waiting.push(path);
                }
            } else if path
                .extension()
                .is_some_and(|ending| endings.iter().any(|wanted| ending == *wanted))
            {
                let relative = path.strip_prefix(root()).expect("below the root");
                found.push(relative.to_str().expect("a plain name").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Whether a file uses the word outside of comments.
fn says_unsafe(text: &str) -> bool {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).any(|code| {
        code.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|word| word == "unsafe")
    })
}

#[test]
fn unsafe_is_in_sys_and_preload_only() {
    assert!(says_unsafe("let x = unsafe { y };") && says_unsafe("unsafe fn f()"));
    assert!(!says_unsafe("// unsafe\n#![forbid(unsafe_code)]"));
    for name in crates() {
        if UNSAFE.contains(&name.as_str()) {
            continue;
        }
        for file in files(&format!("crates/{name}"), &["rs"]) {
            let text = read(&file);
            let forbids = text.contains("#![forbid(unsafe_code)]");
            // Roots of what ships forbid it for all their modules.
            let inside = file.trim_start_matches(&format!("crates/{name}/"));
            let is_root = ["src/lib.rs", "src/main.rs", "build.rs"].contains(&inside)
                || inside.starts_with("src/bin/");
            assert!(forbids || !is_root, "{file}: add #![forbid(unsafe_code)]");
            // Tests, benches and examples are crates of their own.
            assert!(forbids || !says_unsafe(&text), "{file} uses unsafe");
        }
    }
}

/// Whether a file has tests alone.
fn is_of_tests(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("_tests.rs")
}

#[test]
fn long_files_have_a_reason() {
    assert!(is_of_tests("crates/x/tests/y.rs") && is_of_tests("crates/x/src/y/tests.rs"));
    assert!(is_of_tests("crates/x/src/y_tests.rs") && !is_of_tests("crates/x/src/contests.rs"));
    let mut listed = BTreeSet::from(LONG_FILES.map(|(file, _)| file));
    let fuzz = files("fuzz", &["rs"]);
    for file in files("crates", &["rs", "c", "h"]).into_iter().chain(fuzz) {
        let lines = read(&file).lines().count();
        let is_listed = listed.remove(file.as_str());
        let most = if is_of_tests(&file) { MAX_TEST_LINES } else { MAX_LINES };
        assert!(lines <= most || is_listed, "{file}: {lines} lines; divide it, or say why not");
        assert!(lines > most || !is_listed, "{file} is not long any more: take it off the list");
    }
    assert!(listed.is_empty(), "listed, but not there: {listed:?}");
    for (file, reason) in LONG_FILES {
        assert!(reason.len() > 20, "{file}: that is no reason: {reason:?}");
    }
}

/// Paths in `backticks` that a document names: relative ones with a slash.
fn named_paths(text: &str) -> Vec<String> {
    let mut paths = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            let quoted = line.split('`').skip(1).step_by(2);
            paths.extend(
                quoted
                    .filter(|word| word.contains('/') && !word.starts_with('/'))
                    .filter(|word| !word.contains("://") && !word.contains(char::is_whitespace))
                    .map(|word| word.trim_end_matches('/').to_owned()),
            );
        }
    }
    paths
}

#[test]
fn the_architecture_names_only_what_exists() {
    let sample = "a `b/c.rs`, `/dev/x`, `two words/`, `http://x/y`\n```\n`d/e`\n```\n`f/` `g`";
    assert_eq!(named_paths(sample), ["b/c.rs", "f"]);
    let text = read("ARCHITECTURE.md");
    let words = text.split_whitespace().count();
    assert!(words <= MOST_WORDS, "ARCHITECTURE.md has {words} words: move some to docs/design");
    for (document, text) in std::iter::once("ARCHITECTURE.md".to_owned())
        .chain(files("docs/design", &["md"]))
        .map(|path| (path.clone(), read(&path)))
    {
        let missing: Vec<String> =
            named_paths(&text).into_iter().filter(|path| !root().join(path).exists()).collect();
        assert!(missing.is_empty(), "{document} names what is not there: {missing:#?}");
    }
    for path in files("docs/design", &["md"]) {
        assert!(text.contains(&format!("({path})")), "ARCHITECTURE.md does not lead to {path}");
    }
    for room in ROOMS {
        assert!(text.contains(&format!("| `{room}` |")), "ARCHITECTURE.md has no room {room}");
    }
    for name in crates() {
        assert!(text.contains(&name), "ARCHITECTURE.md does not mention the crate {name}");
    }
}

/// Numbers of bench results in a text: ten digits, a dash, the commit.
fn quoted_results(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
        .filter(|word| {
            word.split_once('-').is_some_and(|(seconds, commit)| {
                let is_number = seconds.bytes().all(|byte| byte.is_ascii_digit());
                seconds.len() == 10 && is_number && !commit.is_empty()
            })
        })
        .collect()
}

#[test]
fn every_result_is_quoted_and_every_quoted_one_is_there() {
    let sample = "(1795000000-abc12; `bench/results/1795000001-def-dirty.md`, 10-2, 1795000002)";
    assert_eq!(quoted_results(sample), ["1795000000-abc12", "1795000001-def-dirty"].into());
    let documents = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(str::to_owned);
    let texts: Vec<String> =
        files("docs", &["md"]).iter().chain(&documents).map(|path| read(path)).collect();
    let quoted: BTreeSet<&str> = texts.iter().flat_map(|text| quoted_results(text)).collect();
    let kept = files("bench/results", &["json", "md", "svg"]);
    let number = |path: &'_ str| Path::new(path).file_stem()?.to_str().map(str::to_owned);
    for path in &kept {
        let number = number(path).expect("a result has a name");
        assert!(quoted.contains(number.as_str()), "{path}: no page quotes it; remove it");
    }
    for number in quoted {
        for ending in ["json", "md"] {
            let path = format!("bench/results/{number}.{ending}");
            assert!(kept.contains(&path), "{path} is quoted and not there");
        }
        // Nobody can build what it measured.
        assert!(!number.ends_with("-dirty") && !number.ends_with("-unknown"), "{number}");
    }
}

#[test]
fn every_dependency_has_its_reason_and_its_user() {
    let workspace = manifest("Cargo.toml");
    let table = workspace["workspace"]["dependencies"].as_table().expect("a table");
    let kept: BTreeSet<&str> =
        table.keys().map(String::as_str).filter(|name| !name.starts_with("strata-")).collect();
    let text = read("docs/dependencies.md");
    // | `name` | reason |
    let listed: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .filter(|(_, reason)| reason.trim_matches(['|', ' ']).len() > 20)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(kept, listed, "Cargo.toml and docs/dependencies.md (with reasons) differ");
    let mut used = BTreeSet::new();
    let mut manifests: Vec<String> =
        crates().iter().map(|name| format!("crates/{name}/Cargo.toml")).collect();
    // Beside the crates, and on no floor.
    manifests.push("fuzz/Cargo.toml".into());
    for path in manifests {
        used.extend(dependencies(&manifest(&path)).into_iter().map(|(name, _)| name));
    }
    let unused: Vec<&&str> = kept.iter().filter(|name| !used.contains(**name)).collect();
    assert!(unused.is_empty(), "in the workspace's table, used by no crate: {unused:?}");
}
