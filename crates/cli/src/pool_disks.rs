//! Disks of a guest that are read through pools, and its swap disk: each is served to QEMU
//! by a program of its own, `strata-export`, as the caller and with the caller's rights,
//! which ends when QEMU does.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use strata_api::POOL_SOCKET_NAME;
use strata_units::{ByteSize, LEAST_SWAP_BYTES, MOST_SWAP_BYTES, is_swap_size};
use strata_vm::{PoolDisk, SWAP_SOCKET_NAME, disks_again, socket_name};

use crate::failure::{Failure, Result, printable};
use crate::{place, run, vm};

/// The program, where strata's are.
const PROGRAM: &str = "strata-export";
/// What a qcow2 begins with.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";
/// Longest line that such a program says.
const MAX_LINE_BYTES: u64 = 4096;

/// What `--disk` says; relative paths are relative to `here`.
pub(crate) fn read(disks: &[String], here: &Path, what: &str) -> Result<Vec<PoolDisk>> {
    let refused = |refusal| vm::refusal_of(what, refusal);
    for text in disks {
        PoolDisk::parse(text, looks_like_qcow2).map_err(refused)?;
    }
    Ok(disks_again(disks, here, &[]).map_err(refused)?.0)
}

fn looks_like_qcow2(path: &str) -> bool {
    let mut magic = [0; 4];
    // What cannot be read is refused when it is opened to be served.
    let is_file = std::fs::metadata(path).is_ok_and(|known| known.is_file());
    let read = is_file.then(|| File::open(path).and_then(|mut file| file.read_exact(&mut magic)));
    matches!(read, Some(Ok(()))) && magic == QCOW2_MAGIC
}

/// Whether a swap disk can have that size.
pub(crate) fn check_swap(size: ByteSize, what: &str) -> Result<()> {
    if is_swap_size(size.0) {
        return Ok(());
    }
    let (least, most) = (ByteSize(LEAST_SWAP_BYTES), ByteSize(MOST_SWAP_BYTES));
    let why = format!("a swap disk of {size} cannot be made");
    Err(Failure::new(what, why).todo(format!("give --swap {least} to {most}, a multiple of 4 KiB")))
}

/// One disk's.
struct Export {
    image: String,
    /// What its socket is called, in the guest's directory.
    socket: String,
    /// It serves as long as this is open anywhere.
    hold: ChildStdin,
    says: BufReader<ChildStdout>,
    _child: Child,
}

/// Programs that wait to be told what they serve. Whoever starts a guest again counts as the
/// guest's before it is known what that has, and who serves a disk is nobody's tenant.
pub(crate) struct Servers(Vec<Child>);

impl Drop for Servers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }
}

impl Servers {
    /// So many.
    pub(crate) fn start(count: u32, what: &str) -> Result<Self> {
        let mut servers = Self(Vec::new());
        for _ in 0..count {
            servers.0.push(started(&["--told".into()]).map_err(|why| Failure::new(what, why))?);
        }
        Ok(servers)
    }

    /// One that does what these words say.
    fn told(&mut self, words: &[OsString]) -> std::result::Result<Child, String> {
        let mut child = self.0.pop().ok_or("nobody is left to serve it")?;
        let mut line = Vec::new();
        for word in words {
            line.extend_from_slice(word.as_bytes());
            line.push(0);
        }
        line.push(0);
        let told = child.stdin.as_mut().map(|input| input.write_all(&line));
        match told {
            Some(Ok(())) => Ok(child),
            _ => Err(format!("{PROGRAM} has ended")),
        }
    }
}

/// Starts the program.
fn started(words: &[OsString]) -> std::result::Result<Child, String> {
    let program = place::installed(PROGRAM).ok_or_else(|| {
        format!("{PROGRAM} is not there; install it beside strata or in /usr/lib/strata")
    })?;
    let mut command = Command::new(&program);
    command.args(words);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().map_err(|error| error.to_string())
}

/// All of a guest's. Dropped, they end.
pub(crate) struct Exports {
    list: Vec<Export>,
    /// Of a guest that came from a snapshot.
    servers: Option<Servers>,
}

impl Exports {
    /// Has every image opened and locked; `control`: the daemon's control socket.
    pub(crate) fn start(disks: &[PoolDisk], control: &Path, what: &str) -> Result<Self> {
        Self { list: Vec::new(), servers: None }.with(disks, control, what)
    }

    /// The same for a guest that comes from a snapshot, by programs that wait. A pool that is
    /// not there is done without.
    pub(crate) fn start_again(
        disks: &[PoolDisk],
        servers: Servers,
        control: &Path,
        what: &str,
    ) -> Result<Self> {
        Self { list: Vec::new(), servers: Some(servers) }.with(disks, control, what)
    }

