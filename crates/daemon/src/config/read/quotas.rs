//! The `[quota]` table of a configuration file.

use toml::de::{DeTable, DeValue};

use super::{Reader, Refusal, wrong_type};
use crate::quota::Quota;

/// All keys of the table.
const KEYS: [&str; 5] = ["tenants", "processes", "connections", "log_lines", "pools"];
/// More than any machine has of what is counted here.
const MOST: u32 = 1 << 20;

impl Reader<'_> {
    pub(super) fn quota(&mut self, whole: &DeTable<'_>) -> Quota {
        const KEY: &str = "quota";
        let mut quota = Quota::default();
        let Some(value) = whole.get(KEY) else { return quota };
        let Some(table) = value.get_ref().as_table() else {
            self.complain(&value.span(), KEY, wrong_type(value.get_ref(), "a table: [quota]"));
            return quota;
        };
        self.unknown_keys(table, &KEYS, KEY);
        let places = [
            &mut quota.tenants,
            &mut quota.processes,
            &mut quota.connections,
            &mut quota.log_lines,
            &mut quota.pools,
        ];
        for (key, place) in KEYS.into_iter().zip(places) {
            if let Some(number) = self.get(table, key, number) {
                *place = number;
            }
        }
        quota
    }
}

fn number(value: &DeValue<'_>) -> Result<u32, Refusal> {
    let wanted = format!("how many one user may have, 1 to {MOST}");
    let integer = value.as_integer().ok_or_else(|| wrong_type(value, &wanted))?;
    match u32::from_str_radix(integer.as_str(), integer.radix()) {
        Ok(count) if (1..=MOST).contains(&count) => Ok(count),
        _ => Err((format!("{} is no quota", integer.as_str()), format!("write {wanted}"))),
    }
}
