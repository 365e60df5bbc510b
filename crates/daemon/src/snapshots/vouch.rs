//! Who wrote a file that is to be imported, and whether it asks for more than that
//! user may have.
//!
//! What it asks for it gets: CRIU restores it with this daemon's rights. So a file
//! counts as root's only if root wrote it. Whoever copies another's file without
//! looking, as root, vouches for it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use strata_api::Claim;
use strata_snapshot::archive::Reader;
use strata_snapshot::claims::{self, Beyond, Images, Owner};

/// Claims that a refusal names.
const MOST_NAMED: usize = 4;
const OTHERS_WRITE: u32 = 0o022;

/// Whose a file is, as far as what it asks for is concerned.
#[derive(Debug)]
pub(super) enum Author {
    /// Root, or this daemon's user; or somebody who is trusted.
    Trusted,
    /// Somebody else.
    User(Owner),
}

fn text_of(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

impl Author {
    /// # Errors
    /// It is not known.
    pub(super) fn of(reader: &Reader, own: u32, trust: bool) -> Result<Self, String> {
        let file = reader.metadata().map_err(|error| crate::tenants::chain(&error))?;
        let (user, mode) = (file.uid(), file.mode() & 0o7777);
        if trust {
            return Ok(Self::Trusted);
        }
        if mode & OTHERS_WRITE != 0 {
            return Err(format!(
                "who wrote it is not known: its mode is {mode:o}; take that from others (chmod go-w), or say --trust, which runs it with whatever it asks for"
            ));
        }
        if user == 0 || user == own {
            return Ok(Self::Trusted);
        }
        // What init has is what programs of users begin with.
        let owner = Owner::of(
            user,
            &text_of("/etc/passwd"),
            &text_of("/etc/group"),
            &text_of("/proc/1/limits"),
        );
        Ok(Self::User(owner))
    }

    /// Refuses a guest of somebody else's: its QEMU is started as whoever restores it.
    ///
    /// # Errors
    /// It is somebody else's.
    pub(super) fn check_guest(&self) -> Result<(), String> {
        match self.user() {
            None => Ok(()),
            Some(user) => Err(format!(
                "it belongs to user {user} and says how a QEMU is to be started; --dry-run shows that, --trust takes it in"
            )),
        }
    }

    /// Whose rights it has, unless everything is allowed.
    pub(super) fn user(&self) -> Option<u32> {
        match self {
            Self::Trusted => None,
            Self::User(owner) => Some(owner.user),
        }
    }

    fn beyond(&self, claims: &[claims::Claim]) -> Vec<Beyond> {
        match self {
            Self::Trusted => Vec::new(),
            Self::User(owner) => {
                claims::check(claims, owner, &|path, flags| claims::may_open(path, flags, owner))
            }
        }
    }

    /// All that these images ask for, and of whom it is more than a right.
    pub(super) fn compare(&self, images: &Images) -> (Option<u32>, Vec<Claim>) {
        let all = claims::read(images);
        let beyond = self.beyond(&all);
        let list =
            all.into_iter().map(|claim| match beyond.iter().find(|beyond| beyond.claim == claim) {
                Some(beyond) => Claim { text: beyond.to_string(), is_beyond: true },
                None => Claim { text: claim.to_string(), is_beyond: false },
            });
        (self.user(), list.collect())
    }

    /// # Errors
    /// The images in a directory ask for more than a right, or cannot be read.
    pub(super) fn check(&self, images: &Path) -> Result<(), String> {
        let Self::User(owner) = self else { return Ok(()) };
        let images = claims::load(images).map_err(|error| error.to_string())?;
        let beyond = self.beyond(&claims::read(&images));
        if beyond.is_empty() {
            return Ok(());
        }
        let mut named: Vec<String> =
            beyond.iter().take(MOST_NAMED).map(ToString::to_string).collect();
        if beyond.len() > MOST_NAMED {
            named.push(format!("and {} more", beyond.len() - MOST_NAMED));
        }
        Err(format!(
            "it belongs to user {} and asks for more than that user may have: {}; --dry-run lists all, --trust runs it with that",
            owner.user,
            named.join("; ")
        ))
    }
}
