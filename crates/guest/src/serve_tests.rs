use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use strata_units::PageBuffer;

use super::*;
use crate::disk::{Cache, Stamp};
use crate::link::Links;
use crate::pool::Admission;

fn pool() -> Arc<Pool> {
    Arc::new(Pool::new(16 << 20, Admission::First).expect("a pool"))
}

fn pages(value: u8, count: usize) -> Vec<PageBuffer> {
    vec![PageBuffer([value; PAGE_SIZE]); count]
}

/// What comes of bytes that a client sends before it goes.
fn sent(pool: &Arc<Pool>, bytes: &[u8]) -> io::Result<()> {
    let (mut here, there) = UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        let served = scope.spawn(move || {
            let mut there = there;
            match greet(&mut there, |_, _| Ok(Arc::clone(pool)))? {
                Ok(pool) => serve(&mut there, &pool),
                Err(why) => panic!("{why}"),
            }
        });
        // It may hang up before it has heard all.
        let _ = here.write_all(bytes);
        let _ = here.shutdown(std::net::Shutdown::Write);
        let _ = io::copy(&mut here, &mut io::sink());
        served.join().expect("no panic")
    })
}

#[test]
fn what_is_no_request_ends_the_connection() {
    let pool = pool();
    let greeting = talk::greeting("p").expect("a name");
    let with = |asks: &[Ask], rest: &[u8]| {
        let mut bytes = greeting.clone();
        for ask in asks {
            bytes.extend(ask.encode());
            bytes.resize(bytes.len() + ask.payload_bytes(), 7);
        }
        bytes.extend(rest);
        sent(&pool, &bytes)
    };
    let open = Ask::Open { private: false };
    let put = |file| Ask::Put { file, index: 3, count: 2 };
    assert!(with(&[open, put(0), Ask::Get { file: 0, index: 0, count: 64 }], &[]).is_ok());
    assert_eq!((pool.figures().puts, pool.figures().hits), (2, 2));
    for asks in
        [&[put(0)][..], &[open, put(1)], &[open, Ask::Forget { file: 9, index: 0, count: 1 }]]
    {
        assert_eq!(with(asks, &[]).expect_err("not open").kind(), io::ErrorKind::InvalidData);
    }
    assert!(with(&[open], &[0xff; talk::HEADER_BYTES]).is_err());
    // Cut short: nothing is put.
    let mut cut = put(0).encode().to_vec();
    cut.resize(cut.len() + PAGE_SIZE, 1);
    assert!(with(&[open], &cut).is_err());
    assert_eq!(pool.figures().puts, 2);
    assert!(sent(&pool, b"STRPOOL2....").is_err());
    let mut long = greeting.clone();
    long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(sent(&pool, &long).is_err());
}

/// A daemon with a pool: `how` serves the connection of that number.
fn daemon(
    name: &str,
    how: impl Fn(usize, UnixStream) + Send + Sync + 'static,
) -> (std::path::PathBuf, Arc<AtomicUsize>) {
    let path = std::env::temp_dir().join(format!("strata-pool-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).expect("a socket");
    let count = Arc::new(AtomicUsize::new(0));
    let (counted, how) = (Arc::clone(&count), Arc::new(how));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (number, how) = (counted.fetch_add(1, SeqCst), Arc::clone(&how));
            std::thread::spawn(move || how(number, stream));
        }
    });
    (path, count)
}

fn served(pool: &Arc<Pool>, mut stream: UnixStream) {
    if let Ok(Ok(pool)) = greet(&mut stream, |_, _| Ok(Arc::clone(pool))) {
        let _ = serve(&mut stream, &pool);
    }
}

fn got(link: &mut impl Cache, first: u64, count: usize) -> (Vec<u8>, Vec<PageBuffer>) {
    let (mut found, mut out) = (vec![9; count], pages(0xee, count));
    link.get(Stamp::Own, first, &mut out, &mut found);
    (found, out)
}

