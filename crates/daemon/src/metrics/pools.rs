//! Pools and guests' swap disks as metrics.

use std::fmt::Write as _;

use strata_api::PoolStats;

use super::label;

/// One number of [`PoolStats`], named after the field.
type OfPool = (&'static str, &'static str, fn(&PoolStats) -> u64);

macro_rules! of_pools {
    ($($field:ident: $help:literal,)*) => {
        [$((stringify!($field), $help, |pool| pool.$field)),*]
    };
}

/// Every number of [`PoolStats`] but the user id, which is a label.
const POOL_METRICS: [OfPool; 17] = of_pools! {
    limit_bytes: "Most that the pool may cost; of a swap disk, its size.",
    cost_bytes: "What the pool costs in DRAM.",
    page_bytes: "Pages in the pool, as guests see them.",
    deduplicated_bytes: "Part of page_bytes that is another page's content.",
    fill_bytes: "Part of page_bytes that is one value throughout.",
    files: "Files that the pool knows.",
    connections: "Connections of disks to the pool.",
    gets_total: "Pages that were asked for.",
    hits_total: "Pages that were there.",
    puts_total: "Pages that were taken.",
    refused_total: "Pages for which there was no room.",
    passed_over_total: "Pages that were missed and not wanted.",
    forgotten_total: "Pages that were written or given up.",
    evicted_total: "Pages that went for others.",
    corrupt_total: "Pages whose checksum was wrong.",
    handed_back_total: "Times that all of the pool was handed back.",
    handed_back_bytes_total: "Memory that was handed back so.",
};

fn who(pool: &PoolStats) -> String {
    let kind = if pool.guest.is_some() { "swap" } else { "cache" };
    let guest = pool.guest.as_deref().unwrap_or_default();
    format!(
        "pool=\"{}\",user=\"{}\",kind=\"{kind}\",guest=\"{}\"",
        label(&pool.name),
        pool.uid,
        label(guest)
    )
}

pub(super) fn write_pools(out: &mut String, pools: &[PoolStats]) -> std::fmt::Result {
    let head = |out: &mut String, name: &str, help: &str| {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        writeln!(out, "# HELP strata_pool_{name} {help}\n# TYPE strata_pool_{name} {kind}")
    };
    for (name, help, value) in POOL_METRICS {
        head(out, name, help)?;
        for pool in pools {
            writeln!(out, "strata_pool_{name}{{{}}} {}", who(pool), value(pool))?;
        }
    }
    head(
        out,
        "closed",
        "1 while the pool takes nothing, because the machine has little memory left.",
    )?;
    for pool in pools {
        writeln!(out, "strata_pool_closed{{{}}} {}", who(pool), u8::from(pool.closed))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_a_pool_is_a_metric_with_its_value() {
        let numbers = serde_json::to_value(PoolStats::default()).expect("serialise");
        let mut numbers = numbers.as_object().expect("an object").clone();
        let mut next = 100;
        for (key, value) in &mut numbers {
            if value.is_u64() && key != "uid" {
                next += 1;
                *value = next.into();
            }
        }
        assert_eq!(next - 100, POOL_METRICS.len() as u64);
        let object = serde_json::Value::Object(numbers.clone());
        let pool: PoolStats = serde_json::from_value(object).expect("a pool");
        let swap = PoolStats { name: "w.swap".into(), guest: Some("w".into()), ..pool.clone() };
        let mut out = String::new();
        write_pools(&mut out, &[PoolStats { closed: true, ..pool }, swap]).expect("text");
        for (key, value) in numbers {
            if let Some(number) = value.as_u64().filter(|number| *number > 100) {
                for who in [
                    "pool=\"\",user=\"0\",kind=\"cache\",guest=\"\"",
                    "pool=\"w.swap\",user=\"0\",kind=\"swap\",guest=\"w\"",
                ] {
                    let line = format!("\nstrata_pool_{key}{{{who}}} {number}\n");
                    assert!(out.contains(&line), "{line} is not in {out}");
                }
            }
        }
        assert!(out.contains("kind=\"cache\",guest=\"\"} 1\n"), "{out}");
    }
}
