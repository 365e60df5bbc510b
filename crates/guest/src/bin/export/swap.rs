//! A swap disk. Two processes hold its pages, and one of them works on them: if that one is
//! killed, the other starts the next, which finds every page that was answered for, and
//! QEMU, which waits for it, asks again. If the other one is killed, the disk goes on.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use strata_guest::{Disk, Export, Persistent, SwapFigures, SwapFiles, moment, report};
use strata_sys::{available_bytes, spawn_with_own_files, total_bytes, wait_any_child};

use super::Log;

/// With less than this part of the machine's memory left it takes no page more. Caches of
/// disks give theirs back long before (docs/pools.md).
const LITTLE_LEFT: u64 = 64;
/// How long whoever takes or gives pages may let the next one wait: a store may be busy.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked how much that is.
const LOOK_EVERY_MS: u64 = 20;
/// Before the next process is started: at first, and at most if none lives long.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const LIVED: Duration = Duration::from_secs(10);
/// The status of a process that found a bug of ours.
const PANICKED: i32 = 101;

/// Where it is served.
pub(super) struct Sockets {
    /// To QEMU.
    pub(super) listener: UnixListener,
    /// To whoever takes a snapshot.
    pub(super) moments: UnixListener,
}

/// What is asked for.
pub(super) struct Wish {
    pub(super) size_bytes: u64,
    /// Whose it is, and where the daemon hears of it.
    pub(super) guest: String,
    pub(super) pool_socket: PathBuf,
}

/// Whether the machine has memory for more.
fn room() -> Box<dyn Fn() -> bool + Send + Sync> {
    let least = total_bytes().unwrap_or(0) / LITTLE_LEFT;
    let began = Instant::now();
    let (next_ms, has_room) = (AtomicU64::new(0), AtomicBool::new(true));
    Box::new(move || {
        let now_ms = began.elapsed().as_millis() as u64;
        let due_ms = next_ms.load(Relaxed);
        let looks = now_ms >= due_ms
            && next_ms.compare_exchange(due_ms, now_ms + LOOK_EVERY_MS, Relaxed, Relaxed).is_ok();
        if looks {
            has_room.store(available_bytes().is_ok_and(|left| left >= least), Relaxed);
        }
        has_room.load(Relaxed)
    })
}

fn taken_over(files: &SwapFiles, size_bytes: u64) -> Result<Persistent, String> {
    let files = files.try_clone().map_err(|error| error.to_string())?;
    Persistent::recover(files, size_bytes, None, room()).map_err(|error| error.to_string())
}

/// An empty one.
pub(super) fn create(wish: &Wish) -> Result<SwapFiles, String> {
    // To kill these processes frees nothing as long as one of them is left. The user's own
    // may not ask for that; no matter.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let made = || -> Result<SwapFiles, String> {
        let files = Persistent::create(wish.size_bytes).map_err(|error| error.to_string())?;
        let disk = taken_over(&files, wish.size_bytes)?;
        disk.format().map_err(|error| error.to_string())?;
        Ok(files)
    };
    made().map_err(|why| format!("the swap disk cannot be made: {why}"))
}

/// Has it be served until nobody needs it any more.
pub(super) fn keep(
    wish: &Wish,
    files: &SwapFiles,
    sockets: &Sockets,
    log: &Arc<Log>,
) -> Result<(), String> {
    let mut pause = PAUSE;
    loop {
        let began = Instant::now();
        spawn_with_own_files(|| match serve(wish, files, sockets, log) {
            Ok(()) => 0,
            Err(why) => {
                log.say(&why);
                1
            }
        })
        .map_err(|error| error.to_string())?;
        match wait_any_child().map_err(|error| error.to_string())? {
            None => return Err("it has lost its process".to_owned()),
            Some(ended) if ended.code == 0 => return Ok(()),
            Some(ended) => {
                log.say(&format!(
                    "process {} of the swap disk ended with status {}; no page is lost, and the next one takes over",
                    ended.pid, ended.code
                ));
            }
        }
        pause = if began.elapsed() >= LIVED { PAUSE } else { pause };
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Serves it until standard input ends.
fn serve(wish: &Wish, files: &SwapFiles, sockets: &Sockets, log: &Arc<Log>) -> Result<(), String> {
    let told = Arc::clone(log);
    // What a thread has left half done the next process does not see.
    std::panic::set_hook(Box::new(move |what| {
        told.say(&what.to_string());
        std::process::exit(PANICKED);
    }));
    let disk = Arc::new(taken_over(files, wish.size_bytes)?);
    let complain = Arc::clone(log);
    let export = Arc::new(Export::new(
        Disk::new(Box::new(Arc::clone(&disk)), false),
        None,
        Box::new(move |text| complain.say(text)),
    ));
    let own = |listener: &UnixListener| listener.try_clone().map_err(|error| error.to_string());
    super::serve(&export, own(&sockets.listener)?, log);
    let taken = Arc::clone(&disk);
    super::accept(own(&sockets.moments)?, log, move |stream| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        moment::attend(&stream, &taken)
    });
    let (socket, guest) = (wish.pool_socket.clone(), wish.guest.clone());
    std::thread::spawn(move || {
        let mut tended: Option<SwapFigures> = None;
        report(&socket, &guest, || {
            let figures = disk.figures();
            // What nobody uses is left alone once it is packed.
            if tended != Some(figures) {
                disk.tend();
                tended = Some(figures);
            }
            disk.figures()
        })
    });
    // Whoever holds the other end says nothing more.
    let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
    Ok(())
}
