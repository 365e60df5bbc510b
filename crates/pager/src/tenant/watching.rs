//! What of a tenant is watched for use, and what was seen of it.

use std::sync::Arc;

use strata_sys::{Process, Range};
use strata_units::SpaceId;

/// Part of a process.
#[derive(Clone, Debug)]
pub struct Watch {
    /// The process's space...
    pub space: SpaceId,
    /// ...and its process.
    pub process: Arc<Process>,
    /// What is to be watched, in order, apart from each other.
    pub ranges: Vec<Range>,
    /// It is all that the tenant has on the node.
    pub all: bool,
}

/// What was seen of a range in one look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Where.
    pub range: Range,
    /// Samples that found a page of it used.
    pub hits: u32,
}

/// What was seen, for the keeper.
#[derive(Debug)]
pub(crate) struct Sight {
    pub(crate) space: SpaceId,
    pub(crate) all: bool,
    pub(crate) seen: Vec<Seen>,
}

/// A tenant's part in it.
#[derive(Debug, Default)]
pub(crate) struct Watching {
    /// Where the next look begins.
    pub(crate) next: Option<(SpaceId, u64)>,
    pub(crate) sight: Option<Sight>,
}
