//! What comes over the sockets of guests' disks: from QEMU, or whoever says that it is, and
//! from the program that serves a disk.

use std::io::{self, Read, Write};

use strata_guest::nbd::{Agreed, Command, Handshake, Info, MAX_PAYLOAD_BYTES, Next, Request};
use strata_guest::{Admission, Pool, hear_reports, serve};
use strata_units::MOST_SWAP_BYTES;

/// An NBD client's bytes, behind one that says what is exported: the handshake, then
/// requests.
pub fn nbd(data: &[u8]) {
    let Some((&how, mut data)) = data.split_first() else { return };
    let info = Info { size_bytes: u64::from(how >> 1) << 24 | 777, read_only: how & 1 != 0 };
    let mut handshake = Handshake::new(info);
    let agreed = loop {
        let Some((piece, rest)) = data.split_at_checked(handshake.wanted()) else { return };
        data = rest;
        let Ok(step) = handshake.hear(piece) else { return };
        // An answer is bounded by what was asked.
        assert!(step.answer.len() <= 4096);
        match step.next {
            Next::More => assert!(handshake.wanted() > 0, "it would hear nothing for ever"),
            Next::Transmission(agreed) => break agreed,
            Next::End => return,
        }
    };
    assert!(agreed.structured || !agreed.allocation);
    while let Some((bytes, rest)) = data.split_first_chunk() {
        let Ok(request) = Request::parse(bytes) else { return };
        let Ok(payload) = request.payload_bytes() else { return };
        assert!(payload <= MAX_PAYLOAD_BYTES);
        data = rest.get(payload as usize..).unwrap_or_default();
        for agreed in [agreed, Agreed::default()] {
            check(request.command(info, agreed), info, payload);
        }
    }
}

fn check(command: Result<Command, strata_guest::nbd::Error>, info: Info, payload: u32) {
    let (offset, bytes, changes) = match command {
        Ok(Command::Read { offset, bytes }) => {
            assert!(bytes <= MAX_PAYLOAD_BYTES);
            (offset, bytes, false)
        }
        Ok(Command::Write { offset, bytes, .. }) => {
            assert_eq!(bytes, payload);
            (offset, bytes, true)
        }
        Ok(Command::Trim { offset, bytes, .. } | Command::Zero { offset, bytes, .. }) => {
            (offset, bytes, true)
        }
        Ok(Command::Status { offset, bytes, .. }) => (offset, bytes, false),
        Ok(Command::Flush | Command::Disconnect) | Err(_) => return,
    };
    assert!(bytes > 0 && offset + u64::from(bytes) <= info.size_bytes);
    assert!(!(changes && info.read_only));
}

/// A client that has sent all that it sends.
struct Sent<'a>(&'a [u8]);

impl Read for Sent<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Sent<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A disk's requests of its pool; and, the same bytes, a swap disk's figures.
pub fn pool(data: &[u8]) {
    let pool = Pool::new(0, Admission::Room).expect("a pool");
    let _ = serve(&mut Sent(data), &pool);
    let figures = pool.figures();
    // Each page that was put was sent.
    assert!(figures.pages <= figures.puts && figures.puts <= data.len() as u64 / 4096);
    assert!(figures.hits <= figures.gets && figures.corrupt == 0);
    let mut heard = 0;
    let _ = hear_reports(&mut Sent(data), |figures| {
        heard += 1;
        assert!(figures.size_bytes <= MOST_SWAP_BYTES && figures.cost_bytes <= 2 * MOST_SWAP_BYTES);
    });
    assert!(heard <= data.len() / 80);
}
