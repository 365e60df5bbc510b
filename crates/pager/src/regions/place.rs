//! What a program asks about its own memory: to set something for a range
//! ([`crate::map::settings`]), and where a range lives. Hints are the keeper's
//! ([`crate::keeper`]).
//!
//! Whoever calls has made sure whose memory it is. Addresses are the program's own
//! idea: what is not managed there is passed over.

use std::io;
use std::sync::Arc;

use strata_store::Source;
use strata_sys::Range;
use strata_units::{ADDRESSES_END, PAGE, PAGE_SIZE};

use crate::map::address::{PIECE_BYTES, ids_in};
use crate::map::entry::Entry;
use crate::map::lock;
use crate::map::settings::{Setting, Settings};
use crate::regions::registration::{register_whole, register_within};
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Space};

/// Most of a tenant's budget that can be pinned: the rest is for what a program
/// needs beside it, and for what is stored.
const PINNED_PART: (u64, u64) = (3, 4);

/// What a program wants for ranges of its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// From now on.
    Set(Setting),
    /// No longer pinned.
    Unpin,
    /// Nothing any more.
    Normal,
}

/// Why nothing of a wish was done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refused {
    /// More would be pinned than the budget allows.
    Budget {
        /// What may be.
        most_bytes: u64,
    },
    /// Too many ranges of the process have settings.
    TooMany,
    /// There is no such tier.
    NoTier,
    /// A range is none.
    Range,
    /// It cannot be remembered.
    Memory(String),
}

/// Where a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whereabouts {
    /// Nobody but the kernel knows.
    NotManaged,
    /// In DRAM, in place.
    Dram,
    /// On the node, in place.
    Node,
    /// Out of the address space, raw in DRAM.
    Staged,
    /// In DRAM, compressed, or of one value throughout.
    Compressed,
    /// In the file tier.
    File,
    /// Never touched, or discarded: reads as zero.
    Untouched,
    /// Unreadable.
    Lost,
}

/// Whole pages below the highest address, at least one.
fn is_sane(range: Range) -> bool {
    range.start < range.end
        && range.end <= ADDRESSES_END
        && range.start.is_multiple_of(PAGE)
        && range.end.is_multiple_of(PAGE)
}

/// Most bytes that a tenant with this budget can pin.
pub(crate) fn most_pinned_bytes(budget_bytes: u64) -> u64 {
    budget_bytes / PINNED_PART.1 * PINNED_PART.0
}

impl Tenant {
    /// The settings that a restored process had at its snapshot, before it runs: those
    /// that this tenant has room and a tier for. If that is not all, a note says so.
    ///
    /// # Errors
    /// None could be kept.
    pub fn set_restored(&self, space: &Space, had: &[(Range, Setting)]) -> io::Result<()> {
        let alone = lock(&self.placement.setting);
        let mut gate = lock(&space.gate);
        let most_bytes = most_pinned_bytes(self.budget_bytes());
        let elsewhere = self.pinned_bytes().saturating_sub(gate.settings.bytes_of(Setting::Pinned));
        let mut settings = Settings::default();
        for &(range, setting) in had.iter().filter(|(range, _)| is_sane(*range)) {
            let mut with = settings.clone();
            with.set(range, setting);
            let pinned = elsewhere.saturating_add(with.bytes_of(Setting::Pinned));
            let has_room = setting != Setting::Pinned || pinned <= most_bytes;
            if has_room && self.has_tier_for(setting) && with.fits() {
                settings = with;
            }
        }
        let text = (settings.ranges() != had).then(|| {
            "memory that was pinned or placed in a tier at the snapshot is so no longer: the budget or the tiers do not allow all of it".to_owned()
        });
        self.note("restored placement", text);
        self.adopt_settings(space.id, &mut gate, settings)?;
        drop(gate);
        drop(alone);
        Ok(())
    }

    fn has_tier_for(&self, setting: Setting) -> bool {
        match setting {
            Setting::File => self.record.tier.is_some(),
            Setting::Node => self.record.node.is_some(),
            Setting::Pinned | Setting::Sequential | Setting::Compressed => true,
        }
    }

    /// Makes one mapping of each of `ranges` where it was cut into pieces for the advisor.
    ///
    /// # Errors
    /// A range is none.
    pub fn make_whole(
        self: &Arc<Self>,
        space: &Arc<Space>,
        ranges: &[Range],
    ) -> Result<(), Refused> {
        if !ranges.iter().all(|&range| is_sane(range)) {
            return Err(Refused::Range);
        }
        for &range in ranges {
            register_whole(space, self, range);
        }
        Ok(())
    }