    fn with(mut self, disks: &[PoolDisk], control: &Path, what: &str) -> Result<Self> {
        for (index, disk) in disks.iter().enumerate() {
            make_overlay(disk, what)?;
            let mut words: Vec<OsString> = vec!["--image".into(), disk.image.clone().into()];
            if disk.image_is_read_only() {
                words.push("--read-only".into());
            }
            if self.servers.is_some() {
                words.push("--pool-may-come".into());
            }
            words.extend(["--pool".into(), disk.pool.clone().into()]);
            self.add(words, &disk.image, socket_name(index), control, what)?;
        }
        Ok(self)
    }

    /// Has a swap disk made for a guest.
    pub(crate) fn add_swap(
        &mut self,
        size: ByteSize,
        guest: &str,
        control: &Path,
        what: &str,
    ) -> Result<()> {
        let (bytes, guest) = (size.0.to_string(), guest.to_owned());
        let words = ["--swap".to_owned(), bytes, "--guest".to_owned(), guest];
        let words = words.map(OsString::from).to_vec();
        self.add(words, "for swap", SWAP_SOCKET_NAME.to_owned(), control, what)
    }

    fn add(
        &mut self,
        mut words: Vec<OsString>,
        image: &str,
        socket: String,
        control: &Path,
        what: &str,
    ) -> Result<()> {
        let failed = |why: String| Failure::new(what, format!("the disk {image}: {why}"));
        let pools = control.with_file_name(POOL_SOCKET_NAME);
        words.extend(["--pool-socket".into(), pools.into()]);
        let child = match &mut self.servers {
            None => started(&words),
            Some(servers) => servers.told(&words),
        };
        let mut child = child.map_err(failed)?;
        let (Some(hold), Some(says)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no pipes".into()));
        };
        let (image, says) = (image.to_owned(), BufReader::new(says));
        let mut export = Export { image, socket, hold, says, _child: child };
        export.hear("ready ", what)?;
        self.list.push(export);
        Ok(())
    }

    /// Has every disk be served at its socket in the guest's directory.
    pub(crate) fn serve_in(&mut self, directory: &Path, what: &str) -> Result<()> {
        for export in &mut self.list {
            let socket: PathBuf = directory.join(&export.socket);
            let written = writeln!(export.hold, "{}", socket.display());
            written.map_err(|error| {
                Failure::new(what, format!("the disk {}: {error}", export.image))
            })?;
            export.hear("serving", what)?;
        }
        Ok(())
    }

    /// From now on they end with the program that this process becomes, and all that it
    /// leaves.
    pub(crate) fn end_with_what_is_executed(&self, what: &str) -> Result<()> {
        for Export { image, hold, .. } in &self.list {
            inherited(hold)
                .map_err(|error| Failure::new(what, format!("the disk {image}: {error}")))?;
        }
        Ok(())
    }

    /// From now on they end with `start`ed, and all that it leaves; that sees the guest's
    /// directory, in which their sockets are, by this name, whatever becomes of its path.
    pub(crate) fn end_with<T>(
        self,
        directory: File,
        what: &str,
        start: impl FnOnce() -> std::io::Result<T>,
    ) -> Result<T> {
        self.end_with_what_is_executed(what)?;
        inherited(&directory).and_then(|()| start()).map_err(|error| Failure::new(what, error))
    }
}

/// Has what is started have it, too.
fn inherited(file: &impl AsFd) -> std::io::Result<()> {
    Ok(rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty())?)
}

impl Export {
    /// Waits until it says this; what else it says are notes, or why it failed.
    fn hear(&mut self, wanted: &str, what: &str) -> Result<()> {
        loop {
            let mut line = String::new();
            let read = (&mut self.says).take(MAX_LINE_BYTES).read_line(&mut line);
            let line = line.trim_end();
            if line.starts_with(wanted) {
                return Ok(());
            }
            match line.strip_prefix("note ") {
                Some(note) => run::warn(note),
                None => {
                    let why = match read {
                        Ok(0) | Err(_) => format!("{PROGRAM} ended without a word"),
                        Ok(_) => printable(line),
                    };
                    let why = format!("the disk {}: {why}", self.image);
                    return Err(Failure::new(what, why));
                }
            }
        }
    }
}

/// Makes the overlay, where it is not there yet. Its header names the image, so that it can
/// be used without Strata too.
fn make_overlay(disk: &PoolDisk, what: &str) -> Result<()> {
    let Some(overlay) = &disk.overlay else { return Ok(()) };
    if Path::new(overlay).exists() {
        return Ok(());
    }
    let failed = |why: String| {
        Failure::new(what, format!("the overlay {overlay} cannot be made: {why}"))
            .todo("make it yourself: qemu-img create (Debian: qemu-utils)")
    };
    let image = std::fs::canonicalize(&disk.image)
        .map_err(|error| Failure::new(what, format!("the disk {}: {error}", disk.image)))?;
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", disk.format.name(), "-b"])
        .arg(image)
        .arg("--")
        .arg(overlay)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(format!("qemu-img: {error}")))?;
    if made.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&made.stderr);
    Err(failed(said.lines().next_back().unwrap_or("qemu-img failed").to_owned()))
}
