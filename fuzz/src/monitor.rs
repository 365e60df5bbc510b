//! What a guest's monitor says: a guest may have taken over its QEMU.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use strata_vm::{Monitor, Version, look};

/// Nobody is waited for: all that is said has been said.
const PATIENCE: Duration = Duration::from_secs(60);
/// What every monitor begins with: without it the rest would hardly be heard.
const BEGINNING: &[u8] = b"{\"QMP\": {}}\n{\"return\": {}, \"id\": \"f-0\"}\n";
/// What begins an answer; the name of the request is put in there.
const ANSWERS: [&[u8]; 2] = [b"{\"return\"", b"{\"error\""];
/// More than is said in one case, and less than a socket takes at once.
const MOST_BYTES: usize = 32 << 10;

/// A conversation, the monitor's part of which is all there from the start: with the
/// beginning that is due, if the first byte is even. Also taken for what a QEMU prints when
/// it is asked for its version.
pub fn monitor(data: &[u8]) {
    let _ = Version::parse(&String::from_utf8_lossy(data));
    let Some((how, said)) = data.split_first() else { return };
    let said = &said[..said.len().min(MOST_BYTES)];
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    let (mut bytes, mut number) = (Vec::new(), 0);
    if how % 2 == 0 {
        bytes.extend_from_slice(BEGINNING);
        number = 1;
    }
    for line in said.split_inclusive(|byte| *byte == b'\n') {
        let is_answer = ANSWERS.iter().any(|answer| line.starts_with(answer));
        if is_answer {
            bytes.extend_from_slice(format!("{{\"id\":\"f-{number}\",").as_bytes());
            number += 1;
        }
        bytes.extend_from_slice(&line[usize::from(is_answer)..]);
    }
    // At once: each piece takes room of its own in a socket.
    theirs.write_all(&bytes).expect("room for so little");
    theirs.shutdown(Shutdown::Write).expect("ended");
    let Ok(mut monitor) = Monitor::begin_as(ours, PATIENCE, "f".into()) else { return };
    let balloon = (how % 4 < 2).then_some("balloon");
    if let Ok(state) = look(&mut monitor, balloon) {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        assert!(state.status.len() <= 32 && state.status.chars().all(plain));
        assert!(balloon.is_some() || state.balloon_bytes.is_none());
    }
}
