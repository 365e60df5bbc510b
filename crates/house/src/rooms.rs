//! The rooms of the pager: which of its files may use which.

use std::collections::BTreeMap;

use crate::{files, read};

/// The rooms of the pager, from below: a file uses its own room and those before it.
/// (See `ARCHITECTURE.md`.)
pub(crate) const ROOMS: [&str; 11] = [
    "map", "tenant", "capture", "fault", "regions", "evict", "node", "snapshot", "advice",
    "keeper", "life",
];
/// Files of the pager that are in no room: its face, what its tests share, and what is
/// fed to it from outside.
const ROOMLESS: [&str; 3] = ["lib", "testing", "untrusted"];
/// Types that several rooms give methods to, and what variables of them are called.
const OF_MANY_ROOMS: [(&str, &[&str]); 4] = [
    ("Agent", &["agent"]),
    ("Gate", &["gate"]),
    ("Space", &["space", "child", "parent", "heir"]),
    ("Tenant", &["tenant"]),
];

/// The part of a source file that ships, without its comments.
fn shipped(text: &str) -> String {
    let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// The name that `text` begins with.
fn name_at(text: &str) -> &str {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    &text[..end.unwrap_or(text.len())]
}

/// The room of a file of the pager, by its path below `src`; none: it is in none.
fn room_of(path: &str) -> Option<usize> {
    let first = name_at(path);
    ROOMS.iter().position(|&room| room == first)
}

/// The methods that the file gives to types of many rooms.
fn methods(code: &str) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let mut of = None;
    for line in code.lines() {
        if let Some(rest) = line.strip_prefix("impl ") {
            of = OF_MANY_ROOMS.iter().map(|&(name, _)| name).find(|&name| name == name_at(rest));
        } else if line == "}" {
            of = None;
        } else if let (Some(of), Some((_, rest))) = (of, line.split_once("fn "))
            && line.starts_with("    ")
            && !line.starts_with("     ")
        {
            found.push((of, name_at(rest).to_owned()));
        }
    }
    found
}

/// Uses, in files by their paths, of something that is in a room above.
fn upward_uses(files: &[(&str, String)]) -> Vec<String> {
    let mut lowest: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for (path, code) in files {
        let Some(room) = room_of(path) else { continue };
        for method in methods(code) {
            lowest.entry(method).and_modify(|known| *known = room.min(*known)).or_insert(room);
        }
    }
    let mut wrong = Vec::new();
    for (path, code) in files {
        let Some(room) = room_of(path) else { continue };
        for (at, _) in code.match_indices("crate::") {
            let used = &code[at + "crate::".len()..];
            match ROOMS.iter().position(|&other| other == name_at(used)) {
                Some(other) if other > room => wrong.push(format!("{path} uses {}", ROOMS[other])),
                Some(_) => {}
                None => wrong.push(format!("{path}: crate::{} is no room", name_at(used))),
            }
        }
        if code.contains("super::super") {
            wrong.push(format!("{path} climbs out of its room by `super`"));
        }
        let own = methods(code);
        for ((of, method), &other) in lowest.iter().filter(|&(_, &other)| other > room) {
            let names = OF_MANY_ROOMS.iter().find(|(name, _)| name == of).map_or(&[][..], |x| x.1);
            let itself = own.iter().any(|(own, _)| own == of).then_some("self");
            let mut calls =
                names.iter().copied().chain(itself).map(|name| format!("{name}.{method}("));
            if calls.any(|call| code.contains(&call)) || code.contains(&format!("{of}::{method}("))
            {
                wrong.push(format!("{path} calls {of}::{method} of {}", ROOMS[other]));
            }
        }
    }
    wrong
}

#[test]
fn no_file_of_the_pager_uses_a_room_above_its_own() {
    const SRC: &str = "crates/pager/src/";
    let paths = files(SRC.trim_end_matches('/'), &["rs"]);
    let all: Vec<(&str, String)> = paths
        .iter()
        .filter(|path| !path.ends_with("_tests.rs"))
        .map(|path| (path.trim_start_matches(SRC), shipped(&read(path))))
        .collect();
    for room in ROOMS {
        assert!(all.iter().any(|(path, _)| name_at(path) == room), "there is no room {room}");
    }
    for (path, _) in &all {
        let known = room_of(path).is_some() || ROOMLESS.contains(&name_at(path));
        assert!(known, "{path} is in no room");
    }
    let wrong = upward_uses(&all);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_upward_use_would_be_seen() {
    let keeper = "impl Tenant {\n    pub(crate) fn wind_up(&self) {\n    }\n}\n";
    let wrong_with = |path, code: &str| {
        upward_uses(&[("keeper/start.rs", shipped(keeper)), (path, shipped(code))])
    };
    for code in [
        "use crate::keeper::start;",
        "use crate::{keeper, map};",
        "use super::super::keeper;",
        "fn f() {\n    tenant.wind_up();\n}",
        "impl Tenant {\n    fn f(&self) {\n        self.wind_up();\n    }\n}",
        "fn f() {\n    Tenant::wind_up(x);\n}",
    ] {
        assert_eq!(wrong_with("evict/fetch.rs", code).len(), 1, "{code}");
    }
    for code in [
        "// use crate::keeper::start;",
        "use crate::map::lock;",
        "fn f() {\n    clock.wind_up();\n}",
        "\n#[cfg(test)]\nmod tests {\n    use crate::keeper;\n}",
    ] {
        assert_eq!(wrong_with("evict.rs", code), Vec::<String>::new(), "{code}");
    }
    assert_eq!(
        wrong_with("life.rs", "use crate::keeper;\nfn f() {\n    tenant.wind_up();\n}"),
        [""; 0]
    );
}
