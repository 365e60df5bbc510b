//! `strata advise`: how much DRAM a tenant needs, and how a total is best shared
//! out among all of them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use strata_api::{Advice, AdviceState, CurvePoint, Reply, Request, TenantState};
use strata_units::ByteSize;

use crate::args::AdviseArguments;
use crate::client;
use crate::failure::{Failure, Result, printable};
use crate::show::{columns, json};

/// From one question to the next while there is nothing to say yet.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Size of the plot, without its scales.
const PLOT_ROWS: usize = 10;
const PLOT_COLUMNS: usize = 60;

/// What it prints.
pub(crate) fn advise(arguments: &AdviseArguments) -> Result<String> {
    let deadline = Instant::now() + arguments.wait;
    match &arguments.name {
        Some(name) if arguments.stop => {
            client::command(name, Request::Advise { name: name.clone(), stop: true })
        }
        Some(name) => one(name, deadline, arguments.json),
        None => all(arguments, deadline),
    }
}

fn one(name: &str, deadline: Instant, as_json: bool) -> Result<String> {
    let (socket, _) = client::find(name)?;
    let advice = ask(&socket, name, deadline)?;
    if as_json {
        return json(&advice);
    }
    if advice.state == AdviceState::Watching {
        let seen = format!("it has been watched for {:.0} s", advice.window_seconds);
        let todo = "ask again in half a minute, or with --wait 60";
        return Err(Failure::new(format!("nothing to say of {name} yet"), seen).todo(todo));
    }
    Ok(text(&advice))
}

/// Asks until there is something to say, or time is up.
fn ask(socket: &Path, name: &str, deadline: Instant) -> Result<Advice> {
    let what = format!("no advice on {name}");
    loop {
        let advice = match client::ask(socket, &Request::Advise { name: name.into(), stop: false })
        {
            Ok(Reply::Advice { advice }) => advice,
            Ok(Reply::Error { message, hint }) => {
                return Err(client::refused(&what, &message, &hint));
            }
            Ok(_) => return Err(client::misunderstood(&what)),
            Err(no_reply) => return Err(no_reply.failure(&what, socket)),
        };
        if advice.state != AdviceState::Watching || Instant::now() >= deadline {
            return Ok(*advice);
        }
        std::thread::sleep(ASK_EVERY);
    }
}

fn percent(part: f64) -> String {
    let percent = part * 100.0;
    if percent < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

fn text(advice: &Advice) -> String {
    let Advice { name, .. } = advice;
    let mut text = format!(
        "{}: watched for {:.0} s, {:.1} s of processor time; {} of {} pages; a miss waits {:.0} us\n",
        printable(name),
        advice.window_seconds,
        advice.processor_seconds,
        advice.watched_pages,
        advice.pages,
        advice.miss_us,
    );
    if advice.state == AdviceState::Changing {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "CHANGES TOO FAST to be advised on: for that alone {} of its uses would miss; the \
             figures below are averages and will not hold",
            percent(advice.drift.unwrap_or(0.0)),
        );
    }
    if let Some(now) = &advice.now {
        let _ = writeln!(
            text,
            "its budget of {} costs it {} of its speed (at most {})",
            ByteSize(now.budget_bytes),
            percent(now.loss),
            percent(now.loss_at_most),
        );
    }
    let mut rows = vec![["LOSS", "NEEDS", "TO BE SURE", "SAVES"].map(str::to_owned).to_vec()];
    for need in &advice.needs {
        let size = |bytes: Option<u64>| bytes.map_or("-".into(), |b| ByteSize(b).to_string());
        rows.push(vec![
            percent(need.loss),
            size(need.budget_bytes),
            size(need.budget_bytes_at_most),
            match need.saves_bytes {
                None => "-".into(),
                Some(saves) if saves < 0 => {
                    format!("nothing: {} more", ByteSize(saves.unsigned_abs()))
                }
                Some(saves) => ByteSize(saves.unsigned_abs()).to_string(),
            },
        ]);
    }
    text + "\n" + &columns(&rows, 1) + "\n" + &plot(&advice.curve, advice.budget_bytes)
}

