//! What Strata does not start as a guest, because it would not be right or not be
//! managed: each with its cause and what to do, before there is a process.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::options::Options;

/// Why a guest is not started, and what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The cause.
    pub why: String,
    /// What the user can do.
    pub todo: String,
}

impl Refusal {
    pub(crate) fn new(why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self { why: why.into(), todo: todo.into() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.why, self.todo)
    }
}

impl std::error::Error for Refusal {}

const PLAIN: &str = "leave it out, or start this guest without strata";

/// Whether a device can be in a guest whose memory is private and comes and goes.
pub(crate) fn device(options: &Options) -> Result<(), Refusal> {
    let Some(driver) = options.get("driver") else { return Ok(()) };
    let refuse = |why: &str| Err(Refusal::new(format!("device {driver}: {why}"), PLAIN));
    if driver.starts_with("vhost-user") {
        refuse(
            "another process maps the guest's memory (vhost-user, virtiofs), which is private under Strata",
        )
    } else if driver.starts_with("ivshmem") {
        refuse("its memory is shared with other guests and processes, which Strata does not manage")
    } else if driver.starts_with("vfio-") {
        refuse("the hardware (VFIO) reaches all of the guest's memory, which is pinned for it")
    } else if driver.starts_with("vhost-vdpa") || driver == "pvrdma" {
        refuse("the hardware reaches the guest's memory, which is pinned for it")
    } else {
        Ok(())
    }
}

/// The same of a network (`-netdev`, `-nic`, `-net`).
pub(crate) fn network(options: &Options) -> Result<(), Refusal> {
    let refuse = |why: &str| Err(Refusal::new(format!("network {why}"), PLAIN));
    match options.get("type").as_deref() {
        Some("vhost-user") => refuse(
            "vhost-user: another process maps the guest's memory, which is private under Strata",
        ),
        Some("vhost-vdpa") => {
            refuse("vhost-vdpa: the hardware reaches the guest's memory, which is pinned for it")
        }
        _ => Ok(()),
    }
}

/// The same of an object that is not the guest's RAM. `huge`: where huge pages of the
/// kernel's are mounted; `here`: what relative paths are relative to.
pub(crate) fn object(options: &Options, huge: &[PathBuf], here: &Path) -> Result<(), Refusal> {
    let Some(kind) = options.get("qom-type") else { return Ok(()) };
    let refuse = |why: &str| Err(Refusal::new(format!("object {kind}: {why}"), PLAIN));
    if matches!(
        kind.as_str(),
        "sev-guest" | "sev-snp-guest" | "tdx-guest" | "s390-pv-guest" | "pef-guest"
    ) {
        return refuse("the memory of an encrypted guest cannot leave and come back");
    }
    if !kind.starts_with("memory-backend-") {
        return Ok(());
    }
    let path = options.get("mem-path").map(|path| here.join(path));
    if options.is_on("hugetlb") || path.is_some_and(|path| is_below(&path, huge)) {
        return refuse("huge pages of the kernel's (hugetlbfs) cannot leave");
    }
    Ok(())
}

fn is_below(path: &Path, mounts: &[PathBuf]) -> bool {
    mounts.iter().any(|mount| path.starts_with(mount))
}

/// The same of the machine.
pub(crate) fn machine(options: &Options) -> Result<(), Refusal> {
    for key in ["confidential-guest-support", "memory-encryption"] {
        if options.get(key).is_some() {
            let why = format!("-machine {key}: the memory of an encrypted guest cannot leave");
            return Err(Refusal::new(why, PLAIN));
        }
    }
    for key in ["memory", "memory.size"] {
        if options.get(key).is_some() {
            let why = format!(
                "-machine {key} gives the guest's memory in a way that strata does not read"
            );
            return Err(Refusal::new(why, "use --memory or -m"));
        }
    }
    Ok(())
}

/// `-overcommit` and the older `-realtime`.
pub(crate) fn locked(options: &Options) -> Result<(), Refusal> {
    let locks = |key| options.get(key).is_some_and(|value| value != "off");
    if locks("mem-lock") || locks("mlock") {
        let why = "the guest's memory is to be locked (mem-lock), so none of it could leave";
        return Err(Refusal::new(why, PLAIN));
    }
    Ok(())
}

