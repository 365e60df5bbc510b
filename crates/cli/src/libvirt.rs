//! `strata vm libvirt`: shows what has to be changed in a domain of libvirt's for its guest
//! to be a tenant, and what the daemon's configuration has to say; changes the domain if it
//! is told to. What the XML needs is decided in `strata-vm`; libvirt is asked by `virsh`.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;

use strata_api::{AGENT_SOCKET_NAME, DEFAULT_SOCKET, name_problem};
use strata_units::ByteSize;
use strata_vm::{Domain, DomainWish, OLDEST, amend, unified};

use crate::args::VmLibvirtArguments;
use crate::failure::{Failure, Result, printable};
use crate::program::{self, Caller};
use crate::virsh::Virsh;
use crate::{daemon, place, run, vm};

const QEMU_CONF: &str = "/etc/libvirt/qemu.conf";
/// Where libvirt makes the files of guests' memory, unless its configuration says otherwise.
const MEMORY_DIRECTORY: &str = "/var/lib/libvirt/qemu/ram";
/// The libvirt whose guests have a user and directories of their own.
pub(crate) const SYSTEM: &str = "qemu:///system";
/// Whose QEMU is, as distributions have it.
const USUAL_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];
/// The name of the rule that is proposed.
const TEMPLATE: &str = "vm-{guest}";
/// Where libvirt lets QEMU make files.
pub(crate) const MONITORS: &str = "/var/lib/libvirt/qemu";

