//! Tenants as text: tables and fields for people, JSON for programs.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::Value;
use strata_api::{Stats, TenantState};
use strata_units::ByteSize;

use crate::failure::{Failure, Result, printable};

/// JSON with line feeds; field names are those of [`Stats`].
pub(crate) fn json(value: &(impl Serialize + ?Sized)) -> Result<String> {
    serde_json::to_string_pretty(value).map_err(|error| Failure::new("cannot print JSON", error))
}

/// A size in five characters, for columns: `1.2G`, `950M`, `0`.
pub(crate) fn short_size(bytes: u64) -> String {
    const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];
    if bytes < 1024 {
        return if bytes == 0 { "0".into() } else { format!("{bytes}B") };
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 999.5 would be rounded to four digits.
    while value >= 999.5 {
        value /= 1024.0;
        unit += 1;
    }
    let unit = UNITS[unit];
    if value < 9.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// A count or a rate in at most five characters: `950`, `12k`, `1.2M`.
pub(crate) fn short_count(count: f64) -> String {
    let scaled = |value: f64, unit: &str| {
        if value < 9.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
    };
    match count {
        c if c < 9_999.5 => format!("{c:.0}"),
        c if c < 999_500.0 => scaled(c / 1e3, "k"),
        c if c < 999_500_000.0 => scaled(c / 1e6, "M"),
        c => scaled(c / 1e9, "G"),
    }
}

/// Microseconds in at most five characters: `7.3`, `140`, `1.2ms`.
pub(crate) fn short_latency(us: f64) -> String {
    match us {
        u if u <= 0.0 => "-".into(),
        u if u < 99.95 => format!("{u:.1}"),
        u if u < 9_999.5 => format!("{u:.0}"),
        u if u < 999_500.0 => format!("{:.0}ms", u / 1e3),
        u => format!("{:.0}s", u / 1e6),
    }
}

/// The state as the API names it.
pub(crate) fn state_name(state: TenantState) -> &'static str {
    match state {
        TenantState::Starting => "starting",
        TenantState::Native => "native",
        TenantState::Managed => "managed",
        TenantState::Released => "released",
        TenantState::Ended => "ended",
        TenantState::Exhausted => "exhausted",
    }
}

/// Columns of `rows`, as wide as their widest cell; the first `left` of them and
/// the last one flush left.
pub(crate) fn columns(rows: &[Vec<String>], left: usize) -> String {
    let count = rows.first().map_or(0, Vec::len);
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            let cell = if column < left || column + 1 == count {
                format!("{cell:<width$}  ")
            } else {
                format!("{cell:>width$}  ")
            };
            line += &cell;
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// One line a tenant, for `ps`.
pub(crate) fn table(tenants: &[Stats]) -> String {
    table_for(rustix::process::geteuid().as_raw(), tenants)
}

/// The same for the user `own`, who is told whose others are.
fn table_for(own: u32, tenants: &[Stats]) -> String {
    let head = [
        "NAME",
        "STATE",
        "PROCS",
        "BUDGET",
        "DRAM",
        "UNMANAGED",
        "STORED",
        "FAULTS",
        "EVICTED",
        "STALL",
        "COMMAND",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for stats in tenants {
        rows.push(vec![
            printable(&stats.name),
            state_name(stats.state).to_owned(),
            stats.pids.len().to_string(),
            ByteSize(stats.budget_bytes).to_string(),
            ByteSize(stats.dram_bytes()).to_string(),
            ByteSize(unmanaged_bytes(stats)).to_string(),
            ByteSize(stats.stored_bytes).to_string(),
            stats.faults_total.to_string(),
            stats.evictions_total.to_string(),
            short_percent(stats.stall.some.avg10),
            command(stats),
        ]);
    }
    if tenants.iter().any(|stats| stats.uid != own) {
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let cells = tenants.iter().map(|stats| user_name(&users, stats.uid));
        let cells = std::iter::once("USER".to_owned()).chain(cells);
        rows.iter_mut().zip(cells).for_each(|(row, cell)| row.insert(1, cell));
    }
    if tenants.iter().any(has_node) {
        // Beside DRAM, which it is no part of.
        let cell = |stats: &Stats| match has_node(stats) {
            true => ByteSize(stats.node_bytes).to_string(),
            false => "-".to_owned(),
        };
        let cells = std::iter::once("NODE".to_owned()).chain(tenants.iter().map(cell));
        rows.iter_mut().zip(cells).for_each(|(row, cell)| row.insert(row.len() - 6, cell));
    }
    columns(&rows, 2)
}

/// The name of a user in the text of `/etc/passwd`, or the number.
fn user_name(users: &str, uid: u32) -> String {
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| printable(name))
    });
    name.unwrap_or_else(|| uid.to_string())
}