/// Loss over budget; `|` marks the present budget.
fn plot(curve: &[CurvePoint], budget_bytes: u64) -> String {
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { return String::new() };
    let highest = first.loss_at_most.max(0.01);
    // A budget far beyond all needs would push the curve into a corner.
    let largest = budget_bytes.clamp(last.budget_bytes, last.budget_bytes / 4 * 5).max(1);
    let column =
        |bytes: u64| ((bytes as f64 / largest as f64) * (PLOT_COLUMNS - 1) as f64).round() as usize;
    let row = |loss: f64| ((1.0 - loss / highest) * (PLOT_ROWS - 1) as f64).round() as usize;
    let mut cells = vec![[' '; PLOT_COLUMNS]; PLOT_ROWS];
    for cells in &mut cells {
        if budget_bytes <= largest {
            cells[column(budget_bytes)] = '|';
        }
    }
    let mut draw = |mark: char, of: fn(&CurvePoint) -> f64| {
        let losses = (0..PLOT_COLUMNS).map(|at| {
            let bytes = (at as f64 / (PLOT_COLUMNS - 1) as f64 * largest as f64) as u64;
            (at, loss_at(curve, bytes, of))
        });
        for (at, loss) in losses {
            if let Some(loss) = loss {
                cells[row(loss).min(PLOT_ROWS - 1)][at] = mark;
            }
        }
    };
    draw('.', |point| point.loss_at_most);
    draw('*', |point| point.loss);
    let mut text = String::new();
    for (index, cells) in cells.iter().enumerate() {
        let scale = match index {
            0 => percent(highest),
            index if index + 1 == PLOT_ROWS => percent(0.0),
            _ => String::new(),
        };
        let line: String = cells.iter().collect();
        let _ = writeln!(text, "{scale:>7} {}", line.trim_end());
    }
    let end = ByteSize(largest).to_string();
    let _ = writeln!(text, "{:>7} 0{end:>width$}", "", width = PLOT_COLUMNS - 1);
    text
}

/// The loss at a budget, between points of the curve; none below the first.
fn loss_at(curve: &[CurvePoint], bytes: u64, of: fn(&CurvePoint) -> f64) -> Option<f64> {
    let after = curve.partition_point(|point| point.budget_bytes < bytes);
    let before = curve.get(after.checked_sub(1)?)?;
    Some(curve.get(after).map_or(0.0, |next| {
        let span = (next.budget_bytes - before.budget_bytes).max(1) as f64;
        let part = (bytes - before.budget_bytes) as f64 / span;
        of(before) + (of(next) - of(before)) * part
    }))
}

/// What is proposed for one tenant.
#[derive(Serialize)]
struct Share {
    name: String,
    state: AdviceState,
    budget_bytes: u64,
    /// The same as before where there is no advice to go by.
    proposed_bytes: u64,
    loss_now: Option<f64>,
    loss: Option<f64>,
    #[serde(skip)]
    socket: PathBuf,
    #[serde(skip)]
    curve: Vec<CurvePoint>,
}

#[derive(Serialize)]
struct Shares {
    total_bytes: u64,
    applied: bool,
    tenants: Vec<Share>,
}

fn all(arguments: &AdviseArguments, deadline: Instant) -> Result<String> {
    let lives = |state| !matches!(state, TenantState::Ended | TenantState::Released);
    let mut known: Vec<(PathBuf, String)> = Vec::new();
    for (socket, tenants) in client::list_by_daemon()? {
        let living = tenants.iter().filter(|stats| lives(stats.state));
        known.extend(living.map(|stats| (socket.clone(), client::address(stats))));
    }
    known.sort_by(|a, b| a.1.cmp(&b.1));
    // All are watched before the first one is waited for.
    for (socket, name) in &known {
        ask(socket, name, Instant::now())?;
    }
    let mut shares = Vec::new();
    for (socket, name) in known {
        let advice = ask(&socket, &name, deadline)?;
        shares.push(Share {
            name,
            state: advice.state,
            budget_bytes: advice.budget_bytes,
            proposed_bytes: advice.budget_bytes,
            loss_now: advice.now.map(|now| now.loss),
            loss: advice.now.map(|now| now.loss),
            socket,
            curve: advice.curve,
        });
    }
    let sum = shares.iter().fold(0u64, |sum, share| sum.saturating_add(share.budget_bytes));
    let total_bytes = arguments.total.map_or(sum, |total| total.0);
    let what = format!("cannot share out {}", ByteSize(total_bytes));
    if shares.iter().all(|share| share.state != AdviceState::Steady) {
        let (why, todo) = if shares.is_empty() {
            ("there are no tenants", "strata run starts one")
        } else {
            (
                "there is no advice on any tenant yet",
                "ask again in half a minute, or with --wait 60",
            )
        };
        return Err(Failure::new(what, why).todo(todo));
    }
    propose(&mut shares, total_bytes, &what)?;
    if arguments.apply {
        apply(&shares)?;
    }
    let shares = Shares { total_bytes, applied: arguments.apply, tenants: shares };
    if arguments.json { json(&shares) } else { Ok(table(&shares)) }
}

