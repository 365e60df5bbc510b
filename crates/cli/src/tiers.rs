//! `strata tiers`: what each tier of each tenant holds, and what passes through it.
//! Rates come from two looks; nobody keeps them.

use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use strata_api::{Stats, TierStats};
use strata_units::ByteSize;

use crate::client;
use crate::failure::{Result, printable};
use crate::show;

/// A tenant's tiers over an interval.
#[derive(Serialize)]
struct Tenant<'a> {
    name: &'a str,
    interval_seconds: f64,
    tiers: Vec<Tier<'a>>,
}

/// One of them.
#[derive(Serialize)]
struct Tier<'a> {
    #[serde(flatten)]
    now: &'a TierStats,
    pages_in_per_second: f64,
    pages_out_per_second: f64,
}

/// The tiers of `name`, or of all tenants, as text.
pub(crate) fn tiers(name: Option<&str>, json: bool, interval: Duration) -> Result<String> {
    let look = || match name {
        Some(name) => client::stats(name).map(|stats| vec![stats]),
        None => Ok(client::list_all()?.unwrap_or_else(|| {
            eprintln!("strata: no stratad is running; strata run starts a private one");
            Vec::new()
        })),
    };
    let before = look()?;
    let since = Instant::now();
    let now = if before.is_empty() {
        Vec::new()
    } else {
        thread::sleep(interval);
        look()?
    };
    let tenants = between(&before, &now, since.elapsed());
    if json { show::json(&tenants) } else { Ok(table(&tenants)) }
}

/// What happened between two looks. A tenant that was not there at the first one
/// has had no time to do anything.
fn between<'a>(before: &[Stats], now: &'a [Stats], passed: Duration) -> Vec<Tenant<'a>> {
    let seconds = passed.as_secs_f64().max(1e-3);
    let of_tenant = |stats: &'a Stats| {
        // One that ended and began anew under its name has smaller counters.
        let old = before.iter().find(|old| (&old.name, old.uid) == (&stats.name, stats.uid));
        let tiers = stats.tiers.iter().map(|tier| {
            let old = old.and_then(|old| old.tiers.iter().find(|old| old.tier == tier.tier));
            let old = old.unwrap_or(tier);
            let rate = |now: u64, old: u64| now.saturating_sub(old) as f64 / seconds;
            Tier {
                now: tier,
                pages_in_per_second: rate(tier.pages_in_total, old.pages_in_total),
                pages_out_per_second: rate(tier.pages_out_total, old.pages_out_total),
            }
        });
        Tenant { name: &stats.name, interval_seconds: seconds, tiers: tiers.collect() }
    };
    now.iter().map(of_tenant).collect()
}

fn table(tenants: &[Tenant<'_>]) -> String {
    let head = ["NAME", "TIER", "SIZE", "USED", "PAGES", "P50", "P99", "IN/S", "OUT/S", "BY"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for tenant in tenants {
        for tier in &tenant.tiers {
            let TierStats { size_bytes, used_bytes, pages, p50_us, p99_us, .. } = *tier.now;
            rows.push(vec![
                printable(tenant.name),
                printable(&tier.now.tier),
                size_bytes.map_or_else(|| "-".to_owned(), |size| ByteSize(size).to_string()),
                ByteSize(used_bytes).to_string(),
                show::short_count(pages as f64),
                show::short_latency(p50_us),
                show::short_latency(p99_us),
                show::short_count(tier.pages_in_per_second),
                show::short_count(tier.pages_out_per_second),
                printable(&tier.now.access),
            ]);
        }
    }
    show::columns(&rows, 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stats;

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let (before, mut now) = (vec![stats("db")], vec![stats("db"), stats("new")]);
        now[0].tiers[2].pages_in_total += 300;
        now[0].tiers[1].pages_out_total = 0;
        let seen = between(&before, &now, Duration::from_secs(2));
        let rates: Vec<(f64, f64)> = seen[0]
            .tiers
            .iter()
            .map(|tier| (tier.pages_in_per_second, tier.pages_out_per_second))
            .collect();
        assert_eq!(rates, [(0.0, 0.0), (0.0, 0.0), (150.0, 0.0)]);
        assert!(seen[1].tiers.iter().all(|tier| tier.pages_in_per_second == 0.0));
        let text = table(&seen);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 7, "{text}");
        assert!(lines[0].starts_with("NAME  TIER"), "{text}");
        assert!(lines[2].starts_with("db    compressed        -  300"), "{text}");
        assert!(lines[3].ends_with("150      0  io_uring"), "{text}");
        assert!(lines[3].contains("  8.5    -  "), "{text}");
        let json = show::json(&seen).expect("JSON");
        assert!(json.contains("\"pages_in_per_second\": 150.0"), "{json}");
        assert!(json.contains("\"tier\": \"file\""), "{json}");
    }
}
