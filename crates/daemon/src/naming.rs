//! What a rule calls its tenants: one name, or a template with placeholders, by which each
//! guest, unit or container is a tenant of its own.
//!
//! What stands for a placeholder comes from outside. `{unit}`, `{container}` and `{cgroup}`
//! are the kernel's word; `{guest}` is on the program's own command line, and decides only
//! which of the tenants of the rule's user the program gets.

use std::fmt;

use strata_api::MAX_NAME_BYTES;

use crate::config::nearest;
use crate::program::Program;

/// What a name that had to be changed ends with: a dash and this many hex digits.
const DIGITS: usize = 8;
/// Length of a container's identity, in hex digits.
const CONTAINER_ID_DIGITS: usize = 64;
/// How much of it is shown, as container engines do.
const CONTAINER_DIGITS: usize = 12;

/// What a rule may have a name made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Placeholder {
    /// A guest's name, as QEMU's command line has it.
    Guest,
    /// The unit of the service manager that the program is in.
    Unit,
    /// The container that it is in.
    Container,
    /// The last part of its control group's path.
    Cgroup,
}

impl Placeholder {
    const ALL: [(&str, Self); 4] = [
        ("guest", Self::Guest),
        ("unit", Self::Unit),
        ("container", Self::Container),
        ("cgroup", Self::Cgroup),
    ];

    /// What it stands for in a program; none: for nothing.
    fn value(self, program: &Program) -> Option<String> {
        let of_groups = |find: fn(&str) -> Option<&str>| {
            program.cgroups.iter().find_map(|path| find(path)).map(str::to_owned)
        };
        match self {
            Self::Guest => strata_vm::described(&program.command).name,
            Self::Unit => of_groups(unit),
            Self::Container => of_groups(container),
            Self::Cgroup => of_groups(last_part),
        }
        .filter(|value| !value.is_empty())
    }
}

impl fmt::Display for Placeholder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, _) = Self::ALL.iter().find(|(_, one)| one == self).expect("all are there");
        write!(f, "{{{word}}}")
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Part {
    Text(String),
    Value(Placeholder),
}

/// The name of a rule's tenants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Naming {
    text: String,
    parts: Vec<Part>,
}

impl Naming {
    /// Reads what the configuration says.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    pub(crate) fn parse(text: &str) -> Result<Self, (String, String)> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once('{') {
            let Some((word, behind)) = behind.split_once('}') else {
                let what = format!("{text:?} has a placeholder without an end");
                return Err((what, "close it: {guest}".into()));
            };
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            let known = Placeholder::ALL.iter().find(|(known, _)| *known == word);
            let Some((_, placeholder)) = known else {
                let words = Placeholder::ALL.map(|(word, _)| word);
                let meant = nearest(word, &words);
                let shown: String = word.chars().filter(|c| !c.is_control()).take(64).collect();
                let todo = format!("did you mean {{{meant}}}? (known: {})", words.join(", "));
                return Err((format!("unknown placeholder {{{shown}}}"), todo));
            };
            parts.push(Part::Value(*placeholder));
            rest = behind;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        let naming = Self { text: text.to_owned(), parts };
        // As it would be with the plainest of values.
        let sample = naming.filled(|_| Some("x".to_owned())).expect("each has a value");
        match strata_api::name_problem(&sample) {
            None => Ok(naming),
            Some(problem) => Err((problem.to_owned(), "choose another name".into())),
        }
    }

    /// As the configuration says it.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether programs of one rule can be of several tenants.
    pub(crate) fn is_template(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Value(_)))
    }

    /// What the tenant of a program is called.
    ///
    /// # Errors
    /// A placeholder that stands for nothing in it.
    pub(crate) fn name_of(&self, program: &Program) -> Result<String, Placeholder> {
        Ok(plain(self.filled(|placeholder| placeholder.value(program))?))
    }

    /// Whether a tenant of this name can be the rule's.
    pub(crate) fn can_be(&self, name: &str) -> bool {
        let (Some(first), Some(last)) = (self.parts.first(), self.parts.last()) else {
            return false;
        };
        if !self.is_template() {
            return self.text == name;
        }
        let begins = match first {
            Part::Text(text) => name.starts_with(text.as_str()),
            Part::Value(_) => true,
        };
        let ends = match last {
            Part::Text(text) => name.ends_with(text.as_str()) || ends_with_digits(name),
            Part::Value(_) => true,
        };
        begins && ends
    }

    fn filled(&self, value: impl Fn(Placeholder) -> Option<String>) -> Result<String, Placeholder> {
        let mut name = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Value(placeholder) => {
                    name.push_str(&value(*placeholder).ok_or(*placeholder)?);
                }
            }
        }
        Ok(name)
    }
}

