//! Pages in a pool of the daemon's, each of which may vanish.

use std::fmt;
use std::io;

use strata_sys::{ProgramPool, placement_reason};
pub use strata_units::PageBuffer;

/// A file of one of the user's pools (`strata pool create`): pages by number.
///
/// What is there is what was put there, by whichever process of the user; else it is not
/// found. Threads may share it, and call one after the other; a forked child opens its own.
///
/// ```
/// use strata_client::{PageBuffer, Pool, PoolError};
///
/// match Pool::open("pages", "report-1") {
///     Ok(pool) => {
///         let page = PageBuffer([7; 4096]);
///         pool.put(0, std::slice::from_ref(&page))?;
///         let (mut pages, mut found) = (vec![PageBuffer([0; 4096]); 2], [false; 2]);
///         pool.get(0, &mut pages, &mut found)?;
///         assert!(!found[0] || pages[0].0 == page.0);
///     }
///     Err(PoolError::NotManaged) => println!("no Strata here: do without a cache"),
///     Err(error) => println!("{error}"),
/// }
/// # Ok::<(), PoolError>(())
/// ```
#[derive(Debug)]
pub struct Pool(ProgramPool);

/// Why nothing, or not all, was done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PoolError {
    /// There is no Strata in this process, or nobody who manages it.
    NotManaged,
    /// The connection has ended: the daemon's worker was replaced or the pool removed, and all
    /// pages are gone; or this process came back from a snapshot, or has it from its parent,
    /// and they are there. Open it anew.
    Gone(String),
    /// No such name, or no such range of pages.
    Invalid(String),
    /// The daemon refused, or cannot be reached.
    Refused(String),
}

impl From<io::Error> for PoolError {
    fn from(error: io::Error) -> Self {
        // The library says more, unless a name with a zero in it did not get there.
        let said = placement_reason();
        let why = if said.is_empty() { error.to_string() } else { said };
        match error.kind() {
            io::ErrorKind::Unsupported => Self::NotManaged,
            io::ErrorKind::InvalidInput => Self::Invalid(why),
            io::ErrorKind::ConnectionReset => Self::Gone(why),
            _ => Self::Refused(why),
        }
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotManaged => formatter.write_str("this process is not managed by Strata"),
            Self::Gone(why) | Self::Invalid(why) | Self::Refused(why) => formatter.write_str(why),
        }
    }
}

impl std::error::Error for PoolError {}

impl Pool {
    /// Opens a file of a pool, by the names of both (1 to 64 bytes, 1 to 56).
    ///
    /// # Errors
    /// See [`PoolError`].
    pub fn open(pool: &str, file: &str) -> Result<Self, PoolError> {
        Ok(Self(ProgramPool::open(pool, file)?))
    }

    /// Copies out what is there of so many pages from number `first` on, and says of each
    /// whether it was; a page that was not stays as it is. How many were there.
    ///
    /// # Errors
    /// See [`PoolError`].
    ///
    /// # Panics
    /// When `found` has not as many places as there are pages.
    pub fn get(
        &self,
        first: u64,
        pages: &mut [PageBuffer],
        found: &mut [bool],
    ) -> Result<u32, PoolError> {
        Ok(self.0.get(first, pages, found)?)
    }

    /// Puts pages there, in the place of what is there; how many were taken. Those that were
    /// not are not there.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub fn put(&self, first: u64, pages: &[PageBuffer]) -> Result<u32, PoolError> {
        Ok(self.0.put(first, pages)?)
    }

    /// Has pages be there no more.
    ///
    /// # Errors
    /// See [`PoolError`]: where it is [`PoolError::Gone`] they may be there; flush again.
    pub fn flush(&self, first: u64, count: u64) -> Result<(), PoolError> {
        Ok(self.0.flush(first, count)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_strata_there_is_no_pool() {
        assert_eq!(Pool::open("pages", "file").err(), Some(PoolError::NotManaged));
        assert!(matches!(Pool::open("a\0b", "file"), Err(PoolError::NotManaged)));
        let of_kind = |kind: io::ErrorKind| PoolError::from(io::Error::from(kind));
        assert!(matches!(of_kind(io::ErrorKind::ConnectionReset), PoolError::Gone(_)));
        assert!(matches!(of_kind(io::ErrorKind::InvalidInput), PoolError::Invalid(_)));
        assert!(PoolError::NotManaged.to_string().contains("not managed"));
    }
}
