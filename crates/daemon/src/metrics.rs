//! Metrics for Prometheus: the text of the statistics. What gives it to whoever asks is in
//! [`server`].

mod pools;
mod server;

use std::fmt::Write as _;

use strata_api::{
    AdviceState, GuestStats, NEEDED_FOR, PoolStats, Pressure, Stats, TierStats, UnmanagedBy,
};

pub(crate) use server::Metrics;

/// One field of [`Stats`] as a metric, named after the field.
struct Metric {
    name: &'static str,
    help: &'static str,
    value: fn(&Stats) -> f64,
}

macro_rules! metrics {
    ($($field:ident: $help:literal,)*) => {
        [$(Metric { name: stringify!($field), help: $help, value: |stats| stats.$field as f64 }),*]
    };
}

/// Every number in [`Stats`] but the user id, which is a label, and the
/// latencies, which have a quantile. Names that end in `_total` are counters.
const METRICS: [Metric; 36] = metrics! {
    budget_bytes: "DRAM budget of the tenant.",
    resident_bytes: "Managed pages in DRAM, staged ones included.",
    staged_bytes: "Part of resident_bytes that is out of the address space, kept raw.",
    pinned_bytes: "Memory that its programs have pinned, resident or not.",
    unmanaged_bytes: "Anonymous memory in DRAM that Strata may not or does not yet manage.",
    unattended_processes: "Processes that no agent is in.",
    shared_bytes: "Shared memory and memory files in DRAM that its processes made.",
    swap_bytes: "What a guest's swap disk costs.",
    stored_bytes: "Original size of the stored pages.",
    kept_bytes: "Original size of resident pages whose stored copies are kept.",
    compressed_bytes: "DRAM that the stored pages cost.",
    file_bytes: "Bytes that the stored pages cost in the file tier.",
    node_bytes: "Bytes of its memory on the node: no DRAM.",
    merged_bytes: "Bytes of its memory that the kernel has merged with equal pages (KSM).",
    merged_saved_bytes: "Bytes of them that it does not pay for, because others have them too.",
    metadata_bytes: "Strata's own memory for the tenant.",
    managed_pages: "Pages that have an entry in the page map.",
    stored_objects: "Distinct pages in the store.",
    deduplicated_pages: "Pages stored as another reference to the same content.",
    zero_pages: "Stored pages that are all one value and cost no data.",
    snapshot_file_bytes: "Stored bytes that still lie in the file of a persisted snapshot.",
    faults_total: "Missing-page faults served.",
    soft_faults_total: "Faults that needed no decompression.",
    file_faults_total: "Faults that read the file tier.",
    zero_faults_total: "Faults that were first touches.",
    prefetched_pages_total: "Pages brought back before they were asked for.",
    evictions_total: "Pages evicted.",
    evictions_unchanged_total: "Evictions of pages that the store had already.",
    evictions_refused_total: "Evictions that the kernel refused.",
    discarded_pages_total: "Pages with content that its programs gave back.",
    lost_pages_total: "Stored pages that could not be read back intact.",
    opposed_moves_total: "Pages that somebody else moved back from or to the node within ten seconds.",
    damon_promotions_total: "Pages that came back from the node because DAMON saw them used.",
    node_move_us_total: "Microseconds of processor time that moving pages to the node and back took.",
    worker_restarts_total: "Times that the worker was replaced under the tenant.",
    uptime_seconds: "Seconds since the tenant's start.",
};

/// A label's value, escaped as the text format demands.
fn label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The labels that say which tenant it is: two users may each have one of a name.
fn who(stats: &Stats) -> String {
    format!("tenant=\"{}\",user=\"{}\"", label(&stats.name), stats.uid)
}

/// What there is to tell.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) tenants: Vec<Stats>,
    pub(crate) pools: Vec<PoolStats>,
}

