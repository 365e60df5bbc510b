//! One page's state, and how it is written into the page map's 8 bytes.
//!
//! ```text
//! Untouched ─fault→ Resident ─MOVE→ Leaving ─read→ Stored ─fault→ Arriving → Resident or Kept
//! any ─unmap / discard→ Untouched (the handle is released exactly once)
//! ```
//! Who may write which change: see docs/design/pages.md.

use strata_units::Handle;

/// Where a page's content is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Entry {
    /// Nowhere: never touched, or discarded. Reads as zero.
    Untouched,
    /// Discarded by `madvise`: reads as zero. The kernel tells before it does
    /// it, so the old content may be in place for a moment more: the page is
    /// not taken for resident before a fault of its own has been served, or an
    /// eviction would save what the program threw away.
    Discarded,
    /// In the address space (or discarded since, unseen: then it is zero).
    Resident {
        /// Inherited by a fork and perhaps still mapped by another process
        /// too: charged there.
        shared: bool,
    },
    /// In the address space as above, and the store still has it as it was when
    /// it came back. Whether it has been written since nobody knows: the next
    /// eviction compares, and finds an unchanged page stored already.
    Kept(Handle),
    /// In the address space as above, not shared, and on the node: not in DRAM. That
    /// is what is believed: the kernel moves pages too, and `crate::keeper` looks now
    /// and then.
    OnNode,
    /// On its way out: in place still, or in this slot of the transfer range.
    Leaving {
        /// Slot of the transfer range.
        slot: u16,
        /// A thread waits for it.
        wanted: bool,
    },
    /// In the store.
    Stored(Handle),
    /// In the store, and being put in place.
    Arriving(Handle),
    /// Its stored copy could not be read back: whoever touches it dies.
    Lost,
    /// Of a snapshot only: what the page of the space that it was taken of had
    /// at the freeze, and has still, write-protected.
    Pending,
    /// Of a snapshot only: read, and not in the store yet (`crate::tenant::copied`).
    Copied,
}

const TAG_BITS: u32 = 4;
const TAG: u64 = (1 << TAG_BITS) - 1;
const FLAG: u64 = 1 << TAG_BITS;
const PAYLOAD_SHIFT: u32 = 16;
const _: () = assert!(PAYLOAD_SHIFT + Handle::BITS == 64);

impl Entry {
    pub(crate) const fn encode(self) -> u64 {
        match self {
            Self::Untouched => 0,
            Self::Resident { shared } => 1 | if shared { FLAG } else { 0 },
            Self::Leaving { slot, wanted } => {
                2 | if wanted { FLAG } else { 0 } | ((slot as u64) << PAYLOAD_SHIFT)
            }
            Self::Stored(handle) => 3 | (handle.0 << PAYLOAD_SHIFT),
            Self::Arriving(handle) => 4 | (handle.0 << PAYLOAD_SHIFT),
            Self::Lost => 5,
            Self::Discarded => 6,
            Self::Kept(handle) => 7 | (handle.0 << PAYLOAD_SHIFT),
            Self::Pending => 8,
            Self::Copied => 9,
            Self::OnNode => 10,
        }
    }

    /// A word that no version wrote reads as [`Entry::Lost`]: never as zeroes.
    pub(crate) const fn decode(word: u64) -> Self {
        let payload = word >> PAYLOAD_SHIFT;
        let flag = word & FLAG != 0;
        match word & TAG {
            0 if word == 0 => Self::Untouched,
            1 => Self::Resident { shared: flag },
            2 => Self::Leaving { slot: payload as u16, wanted: flag },
            3 => Self::Stored(Handle(payload)),
            4 => Self::Arriving(Handle(payload)),
            6 if word == 6 => Self::Discarded,
            7 => Self::Kept(Handle(payload)),
            8 if word == 8 => Self::Pending,
            9 if word == 9 => Self::Copied,
            10 if word == 10 => Self::OnNode,
            _ => Self::Lost,
        }
    }

    /// Whether `word` says [`Entry::Leaving`].
    pub(crate) const fn is_leaving(word: u64) -> bool {
        word & TAG == Self::Leaving { slot: 0, wanted: false }.encode()
    }

    /// Whether a missing page is to be filled with zeroes and was not charged.
    pub(crate) const fn reads_zero(self) -> bool {
        matches!(self, Self::Untouched | Self::Discarded)
    }

    /// Whether the page is in the address space, for all that is known.
    pub(crate) const fn is_resident(self) -> bool {
        matches!(self, Self::Resident { .. } | Self::Kept(_) | Self::OnNode)
    }

    /// Whether it is there, in DRAM, and this tenant's alone: what may go to the node.
    pub(crate) const fn is_own_dram(self) -> bool {
        matches!(self, Self::Resident { shared: false } | Self::Kept(_))
    }

    /// The reference to the store that this entry owns.
    pub(crate) const fn handle(self) -> Option<Handle> {
        match self {
            Self::Stored(handle) | Self::Arriving(handle) | Self::Kept(handle) => Some(handle),
            _ => None,
        }
    }

    /// What a forked child's entry becomes of its parent's. The caller retains
    /// the handle, if any.
    pub(crate) const fn inherited(self) -> Self {
        match self {
            // One copy in the store is enough for both; the parent has it.
            Self::Resident { .. } | Self::Kept(_) | Self::OnNode => Self::Resident { shared: true },
            // In the child's own transfer range if the page had been moved already.
            Self::Leaving { slot, .. } => Self::Leaving { slot, wanted: false },
            Self::Arriving(handle) => Self::Stored(handle),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Entry> {
        let handle = Handle((1 << Handle::BITS) - 1);
        vec![
            Entry::Untouched,
            Entry::Resident { shared: false },
            Entry::Resident { shared: true },
            Entry::Leaving { slot: 0, wanted: false },
            Entry::Leaving { slot: 511, wanted: true },
            Entry::Stored(Handle(0)),
            Entry::Stored(handle),
            Entry::Arriving(handle),
            Entry::Kept(handle),
            Entry::Lost,
            Entry::Discarded,
            Entry::Pending,
            Entry::Copied,
            Entry::OnNode,
        ]
    }

    #[test]
    fn every_state_survives_its_encoding() {
        for entry in all() {
            assert_eq!(Entry::decode(entry.encode()), entry);
        }
    }

    #[test]
    fn an_unknown_word_never_reads_as_zero_or_resident() {
        for tag in [5, 6, 8, 9, 10, 11, 12, 13, 14, 15u64] {
            assert_eq!(Entry::decode(tag | 0xABCD_0000), Entry::Lost);
        }
        assert_eq!(Entry::decode(0xABCD_0000), Entry::Lost);
    }

    #[test]
    fn a_child_owns_a_handle_exactly_where_its_parent_is_not_resident() {
        for entry in all() {
            let expected = if entry.is_resident() { None } else { entry.handle() };
            assert_eq!(entry.inherited().handle(), expected, "{entry:?}");
        }
    }
}