/// Whoever cannot be advised keeps what it has; the others share the rest.
fn propose(shares: &mut [Share], total_bytes: u64, what: &str) -> Result<()> {
    let steady = |share: &&mut Share| share.state == AdviceState::Steady;
    let kept = shares
        .iter()
        .filter(|share| share.state != AdviceState::Steady)
        .fold(0u64, |sum, share| sum.saturating_add(share.budget_bytes));
    let Some(rest) = total_bytes.checked_sub(kept) else {
        let why = format!("tenants that cannot be advised keep {}", ByteSize(kept));
        return Err(Failure::new(what, why).todo("name a larger total"));
    };
    let mut advised: Vec<&mut Share> = shares.iter_mut().filter(steady).collect();
    let request = Request::ShareOut {
        total_bytes: rest,
        curves: advised.iter().map(|share| share.curve.clone()).collect(),
    };
    let socket = advised[0].socket.clone();
    match client::ask(&socket, &request) {
        Ok(Reply::Shares { budgets_bytes, losses })
            if budgets_bytes.len() == advised.len() && losses.len() == advised.len() =>
        {
            for ((share, budget), loss) in advised.iter_mut().zip(budgets_bytes).zip(losses) {
                share.proposed_bytes = budget;
                share.loss = Some(loss);
            }
            Ok(())
        }
        Ok(Reply::Error { message, hint }) => Err(client::refused(what, &message, &hint)),
        Ok(_) => Err(client::misunderstood(what)),
        Err(no_reply) => Err(no_reply.failure(what, &socket)),
    }
}

/// Sets the budgets: whoever gives first, then whoever gets.
fn apply(shares: &[Share]) -> Result<()> {
    let gives = |share: &&Share| share.proposed_bytes < share.budget_bytes;
    let gets = |share: &&Share| share.proposed_bytes > share.budget_bytes;
    for share in shares.iter().filter(gives).chain(shares.iter().filter(gets)) {
        let what = format!("cannot set the budget of {}", share.name);
        let request = Request::Set { name: share.name.clone(), dram_bytes: share.proposed_bytes };
        match client::ask(&share.socket, &request) {
            Ok(Reply::Done { note }) if note.is_empty() => {}
            Ok(Reply::Done { note }) => {
                eprintln!("strata: {}: {}", share.name, printable(&note));
            }
            Ok(Reply::Error { message, hint }) => {
                return Err(client::refused(&what, &message, &hint));
            }
            Ok(_) => return Err(client::misunderstood(&what)),
            Err(no_reply) => return Err(no_reply.failure(&what, &share.socket)),
        }
    }
    Ok(())
}

fn table(shares: &Shares) -> String {
    let loss = |loss: Option<f64>| loss.map_or("?".into(), percent);
    let head = ["NAME", "BUDGET", "LOSS", "PROPOSED", "EXPECTED LOSS", "NOTE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for share in &shares.tenants {
        rows.push(vec![
            printable(&share.name),
            ByteSize(share.budget_bytes).to_string(),
            loss(share.loss_now),
            ByteSize(share.proposed_bytes).to_string(),
            loss(share.loss),
            match share.state {
                AdviceState::Steady => String::new(),
                AdviceState::Watching => "nothing to say of it yet: keeps what it has".into(),
                AdviceState::Changing => "changes too fast: keeps what it has".into(),
            },
        ]);
    }
    let proposed = shares.tenants.iter().map(|share| share.proposed_bytes).sum();
    let mut text = columns(&rows, 1);
    let _ = writeln!(
        text,
        "{} of {} given out, {}",
        ByteSize(proposed),
        ByteSize(shares.total_bytes),
        if shares.applied { "budgets set" } else { "nothing changed: --apply sets these budgets" },
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve() -> Vec<CurvePoint> {
        (1..=10u64)
            .map(|n| CurvePoint {
                budget_bytes: n * (100 << 20),
                misses_per_second: (10 - n) as f64 * 1000.0,
                loss: (10 - n) as f64 / 20.0,
                loss_at_most: (10 - n) as f64 / 19.0,
            })
            .collect()
    }

    #[test]
    fn a_plot_falls_from_the_left_to_the_right() {
        let text = plot(&curve(), 500 << 20);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), PLOT_ROWS + 1);
        let first_star = |line: &&str| line.find('*');
        let stars: Vec<usize> = lines.iter().filter_map(first_star).collect();
        assert!(stars.len() > PLOT_ROWS / 2 && stars.is_sorted(), "{text}");
        assert!(lines[0].contains('|') && lines[0].trim_start().starts_with("47 %"), "{text}");
        assert!(lines[PLOT_ROWS].ends_with("1000.0 MiB"), "{text}");
        assert_eq!(plot(&[], 1), "");
    }

    #[test]
    fn changing_tenants_are_named_so() {
        let advice = Advice {
            name: "db".into(),
            state: AdviceState::Changing,
            budget_bytes: 500 << 20,
            window_seconds: 30.0,
            processor_seconds: 28.0,
            watched_pages: 800,
            pages: 250_000,
            miss_us: 18.0,
            drift: Some(0.25),
            now: curve().get(4).copied(),
            needs: vec![strata_api::Need {
                loss: 0.05,
                budget_bytes: Some(900 << 20),
                budget_bytes_at_most: None,
                saves_bytes: Some(-(400 << 20)),
            }],
            curve: curve(),
        };
        let said = text(&advice);
        assert!(said.contains("CHANGES TOO FAST") && said.contains("25 %"), "{said}");
        assert!(said.contains("nothing: 400.0 MiB more"), "{said}");
        let steady = Advice { state: AdviceState::Steady, ..advice };
        assert!(!text(&steady).contains("CHANGES"));
    }
}