/// Its text format, version 0.0.4.
pub(crate) fn render(seen: &Seen) -> String {
    let mut out = String::new();
    write_metrics(&mut out, &seen.tenants)
        .and_then(|()| pools::write_pools(&mut out, &seen.pools))
        .expect("writing to a string does not fail");
    out
}

fn write_metrics(out: &mut String, tenants: &[Stats]) -> std::fmt::Result {
    let head = |out: &mut String, name: &str, kind: &str, help: &str| {
        writeln!(out, "# HELP strata_{name} {help}\n# TYPE strata_{name} {kind}")
    };
    for Metric { name, help, value } in METRICS {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        head(out, name, kind, help)?;
        for stats in tenants {
            writeln!(out, "strata_{name}{{{}}} {}", who(stats), value(stats))?;
        }
    }
    head(out, "fault_latency_us", "gauge", "Fault latency in microseconds, first touches apart.")?;
    for stats in tenants {
        let latency = &stats.fault_latency_us;
        for (quantile, value) in
            [("0.5", latency.p50), ("0.99", latency.p99), ("0.999", latency.p999)]
        {
            let tenant = who(stats);
            writeln!(out, "strata_fault_latency_us{{{tenant},quantile=\"{quantile}\"}} {value}")?;
        }
    }
    write_unmanaged(out, tenants, head)?;
    write_stall(out, tenants, head)?;
    write_tiers(out, tenants)?;
    write_advice(out, tenants, head)?;
    write_guests(out, tenants, head)?;
    head(out, "processes", "gauge", "Processes of the tenant.")?;
    for stats in tenants {
        let (tenant, count) = (who(stats), stats.pids.len());
        writeln!(out, "strata_processes{{{tenant}}} {count}")?;
    }
    head(out, "tenant_info", "gauge", "Always 1; says who the tenant is and what it does.")?;
    for stats in tenants {
        let state = serde_json::to_value(stats.state).expect("a name");
        writeln!(
            out,
            "strata_tenant_info{{{},uid=\"{}\",state=\"{}\"}} 1",
            who(stats),
            stats.uid,
            label(state.as_str().unwrap_or_default()),
        )?;
    }
    Ok(())
}