/// Options that are refused whatever their value is.
pub(crate) fn option(name: &str) -> Result<(), Refusal> {
    match name {
        "readconfig" => Err(Refusal::new(
            "-readconfig: strata does not see what is in that file",
            "give its options on the command line",
        )),
        "mem-path" => {
            Err(Refusal::new("-mem-path: strata places the guest's memory itself", "leave it out"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(check: fn(&Options) -> Result<(), Refusal>, implied: &str, text: &str) -> String {
        let options = Options::parse(text, implied).expect("parsed");
        check(&options).expect_err(text).to_string()
    }

    fn fine(check: fn(&Options) -> Result<(), Refusal>, implied: &str, text: &str) {
        let options = Options::parse(text, implied).expect("parsed");
        assert_eq!(check(&options), Ok(()), "{text}");
    }

    #[test]
    fn devices_that_share_or_pin_are_refused() {
        for (text, why) in [
            ("vhost-user-blk-pci,chardev=c", "vhost-user"),
            ("vhost-user-fs-pci,tag=x", "virtiofs"),
            ("driver=vhost-user-fs-device", "virtiofs"),
            ("ivshmem-plain,memdev=m", "shared with other"),
            ("ivshmem-doorbell,chardev=c", "shared with other"),
            ("vfio-pci,host=01:00.0", "VFIO"),
            (r#"{"driver":"vfio-pci-nohotplug"}"#, "VFIO"),
            ("vhost-vdpa-device-pci", "pinned"),
        ] {
            let line = refused(device, "driver", text);
            assert!(line.contains(why) && line.ends_with("without strata"), "{line}");
        }
        for text in [
            "virtio-net-pci,netdev=n",
            "virtio-mem-pci,memdev=vm0",
            "virtio-pmem-pci,memdev=nv",
            "nvdimm,memdev=nv",
            "vhost-vsock-pci,guest-cid=3",
            "vhost-scsi-pci",
        ] {
            fine(device, "driver", text);
        }
    }

    #[test]
    fn networks_objects_machines_and_locks() {
        assert!(refused(network, "type", "vhost-user,id=n,chardev=c").contains("vhost-user"));
        assert!(refused(network, "type", "type=vhost-vdpa,id=n").contains("pinned"));
        fine(network, "type", "tap,id=n,vhost=on");
        for kind in ["sev-guest,id=s", "tdx-guest,id=t"] {
            let check = |options: &Options| object(options, &[], Path::new("/"));
            assert!(refused(check, "qom-type", kind).contains("encrypted"));
        }
        assert!(refused(machine, "type", "q35,memory-encryption=s").contains("encrypted"));
        assert!(refused(machine, "type", "q35,memory.size=1G").contains("--memory"));
        fine(machine, "type", "q35,nvdimm=on,mem-merge=off");
        assert!(refused(locked, "", "mem-lock=on").contains("locked"));
        assert!(refused(locked, "", "mem-lock=on-fault").contains("locked"));
        assert!(refused(locked, "", "mlock=on").contains("locked"));
        fine(locked, "", "mem-lock=off,cpu-pm=on");
        assert!(option("readconfig").is_err() && option("mem-path").is_err());
        assert_eq!(option("drive"), Ok(()));
    }

    #[test]
    fn huge_pages_are_refused_wherever_they_are_from() {
        let huge = ["/dev/hugepages".into(), "/mnt/huge".into()];
        let check = |text: &str, here: &str| {
            let options = Options::parse(text, "qom-type").expect("parsed");
            object(&options, &huge, Path::new(here))
        };
        for text in [
            "memory-backend-memfd,id=m,hugetlb=on",
            "memory-backend-file,id=m,mem-path=/dev/hugepages",
            "memory-backend-file,id=m,mem-path=/mnt/huge/x",
        ] {
            assert!(check(text, "/").expect_err(text).why.contains("hugetlbfs"));
        }
        assert!(check("memory-backend-file,id=m,mem-path=x", "/mnt/huge").is_err());
        for text in [
            "memory-backend-file,id=m,mem-path=/mnt/hugely/x",
            "memory-backend-memfd,id=m,hugetlb=off",
            "rng-random,id=r",
        ] {
            assert_eq!(check(text, "/"), Ok(()), "{text}");
        }
    }
}
