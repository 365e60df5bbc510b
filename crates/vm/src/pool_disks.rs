//! Disks that are read through a pool: what `--disk` says, and QEMU's words for it; and the
//! swap disk that `--swap` asks for. QEMU talks to each over NBD, at a socket in the guest's
//! directory.

use std::path::Path;

use crate::again::OtherDisk;
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
    /// Of a guest that came from a snapshot: copies of overlays that this one is over, the
    /// nearest first, and that are over the image.
    pub between: Vec<String>,
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
        Ok(Self { image, pool, format, overlay, between: Vec::new(), read_only })
    }

    /// Whether the image itself is only read.
    #[must_use]
    pub fn image_is_read_only(&self) -> bool {
        self.read_only || self.overlay.is_some()
    }

    /// The file that the guest writes to, if it writes.
    #[must_use]
    pub fn written(&self) -> Option<&str> {
        let own = (!self.read_only).then_some(&self.image);
        self.overlay.as_ref().or(own).map(String::as_str)
    }

    /// The same disk of a guest that has `others` in the place of the images that the first
    /// one writes to. Its paths are absolute.
    fn again(&self, here: &Path, others: &[OtherDisk]) -> Result<Self, Refusal> {
        let whole = |path: &str| path_in(here, path);
        let (image, read_only) = (whole(&self.image)?, self.read_only);
        let mut disk = Self { image, between: Vec::new(), ..self.clone() };
        let written = self.written().map(|path| here.join(path));
        match written.and_then(|path| others.iter().find(|other| here.join(&other.said) == path)) {
            Some(OtherDisk { path, layers, .. }) => match layers.split_last() {
                None => disk.image = whole(path)?,
                Some((image, between)) => {
                    disk.image = whole(image)?;
                    disk.between =
                        between.iter().map(|one| whole(one)).collect::<Result<_, _>>()?;
                    disk.overlay = Some(whole(path)?);
                }
            },
            None => disk.overlay = self.overlay.as_deref().map(whole).transpose()?,
        }
        Ok(Self { read_only, ..disk })
    }

    /// The image that its overlay is right above, and that one's format.
    #[must_use]
    pub fn below(&self) -> Option<(&str, &'static str)> {
        self.overlay.as_ref()?;
        Some(match self.between.first() {
            Some(copy) => (copy, Format::Qcow2.name()),
            None => (&self.image, self.format.name()),
        })
    }

    /// QEMU's words for the disk of that number.
    fn words(
        &self,
        index: usize,
        machine: &str,
        directory: &Path,
    ) -> Result<Vec<[String; 2]>, Refusal> {
        let node = node_name(index);
        let rights = if self.image_is_read_only() { "read-only=on" } else { "discard=unmap" };
        let image = image_name(index);
        let mut words = vec![client(&image, &socket_name(index), directory, rights)?];
        let mut top = image;
        if self.format == Format::Qcow2 {
            let base = format!("driver=qcow2,node-name={node}-base,file={top},read-only=on");
            words.push(["-blockdev".to_owned(), base]);
            top = format!("{node}-base");
        }
        for (number, copy) in self.between.iter().enumerate().rev() {
            let (name, copy) = (format!("{node}-under{number}"), escaped(copy));
            let under = format!(
                "driver=qcow2,node-name={name},file.driver=file,file.filename={copy},backing={top},read-only=on"
            );
            words.push(["-blockdev".to_owned(), under]);
            top = name;
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

fn node_name(index: usize) -> String {
    format!("strata-disk{index}")
}

fn image_name(index: usize) -> String {
    format!("{}-image", node_name(index))
}

/// What a guest writes to, as its QEMU has it, that is served to that, or is above what is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Served {
    /// QEMU's name of it.
    pub node: String,
    /// The image that it is; none: it is in no file.
    pub image: Option<String>,
}

/// What a guest of these disks can write to.
#[must_use]
pub fn served(disks: &[PoolDisk], swap: bool) -> Vec<Served> {
    let one = |(index, disk): (usize, &PoolDisk)| {
        let name = if disk.overlay.is_some() { node_name } else { image_name };
        Some(Served { node: name(index), image: Some(disk.written()?.to_owned()) })
    };
    let mut served: Vec<_> = disks.iter().enumerate().filter_map(one).collect();
    served.extend(swap.then(|| Served { node: SWAP_NAME.to_owned(), image: None }));
    served
}

/// The disks, as `--disk` says them, of a guest that has `others` in the place of the images
/// that the first one writes to; and those of `others` that are none of them. Relative paths
/// are relative to `here`.
///
/// # Errors
/// They make no disks: why.
pub fn disks_again(
    disks: &[String],
    here: &Path,
    others: &[OtherDisk],
) -> Result<(Vec<PoolDisk>, Vec<OtherDisk>), Refusal> {
    // What a guest has written to a raw image says nothing.
    let said = disks.iter().map(|text| PoolDisk::parse(text, |_| false));
    let said: Vec<PoolDisk> = said.collect::<Result<_, _>>()?;
    let is_one = |other: &&OtherDisk| {
        let path = here.join(&other.said);
        said.iter().any(|disk| disk.written().is_some_and(|written| here.join(written) == path))
    };
    let rest = others.iter().filter(|other| !is_one(other)).cloned().collect();
    let again = said.iter().map(|disk| disk.again(here, others));
    Ok((again.collect::<Result<_, _>>()?, rest))
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
/// What the socket for its pages of a moment is called there.
pub const SWAP_MOMENTS_NAME: &str = "swap.pages";
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
    fn a_second_guest_has_other_images_over_the_same_one() {
        let here = Path::new("/d");
        let said = ["b.img,cache=p,overlay=o", "raw,cache=p", "c.img,cache=p,readonly=on"];
        let said = said.map(str::to_owned);
        let other = |said: &str, path: &str, layers: &[&str]| OtherDisk {
            said: said.into(),
            path: path.into(),
            format: "qcow2".into(),
            layers: layers.iter().map(|&layer| layer.to_owned()).collect(),
        };
        let (same, rest) = disks_again(&said, here, &[]).expect("disks");
        assert_eq!((same[0].below(), rest.len()), (Some(("/d/b.img", "raw")), 0));
        assert_eq!(same[1].below(), None);
        let over = Served { node: "strata-disk0".into(), image: Some("/d/o".into()) };
        let raw = Served { node: "strata-disk1-image".into(), image: Some("/d/raw".into()) };
        let swap = Served { node: "strata-swap".into(), image: None };
        assert_eq!(served(&same, true), [over, raw, swap]);
        // A clone of a clone.
        let others = [
            other("/d/o", "/d/o.y", &["/d/o.x@1", "/d/o.a@1", "/d/b.img"]),
            other("/d/raw", "/d/raw.y", &["/d/raw.a@1"]),
            other("/d/e", "/d/e.y", &[]),
        ];
        let (disks, rest) = disks_again(&said, here, &others).expect("disks");
        assert_eq!(rest, [others[2].clone()]);
        assert_eq!(disks[0].below(), Some(("/d/o.x@1", "qcow2")));
        let text = words(&disks, "q35", Path::new("/g")).expect("words").concat().join(" ");
        for part in [
            "node-name=strata-disk0-under1,file.driver=file,file.filename=/d/o.a@1,backing=strata-disk0-image,read-only=on",
            "node-name=strata-disk0-under0,file.driver=file,file.filename=/d/o.x@1,backing=strata-disk0-under1,read-only=on",
            "node-name=strata-disk0,file.driver=file,file.filename=/d/o.y,backing=strata-disk0-under0,",
            "node-name=strata-disk1,file.driver=file,file.filename=/d/raw.y,backing=strata-disk1-image,",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!((&*disks[1].image, &*disks[2].image), ("/d/raw.a@1", "/d/c.img"));
        // The one that goes back.
        let back = [other("/d/raw", "/d/raw.strata", &[])];
        let (disks, _) = disks_again(&said, here, &back).expect("disks");
        assert_eq!((&*disks[1].image, disks[1].overlay.is_none()), ("/d/raw.strata", true));
        assert_eq!(disks[0].overlay.as_deref(), Some("/d/o"));
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
        assert!(disks_again(&["a.img".to_owned()], Path::new("/d"), &[]).is_err());
        assert!(words(&vec![disk.clone(); 9], "q35", Path::new("/d")).is_err());
        assert!(words(std::slice::from_ref(&disk), "isapc", Path::new("/d")).is_err());
        assert!(words(&[disk], "q35", Path::new(&"/d".repeat(60))).is_err());
    }
}