/// A name of which a tenant can be called. Where it has to be changed for that it ends
/// with digits made of all of it: what differed still does.
fn plain(name: String) -> String {
    if strata_api::name_problem(&name).is_none() {
        return name;
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let replaced: String = name.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    let begins = replaced.trim_start_matches(['.', '-']);
    let kept = &begins[..begins.len().min(MAX_NAME_BYTES - 1 - DIGITS)];
    let kept = if kept.is_empty() { "tenant" } else { kept };
    format!("{kept}-{:0DIGITS$x}", fnv(name.as_bytes()))
}

fn ends_with_digits(name: &str) -> bool {
    name.rsplit_once('-').is_some_and(|(_, digits)| {
        digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// FNV-1a, the same in every version of the daemon: a tenant keeps its name.
fn fnv(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &b| (hash ^ u32::from(b)).wrapping_mul(0x0100_0193))
}

fn parts_of(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty())
}

/// The unit whose process it is, as the service manager reads such a path: the first part
/// that is no slice; below a user's manager that user's unit. What is below a unit is the
/// unit's own affair. Of a service without the ending.
fn unit(path: &str) -> Option<&str> {
    let is_unit = |part: &str| {
        [".service", ".scope", ".socket", ".mount", ".swap"].iter().any(|end| part.ends_with(end))
    };
    let mut parts = parts_of(path).skip_while(|part| part.ends_with(".slice"));
    let first = parts.next().filter(|part| is_unit(part))?;
    let is_manager = first.starts_with("user@") && first.ends_with(".service");
    let of_user = is_manager
        .then(|| parts.find(|part| !part.ends_with(".slice")).filter(|part| is_unit(part)))
        .flatten();
    let unit = of_user.unwrap_or(first);
    Some(unit.strip_suffix(".service").unwrap_or(unit))
}

/// The outermost container: the others are that one's own affair. Engines write its
/// identity of 64 hex digits as the last or only part of a name: `docker-ID.scope`,
/// `/docker/ID`, `libpod-ID.scope`, `cri-containerd-ID.scope`, `crio-ID`,
/// `/kubepods/…/podUID/ID`, `…:cri-containerd:ID`. Their monitors (`libpod-conmon-ID`)
/// are not in it.
fn container(path: &str) -> Option<&str> {
    parts_of(path).find_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        let (engine, id) = part.rsplit_once(['-', ':']).unwrap_or(("", part));
        let is_id = id.len() == CONTAINER_ID_DIGITS
            && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        (is_id && !engine.ends_with("conmon")).then(|| &id[..CONTAINER_DIGITS])
    })
}

