//! Disks that are read through a pool: what `--disk` says, and QEMU's words for it; and the
//! swap disk that `--swap` asks for. QEMU talks to each over NBD, at a socket in the guest's
//! directory.

use std::path::Path;

use crate::line::{path_in, socket_at};
use crate::options::escaped;
use crate::refusals::Refusal;

/// Disks of one guest.
const MAX_DISKS: usize = 8;
/// Seconds for which QEMU waits for a disk whose server is gone, before it tells the guest
/// that a read or a write has failed.
const RECONNECT_SECONDS: u32 = 60;

/// How the bytes of an image are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// As they are.
    Raw,
    /// QEMU's own.
    Qcow2,
}

impl Format {
    /// As QEMU calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// A disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolDisk {
    /// The image.
    pub image: String,
    /// The pool that it is read through.
    pub pool: String,
    /// What the image is.
    pub format: Format,
    /// Where what the guest writes goes: a qcow2 above the image, which stays as it is.
    pub overlay: Option<String>,
    /// The guest writes nothing.
    pub read_only: bool,
}

/// The parts of `IMAGE,key=value,…`, where a comma in a value is doubled.
fn parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    parts
}

impl PoolDisk {
    /// Reads `IMAGE,cache=POOL[,format=raw|qcow2][,overlay=FILE][,readonly=on]`.
    /// `looks_like_qcow2`: whether a file begins as one does.
    ///
    /// # Errors
    /// It makes no disk: why.
    pub fn parse(text: &str, looks_like_qcow2: impl Fn(&str) -> bool) -> Result<Self, Refusal> {
        const TODO: &str =
            "write IMAGE,cache=POOL, and then format=raw|qcow2, overlay=FILE or readonly=on";
        let refuse = |why: &str| Err(Refusal::new(format!("the disk {text}: {why}"), TODO));
        let mut parts = parts(text).into_iter();
        let image = parts.next().unwrap_or_default();
        if image.is_empty() || image.contains('\0') {
            return refuse("it names no image");
        }
        let (mut pool, mut format, mut overlay, mut read_only) = (None, None, None, false);
        for part in parts {
            match part.split_once('=') {
                Some(("cache", name)) if !name.is_empty() => pool = Some(name.to_owned()),
                Some(("format", "raw")) => format = Some(Format::Raw),
                Some(("format", "qcow2")) => format = Some(Format::Qcow2),
                Some(("overlay", file)) if !file.is_empty() => overlay = Some(file.to_owned()),
                Some(("readonly", "on")) => read_only = true,
                Some(("readonly", "off")) => read_only = false,
                _ => return refuse(&format!("{part} is not understood")),
            }
        }
        let Some(pool) = pool else { return refuse("it names no pool to be read through") };
        let format = match format {
            Some(format) => format,
            // A guest can write to a raw disk what makes it look like a qcow2, which names
            // other files: so it is not guessed.
            None if looks_like_qcow2(&image) => {
                return refuse("it begins as a qcow2 does, and its format is not said");
            }
            None => Format::Raw,
        };
        if read_only && overlay.is_some() {
            return refuse("what is read only has nothing to write to an overlay");
        }
        if format == Format::Qcow2 && !read_only && overlay.is_none() {
            return refuse("a qcow2 cannot grow in an export: give it an overlay");
        }
        Ok(Self { image, pool, format, overlay, read_only })
    }

    /// Whether the image itself is only read.
    #[must_use]
    pub fn image_is_read_only(&self) -> bool {
        self.read_only || self.overlay.is_some()
    }

    /// QEMU's words for the disk of that number.
    fn words(
        &self,
        index: usize,
        machine: &str,
        directory: &Path,
    ) -> Result<Vec<[String; 2]>, Refusal> {
        let node = format!("strata-disk{index}");
        let rights = if self.image_is_read_only() { "read-only=on" } else { "discard=unmap" };
        let image = format!("{node}-image");
        let mut words = vec![client(&image, &socket_name(index), directory, rights)?];
        let mut top = image;
        if self.format == Format::Qcow2 {
            let base = format!("driver=qcow2,node-name={node}-base,file={top},read-only=on");
            words.push(["-blockdev".to_owned(), base]);
            top = format!("{node}-base");
        }
        if let Some(overlay) = &self.overlay {
            let overlay = escaped(overlay);
            let above = format!(
                "driver=qcow2,node-name={node},file.driver=file,file.filename={overlay},backing={top},discard=unmap"
            );
            words.push(["-blockdev".to_owned(), above]);
            top = node.clone();
        }
        words.push(device(machine, &node, &top, ""));
        Ok(words)
    }
}

/// QEMU as the client of whoever serves a disk.
fn client(
    node: &str,
    socket: &str,
    directory: &Path,
    rights: &str,
) -> Result<[String; 2], Refusal> {
    let socket = escaped(&socket_at(path_in(directory, socket)?, "the disk's socket")?);
    let value = format!(
        "driver=nbd,node-name={node},server.type=unix,server.path={socket},reconnect-delay={RECONNECT_SECONDS},{rights}"
    );
    Ok(["-blockdev".to_owned(), value])
}

fn device(machine: &str, node: &str, top: &str, more: &str) -> [String; 2] {
    let driver = if machine == "microvm" { "virtio-blk-device" } else { "virtio-blk-pci" };
    ["-device".to_owned(), format!("{driver},id={node}-device,drive={top}{more}")]
}

