//! What CRIU says when it fails, made readable.

use std::borrow::Cow;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use rustix::fs::statvfs;

/// Lines that say nothing about the cause: after some of them CRIU goes on (the
/// kernel has no such module, which it would need for some programs only), the
/// others repeat that it failed.
const NOISE: [&str; 9] = [
    "Can't setup RLIMIT_NOFILE",
    "Diag module missing",
    "Unable to create tun",
    "reported by netlink",
    "Unable to create a veth pair",
    "Dumping FAILED",
    "Restoring FAILED",
    "Dump files (pid:",
    "Dump mappings (pid:",
];

/// What follows from a cause that was told before.
const CONSEQUENCES: [&str; 5] = [
    "Can't fixup VMA's fd",
    "Can't open root",
    "Can't open cwd",
    " exited, status=",
    "cgroupd: recv",
];

/// It said nothing.
const NONE: &str = "it gives no reason";
/// What CRIU's smallest image needs.
const LEAST_FREE_BYTES: u64 = 64 << 10;
/// Most lines of a reason.
const MOST_LINES: usize = 4;
/// Most that is read of a log, bytes.
const MOST_BYTES: usize = 1 << 20;

/// The text of an error line: `(00.021) 7: Error (criu/x.c:9): unix: text`.
fn error_text(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("Error (")?;
    let (_, text) = rest.split_once("): ")?;
    Some(text.trim())
}

/// A file that is not where it was: CRIU names it twice, without its first slash.
fn in_plain_words(text: &str) -> Cow<'_, str> {
    let missing = |text: &str| {
        let (path, why) = text.strip_prefix("Can't open file ")?.rsplit_once(": ")?;
        let path = path.strip_suffix(" on restore").unwrap_or(path);
        Some(format!("it needs /{}: {why}", path.trim_start_matches('/')))
    };
    missing(text).map_or(Cow::Borrowed(text), Cow::Owned)
}

fn reason(log: &str, output: &str) -> String {
    let mut lines: Vec<Cow<'_, str>> = Vec::new();
    let mut consequence = None;
    let plain = output.lines().map(str::trim).filter(|line| !line.is_empty());
    for text in
        log.lines().filter_map(error_text).chain(plain.map(|line| error_text(line).unwrap_or(line)))
    {
        let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
        if has(&CONSEQUENCES) {
            consequence = consequence.or(Some(text));
        } else if !has(&NOISE) {
            let text = in_plain_words(text);
            if !lines.contains(&text) && lines.len() < MOST_LINES {
                lines.push(text);
            }
        }
    }
    if lines.is_empty() {
        return consequence.unwrap_or(NONE).to_owned();
    }
    lines.join("; ")
}

fn read(path: &Path) -> String {
    let mut bytes = fs::read(path).unwrap_or_default();
    bytes.truncate(MOST_BYTES);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The first causes that CRIU gives, in its log file and in what it printed
/// before it had one.
pub(crate) fn reason_in(log: &Path, output: &Path) -> String {
    reason(&read(log), &read(output))
}

/// Why CRIU gave up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Complaint {
    /// Its own words, cut short.
    pub words: String,
    /// A copy of all that it said, where one was kept.
    pub log: Option<PathBuf>,
}

impl Complaint {
    /// What it says there; all of it is kept in the file `kept` from now on.
    pub(crate) fn read(log: &Path, output: &Path, kept: Option<&Path>) -> Self {
        let mut words = reason_in(log, output);
        // Then there was none for its words either.
        if words == NONE && log.parent().is_some_and(is_full) {
            words = NO_SPACE.to_owned();
        }
        let text = read(log) + &read(output);
        let write = |kept: &&Path| {
            let mut options = fs::OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            options.open(kept).and_then(|mut file| file.write_all(text.as_bytes())).is_ok()
        };
        let log = kept.filter(|_| !text.is_empty()).filter(write).map(Path::to_owned);
        Self { words, log }
    }
}

const NO_SPACE: &str = "No space left on device";

/// Whether next to nothing can be written there.
fn is_full(directory: &Path) -> bool {
    statvfs(directory).is_ok_and(|all| all.f_bavail * all.f_frsize < LEAST_FREE_BYTES)
}

/// Somebody has the number of a thread (EEXIST).
const NO_THREAD: &str = "Unable to create a thread: -17";
/// What was made for a process has another number.
const OTHER_NUMBER: &str = "do not match expected";
/// Nothing was made for a process, for this or another reason.
const NO_PROCESS: &str = "Can't fork for";

/// Causes that are known by words of CRIU's, and what to do about them.
const KNOWN: [(&str, &str); 14] = [
    (
        "Can't bind inet socket",
        "a port that it listened on is in use, or an address not to be had here: end who has it (ss -lnp), or clone with a network of its own (--net new)",
    ),
    (
        "External socket is used",
        "it made new connections to another program while CRIU looked: try again",
    ),
    ("soccr", "one of its TCP connections cannot be read or made again: try again, or close it"),
    (
        "has bad size",
        "a file that it has open is not as large as it was: put the file back as it was at the snapshot",
    ),
    (
        "has bad mode",
        "a file that it has open has another mode than it had: put the file back as it was at the snapshot",
    ),
    (
        "has bad build-ID",
        "the program or a library of it is another version than at the snapshot: install that one again",
    ),
    (
        OTHER_NUMBER,
        "a process number that it had is in use by now: strata clone gives it numbers of its own",
    ),
    (
        NO_THREAD,
        "the number of a thread that it had is in use by now: strata clone gives it numbers of its own",
    ),
    (
        NO_PROCESS,
        "a process that it had cannot be made: its number is in use, or there are too many processes (ulimit -u, pids.max)",
    ),
    (
        "Unseizable",
        "one of its threads did not stop in time, as on an overloaded machine: try again",
    ),
    (
        "Can not set flock",
        "another program holds a lock on a file that it had locked: end that one",
    ),
    (
        "Can't open master pty",
        "a terminal that it made cannot be made again, because its number is in use: close other terminals",
    ),
    (
        NO_SPACE,
        "No space left on device: there is no space where snapshots are kept (snapshot_dir): make some, or remove snapshots",
    ),
    (
        "Cannot allocate memory",
        "there is not enough memory for what CRIU needs besides: free some, or raise the limit of its cgroup",
    ),
];

