//! `strata shares`, and what tenants claim of the DRAM that a host shares out.

use serde::Serialize;
use strata_api::{DramClaim, Reply, Request, TenantShare};
use strata_units::ByteSize;

use crate::args::ClaimArguments;
use crate::client;
use crate::failure::{Failure, Result, printable};
use crate::show;

impl ClaimArguments {
    /// What is claimed; none: nothing.
    pub(crate) fn claim(&self) -> Option<DramClaim> {
        let claim = DramClaim {
            reserve_bytes: self.reserve.map(|size| size.0),
            limit_bytes: self.limit.map(|size| size.0),
            weight: self.weight,
        };
        (!claim.is_empty()).then_some(claim)
    }

    /// Refuses what nobody can have, before anything is started.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        match self.claim().and_then(|claim| claim.problem()) {
            Some(problem) => Err(Failure::new(what, problem)),
            None => Ok(()),
        }
    }
}

/// One daemon's host.
#[derive(Serialize)]
struct Host {
    dram_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    room_bytes: Option<u64>,
    tenants: Vec<TenantShare>,
}

/// What each tenant has of its host's DRAM, wants, and why.
pub(crate) fn shares(json: bool) -> Result<String> {
    const WHAT: &str = "cannot show shares";
    let mut hosts = Vec::new();
    for (_, reply) in client::ask_each(WHAT, &Request::Shares)? {
        match reply {
            Reply::HostShares { dram_bytes, room_bytes, tenants } => {
                hosts.push(Host { dram_bytes, room_bytes, tenants });
            }
            // A private daemon beside one that shares is none of ours to complain of.
            Reply::Error { .. } => {}
            _ => return Err(client::misunderstood(WHAT)),
        }
    }
    if hosts.is_empty() {
        let why = "no stratad that answers here shares DRAM out";
        return Err(Failure::new(WHAT, why).todo("set dram in the configuration of one"));
    }
    if json { show::json(&hosts) } else { Ok(hosts.iter().map(table).collect()) }
}

fn table(host: &Host) -> String {
    let given: u64 = host.tenants.iter().map(|one| one.budget_bytes).sum();
    let room = host.room_bytes.map_or_else(String::new, |bytes| {
        format!("; the machine has no more than {} for them", ByteSize(bytes))
    });
    let mut out = format!("{} of {} given{room}\n", ByteSize(given), ByteSize(host.dram_bytes));
    let header =
        ["NAME", "HAS", "USES", "WANTS", "RESERVE", "LIMIT", "WEIGHT", "STALL", "COSTS", "WHY"];
    let mut rows = vec![header.map(str::to_owned)];
    for one in &host.tenants {
        let limit = one.limit_bytes.map_or("-".to_owned(), |bytes| ByteSize(bytes).to_string());
        rows.push([
            printable(&one.name),
            ByteSize(one.budget_bytes).to_string(),
            ByteSize(one.used_bytes).to_string(),
            ByteSize(one.wants_bytes).to_string(),
            ByteSize(one.reserve_bytes).to_string(),
            limit,
            format!("{}", one.weight),
            format!("{:.1} %", one.stall * 100.0),
            format!("{:.2}", one.costs_others),
            printable(&one.reason),
        ]);
    }
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    for row in &rows {
        let cells =
            row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
                0 => format!("{cell:<width$}"),
                9 => cell.clone(),
                _ => format!("{cell:>width$}"),
            });
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_names_who_has_what_and_why() {
        let one = TenantShare {
            name: "db".into(),
            uid: 0,
            budget_bytes: 1 << 30,
            moves: true,
            used_bytes: 1 << 29,
            wants_bytes: 3 << 30,
            goal_bytes: 2 << 30,
            reserve_bytes: 1 << 28,
            limit_bytes: None,
            weight: 2.0,
            stall: 0.125,
            costs_others: 0.25,
            why: "rising".into(),
            reason: "it waits for pages, and gets 1.0 GiB more".into(),
        };
        let mut host = Host { dram_bytes: 4 << 30, room_bytes: None, tenants: vec![one] };
        let text = table(&host);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "1.0 GiB of 4.0 GiB given");
        assert!(lines[2].starts_with("db "), "{text}");
        for part in
            ["512.0 MiB", "3.0 GiB", "256.0 MiB", " - ", "12.5 %", "0.25", "gets 1.0 GiB more"]
        {
            assert!(lines[2].contains(part), "{part}: {text}");
        }
        host.room_bytes = Some(3 << 30);
        let said = "1.0 GiB of 4.0 GiB given; the machine has no more than 3.0 GiB for them\n";
        assert!(table(&host).starts_with(said));
    }
}
