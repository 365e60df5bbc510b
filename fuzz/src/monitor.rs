//! What a guest's monitor says: a guest may have taken over its QEMU.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use strata_vm::{Monitor, Version, look};

/// Nobody is waited for: all that is said has been said.
const PATIENCE: Duration = Duration::from_secs(60);
/// What every monitor begins with: without it the rest would hardly be heard.
const BEGINNING: &[u8] = b"{\"QMP\": {}}\n{\"return\": {}}\n";
/// More than is said in one case, and less than a socket takes at once.
const MOST_BYTES: usize = 64 << 10;

/// A conversation, the monitor's part of which is all there from the start: with the
/// beginning that is due, if the first byte is even. Also taken for what a QEMU prints when
/// it is asked for its version.
pub fn monitor(data: &[u8]) {
    let _ = Version::parse(&String::from_utf8_lossy(data));
    let Some((how, said)) = data.split_first() else { return };
    let said = &said[..said.len().min(MOST_BYTES)];
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    if how % 2 == 0 {
        theirs.write_all(BEGINNING).expect("room for so little");
    }
    theirs.write_all(said).expect("room for so little");
    theirs.shutdown(Shutdown::Write).expect("ended");
    let Ok(mut monitor) = Monitor::begin(ours, PATIENCE) else { return };
    let balloon = (how % 4 < 2).then_some("balloon");
    if let Ok(state) = look(&mut monitor, balloon) {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        assert!(state.status.len() <= 32 && state.status.chars().all(plain));
        assert!(balloon.is_some() || state.balloon_bytes.is_none());
    }
}