    /// Does what the program of `space` wants for `ranges`, for all or for none.
    ///
    /// # Errors
    /// Nothing was changed.
    pub fn place(
        self: &Arc<Self>,
        space: &Arc<Space>,
        ranges: &[Range],
        wish: Wish,
    ) -> Result<(), Refused> {
        if !ranges.iter().all(|&range| is_sane(range)) {
            return Err(Refused::Range);
        }
        if let Wish::Set(setting) = wish
            && !self.has_tier_for(setting)
        {
            return Err(Refused::NoTier);
        }
        // What is unmapped is known only of memory that is registered: a setting
        // must not outlive what it was made for.
        if let Wish::Set(_) = wish {
            for &range in ranges {
                if !lock(&space.gate).is_registered(range) {
                    register_within(space, self, range);
                }
            }
        }
        let alone = lock(&self.placement.setting);
        let mut gate = lock(&space.gate);
        let mut settings = gate.settings.clone();
        for &range in ranges {
            match wish {
                Wish::Set(setting) => settings.set(range, setting),
                Wish::Unpin => settings.clear(range, |setting| setting == Setting::Pinned),
                Wish::Normal => settings.clear(range, |_| true),
            }
            // A range at a time: a request may name thousands.
            if !settings.fits() {
                return Err(Refused::TooMany);
            }
        }
        let before = gate.settings.bytes_of(Setting::Pinned);
        let after = settings.bytes_of(Setting::Pinned);
        if after > before {
            let most_bytes = most_pinned_bytes(self.budget_bytes());
            let total = self.pinned_bytes().saturating_sub(before).saturating_add(after);
            if total > most_bytes {
                return Err(Refused::Budget { most_bytes });
            }
        }
        let pinned = |&&(_, setting): &&(Range, Setting)| setting == Setting::Pinned;
        let freed: Vec<Range> =
            gate.settings.ranges().iter().filter(pinned).map(|&(range, _)| range).collect();
        self.adopt_settings(space.id, &mut gate, settings)
            .map_err(|error| Refused::Memory(error.to_string()))?;
        if after < before {
            // The policy had forgotten them.
            for range in freed {
                for (_, leaf, part) in gate.object.pages_in(range) {
                    for (address, page) in ids_in(leaf, part) {
                        if gate.settings.at(address) != Some(Setting::Pinned)
                            && self.map.get(page).is_resident()
                        {
                            self.noticed_resident(page);
                        }
                    }
                }
            }
        }
        drop(gate);
        drop(alone);
        self.wake_keeper();
        Ok(())
    }

    /// Where the pages of `range` are, one after the other.
    ///
    /// # Errors
    /// The range is none.
    pub fn whereabouts(&self, space: &Space, range: Range) -> Result<Vec<Whereabouts>, Refused> {
        if !is_sane(range) {
            return Err(Refused::Range);
        }
        let mut found = Vec::with_capacity((range.len() / PAGE) as usize);
        let mut start = range.start;
        while start < range.end {
            let end = (start / PIECE_BYTES + 1) * PIECE_BYTES;
            let part = Range { start, end: end.min(range.end) };
            // The handler waits for no more than this.
            let gate = lock(&space.gate);
            found.extend((part.start..part.end).step_by(PAGE_SIZE).map(|address| {
                if gate.is_registered(Range { start: address, end: address + PAGE }) {
                    self.where_is(&gate, address)
                } else {
                    Whereabouts::NotManaged
                }
            }));
            start = part.end;
        }
        Ok(found)
    }

    fn where_is(&self, gate: &Gate, address: u64) -> Whereabouts {
        let Some(page) = gate.object.page(address) else { return Whereabouts::Untouched };
        match self.map.get(page) {
            Entry::Untouched | Entry::Discarded => Whereabouts::Untouched,
            // One that is on its way either way is in DRAM, and reads at once.
            Entry::Resident { .. }
            | Entry::Kept(_)
            | Entry::Leaving { .. }
            | Entry::Arriving(_) => Whereabouts::Dram,
            Entry::OnNode => Whereabouts::Node,
            // Only who holds the gate may let go of it.
            Entry::Stored(handle) => match self.store.locate(handle) {
                Source::Staged => Whereabouts::Staged,
                Source::File => Whereabouts::File,
                Source::Fill | Source::Compressed => Whereabouts::Compressed,
            },
            Entry::Lost | Entry::Pending | Entry::Copied => Whereabouts::Lost,
        }
    }
}
