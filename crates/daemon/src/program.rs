//! What a process is (executable, control group), and which rules of the
//! configuration are for it. Whose it is, its connection tells. Reads `/proc` and decides; changes nothing.
//!
//! Rules look only at what the kernel says of a process. What the process says
//! of itself (its command line) is for display.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::config::Rule;

/// What is known of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Program {
    /// The executable; None for what has none that we may see.
    pub(crate) exe: Option<PathBuf>,
    /// The file name that it was executed by, up to 15 bytes of it: a link's, where
    /// `exe` is what the link leads to. It can change that, but not before our library
    /// has asked.
    pub(crate) comm: String,
    /// Control groups, one per hierarchy, from the hierarchy's root; those first in which
    /// memory is counted and services are.
    pub(crate) cgroups: Vec<String>,
    /// The command line. The process wrote it: trust nothing in it.
    pub(crate) command: Vec<String>,
}

/// Longest command line that is read: what libvirt writes for a large guest is below that.
const MAX_COMMAND_BYTES: u64 = 64 << 10;
/// How much of it a tenant keeps, to be shown.
const SHOWN_COMMAND_BYTES: usize = 4096;
/// What the kernel appends to the link of an executable that was replaced: by an
/// upgrade under a running server, usually.
const DELETED: &str = " (deleted)";

impl Program {
    /// The process `pid`.
    ///
    /// # Errors
    /// It is gone, or `/proc` does not show it.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        // A process that is not there is nobody's.
        std::fs::metadata(&directory)?;
        let cgroups = std::fs::read_to_string(directory.join("cgroup")).unwrap_or_default();
        let mut command = Vec::new();
        // An evicted page makes this read end early (EIO), not wait.
        if let Ok(file) = File::open(directory.join("cmdline")) {
            let _ = file.take(MAX_COMMAND_BYTES).read_to_end(&mut command);
        }
        Ok(Self {
            exe: std::fs::read_link(directory.join("exe")).ok().map(without_deleted),
            comm: std::fs::read_to_string(directory.join("comm"))
                .map(|line| line.trim_end_matches('\n').to_owned())
                .unwrap_or_default(),
            cgroups: cgroup_paths(&cgroups),
            command: split_command(&command),
        })
    }

    /// The beginning of the command line, for display.
    pub(crate) fn shown_command(&self) -> Vec<String> {
        let mut left = SHOWN_COMMAND_BYTES;
        let fits = |word: &&String| {
            let rest = left.checked_sub(word.len());
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        self.command.iter().take_while(fits).cloned().collect()
    }

    /// Those of `rules` whose conditions all hold but for the user: a program of another
    /// one may be the tenant's by descent.
    pub(crate) fn rules<'a>(&self, rules: &'a [Rule]) -> impl Iterator<Item = &'a Rule> {
        rules.iter().filter(|rule| self.matches(rule))
    }

    fn matches(&self, rule: &Rule) -> bool {
        let exe = rule.exe.as_ref().is_none_or(|wanted| self.is_executable(wanted));
        let cgroup = rule
            .cgroup
            .as_ref()
            .is_none_or(|wanted| self.cgroups.iter().any(|own| Path::new(own).starts_with(wanted)));
        exe && cgroup
    }

    /// A path stands for the file that it leads to, now: programs are installed as
    /// links (Debian's `redis-server`, alternatives). A name alone is the file's or
    /// the one that the program was executed by.
    fn is_executable(&self, wanted: &Path) -> bool {
        let Some(exe) = &self.exe else { return false };
        if wanted.is_absolute() {
            return exe == wanted || wanted.canonicalize().is_ok_and(|file| file == *exe);
        }
        exe.file_name().is_some_and(|name| Path::new(name) == wanted)
            || Path::new(&self.comm) == wanted
    }
}

fn without_deleted(exe: PathBuf) -> PathBuf {
    match exe.to_str().and_then(|text| text.strip_suffix(DELETED)) {
        Some(path) => path.into(),
        None => exe,
    }
}

/// Third parts of lines `7:memory:/a/b`; the path may hold colons.
fn cgroup_paths(text: &str) -> Vec<String> {
    let parts = |line| {
        let mut parts = str::splitn(line, 3, ':');
        Some((parts.next()?, parts.next()?, parts.next()?))
    };
    let rank = |number: &str, controllers: &str| match number {
        _ if controllers.split(',').any(|controller| controller == "memory") => 0,
        "0" => 1,
        _ if controllers == "name=systemd" => 2,
        _ => 3,
    };
    let mut lines: Vec<_> = text.lines().filter_map(parts).collect();
    lines.sort_by_key(|(number, controllers, _)| rank(number, controllers));
    lines.into_iter().map(|(_, _, path)| path.to_owned()).collect()
}

