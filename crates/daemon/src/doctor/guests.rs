//! What virtual machines need: QEMU, KVM, libvirt, and whether what confines libvirt's
//! guests lets Strata in. Files are read; nobody's socket is connected to, because that may
//! start a service.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use strata_api::AGENT_SOCKET_NAME;
use strata_vm::{OLDEST, Version, kvm_problem};

use super::machine::{first_line, in_path, program_finding};
use super::{Files, Finding, Presence};
use crate::config::{Config, DEFAULT_SOCKET_DIR};

/// libvirt's daemons that start guests: of all its drivers, and of QEMU's alone.
const LIBVIRT: [&str; 2] = ["libvirtd", "virtqemud"];
const LIBVIRT_SOCKETS: [&str; 2] = ["/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock"];
/// What AppArmor lets libvirt's guests do, and where an administrator adds to it.
const ABSTRACTION: &str = "/etc/apparmor.d/abstractions/libvirt-qemu";
const LOCAL: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";
const LIBRARY: &str = "libstrata.so";
const LIBRARY_DIRECTORY: &str = "/usr/lib/strata";
/// The program that serves guests' disks.
const EXPORT: &str = "strata-export";
const LOST_DISKS: &str = "guests' disks through pools, and their swap disks";
const LOST: &str = "libvirt's guests as tenants: they run unmanaged";

/// What a guest has to reach.
pub(super) struct Needs {
    library: PathBuf,
    socket: PathBuf,
}

impl Needs {
    /// Of the system's daemon.
    pub(super) fn of(config: Option<&Config>) -> Self {
        let sockets = config.map_or(Path::new(DEFAULT_SOCKET_DIR), |config| &config.socket_dir);
        let library = config.and_then(|config| config.preload.clone());
        Self { library: library.unwrap_or_else(installed), socket: sockets.join(AGENT_SOCKET_NAME) }
    }

    /// The lines that AppArmor has to have. The device's descriptor comes over the socket,
    /// and is looked at when it does.
    fn lines(&self) -> [String; 4] {
        [
            format!("{} mr,", self.library.display()),
            format!("{} rw,", self.socket.display()),
            "/dev/userfaultfd rw,".to_owned(),
            // Snapshots' monitors.
            "/var/lib/libvirt/qemu/*.strata rw,".to_owned(),
        ]
    }
}

/// The library as it is installed, or would be.
fn installed() -> PathBuf {
    beside_us(LIBRARY).unwrap_or_else(|| Path::new(LIBRARY_DIRECTORY).join(LIBRARY))
}

/// A file that is installed beside this program, or where its library is.
fn beside_us(name: &str) -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.to_owned()));
    let places = beside.iter().flat_map(|place| [place.clone(), place.join("../lib/strata")]);
    let found = places.map(|place| place.join(name)).find(|file| file.is_file());
    found.and_then(|file| file.canonicalize().ok())
}

pub(super) fn findings(files: &Files, needs: &Needs, path: &OsStr) -> Vec<Finding> {
    let mut findings = vec![qemu(path)];
    findings.extend(nbd(path));
    findings.extend([export(beside_us(EXPORT)), kvm(files), libvirt(files, path)]);
    findings.extend(app_armor(files, needs));
    findings.extend(selinux(files));
    findings
}

fn qemu(path: &OsStr) -> Finding {
    let name = format!("qemu-system-{}", std::env::consts::ARCH);
    let mut finding = program_finding("QEMU", &name, path);
    if finding.presence == Presence::Yes
        && Version::parse(&finding.detail).is_none_or(|version| version < OLDEST)
    {
        finding.presence = Presence::Partly;
        finding.detail += &format!(": too old, {OLDEST} works");
    }
    finding.without("virtual machines as tenants")
}

/// What QEMU reads those disks by; none: there is no QEMU.
fn nbd(path: &OsStr) -> Option<Finding> {
    let program = in_path(&format!("qemu-system-{}", std::env::consts::ARCH), path)?;
    let words = ["-machine", "none", "-nodefaults", "-drive", "format=help"];
    Some(nbd_among(first_line(&program, &words)))
}

/// `formats`: what QEMU lists.
fn nbd_among(formats: Result<String, String>) -> Finding {
    const NAME: &str = "NBD in QEMU";
    match formats {
        Ok(line) if line.split_ascii_whitespace().any(|format| format == "nbd") => {
            Finding::new(NAME, Presence::Yes, "it knows the driver")
        }
        Ok(_) => Finding::new(NAME, Presence::No, "it is built without the driver"),
        Err(why) => Finding::new(NAME, Presence::No, why),
    }
    .without(LOST_DISKS)
}

fn export(found: Option<PathBuf>) -> Finding {
    let found = found.or_else(|| {
        Some(Path::new(LIBRARY_DIRECTORY).join(EXPORT)).filter(|installed| installed.is_file())
    });
    match found {
        Some(program) => Finding::new(EXPORT, Presence::Yes, program.display().to_string()),
        None => {
            let detail = format!("neither beside stratad nor in {LIBRARY_DIRECTORY}");
            Finding::new(EXPORT, Presence::No, detail)
        }
    }
    .without(LOST_DISKS)
}

fn kvm(files: &Files) -> Finding {
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(files.path("/dev/kvm"));
    let opened = opened.map(drop).map_err(|error| error.to_string());
    let cpuinfo = files.read("/proc/cpuinfo").unwrap_or_default();
    match kvm_problem(opened, &cpuinfo, std::env::consts::ARCH) {
        None => Finding::new("KVM", Presence::Yes, "/dev/kvm opens"),
        Some(why) => Finding::new("KVM", Presence::No, format!("{why}: guests are emulated (TCG)")),
    }
    .without("guests at full speed")
}

