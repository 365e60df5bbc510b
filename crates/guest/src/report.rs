//! What the process that serves a swap disk tells the daemon of it: after a greeting that
//! names the guest, its figures, again and again. Nobody answers. If there is no daemon the
//! disk goes on; the next one is told the same.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use strata_sys::connect_now;
use strata_units::MOST_SWAP_BYTES;

use crate::persistent::SwapFigures;
use crate::serve::hear_answer;
use crate::talk;

const FIGURES: usize = 10;
const REPORT_BYTES: usize = FIGURES * 8;
/// Pages that may be counted twice, being written.
const UNDER_WAY: u64 = 1 << 10;
/// For the daemon to take what it is told.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often it is looked whether there is anything new to tell.
const EVERY: Duration = Duration::from_secs(1);

/// All of them, in the order in which they are sent.
fn numbers(figures: &mut SwapFigures) -> [&mut u64; FIGURES] {
    let SwapFigures {
        size_bytes,
        cost_bytes,
        pages,
        deduplicated_pages,
        fill_pages,
        gets,
        puts,
        refused,
        discarded,
        corrupt,
    } = figures;
    [
        size_bytes,
        cost_bytes,
        pages,
        deduplicated_pages,
        fill_pages,
        gets,
        puts,
        refused,
        discarded,
        corrupt,
    ]
}

/// Figures as they are sent.
fn encode(mut figures: SwapFigures) -> [u8; REPORT_BYTES] {
    let mut bytes = [0; REPORT_BYTES];
    for (to, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers(&mut figures)) {
        *to = number.to_le_bytes();
    }
    bytes
}

/// Figures as they were sent. None: no swap disk has such.
fn decode(bytes: &[u8; REPORT_BYTES]) -> Option<SwapFigures> {
    let mut figures = SwapFigures::default();
    for (number, &from) in numbers(&mut figures).into_iter().zip(bytes.as_chunks().0) {
        *number = u64::from_le_bytes(from);
    }
    // Counted one after the other, while pages come and go.
    let most_pages = figures.size_bytes / strata_units::PAGE_SIZE as u64 + UNDER_WAY;
    let is_one = figures.size_bytes <= MOST_SWAP_BYTES
        && figures.cost_bytes <= MOST_SWAP_BYTES * 2
        && figures.pages <= most_pages
        && figures.deduplicated_pages <= most_pages
        && figures.fill_pages <= most_pages;
    is_one.then_some(figures)
}

/// The daemon's end: hears figures until the disk is gone.
///
/// # Errors
/// The connection's; or they are none.
pub fn hear_reports(stream: &mut impl Read, mut hear: impl FnMut(SwapFigures)) -> io::Result<()> {
    loop {
        let mut bytes = [0; REPORT_BYTES];
        stream.read_exact(&mut bytes)?;
        let figures = decode(&bytes)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "figures of no disk"))?;
        hear(figures);
    }
}

/// The disk's end: tells the daemon behind `socket`, whenever there is one, of the swap disk
/// of this guest. `tick` is called once a second, and says what there is to tell. Does not
/// return.
pub fn report(socket: &Path, guest: &str, mut tick: impl FnMut() -> SwapFigures) -> ! {
    let greeting = talk::swap_greeting(guest).unwrap_or_default();
    let connect = || -> io::Result<UnixStream> {
        let mut stream = connect_now(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(&greeting)?;
        hear_answer(&mut stream)?;
        // To wait for its end is to wait for the next look.
        stream.set_read_timeout(Some(EVERY))?;
        Ok(stream)
    };
    let mut daemon: Option<UnixStream> = None;
    let mut told = None;
    loop {
        let figures = tick();
        if daemon.is_none() {
            (daemon, told) = (connect().ok(), None);
        }
        if let Some(stream) = &mut daemon
            && told != Some(figures)
        {
            match stream.write_all(&encode(figures)) {
                Ok(()) => told = Some(figures),
                Err(_) => daemon = None,
            }
        }
        match &mut daemon {
            None => std::thread::sleep(EVERY),
            Some(stream) => match stream.read(&mut [0]) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) => {}
                // It is dead, or says what nobody says.
                _ => daemon = None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> SwapFigures {
        SwapFigures {
            size_bytes: 1 << 30,
            cost_bytes: 2,
            pages: 3,
            deduplicated_pages: 4,
            fill_pages: 5,
            gets: 6,
            puts: 7,
            refused: 8,
            discarded: 9,
            corrupt: 10,
        }
    }

    #[test]
    fn figures_are_heard_as_they_were_told_and_nonsense_is_not() {
        let sent = [encode(figures()), encode(SwapFigures::default())].concat();
        let mut heard = Vec::new();
        let ended = hear_reports(&mut &sent[..], |figures| heard.push(figures));
        assert_eq!(ended.expect_err("the end").kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(heard, [figures(), SwapFigures::default()]);
        for wrong in [
            SwapFigures { size_bytes: MOST_SWAP_BYTES + 1, ..figures() },
            SwapFigures { cost_bytes: u64::MAX, ..figures() },
            SwapFigures { pages: 1 << 19, ..figures() },
            SwapFigures { fill_pages: u64::MAX, ..figures() },
        ] {
            let ended = hear_reports(&mut &encode(wrong)[..], |_| panic!("{wrong:?}"));
            assert_eq!(ended.expect_err("nonsense").kind(), io::ErrorKind::InvalidData);
        }
    }
}
