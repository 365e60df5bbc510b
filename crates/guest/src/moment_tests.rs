use std::collections::BTreeMap;
use std::net::Shutdown;
use std::thread;

use super::*;

const PAGES: u64 = 3000;
const SIZE: u64 = PAGES * PAGE_SIZE as u64;

fn disk() -> Arc<Persistent> {
    let files = Persistent::create(SIZE).expect("files");
    let disk = Persistent::recover(files, SIZE, None, Box::new(|| true)).expect("a disk");
    disk.format().expect("room");
    Arc::new(disk)
}

fn page(value: u64) -> Box<PageBuffer> {
    let mut page = PageBuffer::zeroed();
    for (at, word) in page.0.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(value.wrapping_mul(77) + at as u64).to_le_bytes());
    }
    page
}

/// A connection to a disk.
fn connected(disk: &Arc<Persistent>) -> (UnixStream, thread::JoinHandle<io::Result<()>>) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let disk = Arc::clone(disk);
    (ours, thread::spawn(move || attend(&theirs, &disk)))
}

fn all(mut taken: Taken) -> io::Result<BTreeMap<u64, Vec<u8>>> {
    let (mut pages, mut buffer) = (BTreeMap::new(), PageBuffer::zeroed());
    while let Some(index) = taken.page(&mut buffer)? {
        pages.insert(index, buffer.0.to_vec());
    }
    Ok(pages)
}

#[test]
fn a_second_disk_has_the_pages_of_the_moment_whatever_is_written_then() {
    let first = disk();
    for index in 1..PAGES {
        match index % 5 {
            0 => first.put(index, &[7; PAGE_SIZE]).expect("room"),
            1 => {}
            _ => first.put(index, &page(index / 3).0).expect("room"),
        }
    }
    let mut now = vec![[0; PAGE_SIZE]; PAGES as usize];
    for (index, out) in now.iter_mut().enumerate() {
        first.get(index as u64, out).expect("a page");
    }
    let (stream, attending) = connected(&first);
    let taken = take(stream, SIZE).expect("a moment");
    // What is written, given up and packed anew meanwhile is not of that moment.
    for index in 0..PAGES {
        match index % 3 {
            0 => first.discard(index..index + 1),
            1 => first.put(index, &page(index + PAGES).0).expect("room"),
            _ => {}
        }
    }
    first.tend();
    let pages = all(taken).expect("pages");
    attending.join().expect("it ends").expect("and well");
    let second = disk();
    let (stream, attending) = connected(&second);
    give(&stream, |each| {
        for (&index, bytes) in &pages {
            let mut page = PageBuffer::zeroed();
            page.0.copy_from_slice(bytes);
            each(index, &page)?;
        }
        Ok(())
    })
    .expect("given");
    attending.join().expect("it ends").expect("and well");
    let mut out = [0; PAGE_SIZE];
    for (index, expected) in now.iter().enumerate() {
        second.get(index as u64, &mut out).expect("a page");
        assert!(out == *expected, "page {index}");
    }
    // Nothing of the moment is left when nobody listens any more.
    first.discard(0..PAGES);
    first.tend();
    assert_eq!(first.figures().pages, 0);
    assert!(first.figures().cost_bytes < 1 << 20, "{:?}", first.figures());
    // A disk that has something is given nothing.
    let (stream, attending) = connected(&second);
    assert!(give(&stream, |_| Ok(())).is_err());
    assert!(attending.join().expect("it ends").is_err());
}

#[test]
fn a_moment_of_which_something_is_missing_is_none() {
    let sent = |numbers: &[u64], with_page: bool| {
        let mut bytes = vec![DONE];
        for number in numbers {
            bytes.extend(number.to_le_bytes());
            if with_page && *number < PAGES {
                bytes.extend([3; PAGE_SIZE]);
            }
        }
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        theirs.write_all(&bytes).expect("sent");
        theirs.shutdown(Shutdown::Write).expect("the end");
        take(ours, SIZE).and_then(all).map(|pages| pages.len())
    };
    assert_eq!(sent(&[5, END, 1], true).expect("whole"), 1);
    for wrong in [&[5, END, 2][..], &[5, 5, END, 2], &[5, 4, END, 2], &[5], &[PAGES, END, 1]] {
        assert!(sent(wrong, true).is_err(), "{wrong:?}");
    }
    assert!(sent(&[BROKEN], false).expect_err("broken").to_string().contains("not what was"));
    assert!(sent(&[5], false).is_err());
}
