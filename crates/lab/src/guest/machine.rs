//! A guest as the host sees it: QEMU's process, and the line on which it is told
//! what to do. Plain QEMU and `strata vm run` get the same machine.

use super::{
    site::{NAME, Site},
    words::{Order, Reply},
};
use crate::{
    cgroup::Group,
    interrupt,
    janitor::Janitor,
    process,
    strata::Strata,
    subject::{Subject, last_line, scratch},
};
use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use std::{
    fmt,
    fs::{self, File},
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Boots are seconds; with many at once, and emulated, minutes.
pub(crate) const BOOT: Duration = Duration::from_secs(240);
/// Between two looks at whether somebody wants this to end.
const LOOK: Duration = Duration::from_millis(200);
/// Longest line that a guest has reason to say.
const LONGEST: usize = 1 << 20;

/// What machine it is.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub name: String,
    pub memory_mebibytes: u64,
    pub processors: u32,
    /// Of the file that is its NVDIMM's content.
    pub nvdimm_mebibytes: Option<u64>,
    /// What it has of Strata.
    pub programs: &'static [&'static str],
    pub disks: Disks,
    /// Its console is this terminal, and not a log.
    pub has_terminal: bool,
}

impl Shape {
    pub(crate) fn new(name: &str, memory_mebibytes: u64) -> Self {
        let name = name.to_owned();
        Self {
            name,
            memory_mebibytes,
            processors: 1,
            nvdimm_mebibytes: None,
            programs: &[],
            disks: Disks::Servers,
            has_terminal: false,
        }
    }
}