fn last_part(path: &str) -> Option<&str> {
    parts_of(path).last()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(command: &[&str], cgroups: &[&str]) -> Program {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        Program {
            exe: Some("/usr/bin/qemu-system-x86_64".into()),
            comm: "qemu-system-x86".into(),
            cgroups: owned(cgroups),
            command: owned(command),
        }
    }

    fn name(template: &str, program: &Program) -> Result<String, Placeholder> {
        Naming::parse(template).expect(template).name_of(program)
    }

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn guests_are_told_apart_by_their_command_lines() {
        for (command, expected) in [
            (&["qemu", "-name", "guest=web1,debug-threads=on", "-m", "1G"][..], Ok("vm-web1")),
            (&["qemu", "-nodefaults", "-name", "web2"], Ok("vm-web2")),
            (&["qemu", "--name", "guest=web-3,process=x"], Ok("vm-web-3")),
            (&["qemu", "-name", "guest="], Err(Placeholder::Guest)),
            (&["qemu", "-m", "1G"], Err(Placeholder::Guest)),
            (&["qemu", "-name"], Err(Placeholder::Guest)),
            (&[], Err(Placeholder::Guest)),
        ] {
            let named = name("vm-{guest}", &program(command, &["/"]));
            assert_eq!(named, expected.map(str::to_owned), "{command:?}");
        }
    }

    #[test]
    fn units_containers_and_groups_are_read_from_the_path() {
        let docker = format!("/system.slice/docker-{ID}.scope/init");
        let pod = format!("/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope");
        let older = format!("/kubepods/burstable/pod-1-2/{ID}");
        let colons =
            format!("/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}");
        let podman = format!("/machine.slice/libpod-{ID}.scope/container");
        let monitor = format!("/machine.slice/libpod-conmon-{ID}.scope");
        let nested = format!("/docker/{ID}/docker/{}", ID.replace('0', "f"));
        for (path, wanted, expected) in [
            ("/system.slice/redis.service", "{unit}", Some("redis")),
            ("/system.slice/redis.service/inner.service", "{unit}", Some("redis")),
            ("/system.slice/system-x.slice/x@1.scope", "{unit}", Some("x-1.scope-fde4a2b2")),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope",
                "{unit}",
                Some("app-x.scope"),
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/init.scope",
                "{unit}",
                Some("init.scope"),
            ),
            ("/user.slice/user-1000.slice", "{unit}", None),
            ("/docker/x", "{unit}", None),
            ("/", "{unit}", None),
            (&docker, "c-{container}", Some("c-0123456789ab")),
            (&docker, "{cgroup}", Some("init")),
            (&pod, "{container}", Some("0123456789ab")),
            (&older, "{container}", Some("0123456789ab")),
            (&colons, "{container}", Some("0123456789ab")),
            (&podman, "{container}", Some("0123456789ab")),
            (&nested, "{container}", Some("0123456789ab")),
            (&monitor, "{container}", None),
            ("/system.slice/redis.service", "{container}", None),
            ("/a/b", "{cgroup}-of-{cgroup}", Some("b-of-b")),
            ("/", "{cgroup}", None),
        ] {
            let named = name(wanted, &program(&[], &[path]));
            assert_eq!(named.ok().as_deref(), expected, "{wanted} of {path}");
        }
        // The first hierarchy that tells it.
        let both = program(&[], &["/", "/system.slice/a.service", "/system.slice/b.service"]);
        assert_eq!(name("{unit}", &both).as_deref(), Ok("a"));
    }

    #[test]
    fn what_is_no_name_becomes_one_and_stays_distinct() {
        let of =
            |value: &str| name("vm-{guest}", &program(&["q", "-name", value], &[])).expect(value);
        let long = |end: &str| "x".repeat(100) + end;
        let (one, two) = (long("1"), long("2"));
        let values = ["a b", "a/b", "a-b", "é", "ü", "../..", &one, &two, "a,,b"];
        let mut names: Vec<String> = values.iter().map(|value| of(value)).collect();
        for name in &names {
            assert_eq!(strata_api::name_problem(name), None, "{name}");
            assert!(Naming::parse("vm-{guest}").expect("one").can_be(name), "{name}");
        }
        assert!(names[0].starts_with("vm-a-b-") && names[2] == "vm-a-b", "{names:?}");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), values.len());
        // Nothing in front of it that a name could begin with.
        for value in ["-rf", "..", ".hidden", "é"] {
            let first = name("{guest}", &program(&["q", "-name", value], &[])).expect(value);
            assert_eq!(strata_api::name_problem(&first), None, "{first}");
        }
    }

    #[test]
    fn a_rules_tenants_are_known_by_their_names() {
        let can =
            |template: &str, name: &str| Naming::parse(template).expect(template).can_be(name);
        assert!(can("db", "db") && !can("db", "db2"));
        assert!(can("vm-{guest}", "vm-x") && !can("vm-{guest}", "web"));
        assert!(can("{guest}.vm", "x.vm") && !can("{guest}.vm", "x"));
        assert!(can("{guest}.vm", "x-0123abcd") && can("{guest}", "x"));
    }

    #[test]
    fn slips_are_named() {
        for (text, expected) in [
            ("vm-{gest}", "unknown placeholder {gest}; did you mean {guest}?"),
            ("{}", "unknown placeholder {}; did you mean"),
            ("vm-{guest", "placeholder without an end; close it"),
            ("vm-guest}", "a name consists of"),
            ("-{guest}", "a name"),
            ("a/{guest}", "a name consists of"),
            ("", "a name"),
        ] {
            let (what, todo) = Naming::parse(text).expect_err(text);
            let line = format!("{what}; {todo}");
            assert!(line.contains(expected), "{text}: {line}");
        }
        assert!(!Naming::parse("db").expect("plain").is_template());
    }
}