pub(crate) fn libvirt(arguments: &VmLibvirtArguments) -> Result<ExitCode> {
    let name = &arguments.domain;
    let what = format!("cannot make the guest {name} a tenant");
    let virsh = Virsh::find(&what)?;
    virsh.check_system()?;
    let info = virsh.ask(&["dominfo", "--domain", name])?;
    if !says(&info, "Persistent", "yes") {
        let why = "it is transient: libvirt forgets it when it ends";
        return Err(Failure::new(what, why).todo("define it first: virsh define"));
    }
    // With passwords: without them, defining it would remove them.
    let old = virsh.ask(&["dumpxml", "--inactive", "--security-info", "--domain", name])?;
    let configured = std::fs::read_to_string(QEMU_CONF).unwrap_or_default();
    let library = place::installed(run::LIBRARY).ok_or_else(|| {
        let why = format!("{} is not installed", run::LIBRARY);
        Failure::new(what.as_str(), why).todo("install it beside strata, or in /usr/lib/strata")
    })?;
    let socket = place::named_socket().filter(|socket| socket != Path::new(DEFAULT_SOCKET));
    let agents = socket.map(|socket| shown(&socket.with_file_name(AGENT_SOCKET_NAME)));
    let wish = DomainWish {
        library: &shown(&library),
        memory_directory: &memory_directory(&configured),
        agent_socket: agents.as_deref(),
        monitor_directory: MONITORS,
    };
    let domain = amend(&old, &wish).map_err(|refusals| {
        let mut failures: Vec<Failure> = refusals
            .into_iter()
            .map(|refusal| Failure::new(what.as_str(), refusal.why).todo(refusal.todo))
            .collect();
        let last = failures.pop().expect("it was refused for something");
        failures.iter().for_each(|failure| eprintln!("strata: {failure}"));
        last
    })?;
    check_emulator(&domain, &what)?;
    let changes = unified(&old, &domain.text, &format!("{name} (now)"), &format!("{name} (then)"));
    print!("{}", without_secrets(&changes));
    let user = user(&domain, &configured, &passwd());
    let tell = |text: &str| eprintln!("strata: {}: {}", printable(name), printable(text));
    domain.notes.iter().for_each(|note| tell(note));
    if let Some(closed) = closed(&library).filter(|_| user != "root") {
        tell(&format!(
            "{} is not open to {user}, whose process QEMU is: the guest would run unmanaged; install strata, or open it (chmod)",
            closed.display()
        ));
    }
    propose_rule(&domain, &user, arguments.dram, &tell);
    if changes.is_empty() {
        tell("the domain is already as it must be");
    } else if arguments.apply {
        virsh.define(&domain.text, &what)?;
        tell(match says(&info, "State", "shut off") {
            true => "defined; it holds from its next start",
            false => "defined; it holds from its next start: as it runs now it is what it was",
        });
    } else {
        tell("nothing was changed; --apply changes the domain");
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a line `Key:   value` is there.
fn says(info: &str, key: &str, value: &str) -> bool {
    info.lines().filter_map(|line| line.split_once(':')).any(|(k, v)| k == key && v.trim() == value)
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// A text of libvirt's configuration; none: it says nothing of it.
fn setting(text: &str, key: &str) -> Option<String> {
    let value = |line: &str| {
        let (known, value) = line.trim().split_once('=')?;
        let value = value.trim().strip_prefix(['"', '\''])?;
        (known.trim() == key).then(|| value.split(['"', '\'']).next().map(str::to_owned))?
    };
    text.lines().filter_map(value).next_back()
}

fn memory_directory(configured: &str) -> String {
    match setting(configured, "memory_backing_dir") {
        Some(directory) => format!("{directory}/libvirt/qemu"),
        None => MEMORY_DIRECTORY.to_owned(),
    }
}

fn passwd() -> String {
    std::fs::read_to_string("/etc/passwd").unwrap_or_default()
}

/// Whose process QEMU is: as the domain says, or libvirt's configuration, or the
/// distribution.
fn user(domain: &Domain, configured: &str, passwd: &str) -> String {
    let said = domain.owner.as_deref().map(str::to_owned).or_else(|| setting(configured, "user"));
    let users = || {
        passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            Some((fields.next()?, fields.nth(1)?))
        })
    };
    let Some(said) = said.filter(|said| !said.is_empty()) else {
        let usual = USUAL_USERS.iter().find(|usual| users().any(|(name, _)| name == **usual));
        return usual.map_or_else(|| "root".to_owned(), |name| (*name).to_owned());
    };
    // As in "+64055:+108".
    let name = said.split(':').next().unwrap_or_default().trim_start_matches('+');
    users().find(|(_, uid)| *uid == name).map_or(name, |(known, _)| known).to_owned()
}

/// What of a path others may not open, if anything.
fn closed(path: &Path) -> Option<&Path> {
    let needs = |part: &Path| if part == path { 0o4 } else { 0o1 };
    let is_open = |part: &Path| part.metadata().is_ok_and(|file| file.mode() & needs(part) != 0);
    path.ancestors().find(|part| !is_open(part))
}

/// What keeps QEMU itself from being a tenant, as in `strata vm run`.
fn check_emulator(domain: &Domain, what: &str) -> Result<()> {
    let Some(emulator) = &domain.emulator else { return Ok(()) };
    let program = program::examine(emulator.as_ref(), "".as_ref(), Caller::this())?;
    if let Some(obstacle) = &program.obstacle {
        let why = format!("the preload cannot enter {emulator}: {obstacle}");
        return Err(Failure::new(what, why).todo("give the domain another emulator"));
    }
    let version = vm::version(&program, what)?;
    if version < OLDEST {
        let why = format!("its QEMU is {version}, which is too old");
        return Err(Failure::new(what, why).todo(format!("use {OLDEST} or newer")));
    }
    Ok(())
}

/// Says which rule the system's daemon needs, unless its configuration has it.
fn propose_rule(domain: &Domain, user: &str, dram: Option<ByteSize>, tell: &dyn Fn(&str)) {
    let emulator = domain.emulator.as_deref().unwrap_or_default();
    let resolved = daemon::checked_configuration().unwrap_or_default();
    let known = rule_for(&resolved, user, emulator);
    let may = user == "root" || may_be_managed(&resolved, user);
    if let (Some(template), true) = (&known, may) {
        let name = template.replace("{guest}", &domain.name);
        let name = if name_problem(&name).is_none() { name } else { template.clone() };
        tell(&format!("the daemon's configuration has a rule for it: its tenant is {name}"));
        if let Some(dram) = dram {
            tell(&format!(
                "strata set {name} --dram {} changes its budget while it runs",
                exact(dram)
            ));
        }
        return;
    }
    println!("# In /etc/strata/stratad.toml, which stratad reads when it starts:");
    if !may {
        println!("uffd_users = [{user:?}]  # with those that are there");
    }
    if known.is_none() {
        print!("{}", rule(user, emulator, dram));
    }
}

/// A rule that makes each of libvirt's guests a tenant.
fn rule(user: &str, emulator: &str, dram: Option<ByteSize>) -> String {
    let mut text = format!("[[manage]]\nname = {TEMPLATE:?}\n");
    if !emulator.is_empty() {
        text += &format!("exe = {emulator:?}\n");
    }
    text += &format!("user = {user:?}\n");
    if let Some(dram) = dram {
        text += &format!("dram = {:?}\n", exact(dram));
    }
    text
}

/// A size as the configuration takes it.
fn exact(size: ByteSize) -> String {
    let mib = size.0 >> 20;
    if size.0 == mib << 20 { format!("{mib}MiB") } else { format!("{}B", size.0) }
}

/// A text value of a line `key = "value"  # comment`.
fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let value = line.strip_prefix(key)?.strip_prefix(" = \"")?;
    value.split('"').next()
}

/// The name of the first rule of a resolved configuration that makes each guest of this
/// user's a tenant.
fn rule_for(resolved: &str, user: &str, emulator: &str) -> Option<String> {
    let applies = |rule: &&str| {
        let all = |key| rule.lines().find_map(|line| value(line, key));
        let exe = all("exe").is_none_or(|exe| {
            exe == emulator || Path::new(emulator).file_name().is_some_and(|name| name == exe)
        });
        let is_users = rule.lines().any(|line| value(line, "user") == Some(user));
        exe && is_users && all("name").is_some_and(|name| name.contains("{guest}"))
    };
    let rule = resolved.split("[[").filter(|part| part.starts_with("manage]]")).find(applies)?;
    rule.lines().find_map(|line| value(line, "name")).map(str::to_owned)
}

