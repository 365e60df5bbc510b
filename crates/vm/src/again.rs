//! A guest's command line once more, for a second guest of its kind beside the first: a
//! clone's, or what comes back from a snapshot. A pure function of the words.
//!
//! Each option is known to be harmless when two have it, or is changed, or refused: what
//! nobody knows could be one thing of the machine's that both would write to.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::drives::Drives;
use crate::line::words::{Item, items, text};
use crate::line::{GENERATION, MONITOR_SOCKET_NAME, path_in, socket_at};
use crate::networks::{Networks, Walk, apart};
use crate::options::Options;
use crate::refusals::Refusal;

/// Options without a value that two guests can have.
const WORDS: [&str; 17] = [
    "enable-kvm",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "no-quit",
    "one-insn-per-tb",
    "singlestep",
    "usb",
    "enable-sync-profile",
    "full-screen",
];
/// Those that a second one is started without: it is in the background anyway, and
/// whether it runs is the snapshot's business.
const LEFT_OUT: [&str; 2] = ["daemonize", "S"];
/// Options with a value that two guests can have.
const VALUED: [&str; 32] = [
    "L",
    "accel",
    "acpitable",
    "append",
    "bios",
    "boot",
    "cpu",
    "device",
    "dtb",
    "fw_cfg",
    "global",
    "icount",
    "initrd",
    "iscsi",
    "kernel",
    "m",
    "machine",
    "mon",
    "msg",
    "numa",
    "overcommit",
    "rtc",
    "sandbox",
    "set",
    "smbios",
    "smp",
    "tb-size",
    "uuid",
    "vga",
    "audio",
    "k",
    "compat",
];
/// Options whose value is an image.
const IMAGES: [&str; 9] = ["cdrom", "fda", "fdb", "hda", "hdb", "hdc", "hdd", "mtdblock", "pflash"];
/// Objects that two guests can have.
const OBJECTS: [&str; 6] =
    ["memory-backend-ram", "iothread", "rng-builtin", "rng-random", "secret", "throttle-group"];
/// Consoles of QEMU's that lead nowhere else.
const INNER: [&str; 6] = ["none", "null", "stdio", "pty", "vc", "ringbuf"];

/// A disk that the second guest has in the place of one that the first one writes to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OtherDisk {
    /// The first one's image, as the command line names it.
    pub said: PathBuf,
    /// The second one's.
    pub path: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// Of one that is read through a pool: the images that it is over, the nearest first.
    pub layers: Vec<String>,
}

/// A command line for a second guest.
#[derive(Clone, PartialEq, Debug)]
pub struct Again {
    /// Its words, without the program's own.
    pub words: Vec<OsString>,
    /// Sockets that it listens at in the place of the first one's consoles.
    pub consoles: Vec<PathBuf>,
    /// Tap devices that QEMU makes for it, and that lead nowhere.
    pub taps: Vec<String>,
    /// What is not as it was.
    pub notes: Vec<String>,
}

/// The words of a guest that is to be called `name` and whose files are in `directory`. It
/// has `disks` in the place of all images that the first one writes to; its relative paths
/// are relative to `here`; what becomes of its networks is said by `networks`.
///
/// # Errors
/// There cannot be a second one like it: why, and what to do.
pub fn again(
    words: &[OsString],
    name: &str,
    directory: &Path,
    (here, disks): (&Path, &[OtherDisk]),
    networks: Networks<'_>,
) -> Result<Again, Refusal> {
    let (drives, networks) = (Drives::new(here, disks), Walk::new(networks));
    let (taken, consoles, notes) = (BTreeSet::new(), Vec::new(), Vec::new());
    let mut second = Second { name, directory, drives, networks, taken, consoles, notes };
    let mut all = Vec::new();
    for item in items(words)? {
        match item {
            Item::Word(word) => {
                let bare = word.to_str().and_then(|word| word.strip_prefix('-'));
                let bare = bare.map(|bare| bare.strip_prefix('-').unwrap_or(bare));
                match bare {
                    Some(bare) if LEFT_OUT.contains(&bare) => {}
                    Some(bare) if !WORDS.contains(&bare) => return Err(unknown(bare)),
                    Some(_) => all.push(word),
                    None => {
                        let image = word.to_str().and_then(|word| second.drives.image(word));
                        all.push(image.map_or(word, OsString::from));
                    }
                }
            }
            Item::Option { word, name, value } if VALUED.contains(&name.as_str()) => {
                let changed = match name.as_str() {
                    "device" => second.device(text(&value, &name)?)?.map(OsString::from),
                    _ => None,
                };
                all.extend([word, changed.unwrap_or(value)]);
            }
            Item::Option { word, name, value } => {
                let value = second.changed(&name, text(&value, &name)?)?;
                all.extend([word, value.into()]);
            }
        }
    }
    second.drives.check()?;
    second.networks.check()?;
    let Walk { taps, notes, replaced, .. } = second.networks;
    all.extend(apart(replaced).into_iter().map(OsString::from));
    second.notes.extend(notes);
    Ok(Again { words: all, consoles: second.consoles, taps, notes: second.notes })
}