/// One cause of [`UnmanagedBy`].
type Cause = (&'static str, fn(&UnmanagedBy) -> u64);

const CAUSES: [Cause; 6] = [
    ("untouched", |by| by.untouched_bytes),
    ("small", |by| by.small_bytes),
    ("stacks", |by| by.stacks_bytes),
    ("executable", |by| by.executable_bytes),
    ("files", |by| by.files_bytes),
    ("unattended", |by| by.unattended_bytes),
];

fn write_unmanaged(
    out: &mut String,
    tenants: &[Stats],
    head: impl Fn(&mut String, &str, &str, &str) -> std::fmt::Result,
) -> std::fmt::Result {
    head(out, "unmanaged_by_bytes", "gauge", "Anonymous memory that is not managed, by cause.")?;
    for stats in tenants {
        for (cause, bytes) in CAUSES {
            let (tenant, bytes) = (who(stats), bytes(&stats.unmanaged_by));
            writeln!(out, "strata_unmanaged_by_bytes{{{tenant},cause=\"{cause}\"}} {bytes}")?;
        }
    }
    Ok(())
}

fn write_stall(
    out: &mut String,
    tenants: &[Stats],
    head: impl Fn(&mut String, &str, &str, &str) -> std::fmt::Result,
) -> std::fmt::Result {
    let help =
        "Hundredths of the last 10, 60 and 300 s in which some thread, and all, waited for a page.";
    head(out, "stall_percent", "gauge", help)?;
    for stats in tenants {
        let tenant = who(stats);
        for (kind, Pressure { avg10, avg60, avg300, .. }) in kinds(stats) {
            for (over, value) in [("10s", avg10), ("60s", avg60), ("300s", avg300)] {
                writeln!(
                    out,
                    "strata_stall_percent{{{tenant},kind=\"{kind}\",over=\"{over}\"}} {value}"
                )?;
            }
        }
    }
    head(out, "stall_us_total", "counter", "Microseconds in which some thread, and all, waited.")?;
    for stats in tenants {
        let tenant = who(stats);
        for (kind, pressure) in kinds(stats) {
            let total = pressure.total_us;
            writeln!(out, "strata_stall_us_total{{{tenant},kind=\"{kind}\"}} {total}")?;
        }
    }
    Ok(())
}

fn kinds(stats: &Stats) -> [(&'static str, Pressure); 2] {
    [("some", stats.stall.some), ("full", stats.stall.full)]
}

/// One number of [`TierStats`] as a metric.
type OfTier = (&'static str, &'static str, fn(&TierStats) -> Option<f64>);

/// What is said of each tier of each tenant.
const TIER_METRICS: [OfTier; 5] = [
    ("tier_size_bytes", "What the tier may hold.", |tier| tier.size_bytes.map(|size| size as f64)),
    ("tier_used_bytes", "What the pages in the tier cost there.", |tier| {
        Some(tier.used_bytes as f64)
    }),
    ("tier_pages", "Distinct pages in the tier.", |tier| Some(tier.pages as f64)),
    ("tier_pages_in_total", "Pages that came into the tier.", |tier| {
        Some(tier.pages_in_total as f64)
    }),
    ("tier_pages_out_total", "Pages that left the tier.", |tier| Some(tier.pages_out_total as f64)),
];

fn write_tiers(out: &mut String, tenants: &[Stats]) -> std::fmt::Result {
    let all = || tenants.iter().flat_map(|stats| stats.tiers.iter().map(move |tier| (stats, tier)));
    for (name, help, value) in TIER_METRICS {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        writeln!(out, "# HELP strata_{name} {help}\n# TYPE strata_{name} {kind}")?;
        for (stats, tier) in all() {
            if let Some(value) = value(tier) {
                let (tenant, tier) = (who(stats), label(&tier.tier));
                writeln!(out, "strata_{name}{{{tenant},tier=\"{tier}\"}} {value}")?;
            }
        }
    }
    let name = "tier_latency_us";
    let help = "Latency of faults that the tier served, in microseconds.";
    writeln!(out, "# HELP strata_{name} {help}\n# TYPE strata_{name} gauge")?;
    for (stats, tier) in all() {
        let (tenant, label) = (who(stats), label(&tier.tier));
        for (quantile, value) in [("0.5", tier.p50_us), ("0.99", tier.p99_us)] {
            writeln!(
                out,
                "strata_{name}{{{tenant},tier=\"{label}\",quantile=\"{quantile}\"}} {value}"
            )?;
        }
    }
    Ok(())
}

/// What is known of guests; nothing of other tenants, and of a guest only what it tells.
fn write_guests(
    out: &mut String,
    tenants: &[Stats],
    head: impl Fn(&mut String, &str, &str, &str) -> std::fmt::Result,
) -> std::fmt::Result {
    type Figure = fn(&GuestStats) -> Option<u64>;
    let figures: [(&str, &str, Figure); 5] = [
        ("memory", "Memory that the guest is promised.", |guest| Some(guest.memory_bytes)),
        ("balloon", "Memory that its balloon leaves the guest.", |guest| guest.balloon_bytes),
        (
            "balloon_target",
            "Memory that a balloon that follows its guest is to leave it.",
            |guest| guest.self_balloon.as_ref()?.target_bytes,
        ),
        ("free", "Memory that the guest has free, as it says.", |guest| guest.free_bytes),
        ("available", "Memory that it could use without swapping, as it says.", |guest| {
            guest.available_bytes
        }),
    ];
    for (name, help, figure) in figures {
        head(out, &format!("guest_{name}_bytes"), "gauge", help)?;
        for stats in tenants {
            if let Some(bytes) = stats.guest.as_ref().and_then(figure) {
                let tenant = who(stats);
                writeln!(out, "strata_guest_{name}_bytes{{{tenant}}} {bytes}")?;
            }
        }
    }
    Ok(())
}

/// What the advisor says; nothing of a tenant of which it says nothing.
fn write_advice(
    out: &mut String,
    tenants: &[Stats],
    head: impl Fn(&mut String, &str, &str, &str) -> std::fmt::Result,
) -> std::fmt::Result {
    let advised = || {
        let advice = |stats: &Stats| Some((who(stats), stats.advice?));
        tenants.iter().filter_map(advice)
    };
    head(out, "advice_changes", "gauge", "1 while the tenant changes too fast to be advised on.")?;
    for (tenant, advice) in advised().filter(|(_, brief)| brief.state != AdviceState::Watching) {
        let changes = u8::from(advice.state == AdviceState::Changing);
        writeln!(out, "strata_advice_changes{{{tenant}}} {changes}")?;
    }
    head(out, "advice_loss", "gauge", "Part of its speed that its budget costs the tenant.")?;
    for (tenant, advice) in advised() {
        if let Some(loss) = advice.loss {
            writeln!(out, "strata_advice_loss{{{tenant}}} {loss}")?;
        }
    }
    head(out, "advice_budget_bytes", "gauge", "Budget that would cost the tenant this loss.")?;
    for (tenant, advice) in advised() {
        for (loss, budget) in NEEDED_FOR.iter().zip(advice.budget_bytes) {
            if let Some(bytes) = budget {
                writeln!(out, "strata_advice_budget_bytes{{{tenant},loss=\"{loss}\"}} {bytes}")?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_api::{AdviceBrief, BalloonStats, Latency, TenantState};

    /// Every number is another one, so that a mixed-up field shows.
    pub(super) fn stats(name: &str) -> Stats {
        Stats {
            name: name.into(),
            pids: vec![7, 8, 9],
            uid: 1001,
            group: None,
            libraries: vec![],
            command: vec!["server".into()],
            state: TenantState::Managed,
            budget_bytes: 11,
            resident_bytes: 12,
            staged_bytes: 13,
            pinned_bytes: 42,
            unmanaged_bytes: 14,
            unmanaged_by: UnmanagedBy::default(),
            unattended_processes: 0,
            unattended: vec![],
            shared_bytes: 0,
            swap_bytes: 81,
            stored_bytes: 15,
            kept_bytes: 41,
            compressed_bytes: 16,
            file_bytes: 17,
            node_bytes: 61,
            merged_bytes: 78,
            merged_saved_bytes: 79,
            metadata_bytes: 18,
            managed_pages: 19,
            stored_objects: 20,
            deduplicated_pages: 21,
            zero_pages: 22,
            snapshot_file_bytes: 80,
            faults_total: 23,
            soft_faults_total: 24,
            file_faults_total: 25,
            zero_faults_total: 26,
            prefetched_pages_total: 43,
            evictions_total: 27,
            evictions_unchanged_total: 42,
            evictions_refused_total: 28,
            discarded_pages_total: 65,
            lost_pages_total: 29,
            opposed_moves_total: 62,
            damon_promotions_total: 64,
            node_move_us_total: 63,
            stall: strata_api::Stall::default(),
            fault_latency_us: Latency { p50: 30.5, p99: 31.5, p999: 32.5 },
            tiers: vec![TierStats {
                tier: "file".into(),
                access: "DAX".into(),
                size_bytes: Some(51),
                used_bytes: 52,
                pages: 53,
                p50_us: 54.5,
                p99_us: 55.5,
                pages_in_total: 56,
                pages_out_total: 57,
            }],
            worker_restarts_total: 33,
            uptime_seconds: 34.25,
            advice: Some(AdviceBrief {
                state: AdviceState::Steady,
                loss: Some(0.125),
                budget_bytes: [None, Some(44), Some(45)],
            }),
            guest: Some(GuestStats {
                memory_bytes: 71,
                balloon_bytes: Some(72),
                free_bytes: Some(73),
                self_balloon: Some(BalloonStats {
                    target_bytes: Some(74),
                    ..BalloonStats::default()
                }),
                ..GuestStats::default()
            }),
            notes: vec![],
        }
    }

    fn of_tenants<const N: usize>(tenants: [Stats; N]) -> Seen {
        Seen { tenants: tenants.to_vec(), pools: vec![] }
    }

    #[test]
    fn every_number_of_stats_is_a_metric_with_its_value() {
        let stats = stats("db");
        let text = render(&of_tenants([stats.clone()]));
        let json = serde_json::to_value(&stats).expect("serialise");
        let mut numbers = 0;
        for (key, value) in json.as_object().expect("an object") {
            if key == "uid" {
                assert!(
                    text.contains(
                        "tenant=\"db\",user=\"1001\",uid=\"1001\",state=\"managed\"} 1\n"
                    )
                );
            } else if let Some(number) = value.as_f64() {
                let line = format!("strata_{key}{{tenant=\"db\",user=\"1001\"}} {number}\n");
                assert!(text.contains(&line), "{key}");
                numbers += 1;
            }
        }
        assert_eq!(numbers, METRICS.len());
        for line in
            ["quantile=\"0.5\"} 30.5", "quantile=\"0.99\"} 31.5", "quantile=\"0.999\"} 32.5"]
        {
            assert!(text.contains(line), "{line}");
        }
        for line in [
            "strata_advice_changes{tenant=\"db\",user=\"1001\"} 0\n",
            "strata_advice_loss{tenant=\"db\",user=\"1001\"} 0.125\n",
            "strata_advice_budget_bytes{tenant=\"db\",user=\"1001\",loss=\"0.05\"} 44\n",
        ] {
            assert!(text.contains(line), "{line}");
        }
        assert!(!text.contains("loss=\"0.01\""));
        for line in [
            "strata_guest_memory_bytes{tenant=\"db\",user=\"1001\"} 71\n",
            "strata_guest_balloon_bytes{tenant=\"db\",user=\"1001\"} 72\n",
            "strata_guest_free_bytes{tenant=\"db\",user=\"1001\"} 73\n",
            "strata_guest_balloon_target_bytes{tenant=\"db\",user=\"1001\"} 74\n",
        ] {
            assert!(text.contains(line), "{line}");
        }
        assert!(!text.contains("guest_available_bytes{"));
        assert!(text.contains("strata_processes{tenant=\"db\",user=\"1001\"} 3\n"));
        let tier = "{tenant=\"db\",user=\"1001\",tier=\"file\"";
        for line in [
            format!("tier_size_bytes{tier}}} 51\n"),
            format!("tier_used_bytes{tier}}} 52\n"),
            format!("tier_pages{tier}}} 53\n"),
            format!("tier_latency_us{tier},quantile=\"0.5\"}} 54.5\n"),
            format!("tier_latency_us{tier},quantile=\"0.99\"}} 55.5\n"),
            format!("tier_pages_in_total{tier}}} 56\n"),
            format!("tier_pages_out_total{tier}}} 57\n"),
        ] {
            assert!(text.contains(&line), "{line}");
        }
    }

    #[test]
    fn each_metric_has_one_head_before_its_samples() {
        let pools = vec![PoolStats::default(), PoolStats::default()];
        let text = render(&Seen { pools, ..of_tenants([stats("a"), stats("b")]) });
        let mut declared = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a kind");
                assert!(!declared.contains(&name), "{name} twice");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                declared.push(name);
            } else if !line.starts_with('#') {
                let name = line.split('{').next().expect("a name");
                assert_eq!(declared.last(), Some(&name), "{line}");
                assert!(
                    line.rsplit(' ').next().is_some_and(|v| v.parse::<f64>().is_ok()),
                    "{line}"
                );
            }
        }
        assert!(declared.len() > METRICS.len());
    }

    #[test]
    fn labels_are_escaped() {
        assert_eq!(label("a\\b\"c\nd"), "a\\\\b\\\"c\\nd");
    }
}