#[test]
fn links_share_a_disks_pages_until_they_are_forgotten() {
    let pool = pool();
    let own = Arc::clone(&pool);
    let (path, _) = daemon("links", move |_, stream| served(&own, stream));
    let links = Links::new(path.clone(), "p", [1; 16]).expect("links");
    links.check().expect("the pool is there");
    let (mut a, mut b) = (links.link(), links.link());
    assert_eq!(got(&mut a, 0, 3).0, [talk::WANTED; 3]);
    a.put(Stamp::Own, 1, &pages(5, 2));
    let (found, out) = got(&mut b, 0, 4);
    assert_eq!(found, [talk::WANTED, talk::HIT, talk::HIT, talk::WANTED]);
    assert_eq!((out[1].0, out[2].0), ([5; PAGE_SIZE], [5; PAGE_SIZE]));
    b.forget(2, 1);
    assert_eq!(got(&mut a, 1, 2).0, [talk::HIT, talk::WANTED]);
    // Another disk's.
    let mut other = Links::new(path.clone(), "p", [2; 16]).expect("links").link();
    assert_eq!(got(&mut other, 1, 1).0, [talk::WANTED]);
    // The pool goes; nothing is found, and nothing fails.
    pool.end();
    a.forget(1, 1);
    assert_eq!(got(&mut b, 1, 1).0, [talk::MISSED]);
    drop((a, b, other));
    std::fs::remove_file(path).expect("removed");
}

#[test]
fn nothing_is_got_that_could_not_be_forgotten_or_whose_fate_is_not_known() {
    let pool = pool();
    let own = Arc::clone(&pool);
    // The first connection takes one request after the file was opened, and hangs up.
    let (path, _) = daemon("fate", move |number, mut stream| match number {
        0 => {
            let Ok(Ok(pool)) = greet(&mut stream, |_, _| Ok(Arc::clone(&own))) else {
                return;
            };
            let mut some = vec![0; talk::HEADER_BYTES + talk::FILE_ID_BYTES];
            stream.read_exact(&mut some).expect("a file");
            let id = some[talk::HEADER_BYTES..].try_into().expect("its identity");
            let file = pool.open(&id).expect("room");
            stream.write_all(&file.to_le_bytes()).expect("told");
            let mut put = vec![0; talk::HEADER_BYTES + PAGE_SIZE];
            stream.read_exact(&mut put).expect("a page");
            drop(stream);
            // It is taken after all, much later.
            pool.put(file, 0, &[1; PAGE_SIZE]);
        }
        _ => served(&own, stream),
    });
    let links = Links::new(path.clone(), "p", [1; 16]).expect("links");
    let mut link = links.link();
    link.put(Stamp::Own, 0, &pages(1, 1));
    while pool.figures().puts == 0 {
        std::thread::yield_now();
    }
    // The page is there, and must not be got: it may have been written meanwhile.
    let until = |link: &mut crate::Link| loop {
        let found = got(link, 0, 1).0[0];
        if found != talk::MISSED {
            return found;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    assert_eq!(until(&mut link), talk::WANTED);
    link.put(Stamp::Own, 0, &pages(2, 1));
    assert_eq!(got(&mut link, 0, 1).0, [talk::HIT]);
    // Nobody answers when it is to be forgotten.
    std::fs::rename(&path, path.with_extension("away")).expect("away");
    drop(link);
    let mut link = links.link();
    link.forget(0, 1);
    std::fs::rename(path.with_extension("away"), &path).expect("back");
    let mut link = links.link();
    assert_eq!(until(&mut link), talk::WANTED, "it could not be forgotten");
    std::fs::remove_file(path).expect("removed");
}

#[test]
fn who_greets_is_known_and_who_is_refused_is_told_why() {
    let mut whole = talk::swap_greeting("web").expect("a name");
    let (mut here, mut there) = UnixStream::pair().expect("a pair");
    here.write_all(&whole).expect("sent");
    let met = greet(&mut there, |caller, name| {
        assert_eq!((caller, name), (Caller::Swap, "web"));
        Err::<(), _>("ä".repeat(talk::MAX_TEXT_BYTES))
    });
    assert!(met.expect("a greeting").is_err());
    let told = hear_answer(&mut here).expect_err("refused").to_string();
    assert_eq!(told, "ä".repeat(talk::MAX_TEXT_BYTES / 2));
    whole[7] = b'9';
    here.write_all(&whole).expect("sent");
    assert!(greet(&mut there, |_, _| Ok(())).is_err());
}