fn unknown(option: &str) -> Refusal {
    Refusal::new(
        format!("whether two guests can have -{option} is not known"),
        "start the guest without it",
    )
}

fn one_only(what: &str) -> Refusal {
    Refusal::new(format!("{what} is one guest's only"), "start the guest without it")
}

struct Second<'a> {
    name: &'a str,
    directory: &'a Path,
    drives: Drives<'a>,
    networks: Walk<'a>,
    /// Files in the directory.
    taken: BTreeSet<String>,
    consoles: Vec<PathBuf>,
    notes: Vec<String>,
}

impl Second<'_> {
    /// What stands in the place of a device, if anything does.
    fn device(&mut self, value: &str) -> Result<Option<String>, Refusal> {
        let mut options = Options::parse(value, "driver")?;
        let driver = options.get("driver").unwrap_or_default();
        if ["vhost-", "usb-host", "scsi-generic", "scsi-block"]
            .iter()
            .any(|of| driver.starts_with(of))
        {
            return Err(one_only(&format!("the device {driver}")));
        }
        if driver == GENERATION {
            options.set("guid", "auto");
            return Ok(Some(options.to_string()));
        }
        let is_card = options.get("netdev").is_some();
        if is_card && self.networks.card(&mut options, "mac") {
            return Ok(Some(options.to_string()));
        }
        Ok(None)
    }

    fn changed(&mut self, option: &str, value: &str) -> Result<String, Refusal> {
        match option {
            "name" => {
                let mut options = Options::parse(value, "guest")?;
                options.set("guest", self.name);
                Ok(options.to_string())
            }
            "netdev" | "nic" | "net" => self.networks.network(option, value),
            "drive" => self.drives.drive(value),
            "blockdev" => self.drives.blockdev(value),
            image if IMAGES.contains(&image) => {
                Ok(self.drives.image(value).unwrap_or_else(|| value.to_owned()))
            }
            "object" => {
                let options = Options::parse(value, "qom-type")?;
                let kind = options.get("qom-type").unwrap_or_default();
                match OBJECTS.contains(&kind.as_str()) {
                    true => Ok(value.to_owned()),
                    false => Err(one_only(&format!("the object {kind}"))),
                }
            }
            "display" | "vnc" if value == "none" => Ok(value.to_owned()),
            "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" | "debugcon" => {
                self.console(value)
            }
            "chardev" => self.chardev(value),
            "pidfile" | "D" => self.file(value),
            _ => Err(unknown(option)),
        }
    }

    /// What is connected to a serial line and the like.
    fn console(&mut self, value: &str) -> Result<String, Refusal> {
        let (mux, rest) = match value.strip_prefix("mon:") {
            Some(rest) => ("mon:", rest),
            None => ("", value),
        };
        let kind = rest.split([':', ',']).next().unwrap_or_default();
        if INNER.contains(&kind) || kind == "chardev" {
            return Ok(value.to_owned());
        }
        match rest.split_once(':') {
            Some(("file", path)) => Ok(format!("{mux}file:{}", self.file(path)?)),
            Some(("unix", rest)) => {
                let options = self.socket(Options::parse(rest, "path")?)?;
                Ok(format!("{mux}unix:{options}"))
            }
            _ => Err(one_only(&format!("the console {kind}"))),
        }
    }

    fn chardev(&mut self, value: &str) -> Result<String, Refusal> {
        let mut options = Options::parse(value, "backend")?;
        let kind = options.get("backend").unwrap_or_default();
        match (kind.as_str(), options.get("path")) {
            (inner, _) if INNER.contains(&inner) => {}
            ("file", Some(path)) => options.set("path", &self.file(&path)?),
            ("socket", Some(_)) => options = self.socket(options)?,
            _ => return Err(one_only(&format!("the console {kind}"))),
        }
        Ok(options.to_string())
    }

    /// A socket of its own that nobody needs to be connected to.
    fn socket(&mut self, mut options: Options) -> Result<Options, Refusal> {
        if !options.is_on("server") {
            return Err(one_only("a console that connects to a socket"));
        }
        let path = self.file(&options.get("path").unwrap_or_default())?;
        let path = socket_at(path, "the socket")?;
        options.set("path", &path);
        options.set("wait", "off");
        self.consoles.push(path.into());
        Ok(options)
    }

    /// A file of its own in the place of one of the first guest's.
    fn file(&mut self, path: &str) -> Result<String, Refusal> {
        let own = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or("file");
        let is_free = |name: &str| {
            !self.taken.contains(name)
                && name != MONITOR_SOCKET_NAME
                && !name.starts_with("strata-")
        };
        let numbered = |number: u32| match number {
            0 => own.to_owned(),
            _ => format!("{number}-{own}"),
        };
        let name = (0..).map(numbered).find(|name| is_free(name)).expect("numbers do not run out");
        let path_here = path_in(self.directory, &name)?;
        self.notes.push(format!("in the place of {path} it has {path_here}"));
        self.taken.insert(name);
        Ok(path_here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::networks::{CloneNetworks, NetworkWish};

    fn second(words: &[&str]) -> Result<Again, Refusal> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let place = Path::new("/run/strata/guests/0.b");
        again(&words, "b", place, (Path::new("/"), &[]), Networks::Back { beside: false })
    }

    fn words(words: &[&str]) -> Vec<String> {
        let found = second(words).expect("there can be a second one").words;
        found.into_iter().map(|word| word.into_string().expect("text")).collect()
    }

    #[test]
    fn what_two_can_have_stays() {
        let line = [
            "-cpu",
            "max",
            "-nodefaults",
            "-display",
            "none",
            "-kernel",
            "/k",
            "-append",
            "console=ttyS0 -x",
            "-device",
            "virtio-net-pci,netdev=n",
            "-netdev",
            "user,id=n",
            "-object",
            "memory-backend-ram,id=m,size=1G",
            "-serial",
            "mon:stdio",
            "/disk.img",
            "-serial",
            "chardev:c",
            "-chardev",
            "null,id=c",
        ];
        let mut expected = line.to_vec();
        (expected[12], expected[21]) = ("type=user,id=n", "backend=null,id=c");
        assert_eq!(words(&line), expected);
    }

    #[test]
    fn its_generation_is_another() {
        let line = ["-device", "vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87,id=g"];
        assert_eq!(words(&line)[1], "driver=vmgenid,guid=auto,id=g");
    }

    #[test]
    fn a_clones_cards_have_addresses_in_their_order() {
        let words: Vec<OsString> = [
            "-device",
            "e1000,netdev=m,id=x",
            "-netdev",
            "user,id=m",
            "-netdev",
            "bridge,id=n",
            "-device",
            "virtio-net-pci,netdev=n,mac=52:54:00:12:34:56",
        ]
        .map(OsString::from)
        .into();
        let clone = CloneNetworks { id: [1, 2, 3, 4], wish: NetworkWish::SameKind };
        let place = Path::new("/x");
        let found = again(&words, "b", place, (place, &[]), Networks::Clone(clone));
        let found = found.expect("there can be");
        assert_eq!(found.words[1], "driver=e1000,netdev=m,id=x,mac=02:01:02:03:04:00");
        assert_eq!(found.words[7], "driver=virtio-net-pci,netdev=n,mac=02:01:02:03:04:01");
        assert_eq!((found.taps, found.notes.len()), (vec!["st01020304-0".to_owned()], 1));
    }

    #[test]
    fn its_own_things_are_its_own() {
        let here = "/run/strata/guests/0.b";
        let found = second(&[
            "-name",
            "a,process=x",
            "-S",
            "-daemonize",
            "-pidfile",
            "/run/a.pid",
            "-serial",
            "file:/var/log/a.log",
            "-serial",
            "unix:/x/a.log,server=on,wait=on",
            "-chardev",
            "socket,id=q,path=monitor,server,nowait",
            "-nic",
            "user,hostfwd=tcp::22-:22,model=e1000",
        ])
        .expect("there can be");
        let expected = [
            "-name".to_owned(),
            "guest=b,process=x".into(),
            "-pidfile".into(),
            format!("{here}/a.pid"),
            "-serial".into(),
            format!("file:{here}/a.log"),
            "-serial".into(),
            format!("unix:path={here}/1-a.log,server=on,wait=off"),
            "-chardev".into(),
            format!("backend=socket,id=q,path={here}/1-monitor,server=on,wait=off"),
            "-nic".into(),
            "type=user,model=e1000".into(),
        ];
        assert_eq!(found.words, expected.map(OsString::from));
        assert_eq!(found.notes.len(), 5, "{:?}", found.notes);
    }

    #[test]
    fn what_is_one_guests_or_not_known_is_refused_by_name() {
        for (line, named) in [
            (&["-vnc", ":1"][..], "-vnc"),
            (&["-netdev", "vde,id=n"], "vde"),
            (&["-serial", "tcp::4444,server=on"], "tcp"),
            (&["-chardev", "socket,id=c,path=/x"], "connects to a socket"),
            (&["-chardev", "pipe,id=c,path=/x"], "pipe"),
            (&["-device", "usb-host,hostbus=1"], "usb-host"),
            (&["-object", "filter-dump,id=f,file=/x"], "filter-dump"),
            (&["-incoming", "tcp:0:4444"], "-incoming"),
            (&["-snapshot"], "-snapshot"),
            (&["-gdb", "tcp::1234"], "-gdb"),
        ] {
            let refusal = second(line).expect_err(named);
            assert!(refusal.why.contains(named), "{}", refusal.why);
        }
        let long = "x".repeat(100);
        assert!(second(&["-serial", &format!("unix:/{long},server=on")]).is_err());
    }
}
