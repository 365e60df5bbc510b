//! What a tenant's programs have set for their memory, in sum, and what it means for a
//! page.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use strata_units::{PageId, SpaceId};

use crate::map::address::address_of;
use crate::map::lock;
use crate::map::settings::{Setting, Settings};
use crate::tenant::Tenant;
use crate::tenant::space::{Gate, Space};

/// Sums over a tenant's spaces.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    /// Bytes of its spaces' memory that are pinned.
    pinned_bytes: AtomicI64,
    /// They are more than its budget allows, and not heeded.
    pub(crate) suspended: AtomicBool,
    /// Memory is registered that the budget does not ask for.
    pub(crate) registers: AtomicBool,
    /// Held by whoever registers it, and over a freeze: what is registered between
    /// the arming and the thaw would be in the snapshot by halves.
    pub(crate) registering: Mutex<()>,
    /// Held by whoever sets something.
    pub(crate) setting: Mutex<()>,
}

impl Tenant {
    /// Bytes of memory that its programs have pinned, resident or not.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.placement.pinned_bytes.load(Ordering::Relaxed).max(0) as u64
    }

    /// Changes the settings of a space and keeps them; what does not fit is as
    /// before. The caller holds its gate.
    pub(crate) fn change_settings(
        &self,
        space: SpaceId,
        gate: &mut Gate,
        change: impl FnOnce(&mut Settings),
    ) {
        if gate.settings.is_empty() {
            return;
        }
        let mut settings = gate.settings.clone();
        change(&mut settings);
        // An unmapping in the middle of a range can make two of one: where there is
        // no place for both, the hole keeps the setting.
        if settings.fits() && settings != gate.settings {
            // There is a file by now.
            let _ = self.adopt_settings(space, gate, settings);
        }
    }

    /// The settings of a space are these, as an earlier worker kept them or as
    /// they were just changed. The caller holds its gate.
    pub(crate) fn adopt_settings(
        &self,
        space: SpaceId,
        gate: &mut Gate,
        settings: Settings,
    ) -> io::Result<()> {
        self.registry.keep_settings(space, &settings)?;
        let before = gate.settings.bytes_of(Setting::Pinned);
        let after = settings.bytes_of(Setting::Pinned);
        self.placement.pinned_bytes.fetch_add(after as i64 - before as i64, Ordering::Relaxed);
        gate.settings = settings;
        Ok(())
    }

    /// A space whose process is gone.
    pub(crate) fn forget_settings(&self, space: &Space) {
        self.change_settings(space.id, &mut lock(&space.gate), |settings| {
            *settings = Settings::default();
        });
    }

    /// What an earlier worker kept for `space`, before anything is done with it.
    pub(crate) fn recover_settings(&self, space: &Space) {
        let settings = self.registry.kept_settings(space.id);
        let pinned = settings.bytes_of(Setting::Pinned) as i64;
        self.placement.pinned_bytes.fetch_add(pinned, Ordering::Relaxed);
        lock(&space.gate).settings = settings;
    }

    /// Whether the page at `address` must stay.
    pub(crate) fn holds_pinned(&self, gate: &Gate, address: u64) -> bool {
        !gate.settings.is_empty()
            && gate.settings.at(address) == Some(Setting::Pinned)
            && !self.placement.suspended.load(Ordering::Relaxed)
    }

    /// The same for whoever knows the page by its number alone.
    pub(crate) fn is_pinned(&self, page: PageId) -> bool {
        self.pinned_bytes() > 0 && self.asks(page, |gate, address| self.holds_pinned(gate, address))
    }

    /// Whether the program wants the page on the node.
    pub(crate) fn is_for_node(&self, page: PageId) -> bool {
        self.asks(page, |gate, address| gate.settings.at(address) == Some(Setting::Node))
    }

    fn asks(&self, page: PageId, what: impl FnOnce(&Gate, u64) -> bool) -> bool {
        let Some((space, piece)) = self.map.owner(page.leaf()) else { return false };
        let address = address_of(piece, page.index());
        self.space(space).is_some_and(|space| what(&lock(&space.gate), address))
    }
}
