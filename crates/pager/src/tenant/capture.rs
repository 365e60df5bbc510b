//! What a space knows of the snapshot that is taken of it, and of the one before.
//! (`crate::capture` does what there is to do.)

use std::sync::Arc;

use strata_sys::{Process, Range};
use strata_units::SpaceId;

use crate::map::lock;
use crate::map::object::Object;
use crate::map::page_map::Piece;
use crate::map::page_set::PageSet;
use crate::tenant::copied::Copied;
use crate::tenant::space::Space;

/// What is still to be captured of a space. Behind its gate.
#[derive(Debug)]
pub(crate) struct Capture {
    /// The snapshot's.
    pub(crate) object: Object,
    /// No more than this is in it.
    pub(crate) wanted: Range,
    pub(crate) pages: Arc<Process>,
    pub(crate) pending: u64,
    /// How much of it the snapshot before did not have, at the freeze.
    pub(crate) unknown: u64,
    pub(crate) torn: bool,
    /// Of what is pending: what the snapshot before it has.
    pub(crate) clean: CleanPages,
    /// How much of it that was.
    pub(crate) from_base: u64,
    /// What was read when somebody was about to write.
    pub(crate) copied: Copied,
    /// For the pages of a block, where DRAM is short.
    pub(crate) block: Vec<u8>,
    /// Where the keeper goes on.
    pub(crate) next: Piece,
}

/// A snapshot that the next one can build on. It may be gone by then, and its slot
/// another's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Base {
    pub(crate) snapshot: SpaceId,
    pub(crate) serial: u64,
}

/// Pages that have not been written since a snapshot. Empty: no base.
#[derive(Debug, Default)]
pub(crate) struct CleanPages {
    pub(crate) base: Option<Base>,
    pub(crate) pages: PageSet,
}

impl Space {
    /// What copies of pages that are not in the store yet cost.
    pub(crate) fn copied_bytes(&self) -> u64 {
        lock(&self.gate).capture.as_ref().map_or(0, |capture| capture.copied.bytes())
    }
}
