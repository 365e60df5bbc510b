//! Finds CRIU and asks for its version.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fmt, io};

/// The oldest version that works: older ones fail on kernels from 6.16 on.
pub const OLDEST: (u32, u32) = (4, 2);

/// A process is put into its cgroup by whoever restores it. CRIU would mount all
/// hierarchies of cgroups in its work directory, and killed leave them there: to
/// remove that directory would be to remove cgroups.
pub(crate) const IGNORE_CGROUPS: &str = "--manage-cgroups=ignore";

/// Places of system programs that a user's PATH may lack.
const MORE_PLACES: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// A CRIU that can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Criu {
    path: PathBuf,
    version: String,
}

/// Why no CRIU can be used.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// There is none.
    #[error("CRIU is not installed (looked in PATH); install criu {}.{} or newer, or name it in the configuration", OLDEST.0, OLDEST.1)]
    Missing,
    /// The one named does not start.
    #[error("{path} does not start: {cause}")]
    DoesNotStart {
        /// The program.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// It says something else than a version.
    #[error("{path} does not say a version, so it is not taken for CRIU: {said:?}")]
    NoVersion {
        /// The program.
        path: PathBuf,
        /// What it said.
        said: String,
    },
    /// It is too old.
    #[error("{path} is version {version}; {}.{} or newer is needed", OLDEST.0, OLDEST.1)]
    TooOld {
        /// The program.
        path: PathBuf,
        /// Its version.
        version: String,
    },
}

fn parse_version(said: &str) -> Option<(u32, u32, &str)> {
    let text = said.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let major = numbers.next()?.ok()?;
    Some((major, numbers.next().and_then(Result::ok).unwrap_or(0), text))
}

impl Criu {
    /// The file of that name in a PATH, or where system programs are.
    #[must_use]
    pub fn in_path(path: &OsStr) -> Option<PathBuf> {
        env::split_paths(path)
            .chain(MORE_PLACES.map(PathBuf::from))
            .map(|place| place.join("criu"))
            .find(|program| program.is_file())
    }

    /// The program that the configuration names, or else the one in PATH.
    ///
    /// # Errors
    /// There is none, or it is too old: [`CriuError`] says which.
    pub fn find(configured: Option<&Path>) -> Result<Self, CriuError> {
        let path = match configured {
            Some(path) => path.to_owned(),
            None => {
                Self::in_path(&env::var_os("PATH").unwrap_or_default()).ok_or(CriuError::Missing)?
            }
        };
        let output = Command::new(&path)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .map_err(|cause| CriuError::DoesNotStart { path: path.clone(), cause })?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let Some((major, minor, version)) = parse_version(&said) else {
            let said = format!("{said}{}", String::from_utf8_lossy(&output.stderr));
            return Err(CriuError::NoVersion { path, said });
        };
        let version = version.to_owned();
        if (major, minor) < OLDEST {
            return Err(CriuError::TooOld { path, version });
        }
        Ok(Self { path, version })
    }

    /// The program.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, as it says it.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }
}

impl fmt::Display for Criu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (version {})", self.path.display(), self.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Fake;

    #[test]
    fn versions_are_told_apart() {
        assert_eq!(parse_version("Version: 4.2.1\nGitID: x"), Some((4, 2, "4.2.1")));
        assert_eq!(parse_version("Version: 5"), Some((5, 0, "5")));
        assert_eq!(parse_version("criu 4.2"), None);
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_the_reason() {
        let fake = Fake::new("find");
        let says = |text: &str| Criu::find(Some(&fake.program(text)));
        assert_eq!(says("echo Version: 4.2.1").expect("new enough").version(), "4.2.1");
        assert!(says("echo Version: 10.0").is_ok());
        let old = says("echo Version: 4.1.1").expect_err("too old");
        assert!(old.to_string().contains("is version 4.1.1; 4.2 or newer"), "{old}");
        assert!(matches!(says("echo hello"), Err(CriuError::NoVersion { .. })));
        let gone = Criu::find(Some(Path::new("/nonexistent/criu"))).expect_err("missing");
        assert!(matches!(gone, CriuError::DoesNotStart { .. }));
    }
}
