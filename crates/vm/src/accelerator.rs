//! Who executes the guest's instructions: the processor (KVM) or an emulator (TCG).

use std::fmt;

/// What QEMU is told to use where the command line does not say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's emulator.
    Tcg,
}

impl Accelerator {
    /// What QEMU is told. The emulator's buffer of translated code is a gigabyte unless
    /// it is bounded; it is executable memory, which is never paged.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi,tb-size=64",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        })
    }
}

/// Why guests do not run under KVM here; None: they do.
///
/// `opened`: whether `/dev/kvm` opens, and if not, why; `cpuinfo`: `/proc/cpuinfo`. On
/// x86 a KVM without the processor's help (paravirtual, as inside some machines) boots no
/// unmodified guest.
#[must_use]
pub fn kvm_problem(opened: Result<(), String>, cpuinfo: &str, arch: &str) -> Option<String> {
    if let Err(why) = opened {
        return Some(format!("/dev/kvm does not open ({why})"));
    }
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags"));
    let helps = |flags: &str| flags.split_ascii_whitespace().any(|f| f == "vmx" || f == "svm");
    (arch == "x86_64" && !flags.is_some_and(helps)).then(|| {
        "/dev/kvm is there, but the processor shows neither vmx nor svm: unmodified guests do not boot under such a KVM".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_is_used_where_stock_guests_boot() {
        let with = "processor\t: 0\nflags\t\t: fpu vmx sse\n";
        let without = "processor\t: 0\nflags\t\t: fpu vmx_not sse\n";
        assert_eq!(kvm_problem(Ok(()), with, "x86_64"), None);
        assert_eq!(kvm_problem(Ok(()), "flags : svm\n", "x86_64"), None);
        assert_eq!(kvm_problem(Ok(()), "", "aarch64"), None);
        for (opened, cpuinfo, why) in [
            (Err("no such file".to_owned()), with, "no such file"),
            (Ok(()), without, "neither vmx nor svm"),
            (Ok(()), "", "neither vmx nor svm"),
        ] {
            let problem = kvm_problem(opened, cpuinfo, "x86_64").expect(why);
            assert!(problem.contains(why), "{problem}");
        }
    }
}