/// Words of a `/proc/PID/cmdline`, each ended by a zero byte.
fn split_command(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::User;
    use crate::naming::Naming;
    use strata_units::ByteSize;

    fn rule(exe: Option<&str>, cgroup: Option<&str>) -> Rule {
        Rule {
            name: named("r"),
            exe: exe.map(Into::into),
            user: User { name: "105".into(), uid: 105 },
            cgroup: cgroup.map(Into::into),
            claim: None,
            dram: ByteSize(1 << 30),
            tier_limit: None,
            tier_order: None,
            required: false,
        }
    }

    fn named(text: &str) -> Naming {
        Naming::parse(text).expect("a name")
    }

    fn first<'a>(program: &Program, rules: &'a [Rule]) -> Option<&'a Rule> {
        program.rules(rules).next()
    }

    fn redis() -> Program {
        Program {
            exe: Some("/usr/bin/redis-server".into()),
            comm: "redis-server".into(),
            cgroups: vec!["/".into(), "/system.slice/redis.service/inner".into()],
            command: vec![],
        }
    }

    #[test]
    fn all_conditions_must_hold() {
        let group = Some("/system.slice/redis.service");
        for (matching, exe, cgroup) in [
            (true, Some("/usr/bin/redis-server"), None),
            (true, Some("redis-server"), None),
            (false, Some("server"), None),
            (false, Some("/opt/redis-server"), None),
            (true, None, None),
            (true, None, group),
            (false, None, Some("/system.slice/redis")),
            (true, Some("redis-server"), group),
            (false, Some("mysqld"), group),
        ] {
            let rules = [rule(exe, cgroup)];
            assert_eq!(first(&redis(), &rules).is_some(), matching, "{exe:?} {cgroup:?}");
        }
    }

    #[test]
    fn the_first_match_wins_and_nothing_matches_the_unknown() {
        let redis_group = Some("/system.slice/redis.service");
        let mut rules = [rule(None, redis_group), rule(Some("redis-server"), None)];
        rules[1].name = named("second");
        let names: Vec<&str> = redis().rules(&rules).map(|rule| rule.name.text()).collect();
        assert_eq!(names, ["r", "second"]);
        let unknown = Program { exe: None, comm: "c".into(), cgroups: vec![], command: vec![] };
        assert_eq!(first(&unknown, &rules), None);
        assert_eq!(first(&unknown, &[rule(Some("c"), None)]), None);
    }

    #[test]
    fn a_link_to_a_program_names_it() {
        let place = std::env::temp_dir().join(format!("strata-link-{}", std::process::id()));
        std::fs::create_dir(&place).expect("a directory");
        let link = place.join("link-to-sleep");
        let sleep = Path::new("/bin/sleep").canonicalize().expect("sleep");
        std::os::unix::fs::symlink(&sleep, &link).expect("a link");
        let started = std::process::Command::new(&link).arg("60").spawn();
        let mut child = started.expect("sleep by the link");
        let seen = Program::of(child.id()).expect("a child");
        let matches = |exe: &str| first(&seen, &[rule(Some(exe), None)]).is_some();
        let told = ["link-to-sleep", "sleep", "link", "/nonexistent"].map(matches);
        let paths = [&link, &sleep, &place].map(|path| matches(path.to_str().expect("text")));
        child.kill().expect("kill");
        child.wait().expect("wait");
        std::fs::remove_dir_all(&place).expect("removed");
        assert_eq!((told, paths), ([true, true, false, false], [true, true, false]));
    }

    #[test]
    fn a_long_command_line_is_shown_in_part() {
        let word = "x".repeat(SHOWN_COMMAND_BYTES / 2);
        let long = Program { command: vec![word; 5], ..redis() };
        assert_eq!(long.shown_command().len(), 2);
        let short = Program { command: vec!["a".into(), String::new()], ..redis() };
        assert_eq!(short.shown_command(), short.command);
    }

    #[test]
    fn this_process_is_what_it_is() {
        let own = Program::of(std::process::id()).expect("/proc/self");
        assert_eq!(own.exe, std::env::current_exe().ok());
        let command: Vec<String> = std::env::args().collect();
        assert_eq!(own.command, command);
        // The test runs in some group of every hierarchy that there is.
        assert!(own.cgroups.iter().all(|group| group.starts_with('/')), "{:?}", own.cgroups);
        Program::of(u32::MAX).expect_err("no such process");
    }

    #[test]
    fn lines_of_proc() {
        assert_eq!(cgroup_paths("0::/\n"), ["/"]);
        let several = "9:cpu,cpuacct:/cpu\n7:hugetlb,memory:/a:b/c\n1:name=systemd:/s\n0::/u\nx\n";
        assert_eq!(cgroup_paths(several), ["/a:b/c", "/u", "/s", "/cpu"]);
        assert_eq!(split_command(b"a\0b c\0\0"), ["a", "b c", ""]);
        assert!(split_command(b"").is_empty());
        let replaced = without_deleted("/usr/bin/x (deleted)".into());
        assert_eq!(replaced, Path::new("/usr/bin/x"));
    }
}