/// Its disks; the first one is its root.
#[derive(Clone, Debug)]
pub(crate) enum Disks {
    /// The site's, with servers on it. What is written to it is forgotten.
    Servers,
    /// Images, each with its format. None: whoever starts it adds them.
    Images(Vec<(PathBuf, &'static str)>),
}

/// Who keeps it to its DRAM.
#[derive(Clone, Copy)]
pub(crate) enum Under<'a> {
    Nothing,
    /// With these words for `strata vm run`.
    Strata(&'a Strata, &'a [String]),
    /// The kernel, by a limit.
    Group(&'a Group),
}

/// A running one; killed when the guard drops.
pub(crate) struct Guest {
    name: String,
    subject: Subject,
    line: UnixStream,
    heard: Vec<u8>,
    console: PathBuf,
}

/// QEMU's words for it, without its name.
fn words(site: &Site, shape: &Shape, accelerator: &str, directory: &Path) -> Vec<String> {
    let file = |name: &str| directory.join(name).display().to_string();
    let has_nvdimm = shape.nvdimm_mebibytes.is_some();
    let mut words: Vec<String> = vec![
        "-machine".into(),
        if has_nvdimm { "q35,nvdimm=on".into() } else { "q35".into() },
        "-cpu".into(),
        "max".into(),
        "-smp".into(),
        shape.processors.to_string(),
        "-accel".into(),
        accelerator.into(),
    ];
    let memory = shape.memory_mebibytes;
    let most = shape
        .nvdimm_mebibytes
        .map_or_else(String::new, |size| format!(",slots=2,maxmem={}M", memory + size));
    words.extend(["-m".into(), format!("{memory}M{most}")]);
    if let Some(size) = shape.nvdimm_mebibytes {
        let nvdimm = file("nvdimm");
        let object =
            format!("memory-backend-file,id=nvdimm,share=on,mem-path={nvdimm},size={size}M");
        words.extend(["-object".into(), object]);
        words.extend(["-device".into(), "nvdimm,memdev=nvdimm".into()]);
    }
    let console =
        if shape.has_terminal { "mon:stdio".into() } else { format!("file:{}", file("console")) };
    let line = format!("socket,id=line,path={},server=on,wait=off", file("line"));
    // Past the host's page cache, which plain guests would have beside their DRAM.
    let drive = |image: &Path, more: &str| {
        format!("file={},if=none,cache=none,format={more}", image.display())
    };
    let drives = match &shape.disks {
        Disks::Servers => vec![drive(&site.disk, "raw,snapshot=on")],
        Disks::Images(images) => {
            images.iter().map(|(image, format)| drive(image, format)).collect()
        }
    };
    let told = format!("console=ttyS0 quiet panic=-1 rdinit=/strata/{NAME} -- guest");
    for (option, value) in [
        ("-kernel", site.kernel.display().to_string()),
        ("-initrd", file("initramfs")),
        ("-append", told),
        ("-serial", console),
        ("-chardev", line),
        ("-serial", "chardev:line".into()),
        ("-display", "none".into()),
    ] {
        words.extend([option.into(), value]);
    }
    for (number, drive) in drives.into_iter().enumerate() {
        words.extend(["-drive".into(), format!("{drive},id=disk{number}")]);
        words.extend(["-device".into(), format!("virtio-blk-pci,drive=disk{number}")]);
    }
    words.extend(["-nodefaults".into(), "-no-reboot".into()]);
    words
}

impl Guest {
    /// Starts it; it has booted once [`Self::up`] says so.
    pub(crate) fn start(
        janitor: &Janitor,
        site: &Site,
        shape: &Shape,
        accelerator: &str,
        under: Under<'_>,
    ) -> Result<Self> {
        let name = shape.name.clone();
        let (directory, files) = scratch(janitor, &name)?;
        fs::write(directory.join("initramfs"), site.initramfs(shape.programs)?)
            .context("write an initramfs")?;
        if let Some(size) = shape.nvdimm_mebibytes {
            let nvdimm = File::create(directory.join("nvdimm")).context("make an NVDIMM's file")?;
            nvdimm.set_len(size << 20).context("make an NVDIMM's file")?;
        }
        let mut command = match under {
            Under::Nothing => Command::new(&site.qemu),
            Under::Group(group) => {
                let wrapping = group.wrapping();
                let mut command = Command::new(&wrapping[0]);
                command.args(&wrapping[1..]).arg(&site.qemu);
                command
            }
            Under::Strata(strata, words) => {
                let mut command = strata.command(&["vm", "run", "--name", &name]);
                command.args(words).arg("--").arg(&site.qemu);
                command
            }
        };
        let log = directory.join("log");
        let said = File::create(&log).context("make QEMU's log")?;
        command.args(words(site, shape, accelerator, &directory));
        if shape.has_terminal {
            command.stdin(Stdio::inherit()).stdout(Stdio::inherit()).stderr(said);
        } else {
            command.stdin(Stdio::null());
            command.stdout(said.try_clone().context("share QEMU's log")?).stderr(said);
        }
        let subject = Subject::spawn(janitor, &mut command)?.with(files);
        let console = directory.join("console");
        let mut starting = Starting { subject, log, socket: directory.join("line") };
        let line = starting.connect().with_context(|| name.clone())?;
        line.set_read_timeout(Some(LOOK)).context("bound reads")?;
        Ok(Self { name, subject: starting.subject, line, heard: Vec::new(), console })
    }

    /// QEMU's process, and whatever `strata vm run` has started for it.
    pub(crate) fn pids(&self) -> Vec<u32> {
        process::family(self.subject.pid())
    }

    /// Waits until it has booted.
    pub(crate) fn up(&mut self) -> Result<()> {
        match self.reply(BOOT)? {
            Reply::Up => Ok(()),
            other => bail!("{}: it said {other:?} before it had booted", self.name),
        }
    }

    pub(crate) fn tell(&mut self, order: &Order) -> Result<()> {
        let text = serde_json::to_string(order).context("encode an order")?;
        writeln!(self.line, "{text}").with_context(|| format!("{} does not listen", self.name))
    }

    /// The answer to what it was told.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<T> {
        match self.reply(patience)? {
            Reply::Done(value) => serde_json::from_value(value)
                .with_context(|| format!("read what {} answered", self.name)),
            Reply::Failed(why) => bail!("{}: {why}", self.name),
            Reply::Up => bail!("{} booted once more", self.name),
        }
    }

    pub(crate) fn ask<T: DeserializeOwned>(
        &mut self,
        order: &Order,
        patience: Duration,
    ) -> Result<T> {
        self.tell(order)?;
        self.hear(patience)
    }

    fn reply(&mut self, patience: Duration) -> Result<Reply> {
        let until = Instant::now() + patience;
        loop {
            if let Some(line) = next_line(&mut self.heard) {
                return serde_json::from_str(&line)
                    .with_context(|| format!("understand {}: {line:?}", self.name));
            }
            interrupt::check()?;
            let mut piece = [0; 4096];
            match self.line.read(&mut piece) {
                Ok(0) => bail!("{} ended: {}", self.name, last_line(&self.console)),
                Ok(count) => self.heard.extend_from_slice(&piece[..count]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error).context(format!("hear {}", self.name)),
            }
            if self.heard.len() > LONGEST {
                bail!("{} talks without end", self.name);
            }
            if Instant::now() > until {
                let said = last_line(&self.console);
                let (name, seconds) = (self.name.clone(), patience.as_secs());
                return Err(Silent { name, seconds, said }.into());
            }
        }
    }

    /// Has it switch itself off.
    pub(crate) fn end(mut self) -> Result<()> {
        let _: () = self.ask(&Order::End, Duration::from_secs(60))?;
        let status = self.subject.wait(Duration::from_secs(60), || Ok(()))?;
        if !status.success() {
            bail!("{}: QEMU ended with {status}", self.name);
        }
        self.subject.stop()
    }
}

/// A guest that was asked and has not answered in time.
#[derive(Debug)]
pub(crate) struct Silent {
    name: String,
    seconds: u64,
    said: String,
}

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, seconds, said } = self;
        write!(f, "{name} does not answer within {seconds} s: {said}")
    }
}