/// Said already as a person would, by [`in_plain_words`] or by who looked after it.
const PLAIN: &str = "it needs /";

impl Complaint {
    /// Whether a number of a process or thread was somebody else's.
    pub(crate) fn is_of_taken_number(&self) -> bool {
        let has = |words| self.words.contains(words);
        has(NO_THREAD) || has(OTHER_NUMBER) || has(NO_PROCESS) && has("File exists")
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = KNOWN.iter().find(|(words, _)| self.words.contains(words));
        match (known, self.words.find(PLAIN)) {
            (Some((_, sentence)), _) => f.write_str(sentence)?,
            (None, Some(at)) => {
                let first = self.words[at..].split("; ").next().unwrap_or_default();
                write!(f, "{first}: put that back, as it was at the snapshot")?;
            }
            (None, None) => {
                f.write_str("CRIU gave up, for a reason that Strata has no words for")?
            }
        }
        match &self.log {
            Some(log) => write!(f, " (what CRIU says: {})", log.display()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_comes_first_and_noise_is_left_out() {
        let log = "(00.045) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self\n\
                   (00.05)  77: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket\n\
                   (00.05)  77: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket\n\
                   (00.06) Warn  (criu/x.c:1): nothing\n\
                   (00.07) Error (criu/cr-restore.c:2331): Restoring FAILED.\n";
        assert_eq!(reason(log, ""), "inet: Can't bind inet socket");
        assert_eq!(reason("", "criu: unknown option\n"), "criu: unknown option");
        assert_eq!(reason("", ""), "it gives no reason");
    }

    #[test]
    fn a_file_that_is_not_there_is_named_once_by_its_path() {
        let log = "(00.02) Error (criu/sockets.c:142): sockets: Diag module missing (-2)\n\
                   (00.03)  77: Error (criu/files-reg.c:2284): Can't open file usr/bin/x on restore: \
                   No such file or directory\n\
                   (00.03)  77: Error (criu/files-reg.c:2220): Can't open file usr/bin/x: \
                   No such file or directory\n\
                   (00.03)  77: Error (criu/mem.c:1483): Can't fixup VMA's fd\n\
                   (00.04) Error (criu/cr-restore.c:1480): 77 exited, status=1\n";
        assert_eq!(reason(log, ""), "it needs /usr/bin/x: No such file or directory");
    }

    #[test]
    fn what_users_read_is_a_sentence_and_names_where_the_rest_is() {
        let says = |words: &str, log: Option<&str>| {
            Complaint { words: words.to_owned(), log: log.map(PathBuf::from) }.to_string()
        };
        let port = says("inet: Can't bind inet socket (id 7): Address already in use", None);
        assert!(port.starts_with("a port that"), "{port}");
        let file = says("x; it needs /tmp/hsperfdata_u/7: No such file or directory; y", None);
        assert_eq!(
            file,
            "it needs /tmp/hsperfdata_u/7: No such file or directory: put that back, as it was at the snapshot"
        );
        let other = says("tty: Don't have tty to inherit session from", Some("/var/x.log"));
        assert!(!other.contains("inherit"), "{other}");
        assert!(other.ends_with(" (what CRIU says: /var/x.log)"), "{other}");
    }

    #[test]
    fn a_number_that_somebody_has_is_told_from_other_causes() {
        let is_taken =
            |words: &str| Complaint { words: words.to_owned(), log: None }.is_of_taken_number();
        assert!(is_taken("pie: 900: Unable to create a thread: -17"));
        assert!(is_taken("Pid 901 do not match expected 900"));
        assert!(is_taken("Can't fork for 900: File exists"));
        assert!(!is_taken("pie: 900: Unable to create a thread: -11"));
        assert!(!is_taken("Can't fork for 900: Resource temporarily unavailable"));
        assert!(!is_taken("Can't make /x: File exists"));
    }

    #[test]
    fn all_that_was_said_is_kept_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let fake = crate::testing::Fake::new("kept");
        let at = |name: &str| fake.directory().join(name);
        fs::write(at("log"), "(00.1) Error (criu/x.c:9): y: no such thing\n").expect("a log");
        let complaint = Complaint::read(&at("log"), &at("none"), Some(&at("kept")));
        assert_eq!(
            (complaint.words.as_str(), complaint.log),
            ("y: no such thing", Some(at("kept")))
        );
        assert!(fs::read_to_string(at("kept")).expect("kept").contains("criu/x.c:9"));
        assert_eq!(fs::metadata(at("kept")).expect("kept").permissions().mode() & 0o777, 0o600);
        assert_eq!(Complaint::read(&at("none"), &at("none"), Some(&at("kept"))).log, None);
    }

    #[test]
    fn a_consequence_is_told_where_no_cause_is() {
        let log = "(00.04) Error (criu/cr-restore.c:1480): 77 exited, status=1\n";
        assert_eq!(reason(log, ""), "77 exited, status=1");
    }
}
