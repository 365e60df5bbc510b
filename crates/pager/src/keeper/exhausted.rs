//! What is said of a tenant that costs more than it may: what takes the room, and what
//! of all that could be done helps.

use strata_policy::budget::Actions;
use strata_store::StoreStats;
use strata_units::{ByteSize, PAGE};

use super::Keeper;
use crate::keeper::observe::file_room_bytes;
use crate::tenant::usage::Usage;

/// What is not less than this part of a budget is the cause to name.
const CAUSE_PART: u64 = 4;
/// What a file tier must still take to be of use.
const FILE_ROOM_BYTES: u64 = 16 << 20;

/// What there is to know of such a tenant.
#[derive(Clone, Copy, Debug)]
struct Excess {
    usage: Usage,
    budget_bytes: u64,
    /// So much is missing.
    short_bytes: u64,
    /// Anonymous, and not managed.
    unmanaged_bytes: u64,
    /// What stored pages cost in DRAM and could have in a file.
    stored_bytes: u64,
    /// Room in its file tier; none where it has none.
    file_room_bytes: Option<u64>,
}

impl Excess {
    /// One line: what it costs, why, and what to do.
    fn text(&self) -> String {
        let Self { usage, budget_bytes, short_bytes, .. } = *self;
        let part = budget_bytes / CAUSE_PART;
        let enough = ByteSize(usage.real_bytes().max(budget_bytes + short_bytes));
        // The largest part is what to do something about.
        let merged_bytes = usage.merged_cost_bytes();
        let largest =
            usage.shared_bytes.max(self.unmanaged_bytes).max(self.stored_bytes).max(merged_bytes);
        let largest = largest.max(usage.swap_bytes);
        let is_cause = |bytes: u64| bytes >= part && bytes == largest;
        let (why, todo) = if is_cause(usage.shared_bytes) {
            let shared = ByteSize(usage.shared_bytes);
            (
                format!("{shared} of it are shared memory, which is not managed"),
                format!("raise the budget to {enough}, or have the program use less shared memory"),
            )
        } else if is_cause(usage.swap_bytes) {
            let swap = ByteSize(usage.swap_bytes);
            (
                format!("{swap} of it are what the guest has swapped out"),
                format!("raise the budget to {enough}, or give the guest more memory"),
            )
        } else if is_cause(self.unmanaged_bytes) {
            let unmanaged = ByteSize(self.unmanaged_bytes);
            (
                format!("{unmanaged} of it cannot be managed (strata stats says why)"),
                format!("raise the budget to {enough}"),
            )
        } else if is_cause(merged_bytes) {
            let (merged, cost) = (ByteSize(usage.merged_bytes), ByteSize(merged_bytes));
            (
                format!(
                    "{cost} of it are its part of {merged} of pages that the kernel has merged with equal ones (KSM), which are left where they are"
                ),
                format!("raise the budget to {enough}, or have less merged"),
            )
        } else if is_cause(self.stored_bytes) {
            let stored = ByteSize(self.stored_bytes);
            let why = format!("{stored} of it are compressed pages");
            match self.file_room_bytes {
                None => (why, "raise the budget, or give it a file tier (tier_path)".into()),
                Some(room) if room < FILE_ROOM_BYTES => (
                    format!("{why}, and its file tier is full"),
                    "raise the budget, or tier_limit".into(),
                ),
                Some(_) => (why, "raise the budget".into()),
            }
        } else {
            ("nothing more can leave DRAM".into(), format!("raise the budget to {enough}"))
        };
        format!(
            "over its budget: costs {}, may cost {}; {why} ({} short); {todo}",
            ByteSize(usage.real_bytes()),
            ByteSize(budget_bytes),
            ByteSize(short_bytes),
        )
    }
}

