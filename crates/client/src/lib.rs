//! What a program can say of its memory to Strata, and ask: the placement API of
//! `include/strata.h`, safely; and its cache that may vanish ([`Pool`]).
//!
//! ```
//! use strata_client::{Advice, Error, advise};
//!
//! let table = vec![1_u64; 1 << 20];
//! match advise(&table, Advice::Cold) {
//!     Ok(()) => println!("it may leave DRAM"),
//!     Err(Error::NotManaged) => println!("no Strata here: nothing was done"),
//!     Err(error) => println!("{error}"),
//! }
//! ```
//!
//! Nothing is linked: the functions are those of the library that `strata run` has
//! put into the process, and a program that runs without gets
//! [`Error::NotManaged`]. All of it is safe, whatever is said of whatever memory:
//! content never changes. (What it takes of `unsafe` is in `strata-sys`.)
//!
//! It is not a client of the daemon's commands: that is the command line.
#![forbid(unsafe_code)]

mod pool;

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};

use strata_sys::{MappedMemory, PlacementError, advise_memory, memory_tiers, placement_reason};

pub use pool::{PageBuffer, Pool, PoolError};

/// Where memory can be asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Tier {
    /// In DRAM: it is pinned.
    Dram = 1,
    /// In place, in slower memory of this machine.
    Node = 2,
    /// Compressed in DRAM.
    Compressed = 3,
    /// In the file tier.
    File = 4,
}

/// What can be said of a range. The first four hold until they are changed, the
/// others are about now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum Advice {
    /// Nothing is set any more.
    Normal = 0,
    /// It is read in order.
    Sequential = 3,
    /// It is never evicted.
    Pin = 4,
    /// It is pinned no longer.
    Unpin = 5,
    /// It is wanted soon.
    Hot = 1,
    /// It is not wanted for a while, and may leave at once.
    Cold = 2,
    /// It will be freed.
    FreeSoon = 6,
}

/// Where a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// With the kernel: in DRAM, if it is anywhere.
    NotManaged,
    /// In DRAM, in place.
    Dram,
    /// In slower memory of this machine.
    Node,
    /// Compressed in DRAM, or of one value throughout.
    Compressed,
    /// In the file tier.
    File,
    /// Out of place, raw in DRAM.
    Staged,
    /// Never touched: reads as zero.
    Untouched,
    /// Unreadable.
    Lost,
}

impl Place {
    const fn of(number: u8) -> Self {
        match number {
            1 => Self::Dram,
            2 => Self::Node,
            3 => Self::Compressed,
            4 => Self::File,
            5 => Self::Staged,
            6 => Self::Untouched,
            7 => Self::Lost,
            _ => Self::NotManaged,
        }
    }
}

/// Why nothing, or not all, was done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Error {
    /// There is no Strata in this process, or nobody who manages it: the program
    /// runs as it would anyway.
    NotManaged,
    /// The daemon is 1024 hints of this process behind: this one was dropped.
    Behind,
    /// More would be pinned than the budget allows, or there is no memory.
    NoMemory(String),
    /// More than 512 ranges of the process would have settings.
    TooMany(String),
    /// There is no such tier.
    NoTier(String),
    /// A range that is none.
    Invalid(String),
    /// The daemon refused, cannot be reached, or went away.
    Daemon(String),
}

impl From<PlacementError> for Error {
    fn from(error: PlacementError) -> Self {
        let why = placement_reason;
        match error {
            PlacementError::NotManaged => Self::NotManaged,
            PlacementError::Behind => Self::Behind,
            PlacementError::NoMemory => Self::NoMemory(why()),
            PlacementError::TooMany => Self::TooMany(why()),
            PlacementError::NoTier => Self::NoTier(why()),
            PlacementError::Invalid | PlacementError::NotMapped => Self::Invalid(why()),
            PlacementError::Daemon => Self::Daemon(why()),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotManaged => formatter.write_str("this process is not managed by Strata"),
            Self::Behind => formatter.write_str("too many hints at once: this one was dropped"),
            Self::NoMemory(why)
            | Self::TooMany(why)
            | Self::NoTier(why)
            | Self::Invalid(why)
            | Self::Daemon(why) => formatter.write_str(why),
        }
    }
}

impl std::error::Error for Error {}

/// Says something of the pages that `memory` touches; of [`Advice::Cold`] and
/// [`Advice::FreeSoon`], of those that are wholly in it.
///
/// # Errors
/// See [`Error`].
pub fn advise<T>(memory: &[T], advice: Advice) -> Result<(), Error> {
    let start = memory.as_ptr() as usize;
    Ok(advise_memory(start, size_of_val(memory), advice as i32)?)
}

/// Where the pages are that `memory` touches, as it was during the call.
///
/// # Errors
/// See [`Error`].
pub fn places<T>(memory: &[T]) -> Result<Vec<Place>, Error> {
    let tiers = memory_tiers(memory.as_ptr() as usize, size_of_val(memory))?;
    Ok(tiers.into_iter().map(Place::of).collect())
}

/// Zeroed memory of its own, given back when dropped. Worth it from 128 KiB on.
#[derive(Debug)]
pub struct Memory(MappedMemory);

impl Memory {
    /// In a tier.
    ///
    /// # Errors
    /// See [`Error`]; with [`Memory::plain`] a program goes on.
    pub fn in_tier(bytes: usize, tier: Tier) -> Result<Self, Error> {
        Ok(Self(MappedMemory::in_tier(bytes, tier as i32)?))
    }

    /// Anywhere.
    ///
    /// # Errors
    /// There is no memory.
    pub fn plain(bytes: usize) -> io::Result<Self> {
        Ok(Self(MappedMemory::plain(bytes)?))
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_strata_nothing_is_done_and_it_is_said() {
        let memory = vec![7_u32; 10_000];
        assert_eq!(advise(&memory, Advice::Cold), Err(Error::NotManaged));
        assert_eq!(places(&memory), Err(Error::NotManaged));
        assert!(Memory::in_tier(1 << 20, Tier::Dram).is_err_and(|e| e == Error::NotManaged));
        let mut plain = Memory::plain(1 << 20).expect("memory");
        plain[5] = 1;
        assert_eq!(plain.iter().map(|byte| u32::from(*byte)).sum::<u32>(), 1);
        assert!(memory.iter().all(|number| *number == 7));
    }

    #[test]
    fn errors_say_something() {
        assert!(Error::NotManaged.to_string().contains("not managed"));
        assert_eq!(Error::NoTier("none here".into()).to_string(), "none here");
    }
}