fn libvirt(files: &Files, path: &OsStr) -> Finding {
    // Root's PATH has it, others' do not.
    let mut places: Vec<PathBuf> = std::env::split_paths(path).collect();
    places.push("/usr/sbin".into());
    let path = std::env::join_paths(places).unwrap_or_else(|_| OsString::from(path));
    let name = LIBVIRT.into_iter().find(|name| in_path(name, &path).is_some());
    let mut finding = program_finding("libvirt", name.unwrap_or(LIBVIRT[0]), &path);
    if finding.presence == Presence::Yes {
        let there = LIBVIRT_SOCKETS.iter().any(|socket| files.exists(socket));
        finding.detail += if there { ", its socket is there" } else { ", not started" };
    }
    finding.without("libvirt's guests; strata vm run needs none")
}

/// None: no guest is confined by it.
fn app_armor(files: &Files, needs: &Needs) -> Option<Finding> {
    let is_on = files.read("/sys/module/apparmor/parameters/enabled").as_deref() == Some("Y");
    if !is_on || !files.exists(ABSTRACTION) {
        return None;
    }
    let allowed = [ABSTRACTION, LOCAL].map(|file| files.read(file).unwrap_or_default()).join("\n");
    let missing: Vec<String> =
        needs.lines().into_iter().filter(|line| !allows(&allowed, line)).collect();
    let finding = if missing.is_empty() {
        Finding::new("AppArmor", Presence::Yes, "lets libvirt's guests reach Strata")
    } else {
        let detail = format!("confines libvirt's guests; add to {LOCAL}: {}", missing.join(" "));
        Finding::new("AppArmor", Presence::Partly, detail)
    };
    Some(finding.without(LOST))
}

/// Whether a rule for the same file is there that allows as much. Patterns are not
/// understood: a line that says it plainly does no harm beside one.
fn allows(text: &str, wanted: &str) -> bool {
    let rule = |line: &str| -> Option<(String, String)> {
        let line = line.split('#').next()?.trim().strip_suffix(',')?;
        let (file, may) = line.trim_start_matches("owner ").split_once(char::is_whitespace)?;
        Some((file.trim_matches('"').to_owned(), may.trim().to_owned()))
    };
    let Some((file, may)) = rule(wanted) else { return false };
    let enough = |own: &str| may.chars().all(|letter| own.contains(letter));
    text.lines().filter_map(rule).any(|(known, own)| known == file && enough(&own))
}

/// None: nothing is enforced.
fn selinux(files: &Files) -> Option<Finding> {
    if files.read("/sys/fs/selinux/enforce").as_deref() != Some("1") {
        return None;
    }
    let detail = "enforcing: libvirt's guests (svirt_t) reach stratad's socket and libstrata.so only if a policy module lets them; make one of what is denied (ausearch -m avc -c qemu-system, audit2allow -M strata)";
    Some(Finding::new("SELinux", Presence::Partly, detail).without(LOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_app_armor_has_are_found() {
        let text = "  #include <x>\n  /usr/lib/strata/libstrata.so mr,\n\
                    owner \"/run/strata/agent.sock\" rwk, # ours\n#/dev/userfaultfd rw,\n";
        let needs = Needs {
            library: "/usr/lib/strata/libstrata.so".into(),
            socket: "/run/strata/agent.sock".into(),
        };
        assert_eq!(needs.lines().map(|line| allows(text, &line)), [true, true, false, false]);
        assert!(!allows("/dev/userfaultfd r,", "/dev/userfaultfd rw,"));
        assert!(!allows("/dev/userfaultfd rw", "/dev/userfaultfd rw,"));
    }

    #[test]
    fn what_disks_need_is_found_or_missed() {
        assert_eq!(nbd(OsStr::new("/nowhere")), None);
        for (listed, presence) in [
            (Ok("Supported formats: file nbd raw"), Presence::Yes),
            (Ok("Supported formats: file nbd-like raw"), Presence::No),
            (Err("it does not run"), Presence::No),
        ] {
            let finding = nbd_among(listed.map(str::to_owned).map_err(str::to_owned));
            let is_lost = finding.lost == LOST_DISKS;
            assert_eq!((finding.presence, is_lost), (presence, presence == Presence::No));
        }
        assert_eq!(export(Some("/x/strata-export".into())).detail, "/x/strata-export");
    }

    #[test]
    fn what_confines_is_told_only_where_it_does() {
        let root = std::env::temp_dir().join(format!("strata-confined-{}", std::process::id()));
        let files = Files { root: root.clone() };
        let needs = Needs::of(None);
        assert_eq!((app_armor(&files, &needs), selinux(&files)), (None, None));
        let write = |path: &str, text: &str| {
            let path = files.path(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
            std::fs::write(path, text).expect("file");
        };
        write("/sys/module/apparmor/parameters/enabled", "Y\n");
        assert_eq!(app_armor(&files, &needs), None);
        write(ABSTRACTION, "/dev/kvm rw,\n");
        write("/sys/fs/selinux/enforce", "1\n");
        let finding = app_armor(&files, &needs).expect("confined");
        assert_eq!((finding.presence, finding.lost), (Presence::Partly, LOST));
        for line in needs.lines() {
            assert!(finding.detail.contains(&line), "{}", finding.detail);
        }
        write(LOCAL, &needs.lines().join("\n"));
        assert_eq!(app_armor(&files, &needs).expect("confined").presence, Presence::Yes);
        assert_eq!(selinux(&files).expect("enforced").presence, Presence::Partly);
        std::fs::remove_dir_all(root).expect("clean up");
    }
}
