//! An initramfs being written: cpio's "newc" format, as the kernel documents it
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use anyhow::{Context, Result, bail};
use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;

/// What has been written so far.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    known: BTreeSet<String>,
    inode: u32,
}

impl Archive {
    /// A file with its directories. A name that is there already is passed over.
    pub(super) fn put(&mut self, name: &str, mode: u32, content: &[u8]) {
        let name = name.trim_start_matches('/');
        if !self.known.insert(name.to_owned()) {
            return;
        }
        for (end, _) in name.match_indices('/') {
            let parent = &name[..end];
            if self.known.insert(parent.to_owned()) {
                self.entry(parent, DIRECTORY | 0o755, &[]);
            }
        }
        self.entry(name, FILE | (mode & 0o777), content);
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let length = content.len() as u32;
        // inode, mode, uid, gid, links, time, size, four of devices, name, check
        let fields = [self.inode, mode, 0, 0, 1, 0, length, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            write!(self.bytes, "{field:08X}").expect("a Vec takes all");
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// A program of this machine, with the libraries that it is linked with, and without
    /// what only a debugger reads: all of it is the guest's memory for good.
    pub(super) fn program(&mut self, source: &Path, name: &str) -> Result<()> {
        let mode = fs::metadata(source).context("look at a program")?.permissions().mode();
        self.put(name, mode, &stripped(source)?);
        let output = Command::new("ldd").arg(source).stderr(Stdio::null()).output();
        let said = output.context("run ldd")?.stdout;
        for library in libraries(&String::from_utf8_lossy(&said)) {
            self.file(Path::new(library), library)?;
        }
        Ok(())
    }

    pub(super) fn file(&mut self, source: &Path, name: &str) -> Result<()> {
        let content = fs::read(source).with_context(|| format!("read {}", source.display()))?;
        let mode = fs::metadata(source).context("look at a file")?.permissions().mode();
        self.put(name, mode, &content);
        Ok(())
    }

    /// A kernel module, decompressed.
    pub(super) fn module(&mut self, source: &Path) -> Result<()> {
        let name = source.file_name().and_then(|name| name.to_str()).context("a module's name")?;
        let Some(plain) = name.strip_suffix(".xz") else {
            return self.file(source, &format!("modules/{name}"));
        };
        let output = Command::new("xz").arg("-dc").arg(source).output();
        let output = output.context("run xz; scripts/setup.sh disk installs it")?;
        if !output.status.success() {
            bail!("{} is no xz file", source.display());
        }
        self.put(&format!("modules/{plain}"), 0o644, &output.stdout);
        Ok(())
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

/// What `strip` makes of a program; where there is none, the program as it is.
fn stripped(source: &Path) -> Result<Vec<u8>> {
    let (directory, name) = (std::env::temp_dir(), source.file_name().unwrap_or_default());
    let to = directory.join(format!("{}-{}", std::process::id(), name.to_string_lossy()));
    let made = Command::new("strip").arg("-o").arg(&to).arg(source).output();
    let read = if made.is_ok_and(|made| made.status.success()) { &to } else { source };
    let bytes = fs::read(read).with_context(|| format!("read {}", source.display()));
    let _ = fs::remove_file(&to);
    bytes
}

/// Paths in what `ldd` prints.
fn libraries(said: &str) -> Vec<&str> {
    said.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_the_loader_too() {
        let said = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x0000)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x0000)\n";
        assert_eq!(libraries(said), ["/lib/x/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert!(libraries("\tstatically linked\n").is_empty());
    }

    #[test]
    fn entries_lie_on_multiples_of_four_and_parents_come_first() {
        let mut archive = Archive::default();
        archive.put("/a/b/file", 0o755, b"hello");
        archive.put("a/b/file", 0o755, b"again");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let place = |name: &str| text.find(name).expect("it is there");
        assert!(place("a\0") < place("a/b\0") && place("a/b\0") < place("a/b/file\0"));
        assert!(place("hello") < place("TRAILER!!!\0") && !text.contains("again"));
        // Mode and size of the file, in hexadecimal, stand before its name.
        let entry = &text[place("a/b/file\0") - 110..];
        assert!(entry.starts_with("070701") && &entry[14..22] == "000081ED");
        assert_eq!(&entry[54..62], "00000005");
    }
}
