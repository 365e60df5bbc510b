//! strata-export: serves one disk image over NBD at a unix socket, through a pool of the
//! daemon's, with the rights of whoever starts it. `strata vm run --disk` does.
//!
//!     strata-export --image PATH [--read-only] [--pool NAME --pool-socket PATH]
//!     strata-export --swap BYTES --guest NAME --pool-socket PATH
//!     strata-export --told
//!
//! The second is a guest's swap disk, which is in its own memory ([`swap`]). The third reads
//! such words from standard input, a zero byte behind each, and one more behind the last: it
//! is started before it is known for what. With `--pool-may-come` it serves an image of
//! which the pool is not there, and finds it when it is.
//!
//! It opens and locks the image, says `ready BYTES` on standard output, perhaps after a
//! `note` or two, or else why it cannot, and reads from standard input, on one line, the path of the socket that it is to make; then it says
//! `serving`. It ends when standard input does: whoever holds the other end, QEMU in the
//! end, has ended then. Signals of the terminal do not reach it.
#![forbid(unsafe_code)]

#[path = "export/swap.rs"]
mod swap;

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use strata_guest::{Disk, Export, Links};
use strata_sys::peer::peer_of;
use strata_sys::{ImageFile, own_session_now};
use strata_units::is_swap_size;

/// Lines that it says at most about what went wrong.
const MAX_LINES: u32 = 200;
/// Bytes of all words that come by standard input.
const MOST_TOLD_BYTES: u64 = 64 << 10;
/// Longest path of a socket.
const MAX_PATH_BYTES: u64 = 4096;
/// Beside the socket of a swap disk, one for the pages of moments.
const MOMENTS: &str = "pages";
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

enum Wish {
    Image { path: PathBuf, read_only: bool, pool: Option<Pool> },
    Swap(swap::Wish),
}

struct Pool {
    name: String,
    socket: PathBuf,
    may_come: bool,
}

/// Words that come by standard input.
fn told() -> Result<Vec<OsString>, String> {
    let (mut words, mut left) = (Vec::new(), MOST_TOLD_BYTES);
    loop {
        let mut word = Vec::new();
        let mut input = std::io::stdin().lock().take(left);
        let read = input.read_until(0, &mut word).map_err(|error| error.to_string())?;
        left -= read as u64;
        match word.pop() {
            Some(0) if word.is_empty() => return Ok(words),
            Some(0) => words.push(OsString::from_vec(word)),
            _ => return Err("it was not told what to do".to_owned()),
        }
    }
}