/// Whether programs of this user may be managed.
fn may_be_managed(resolved: &str, user: &str) -> bool {
    let users = resolved.lines().find_map(|line| line.strip_prefix("uffd_users = "));
    users.is_some_and(|users| users.contains(&format!("{user:?}")))
}

/// What is shown of a domain: passwords are not.
fn without_secrets(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let mut rest = line;
        while let Some((before, behind)) = rest.split_once("passwd=") {
            let quote = behind.chars().next().unwrap_or(' ');
            let behind = &behind[quote.len_utf8().min(behind.len())..];
            out += &format!("{before}passwd={quote}***{quote}");
            rest = behind.split_once(quote).map_or("", |(_, rest)| rest);
        }
        out += rest;
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(owner: Option<&str>) -> Domain {
        Domain {
            name: "web1".into(),
            memory: None,
            emulator: Some("/usr/bin/qemu-system-x86_64".into()),
            kind: "kvm".into(),
            owner: owner.map(str::to_owned),
            text: String::new(),
            notes: vec![],
        }
    }

    #[test]
    fn qemus_user_is_the_domains_or_libvirts_or_the_usual_one() {
        let passwd = "root:x:0:0::/:/bin/sh\nlibvirt-qemu:x:64055:108::/:/bin/sh\n";
        let conf = "#user = \"x\"\nuser = \"vms\"\n";
        for (owner, conf, expected) in [
            (None, "", "libvirt-qemu"),
            (None, "# user = \"x\"\n", "libvirt-qemu"),
            (None, conf, "vms"),
            (None, "user = \"+0\"", "root"),
            (Some("+64055:+108"), conf, "libvirt-qemu"),
            (Some("other:kvm"), conf, "other"),
            (Some("+7:+7"), conf, "7"),
        ] {
            assert_eq!(user(&domain(owner), conf, passwd), expected, "{owner:?} {conf}");
        }
        assert_eq!(user(&domain(None), "", "root:x:0:0::/:/bin/sh\n"), "root");
        assert_eq!(memory_directory(conf), MEMORY_DIRECTORY);
        assert_eq!(memory_directory("memory_backing_dir = \"/m\""), "/m/libvirt/qemu");
    }

    #[test]
    fn a_rule_that_is_there_is_known_and_one_that_is_not_proposed() {
        let proposed = rule("libvirt-qemu", "/usr/bin/qemu-system-x86_64", Some(ByteSize(1 << 30)));
        assert_eq!(
            proposed,
            "[[manage]]\nname = \"vm-{guest}\"\nexe = \"/usr/bin/qemu-system-x86_64\"\n\
             user = \"libvirt-qemu\"\ndram = \"1024MiB\"\n"
        );
        let resolved = format!("uffd_users = [\"a\", \"libvirt-qemu\"]\n\n{proposed}")
            .replace("user = \"libvirt-qemu\"", "user = \"libvirt-qemu\"  # uid 64055");
        let emulator = "/usr/bin/qemu-system-x86_64";
        let known = |user, emulator| rule_for(&resolved, user, emulator);
        assert_eq!(known("libvirt-qemu", emulator).as_deref(), Some("vm-{guest}"));
        assert_eq!(known("root", emulator), None);
        assert_eq!(known("libvirt-qemu", "/usr/bin/qemu-system-i386"), None);
        assert_eq!(rule_for(&resolved.replace("{guest}", "x"), "libvirt-qemu", emulator), None);
        assert!(may_be_managed(&resolved, "libvirt-qemu") && !may_be_managed(&resolved, "qemu"));
        assert!(!may_be_managed("", "qemu"));
    }

    #[test]
    fn passwords_are_not_shown() {
        let line = "   <graphics type='vnc' passwd='it&apos;s \"x\"' listen='::'/>\n";
        let shown = "   <graphics type='vnc' passwd='***' listen='::'/>\n";
        assert_eq!(without_secrets(line), shown);
        assert_eq!(without_secrets("a\nb passwd=\"x\n"), "a\nb passwd=\"***\"\n");
        assert_eq!(without_secrets("passwd="), "passwd= *** \n");
    }

    #[test]
    fn what_virsh_says_of_a_domain() {
        let info = "Id:             -\nState:          shut off\nPersistent:     yes\n";
        assert!(says(info, "Persistent", "yes") && says(info, "State", "shut off"));
        assert!(!says(info, "Persistent", "no") && !says("", "State", "running"));
    }

    #[test]
    fn a_library_in_a_place_of_ones_own_is_not_open_to_others() {
        use std::os::unix::fs::PermissionsExt;
        let directory = crate::testing::Directory::new("closed");
        let library = directory.path().join("libstrata.so");
        std::fs::write(&library, "").expect("a file");
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("a mode");
        };
        mode(directory.path(), 0o711);
        mode(&library, 0o644);
        assert_eq!(closed(&library), None);
        mode(&library, 0o640);
        assert_eq!(closed(&library), Some(library.as_path()));
        mode(&library, 0o644);
        mode(directory.path(), 0o700);
        assert_eq!(closed(&library), Some(directory.path()));
    }
}