/// What the socket of a guest's swap disk is called, in the guest's directory.
pub const SWAP_SOCKET_NAME: &str = "swap.sock";
/// What the guest knows its swap disk by: /dev/disk/by-id/virtio-strata-swap.
const SWAP_NAME: &str = "strata-swap";

/// QEMU's words for a swap disk.
pub(crate) fn swap_words(machine: &str, directory: &Path) -> Result<Vec<[String; 2]>, Refusal> {
    if without_virtio(machine) {
        let why = format!("a machine of the kind {machine} has no virtio disks");
        return Err(Refusal::new(why, "use another machine, or none of --swap"));
    }
    let more = format!(",serial={SWAP_NAME},logical_block_size=4096,physical_block_size=4096");
    Ok(vec![
        client(SWAP_NAME, SWAP_SOCKET_NAME, directory, "discard=unmap")?,
        device(machine, SWAP_NAME, SWAP_NAME, &more),
    ])
}

fn without_virtio(machine: &str) -> bool {
    ["isapc", "none"].contains(&machine)
}

/// What the socket of the disk of that number is called, in the guest's directory.
#[must_use]
pub fn socket_name(index: usize) -> String {
    format!("disk{index}.sock")
}

/// QEMU's words for all disks.
pub(crate) fn words(
    disks: &[PoolDisk],
    machine: &str,
    directory: &Path,
) -> Result<Vec<[String; 2]>, Refusal> {
    if disks.len() > MAX_DISKS {
        let why = format!("a guest has at most {MAX_DISKS} disks that are read through pools");
        return Err(Refusal::new(why, "give it some with -drive"));
    }
    if !disks.is_empty() && without_virtio(machine) {
        let why = format!("a machine of the kind {machine} has no virtio disks");
        return Err(Refusal::new(why, "use another machine, or -drive"));
    }
    let each = disks.iter().enumerate().map(|(index, disk)| disk.words(index, machine, directory));
    Ok(each.collect::<Result<Vec<_>, _>>()?.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PoolDisk, String> {
        PoolDisk::parse(text, |path| path.ends_with("qcow2")).map_err(|refusal| refusal.why)
    }

    fn line(text: &str, machine: &str) -> String {
        let disk = parse(text).expect("a disk");
        words(&[disk], machine, Path::new("/run/s/guests/0.g")).expect("words").concat().join(" ")
    }

    #[test]
    fn what_a_disk_is_told_is_what_qemu_is_told() {
        let image = "server.type=unix,server.path=/run/s/guests/0.g/disk0.sock,reconnect-delay=60";
        assert_eq!(
            line("a.img,cache=p", "q35"),
            format!(
                "-blockdev driver=nbd,node-name=strata-disk0-image,{image},discard=unmap -device virtio-blk-pci,id=strata-disk0-device,drive=strata-disk0-image"
            )
        );
        assert_eq!(
            line("a.qcow2,format=qcow2,overlay=b,,c,cache=p", "microvm"),
            format!(
                "-blockdev driver=nbd,node-name=strata-disk0-image,{image},read-only=on -blockdev driver=qcow2,node-name=strata-disk0-base,file=strata-disk0-image,read-only=on -blockdev driver=qcow2,node-name=strata-disk0,file.driver=file,file.filename=b,,c,backing=strata-disk0-base,discard=unmap -device virtio-blk-device,id=strata-disk0-device,drive=strata-disk0"
            )
        );
        assert!(parse("a.img,cache=p,overlay=o").expect("a disk").image_is_read_only());
        assert!(!parse("a.img,cache=p,readonly=off").expect("a disk").image_is_read_only());
        assert!(
            line("a.qcow2,cache=p,format=qcow2,readonly=on", "q35")
                .contains("drive=strata-disk0-base")
        );
        assert_eq!(parse("a,,b,cache=p").expect("a disk").image, "a,b");
        let swap = swap_words("q35", Path::new("/run/s/guests/0.g")).expect("words");
        assert_eq!(
            swap.concat().join(" "),
            "-blockdev driver=nbd,node-name=strata-swap,server.type=unix,server.path=/run/s/guests/0.g/swap.sock,reconnect-delay=60,discard=unmap -device virtio-blk-pci,id=strata-swap-device,drive=strata-swap,serial=strata-swap,logical_block_size=4096,physical_block_size=4096"
        );
        assert!(swap_words("none", Path::new("/d")).is_err());
        assert!(swap_words("q35", Path::new(&"/d".repeat(60))).is_err());
    }

    #[test]
    fn what_makes_no_disk_is_refused() {
        for (text, why) in [
            ("", "names no image"),
            (",cache=p", "names no image"),
            ("a.img", "names no pool"),
            ("a.img,cache=", "cache= is not understood"),
            ("a.img,cache=p,what", "what is not understood"),
            ("a.qcow2,cache=p", "its format is not said"),
            ("a.qcow2,cache=p,format=qcow2", "give it an overlay"),
            ("a.img,cache=p,overlay=o,readonly=on", "nothing to write"),
        ] {
            let refused = parse(text).expect_err(text);
            assert!(refused.contains(why), "{text}: {refused}");
        }
        let disk = parse("a.img,cache=p").expect("a disk");
        assert!(words(&vec![disk.clone(); 9], "q35", Path::new("/d")).is_err());
        assert!(words(std::slice::from_ref(&disk), "isapc", Path::new("/d")).is_err());
        assert!(words(&[disk], "q35", Path::new(&"/d".repeat(60))).is_err());
    }
}
