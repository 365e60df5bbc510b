//! What CRIU says when it fails, made readable.

use std::borrow::Cow;
use std::fs;
use std::path::Path;

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
        return consequence.unwrap_or("it gives no reason").to_owned();
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
    fn a_consequence_is_told_where_no_cause_is() {
        let log = "(00.04) Error (criu/cr-restore.c:1480): 77 exited, status=1\n";
        assert_eq!(reason(log, ""), "77 exited, status=1");
    }
}