/// The table, and below it what there is to say of each tenant: for `ps`.
pub(crate) fn listing(tenants: &[Stats]) -> String {
    let mut text = table(tenants);
    for stats in tenants {
        for note in &stats.notes {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}: {}", printable(&stats.name), long_printable(note));
        }
    }
    text
}

/// Longest note that is shown whole.
const MAX_NOTE_CHARS: usize = 1000;

fn long_printable(text: &str) -> String {
    let clean = |c: char| if c.is_control() { '?' } else { c };
    text.chars().take(MAX_NOTE_CHARS).map(clean).collect()
}

/// What of a tenant's DRAM Strata does not manage, shared memory included.
pub(crate) fn unmanaged_bytes(stats: &Stats) -> u64 {
    stats.unmanaged_bytes.saturating_add(stats.shared_bytes)
}

/// A share of time, in hundredths, in at most four characters.
pub(crate) fn short_percent(percent: f64) -> String {
    if percent > 0.0 && percent < 9.95 {
        format!("{percent:.1}%")
    } else {
        format!("{percent:.0}%")
    }
}

/// What is not managed by cause, the largest first: `12M stacks, 8.0M small`.
pub(crate) fn causes(stats: &Stats) -> String {
    let by = &stats.unmanaged_by;
    let mut causes = [
        (by.untouched_bytes, "not registered yet"),
        (by.small_bytes, "in small mappings"),
        (by.stacks_bytes, "stacks"),
        (by.executable_bytes, "executable"),
        (by.files_bytes, "of files"),
        (by.unattended_bytes, "in processes without an agent"),
        (stats.shared_bytes, "shared"),
    ];
    causes.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let some = causes.iter().filter(|(bytes, _)| *bytes > 0);
    some.map(|(bytes, cause)| format!("{} {cause}", short_size(*bytes)))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Whether a tenant has a node tier.
pub(crate) fn has_node(stats: &Stats) -> bool {
    stats.tiers.iter().any(|tier| tier.tier == "node")
}

/// Longest command line in a table.
const MAX_COMMAND_CHARS: usize = 60;

/// A tenant's command line, for a table.
fn command(stats: &Stats) -> String {
    let text = printable(&stats.command.join(" "));
    if text.chars().count() <= MAX_COMMAND_CHARS {
        return text;
    }
    text.chars().take(MAX_COMMAND_CHARS - 1).chain(['…']).collect()
}

/// Every field of one tenant on a line of its own, for `stats`: named as in the
/// JSON, in the same order.
pub(crate) fn fields(stats: &Stats) -> Result<String> {
    // `Value` sorts its keys; the order of declaration, which groups what
    // belongs together, is in the text.
    let text = json(stats)?;
    let value = serde_json::to_value(stats)
        .map_err(|error| Failure::new("cannot print the statistics", error))?;
    let names = text.lines().filter_map(|line| {
        let name = line.strip_prefix("  \"")?;
        name.split_once("\": ").map(|(name, _)| name)
    });
    let mut rows = Vec::new();
    for name in names {
        add_rows(&mut rows, name, name, &value[name]);
    }
    Ok(columns(&rows, 1))
}

/// The rows of a field called `path`, whose last part is `name`.
fn add_rows(rows: &mut Vec<Vec<String>>, path: &str, name: &str, value: &Value) {
    match value {
        Value::Object(inner) => {
            for (part, value) in inner {
                add_rows(rows, &format!("{path}.{part}"), part, value);
            }
        }
        Value::Array(values) if values.iter().any(Value::is_object) => {
            for inner in values {
                // What tells it from the others.
                let key = if inner["tier"].is_string() { "tier" } else { "pid" };
                let of = plain("", &inner[key]);
                for (part, value) in inner.as_object().into_iter().flatten() {
                    if part != key {
                        add_rows(rows, &format!("{path}.{of}.{part}"), part, value);
                    }
                }
            }
        }
        value => rows.push(vec![path.to_owned(), plain(name, value)]),
    }
}

/// A value for people; sizes also in units.
fn plain(name: &str, value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::String(string) => text += &printable(string),
        Value::Array(values) => {
            let separator = if name == "notes" { "; " } else { " " };
            let values: Vec<String> = values.iter().map(|value| plain("", value)).collect();
            text += &values.join(separator);
        }
        other => text += &other.to_string(),
    }
    if let (true, Some(bytes)) = (name.ends_with("_bytes"), value.as_u64()) {
        // Writing to a string does not fail.
        let _ = write!(text, " ({})", ByteSize(bytes));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stats;

    #[test]
    fn short_forms_fit_their_columns() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1B"),
            (1023, "1023B"),
            (1024, "1.0K"),
            (10 << 20, "10M"),
            ((1 << 30) - 1, "1.0G"),
            (3 << 29, "1.5G"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(short_size(bytes), text, "{bytes}");
        }
        for (count, text) in
            [(0.0, "0"), (9999.0, "9999"), (9999.9, "10k"), (1.25e6, "1.2M"), (2e9, "2.0G")]
        {
            assert_eq!(short_count(count), text, "{count}");
        }
        for (us, text) in [
            (0.0, "-"),
            (7.31, "7.3"),
            (140.2, "140"),
            (99.97, "100"),
            (12_000.0, "12ms"),
            (5e6, "5s"),
        ] {
            assert_eq!(short_latency(us), text, "{us}");
        }
    }

    #[test]
    fn the_table_has_a_line_a_tenant() {
        let mut odd = stats("odd\n");
        odd.command = vec!["x".repeat(100)];
        let own = odd.uid;
        let text = table_for(own, &[stats("db"), odd]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].starts_with("NAME  STATE"), "{text}");
        assert!(lines[1].starts_with("db    managed"), "{text}");
        assert!(lines[2].starts_with("odd?") && lines[2].ends_with('…'), "{text}");
        assert_eq!(table(&[]).lines().count(), 1);
        // Whoever sees others' is told whose they are.
        let text = table_for(own + 1, &[stats("db")]);
        assert!(text.starts_with("NAME  USER"), "{text}");
        assert_eq!(user_name("root:x:0:0::/root:/bin/sh\na:x:7:7:::\n", 7), "a");
        assert_eq!(user_name("broken\na:x:7:7:::\n", 8), "8");
    }

    #[test]
    fn what_is_not_managed_is_shown_with_its_causes() {
        let mut db = stats("db");
        db.shared_bytes = 400 << 20;
        db.stall.some.avg10 = 70.25;
        let text = table(std::slice::from_ref(&db));
        assert!(text.lines().nth(1).is_some_and(|line| line.contains("420.0 MiB")), "{text}");
        assert!(text.contains("  70%  "), "{text}");
        assert_eq!(causes(&db), "400M shared, 12M stacks, 8.0M in small mappings");
        db.notes.push("over its budget\n".into());
        let listed = listing(&[db]);
        assert!(listed.ends_with("\ndb: a note\ndb: over its budget?\n"), "{listed}");
        assert_eq!([0.0, 0.04, 9.9, 99.96].map(short_percent), ["0%", "0.0%", "9.9%", "100%"]);
    }

    #[test]
    fn the_node_has_a_column_where_there_is_one() {
        let mut with = stats("db");
        with.tiers[1].tier = "node".into();
        with.node_bytes = 3 << 20;
        let text = table(&[with, stats("cache")]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("  NODE  "), "{text}");
        assert!(lines[1].contains("  3.0 MiB  ") && lines[2].contains("  -  "), "{text}");
        assert!(!table(&[stats("cache")]).contains("NODE"));
    }

    #[test]
    fn fields_are_those_of_the_json_in_its_order() {
        let stats = stats("db");
        let text = fields(&stats).expect("text");
        let json = serde_json::to_value(&stats).expect("JSON");
        for key in json.as_object().expect("an object").keys() {
            let found = text.lines().any(|line| {
                line.starts_with(&format!("{key} "))
                    || line.starts_with(&format!("{key}."))
                    || line == key
            });
            assert!(found, "{key} is missing:\n{text}");
        }
        assert!(text.starts_with("name"), "{text}");
        let budget = text.lines().find(|line| line.starts_with("budget_bytes")).expect("a line");
        assert!(budget.ends_with("1073741824 (1.0 GiB)"), "{budget}");
        assert!(text.contains("fault_latency_us.p99 "), "{text}");
        assert!(text.contains("stall.some.avg10 "), "{text}");
        let stacks = text.lines().find(|line| line.starts_with("unmanaged_by.stacks_bytes"));
        assert!(stacks.expect("a line").ends_with("(12.0 MiB)"), "{text}");
    }
}