impl Keeper<'_> {
    /// Notes whether it is over its budget for good.
    pub(super) fn say_exhausted(
        &self,
        exhausted: bool,
        actions: &Actions,
        usage: Usage,
        budget_bytes: u64,
    ) {
        let tenant = self.tenant;
        let store: StoreStats = tenant.store_stats();
        let (resident_pages, _) = tenant.pages();
        // Shared memory that takes nearly all: the rest is kept within what is left.
        let by_shared = usage.fixed_bytes() > usage.counted_shared_bytes;
        let text = (exhausted || by_shared).then(|| {
            let over = usage.real_bytes().saturating_sub(budget_bytes);
            let excess = Excess {
                usage,
                budget_bytes,
                short_bytes: actions.cannot_by_bytes.max(over),
                unmanaged_bytes: usage.unmanaged_bytes(resident_pages * PAGE),
                stored_bytes: store.dram_bytes.saturating_sub(store.staged_bytes),
                file_room_bytes: file_room_bytes(&tenant.record, &store),
            };
            excess.text()
        });
        tenant.note("exhausted", text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn excess() -> Excess {
        let usage = Usage { anonymous_bytes: 300 * MIB, ..Usage::default() };
        Excess {
            usage,
            budget_bytes: 256 * MIB,
            short_bytes: 44 * MIB,
            unmanaged_bytes: 0,
            stored_bytes: 0,
            file_room_bytes: None,
        }
    }

    #[test]
    fn what_would_not_help_is_not_advised() {
        let text = excess().text();
        assert!(
            text.contains("raise the budget to 300.0 MiB") && !text.contains("file tier"),
            "{text}"
        );
        let mut shared = excess();
        shared.usage.shared_bytes = 400 * MIB;
        shared.usage.counted_shared_bytes = 224 * MIB;
        let text = shared.text();
        assert!(
            text.contains("costs 700.0 MiB, may cost 256.0 MiB; 400.0 MiB of it are shared"),
            "{text}"
        );
        assert!(
            text.contains("raise the budget to 700.0 MiB, or") && !text.contains("file tier"),
            "{text}"
        );
        let mut swapped = excess();
        swapped.usage.swap_bytes = 400 * MIB;
        let text = swapped.text();
        assert!(text.contains("400.0 MiB of it are what the guest has swapped out"), "{text}");
        // Less of it is shared than cannot be managed.
        let mut both = Excess { unmanaged_bytes: 280 * MIB, ..excess() };
        both.usage.shared_bytes = 100 * MIB;
        both.usage.counted_shared_bytes = 100 * MIB;
        assert!(both.text().contains("280.0 MiB of it cannot be managed"), "{}", both.text());
        let text = Excess { unmanaged_bytes: 280 * MIB, ..excess() }.text();
        assert!(
            text.contains("280.0 MiB of it cannot be managed") && !text.contains("tier"),
            "{text}"
        );
    }

    #[test]
    fn pages_that_are_merged_are_named() {
        let mut merged = excess();
        (merged.usage.merged_bytes, merged.usage.merged_saved_bytes) = (500 * MIB, 250 * MIB);
        let text = merged.text();
        assert!(text.contains("250.0 MiB of it are its part of 500.0 MiB of pages"), "{text}");
        assert!(text.contains("raise the budget to 300.0 MiB, or have less merged"), "{text}");
        let mut little = excess();
        (little.usage.merged_bytes, little.usage.merged_saved_bytes) = (80 * MIB, 40 * MIB);
        assert!(!little.text().contains("KSM"), "{}", little.text());
    }

    #[test]
    fn a_file_tier_is_advised_where_it_helps() {
        let stored = Excess { stored_bytes: 200 * MIB, ..excess() };
        assert!(stored.text().contains("or give it a file tier"), "{}", stored.text());
        let full = Excess { file_room_bytes: Some(0), ..stored };
        assert!(full.text().contains("its file tier is full"), "{}", full.text());
        let roomy = Excess { file_room_bytes: Some(1 << 40), ..stored };
        assert!(!roomy.text().contains("tier"), "{}", roomy.text());
    }
}