impl std::error::Error for Silent {}

/// Takes the first whole line.
fn next_line(heard: &mut Vec<u8>) -> Option<String> {
    let end = heard.iter().position(|&byte| byte == b'\n')?;
    let line: Vec<u8> = heard.drain(..=end).collect();
    Some(String::from_utf8_lossy(&line).trim().to_owned())
}

struct Starting {
    subject: Subject,
    log: PathBuf,
    socket: PathBuf,
}

impl Starting {
    fn connect(&mut self) -> Result<UnixStream> {
        let until = Instant::now() + BOOT;
        loop {
            interrupt::check()?;
            if let Ok(line) = UnixStream::connect(&self.socket) {
                return Ok(line);
            }
            if let Some(status) = self.subject.child().try_wait().context("look at QEMU")? {
                bail!("QEMU ended at once ({status}): {}", last_line(&self.log));
            }
            if Instant::now() > until {
                bail!("QEMU does not open its line: {}", last_line(&self.log));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site() -> Site {
        let place = Path::new("/place");
        Site::for_tests(place)
    }

    #[test]
    fn the_machine_is_the_same_but_for_what_was_asked() {
        let shape = Shape::new("a", 512);
        let plain = words(&site(), &shape, "tcg", Path::new("/d"));
        let with = Shape { nvdimm_mebibytes: Some(256), ..shape };
        let with = words(&site(), &with, "tcg", Path::new("/d"));
        assert!(plain.contains(&"512M".to_owned()) && !plain.concat().contains("nvdimm"));
        assert!(with.contains(&"512M,slots=2,maxmem=768M".to_owned()));
        assert!(with.contains(&"q35,nvdimm=on".to_owned()));
        for words in [plain, with] {
            assert!(words.contains(&"file:/d/console".to_owned()));
            assert!(words.concat().contains("rdinit=/strata/strata-lab -- guest"));
        }
    }

    #[test]
    fn lines_come_whole_or_not_at_all() {
        let mut heard = b"\"up\"\r\n{\"done\":".to_vec();
        assert_eq!(next_line(&mut heard).as_deref(), Some("\"up\""));
        assert_eq!(next_line(&mut heard), None);
        heard.extend_from_slice(b"null}\n");
        assert_eq!(next_line(&mut heard).as_deref(), Some("{\"done\":null}"));
        assert!(heard.is_empty());
    }
}
