//! The drives of a guest's command line, for a second guest that has other images in the
//! place of those that the first one writes to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::again::OtherDisk;
use crate::options::Options;
use crate::refusals::Refusal;

/// The drives of one command line.
pub(crate) struct Drives<'a> {
    here: &'a Path,
    disks: &'a [OtherDisk],
    /// Which of the disks have been met.
    found: Vec<bool>,
    /// Nodes (`-blockdev`) that are the file of a disk.
    nodes: BTreeMap<String, usize>,
}

impl<'a> Drives<'a> {
    pub(crate) fn new(here: &'a Path, disks: &'a [OtherDisk]) -> Self {
        Self { here, disks, found: vec![false; disks.len()], nodes: BTreeMap::new() }
    }

    /// The disk whose image a path names.
    fn disk(&mut self, path: &str) -> Option<usize> {
        let path: PathBuf = self.here.join(path.strip_prefix("file:").unwrap_or(path));
        let index = self.disks.iter().position(|disk| self.here.join(&disk.said) == path)?;
        self.found[index] = true;
        Some(index)
    }

    /// What stands in the place of an image.
    pub(crate) fn image(&mut self, path: &str) -> Option<String> {
        self.disk(path).map(|index| self.disks[index].path.clone())
    }

    /// `-drive`.
    pub(crate) fn drive(&mut self, value: &str) -> Result<String, Refusal> {
        let mut options = Options::parse(value, "file")?;
        let below = options.get_below("file", "filename");
        let path = options.get("file").or_else(|| below.clone());
        let Some(index) = path.and_then(|path| self.disk(&path)) else {
            return Ok(value.to_owned());
        };
        check(&options)?;
        if options.is_on("snapshot") {
            let why = "a drive with snapshot=on writes to a file that has no name";
            return Err(Refusal::new(why, "start the guest without it"));
        }
        let OtherDisk { path, format, .. } = &self.disks[index];
        match below {
            Some(_) => options.set_below("file", "filename", path),
            None => options.set("file", path),
        }
        let key = if options.get("driver").is_some() { "driver" } else { "format" };
        options.set(key, format);
        Ok(options.to_string())
    }

    /// `-blockdev`. QEMU knows those before it only.
    pub(crate) fn blockdev(&mut self, value: &str) -> Result<String, Refusal> {
        let mut options = Options::parse(value, "driver")?;
        if let Some(index) = options.get_below("file", "filename").and_then(|path| self.disk(&path))
        {
            options.set_below("file", "filename", &self.disks[index].path);
            self.format(&mut options, index)?;
        } else if let Some(index) = options.get("filename").and_then(|path| self.disk(&path)) {
            check(&options)?;
            options.set("filename", &self.disks[index].path);
            self.nodes.extend(options.get("node-name").map(|name| (name, index)));
        } else if let Some(&index) = options.get("file").and_then(|name| self.nodes.get(&name)) {
            self.format(&mut options, index)?;
        } else {
            return Ok(value.to_owned());
        }
        Ok(options.to_string())
    }

    /// A node over the file of a disk reads that disk's format.
    fn format(&self, options: &mut Options, index: usize) -> Result<(), Refusal> {
        check(options)?;
        let driver = options.get("driver").unwrap_or_default();
        let format = &self.disks[index].format;
        let is_part = ["offset", "size"].iter().any(|key| options.get(key).is_some());
        if driver != *format && (driver != "raw" || is_part) {
            let why =
                format!("the drive {} is of the kind {driver}", self.disks[index].said.display());
            return Err(Refusal::new(why, "give the guest a raw or a qcow2 image, all of it"));
        }
        options.set("driver", format);
        Ok(())
    }

    /// That all disks have been met.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let missing = self.disks.iter().zip(&self.found).find(|(_, found)| !**found);
        match missing {
            None => Ok(()),
            Some((disk, _)) => Err(Refusal::new(
                format!("its drive {} is not on its command line", disk.said.display()),
                "give it by -drive or -blockdev when the guest is started",
            )),
        }
    }
}

/// Two guests never write to one image: QEMU's locks see to that.
fn check(options: &Options) -> Result<(), Refusal> {
    let lock = options.get("locking").or_else(|| options.get_below("file", "locking"));
    if lock.is_some_and(|lock| lock == "off") {
        return Err(Refusal::new("a drive has its locks off (locking=off)", "leave that out"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use crate::again::again;
    use crate::networks::Networks;

    use super::*;

    fn second(words: &[&str]) -> Result<Vec<String>, Refusal> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let disk = |said: &str, path: &str, format: &str| OtherDisk {
            said: said.into(),
            path: path.into(),
            format: format.into(),
            layers: Vec::new(),
        };
        let disks = [disk("/d/a.img", "/d/a.b", "qcow2"), disk("/d/v,1.qcow2", "/n", "qcow2")];
        let here = Path::new("/d");
        let (place, networks) = (Path::new("/x"), Networks::Back { beside: false });
        let found = again(&words, "b", place, (here, &disks), networks)?;
        Ok(found.words.into_iter().map(|word| word.into_string().expect("text")).collect())
    }

    #[test]
    fn drives_of_all_kinds_have_the_other_images() {
        let words = [
            "-drive",
            "file=a.img,format=raw,if=virtio,cache=none",
            "-drive",
            "if=none,id=x,file=/d/v,,1.qcow2",
            "-drive",
            "file=/d/other.iso,readonly=on",
        ];
        let expected = [
            "-drive",
            "file=/d/a.b,format=qcow2,if=virtio,cache=none",
            "-drive",
            "if=none,id=x,file=/n,format=qcow2",
            "-drive",
            "file=/d/other.iso,readonly=on",
        ];
        assert_eq!(second(&words).expect("a second one"), expected);
        let words = [
            "-blockdev",
            "file,node-name=f,filename=/d/a.img",
            "-blockdev",
            "driver=raw,node-name=d,file=f",
            "-blockdev",
            r#"{"driver":"qcow2","node-name":"e","file":{"driver":"file","filename":"v,1.qcow2"}}"#,
        ];
        let expected = [
            "-blockdev",
            "driver=file,node-name=f,filename=/d/a.b",
            "-blockdev",
            "driver=qcow2,node-name=d,file=f",
            "-blockdev",
            r#"{"driver":"qcow2","file":{"driver":"file","filename":"/n"},"node-name":"e"}"#,
        ];
        assert_eq!(second(&words).expect("a second one"), expected);
        let words = ["-hda", "a.img", "v,1.qcow2"];
        assert_eq!(second(&words).expect("a second one"), ["-hda", "/d/a.b", "/n"]);
        let words =
            ["-drive", "driver=raw,file.driver=file,file.filename=a.img", "-hda", "v,1.qcow2"];
        assert_eq!(
            second(&words).expect("a second one")[1],
            "driver=qcow2,file.driver=file,file.filename=/d/a.b"
        );
    }

    #[test]
    fn what_two_would_write_to_is_refused_by_name() {
        for (word, named) in [
            ("file=a.img,snapshot=on", "snapshot=on"),
            ("file=a.img,file.locking=off", "locking=off"),
            ("file=other.img", "/d/a.img is not on its command line"),
        ] {
            let refusal = second(&["-drive", word, "-hda", "v,1.qcow2"]).expect_err(named);
            assert!(refusal.why.contains(named), "{}", refusal.why);
        }
        let part = "driver=raw,offset=512,file.driver=file,file.filename=a.img";
        let refusal = second(&["-blockdev", part, "-hda", "v,1.qcow2"]).expect_err("a part");
        assert!(refusal.why.contains("of the kind raw"), "{}", refusal.why);
    }
}
