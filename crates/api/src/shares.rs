//! How the host's DRAM is shared out among its tenants.

use serde::{Deserialize, Serialize};

/// Bounds of [`DramClaim::weight`].
const LEAST_WEIGHT: f64 = 0.001;
const MOST_WEIGHT: f64 = 1_000_000.0;

/// What a tenant claims of the host's DRAM. What is not named stays as it is; of a tenant
/// that had no claim: no reserve, no limit, a weight of 1.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct DramClaim {
    /// What it always gets back when it wants it.
    pub reserve_bytes: Option<u64>,
    /// The most that it may have.
    pub limit_bytes: Option<u64>,
    /// Its share of the rest beside those of others.
    pub weight: Option<f64>,
}

impl DramClaim {
    /// Whether nothing is claimed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What is wrong with it, whoever claims; None when nothing is.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if let Some(weight) = self.weight
            && !(LEAST_WEIGHT..=MOST_WEIGHT).contains(&weight)
        {
            return Some(format!("a weight of {weight} is not in {LEAST_WEIGHT} to {MOST_WEIGHT}"));
        }
        match (self.reserve_bytes, self.limit_bytes) {
            (Some(reserve), Some(limit)) if reserve > limit => {
                Some("its reserve is more than its limit".to_owned())
            }
            _ => None,
        }
    }
}

/// What one tenant has of the host's DRAM, and why.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantShare {
    /// Its name.
    pub name: String,
    /// Its owner's user id.
    pub uid: u32,
    /// Its budget, and whether that moves.
    pub budget_bytes: u64,
    /// False: it has a budget of its own, which changes only when it is told to.
    pub moves: bool,
    /// What it costs now.
    pub used_bytes: u64,
    /// What it would have if nobody else wanted anything.
    pub wants_bytes: u64,
    /// What it is on the way to.
    pub goal_bytes: u64,
    /// What it always gets back.
    pub reserve_bytes: u64,
    /// The most that it may have; none: all of the host's.
    pub limit_bytes: Option<u64>,
    /// Its share of the rest.
    pub weight: f64,
    /// Part of the last second in which some thread waited for a page.
    pub stall: f64,
    /// What others lose of their speed because it has more than its reserve, in sum and
    /// by weight: 0.1 is a tenth of the speed of one tenant with a weight of 1.
    pub costs_others: f64,
    /// Why it has what it has: one word for scripts (`content`, `reserve`, `rising`,
    /// `outbid`, `quiet`, `limit`, `fixed`).
    pub why: String,
    /// The same as a sentence.
    pub reason: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_that_cannot_be_are_refused() {
        let fine = DramClaim { reserve_bytes: Some(1), limit_bytes: Some(1), weight: Some(0.5) };
        assert_eq!(fine.problem(), None);
        assert!(!fine.is_empty() && DramClaim::default().is_empty());
        for weight in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e7] {
            assert!(DramClaim { weight: Some(weight), ..fine }.problem().is_some(), "{weight}");
        }
        assert!(DramClaim { reserve_bytes: Some(2), ..fine }.problem().is_some());
    }
}
