use super::*;
use crate::disk::Image;
use strata_sys::{Allocation, FileStamp, page_bytes, page_bytes_mut};

const SIZE: usize = 1 << 20;

/// Bytes, and whether they count as a device's.
struct Memory(Mutex<Vec<u8>>, bool);

impl Image for Memory {
    fn waits(&self) -> bool {
        self.1
    }

    fn size_bytes(&self) -> u64 {
        SIZE as u64
    }

    fn read_pages(&self, offset: u64, pages: &mut [PageBuffer]) -> io::Result<()> {
        let len = size_of_val(pages);
        let bytes = lock(&self.0);
        page_bytes_mut(pages).copy_from_slice(&bytes[offset as usize..][..len]);
        Ok(())
    }

    fn write_pages(&self, offset: u64, pages: &[PageBuffer]) -> io::Result<()> {
        lock(&self.0)[offset as usize..][..size_of_val(pages)].copy_from_slice(page_bytes(pages));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero_pages(&self, _: u64, _: u64, _: bool) -> io::Result<bool> {
        Ok(false)
    }

    fn allocation(&self, _: u64) -> Allocation {
        Allocation { hole: false, end: SIZE as u64 }
    }

    fn stamp(&self) -> io::Result<Option<FileStamp>> {
        Ok(None)
    }
}

fn export(waits: bool) -> Export {
    let disk = Disk::new(Box::new(Memory(Mutex::new(vec![0; SIZE]), waits)), false);
    Export::new(disk, None, Box::new(|_| {}))
}

fn request(kind: u16, cookie: u64, offset: u64, bytes: u32) -> Vec<u8> {
    let mut raw = 0x2560_9513u32.to_be_bytes().to_vec();
    raw.extend([0, 0]);
    raw.extend(kind.to_be_bytes());
    raw.extend(cookie.to_be_bytes());
    raw.extend(offset.to_be_bytes());
    raw.extend(bytes.to_be_bytes());
    raw
}

/// A handshake of the old kind, without structured replies.
fn old_handshake() -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
    bytes
}

/// What a client hears that sends `bytes` and then goes.
fn heard(export: &Export, bytes: &[u8]) -> (Vec<u8>, io::Result<()>) {
    let (here, there) = UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        let served = scope.spawn(move || export.serve(there));
        let mut reader = here.try_clone().expect("a second one");
        let sender = scope.spawn(move || {
            let mut here = here;
            let _ = here.write_all(bytes);
            let _ = here.shutdown(Shutdown::Write);
        });
        let mut answers = Vec::new();
        let _ = reader.read_to_end(&mut answers);
        sender.join().expect("no panic");
        (answers, served.join().expect("no panic"))
    })
}

#[test]
fn all_that_was_sent_is_answered_before_the_connection_ends() {
    let export = export(true);
    let mut bytes = old_handshake();
    let data: Vec<u8> = (0..100_000u32).map(|at| (at * 7) as u8).collect();
    bytes.extend(request(1, 1, 777, data.len() as u32));
    bytes.extend(&data);
    // Refused, with what follows it.
    bytes.extend(request(1, 2, SIZE as u64, 5000));
    bytes.extend([9; 5000]);
    bytes.extend(request(99, 3, 0, 0));
    bytes.extend(request(2, 4, 0, 0));
    let (answers, served) = heard(&export, &bytes);
    served.expect("a good client");
    let mut answers: Vec<_> = answers[18 + 10..].as_chunks::<16>().0.to_vec();
    answers.sort_by_key(|answer| answer[15]);
    let errors: Vec<u8> = answers.iter().map(|answer| answer[7]).collect();
    assert_eq!(errors, [0, 28, 22]);
    let mut bytes = old_handshake();
    bytes.extend(request(0, 5, 777, data.len() as u32));
    let (answers, _) = heard(&export, &bytes);
    assert!(answers[18 + 10 + 16..] == data);
    assert_eq!((*lock(&export.connections), *lock(&export.under_way.bytes)), (0, 0));
}

#[test]
fn a_client_that_is_none_or_that_goes_in_the_middle_is_let_go() {
    let export = export(true);
    let mut long = old_handshake();
    long.extend(request(1, 1, 0, u32::MAX));
    let mut cut = old_handshake();
    cut.extend(request(1, 1, 0, 100_000));
    cut.extend([7; 5000]);
    let mut wrong = old_handshake();
    wrong.extend([0; 28]);
    for bytes in [long, cut, wrong, b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 64]] {
        let (_, served) = heard(&export, &bytes);
        served.expect_err("it is none");
    }
    assert_eq!((*lock(&export.connections), *lock(&export.under_way.bytes)), (0, 0));
    // What was cut short was not written.
    let mut bytes = old_handshake();
    bytes.extend(request(0, 5, 0, 4096));
    assert_eq!(heard(&export, &bytes).0[18 + 10 + 16..], [0; 4096]);
}

#[test]
fn a_client_that_takes_no_answer_yet_is_heard_all_the_same() {
    for waits in [false, true] {
        takes_no_answer_yet(&export(waits));
    }
}

fn takes_no_answer_yet(export: &Export) {
    const BYTES: usize = SIZE / 2;
    let (here, there) = UnixStream::pair().expect("a pair");
    here.set_write_timeout(Some(Duration::from_secs(30))).expect("a limit");
    std::thread::scope(move |scope| {
        // Gone when the case fails, so that the server ends.
        let mut here = here;
        let served = scope.spawn(move || export.serve(there));
        let mut bytes = old_handshake();
        bytes.extend(request(0, 1, 0, BYTES as u32));
        here.write_all(&bytes).expect("it is heard");
        let mut beginning = [0; 18 + 10 + 16];
        here.read_exact(&mut beginning).expect("an answer begins");
        // It is more than a socket takes, as is what is to be written.
        let mut bytes = request(1, 2, BYTES as u64, BYTES as u32);
        bytes.extend(vec![7; BYTES]);
        here.write_all(&bytes).expect("it is heard while it takes no answer");
        here.read_exact(&mut vec![0; BYTES + 16]).expect("all answers");
        drop(here);
        served.join().expect("no panic").expect("a good client");
    });
}