fn wish() -> Result<Wish, String> {
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words = if given == ["--told"] { told()? } else { given };
    let mut words = words.into_iter();
    let (mut image, mut read_only, mut pool, mut socket) = (None, false, None, None);
    let mut may_come = false;
    let (mut size, mut guest) = (None, None);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{} has no value", word.display()));
        let text = |value: OsString| {
            value.into_string().map_err(|value| format!("{} is no text", value.display()))
        };
        match word.to_str() {
            Some("--image") => image = Some(value()?.into()),
            Some("--read-only") => read_only = true,
            Some("--pool-may-come") => may_come = true,
            Some("--pool") => pool = Some(text(value()?)?),
            Some("--pool-socket") => socket = Some(value()?.into()),
            Some("--swap") => size = Some(text(value()?)?),
            Some("--guest") => guest = Some(text(value()?)?),
            _ => return Err(format!("{} is not known; see docs/pools.md", word.display())),
        }
    }
    match (image, size) {
        (Some(path), None) => {
            let pool = match (pool, socket) {
                (Some(name), Some(socket)) => Some(Pool { name, socket, may_come }),
                (None, None) => None,
                _ => return Err("--pool and --pool-socket belong together".to_owned()),
            };
            Ok(Wish::Image { path, read_only, pool })
        }
        (None, Some(size)) => {
            let (Some(guest), Some(pool_socket), None) = (guest, socket, pool) else {
                return Err("--swap goes with --guest and --pool-socket".to_owned());
            };
            let size_bytes = size.parse().ok().filter(|size| is_swap_size(*size));
            let size_bytes =
                size_bytes.ok_or_else(|| format!("a swap disk cannot have {size} bytes"))?;
            Ok(Wish::Swap(swap::Wish { size_bytes, guest, pool_socket }))
        }
        _ => Err("give --image or --swap; strata vm run starts this program".to_owned()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            // Whoever started it tells people.
            println!("{}", why.replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    own_session_now();
    let log = Arc::new(Log::default());
    match wish()? {
        Wish::Image { path, read_only, pool } => {
            let (export, size) = opened(&path, read_only, pool, &log)?;
            say(&format!("ready {size}"))?;
            let Some((_, listener)) = listener(&log)? else { return Ok(()) };
            serve(&export, listener, &log);
            say("serving")?;
            // Whoever holds the other end says nothing more.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            Ok(())
        }
        Wish::Swap(wish) => {
            let files = swap::create(&wish)?;
            say(&format!("ready {}", wish.size_bytes))?;
            let Some((socket, listener)) = listener(&log)? else { return Ok(()) };
            let moments = bind(&socket.with_extension(MOMENTS))?;
            say("serving")?;
            swap::keep(&wish, &files, &swap::Sockets { listener, moments }, &log)
        }
    }
}

/// An image, opened and locked, and its size.
fn opened(
    path: &Path,
    read_only: bool,
    pool: Option<Pool>,
    log: &Arc<Log>,
) -> Result<(Arc<Export>, u64), String> {
    let image = ImageFile::open(path, !read_only)
        .map_err(|error| format!("{} cannot be opened: {error}", path.display()))?;
    if !image.is_direct() {
        log.say(&format!(
            "{} is on a file system without O_DIRECT: the machine's page cache holds a second copy",
            path.display()
        ));
    }
    let links = match pool {
        None => None,
        Some(Pool { name, socket, may_come }) => {
            let mut session = [0; 16];
            File::open("/dev/urandom")
                .and_then(|mut random| random.read_exact(&mut session))
                .map_err(|error| format!("/dev/urandom cannot be read: {error}"))?;
            let links = Links::new(socket, &name, session).map_err(|error| error.to_string())?;
            match links.check() {
                Err(why) if may_come => log.say(&format!(
                    "{} is read without the pool {name}, until there is one: {why}",
                    path.display()
                )),
                Err(why) => return Err(format!("the pool {name} cannot be used: {why}")),
                Ok(()) => {}
            }
            Some(links)
        }
    };
    let size = image.size_bytes();
    let complain = Arc::clone(log);
    let disk = Disk::new(Box::new(image), read_only);
    let export = Export::new(disk, links, Box::new(move |text| complain.say(text)));
    Ok((Arc::new(export), size))
}

/// The socket that standard input names; none: it has ended.
fn listener(log: &Log) -> Result<Option<(PathBuf, UnixListener)>, String> {
    let mut line = String::new();
    let read = std::io::stdin().lock().take(MAX_PATH_BYTES).read_line(&mut line);
    let socket = match read {
        Ok(0) => return Ok(None),
        Ok(_) if line.ends_with('\n') => PathBuf::from(line.trim_end_matches('\n')),
        _ => return Err("no path of a socket".to_owned()),
    };
    let listener = bind(&socket)?;
    log.to(&socket.with_extension("log"));
    Ok(Some((socket, listener)))
}

/// Only its user may connect: `own_session_now` has set the mode of new files.
fn bind(socket: &Path) -> Result<UnixListener, String> {
    UnixListener::bind(socket)
        .map_err(|error| format!("{} cannot be made: {error}", socket.display()))
}

fn say(text: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|error| error.to_string())
}

fn serve(export: &Arc<Export>, listener: UnixListener, log: &Arc<Log>) {
    let export = Arc::clone(export);
    accept(listener, log, move |stream| export.serve(stream));
}

/// Has whoever may connect be attended, each by a thread of its own.
fn accept(
    listener: UnixListener,
    log: &Arc<Log>,
    attend: impl Fn(UnixStream) -> std::io::Result<()> + Send + Sync + 'static,
) {
    let own = fs::metadata("/proc/self").map(|own| own.uid()).ok();
    let (attend, log) = (Arc::new(attend), Arc::clone(log));
    std::thread::spawn(move || {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            let peer = peer_of(&stream).ok().map(|peer| peer.uid);
            if peer.is_none() || (peer != own && peer != Some(0)) {
                log.say(&format!("user {peer:?} may not use this disk"));
                continue;
            }
            let (attend, log) = (Arc::clone(&attend), Arc::clone(&log));
            std::thread::spawn(move || {
                match attend(stream) {
                    // One that goes without a word is none of people's business.
                    Err(error) if !is_gone(&error) => {
                        log.say(&format!("a client was let go: {error}"));
                    }
                    _ => {}
                }
            });
        }
    });
}

fn is_gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// What people should know: on standard output, and, once it serves, in a file beside its
/// socket.
#[derive(Default)]
struct Log {
    said: AtomicU32,
    file: Mutex<Option<File>>,
}

impl Log {
    fn to(&self, path: &Path) {
        let opened = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
        if let (Ok(file), Ok(mut place)) = (opened, self.file.lock()) {
            *place = Some(file);
        }
    }

    fn say(&self, text: &str) {
        if self.said.fetch_add(1, Ordering::Relaxed) >= MAX_LINES {
            return;
        }
        let text: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        let Ok(mut place) = self.file.lock() else { return };
        // Nobody is left to be told that this cannot be written.
        let _ = match &mut *place {
            Some(file) => writeln!(file, "{text}"),
            None => writeln!(std::io::stdout(), "note {text}"),
        };
    }
}
