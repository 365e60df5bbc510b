//! Which QEMU it is, by what it prints for `--version`.

use std::fmt;

/// A version of QEMU's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    /// As in 7.2.
    pub major: u32,
    /// As in 7.2.
    pub minor: u32,
}

/// The first whose balloon device reports free pages; the machine takes a memory object
/// since 5.0.
pub const OLDEST: Version = Version { major: 5, minor: 1 };

impl Version {
    /// None: that is not what QEMU prints.
    #[must_use]
    pub fn parse(printed: &str) -> Option<Self> {
        Self::written(printed.lines().next()?.strip_prefix("QEMU emulator version ")?)
    }

    /// What a text begins with, as in 7.2.
    #[must_use]
    pub fn written(text: &str) -> Option<Self> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit());
        let mut number = || numbers.next()?.parse().ok();
        Some(Self { major: number()?, minor: number()? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_they_are_printed() {
        let parsed = |text| Version::parse(text).map(|version| version.to_string());
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright";
        assert_eq!(parsed(debian).as_deref(), Some("7.2"));
        assert_eq!(parsed("QEMU emulator version 10.0.13").as_deref(), Some("10.0"));
        assert_eq!(parsed("QEMU emulator version 9.1.50 (v9.1.0-1)").as_deref(), Some("9.1"));
        assert_eq!(Version::written("7.2"), parsed(debian).as_deref().and_then(Version::written));
        for other in ["", "bash 5.2", "QEMU emulator version x.y", "QEMU emulator version 7"] {
            assert_eq!(parsed(other), None, "{other}");
        }
        assert!(
            Version { major: 5, minor: 0 } < OLDEST && Version { major: 10, minor: 0 } > OLDEST
        );
    }
}
