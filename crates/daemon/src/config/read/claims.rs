//! What rules claim of the DRAM that is shared out.

use strata_api::DramClaim;
use strata_units::ByteSize;
use toml::de::{DeTable, DeValue};

use super::{Reader, Refusal, budget, wrong_type};
use crate::config::Config;

/// The keys of a rule that claim.
const CLAIMS: [&str; 3] = ["reserve", "limit", "weight"];

impl Reader<'_> {
    /// What a rule claims. One that names neither a budget nor a claim claims nothing in
    /// particular, where DRAM is shared out.
    pub(super) fn claim(&mut self, whole: &DeTable<'_>, table: &DeTable<'_>) -> Option<DramClaim> {
        let machine = self.machine;
        let shared = whole.contains_key("dram");
        let first = CLAIMS.iter().find_map(|key| Some((*key, table.get(*key)?)));
        let Some((key, value)) = first else {
            return (shared && !table.contains_key("dram")).then(DramClaim::default);
        };
        if !shared {
            let todo = "set dram before the first [[manage]]".to_owned();
            self.complain(&value.span(), key, ("no DRAM is shared out".into(), todo));
            return None;
        }
        if let Some(fixed) = table.get("dram") {
            let what = format!("a budget of its own does not move, and {key} is for one that does");
            self.complain(&fixed.span(), "dram", (what, format!("leave out dram, or {key}")));
            return None;
        }
        let reserve = self.get(table, "reserve", |value| budget(value, machine));
        let limit = self.get(table, "limit", |value| budget(value, machine));
        let claim = DramClaim {
            reserve_bytes: reserve.map(|size| size.0),
            limit_bytes: limit.map(|size| size.0),
            weight: self.get(table, "weight", weight),
        };
        if let Some(problem) = claim.problem() {
            self.complain(&value.span(), key, (problem, "name others".into()));
        }
        Some(claim)
    }

    /// What all rules reserve together must be there.
    pub(super) fn claims(&mut self, whole: &DeTable<'_>, config: &mut Config) {
        let (Some(dram), Some(value)) = (config.dram, whole.get("dram")) else { return };
        let kept = |claim: &Option<DramClaim>| claim.and_then(|claim| claim.reserve_bytes);
        let reserved = config.manage.iter().filter_map(|rule| kept(&rule.claim)).sum();
        if ByteSize(reserved) > dram {
            let what = format!("rules reserve {} of it in all", ByteSize(reserved));
            self.complain(&value.span(), "dram", (what, "reserve less".into()));
        }
    }
}

fn weight(value: &DeValue<'_>) -> Result<f64, Refusal> {
    let number = match value {
        DeValue::Integer(number) => number.to_string().parse().ok(),
        DeValue::Float(number) => number.as_str().parse().ok(),
        _ => return Err(wrong_type(value, "a number: 2")),
    };
    number.ok_or_else(|| ("is no weight".into(), "write a number: 2".into()))
}
