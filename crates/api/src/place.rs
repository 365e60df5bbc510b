//! What a program asks about its own memory.

use serde::{Deserialize, Serialize};

/// Most ranges of one request: a program with more asks again.
pub const MAX_PLACE_RANGES: usize = 64;
/// Most pages of one request: 256 MiB.
pub const MAX_PLACE_PAGES: u32 = 1 << 16;

/// What is wanted for ranges of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceWish {
    /// Nothing any more.
    Normal,
    /// Never to be evicted.
    Pin,
    /// No longer pinned.
    Unpin,
    /// It is read in order.
    Sequential,
    /// To leave DRAM early, compressed.
    Compressed,
    /// To lie on the node, in place.
    Node,
    /// To leave DRAM early, to the file tier.
    File,
    /// To be one mapping: where a part of it is watched for the advisor the kernel has
    /// several, and `mremap` takes one only.
    Whole,
}

/// What came of it. The library inside programs knows these words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceOutcome {
    /// Done, for all ranges. All others: for none.
    Done,
    /// More would be pinned than the budget allows.
    Budget,
    /// Too many ranges of the process have something set.
    TooMany,
    /// There is no such tier.
    NoTier,
    /// A range is none.
    Range,
}

/// The letters of [`crate::Reply::Where`].
pub mod tier_letters {
    /// Not managed: where it is, only the kernel knows.
    pub const NOT_MANAGED: char = '-';
    /// In DRAM, in place.
    pub const DRAM: char = 'd';
    /// On the node, in place.
    pub const NODE: char = 'n';
    /// Raw in DRAM, out of place.
    pub const STAGED: char = 's';
    /// Compressed in DRAM.
    pub const COMPRESSED: char = 'c';
    /// In the file tier.
    pub const FILE: char = 'f';
    /// Reads as zero.
    pub const UNTOUCHED: char = '0';
    /// Unreadable.
    pub const LOST: char = 'x';
}
