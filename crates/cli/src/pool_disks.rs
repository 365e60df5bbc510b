//! Disks of a guest that are read through pools, and its swap disk: each is served to QEMU
//! by a program of its own, `strata-export`, as the caller and with the caller's rights,
//! which ends when QEMU does.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use strata_api::POOL_SOCKET_NAME;
use strata_units::{ByteSize, LEAST_SWAP_BYTES, MOST_SWAP_BYTES, is_swap_size};
use strata_vm::{PoolDisk, SWAP_SOCKET_NAME, socket_name};

use crate::failure::{Failure, Result, printable};
use crate::{place, run, vm};

/// The program, where strata's are.
const PROGRAM: &str = "strata-export";
/// What a qcow2 begins with.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";
/// Longest line that such a program says.
const MAX_LINE_BYTES: u64 = 4096;

/// What `--disk` says.
pub(crate) fn read(disks: &[String], what: &str) -> Result<Vec<PoolDisk>> {
    let read = |text: &String| {
        let disk = PoolDisk::parse(text, looks_like_qcow2);
        disk.map_err(|refusal| vm::refusal_of(what, refusal))
    };
    disks.iter().map(read).collect()
}

fn looks_like_qcow2(path: &str) -> bool {
    let mut magic = [0; 4];
    // What cannot be read is refused when it is opened to be served.
    let is_file = std::fs::metadata(path).is_ok_and(|known| known.is_file());
    let read =
        is_file.then(|| std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)));
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

/// All of a guest's. Dropped, they end.
pub(crate) struct Exports(Vec<Export>);

impl Exports {
    /// Has every image opened and locked; `control`: the daemon's control socket.
    pub(crate) fn start(disks: &[PoolDisk], control: &Path, what: &str) -> Result<Self> {
        let mut exports = Self(Vec::new());
        for (index, disk) in disks.iter().enumerate() {
            make_overlay(disk, what)?;
            let mut words: Vec<OsString> = vec!["--image".into(), disk.image.clone().into()];
            if disk.image_is_read_only() {
                words.push("--read-only".into());
            }
            words.extend(["--pool".into(), disk.pool.clone().into()]);
            exports.add(words, &disk.image, socket_name(index), control, what)?;
        }
        Ok(exports)
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
        words: Vec<OsString>,
        image: &str,
        socket: String,
        control: &Path,
        what: &str,
    ) -> Result<()> {
        let failed = |why: String| Failure::new(what, format!("the disk {image}: {why}"));
        let program = place::installed(PROGRAM).ok_or_else(|| {
            failed(format!("{PROGRAM} is not there"))
                .todo("install it beside strata or in /usr/lib/strata")
        })?;
        let mut command = Command::new(&program);
        command.args(words).arg("--pool-socket").arg(control.with_file_name(POOL_SOCKET_NAME));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
        let (Some(hold), Some(says)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no pipes".into()));
        };
        let (image, says) = (image.to_owned(), BufReader::new(says));
        let mut export = Export { image, socket, hold, says, _child: child };
        export.hear("ready ", what)?;
        self.0.push(export);
        Ok(())
    }

    /// Has every disk be served at its socket in the guest's directory.
    pub(crate) fn serve_in(&mut self, directory: &Path, what: &str) -> Result<()> {
        for export in &mut self.0 {
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
        for Export { image, hold, .. } in &self.0 {
            rustix::io::fcntl_setfd(hold, rustix::io::FdFlags::empty())
                .map_err(|error| Failure::new(what, format!("the disk {image}: {error}")))?;
        }
        Ok(())
    }
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
