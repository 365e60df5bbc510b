//! Long work, shown while it lasts: one line on the terminal, rewritten, once
//! the work has taken a second. Nothing where standard error is not a terminal:
//! a log wants what came of it, not how far it was.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use strata_api::{Progress, Unit};
use strata_units::ByteSize;

use crate::failure::printable;

/// What takes less is not worth a line that flickers.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two drawings: more cannot be read.
const REDRAW: Duration = Duration::from_millis(100);
/// A terminal that does not tell its width.
const USUAL_COLUMNS: usize = 80;
/// Longest name of a step that is shown.
const MAX_WHAT_CHARS: usize = 40;
/// To the line's beginning, and nothing right of it.
const ERASE: &str = "\r\x1b[K";

/// Draws progress on standard error; takes its line away when dropped.
pub(crate) struct Meter {
    start: Instant,
    pace: Pace,
    columns: usize,
    shown: bool,
    terminal: bool,
}

impl Meter {
    /// For work that begins now.
    pub(crate) fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let told = terminal.then(ratatui::crossterm::terminal::size).and_then(|size| size.ok());
        // Some say 0 for "unknown".
        let columns = told.map_or(0, |(columns, _)| usize::from(columns));
        let columns = if columns == 0 { USUAL_COLUMNS } else { columns };
        Self { start: Instant::now(), pace: Pace::default(), columns, shown: false, terminal }
    }

    /// Shows how far the work is, if it is time to.
    pub(crate) fn update(&mut self, progress: &Progress) {
        if !self.terminal {
            return;
        }
        if let Some(line) = self.pace.line(self.start.elapsed(), progress) {
            // A line that wraps could not be taken away again.
            let line: String = line.chars().take(self.columns.saturating_sub(1)).collect();
            // Who closed standard error does not want to know.
            let _ = write!(std::io::stderr(), "{ERASE}{line}");
            self.shown = true;
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "{ERASE}");
        }
    }
}

/// When to draw and what. Times are since the beginning of the work.
#[derive(Default)]
struct Pace {
    drawn: Option<Duration>,
    /// The step that is under way: its name, when it was first heard of, and how
    /// much was done then.
    step: Option<(String, Duration, u64)>,
}

impl Pace {
    fn line(&mut self, now: Duration, progress: &Progress) -> Option<String> {
        let same = |step: &&(String, Duration, u64)| step.0 == progress.what;
        let known = self.step.as_ref().filter(same).map(|(_, since, from)| (*since, *from));
        let (since, from) = known.unwrap_or((now, progress.done));
        if known.is_none() {
            self.step = Some((progress.what.clone(), since, from));
        }
        let is_new = known.is_none() && self.drawn.is_some();
        let due = self.drawn.is_none_or(|drawn| now.saturating_sub(drawn) >= REDRAW);
        if now < PATIENCE || !(due || is_new) {
            return None;
        }
        self.drawn = Some(now);
        let done = progress.done.saturating_sub(from);
        Some(text(progress, now.saturating_sub(since), done))
    }
}

/// `progress` in a line; `done` of it took `elapsed`.
fn text(progress: &Progress, elapsed: Duration, done: u64) -> String {
    let what: String = printable(&progress.what).chars().take(MAX_WHAT_CHARS).collect();
    let bytes = progress.unit == Unit::Bytes;
    let amount = |count: u64| if bytes { ByteSize(count).to_string() } else { count.to_string() };
    let mut line = match progress.total.filter(|total| *total > 0) {
        Some(total) => {
            // A total that was set too low is no reason to say 130 %.
            let share = progress.done.min(total) as f64 / total as f64 * 100.0;
            let (done, total) = (amount(progress.done), amount(total));
            format!("{what}: {share:.0} % ({done} of {total})")
        }
        None => format!("{what}: {}", amount(progress.done)),
    };
    let seconds = elapsed.as_secs_f64();
    // In the first moments a rate is noise.
    if bytes && seconds >= 0.5 && done > 0 {
        line += &format!(", {}/s", ByteSize((done as f64 / seconds) as u64));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(what: &str, done: u64, total: Option<u64>) -> Progress {
        Progress { what: what.into(), done, total, unit: Unit::Bytes }
    }

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn short_work_shows_nothing_and_long_work_ten_times_a_second() {
        let mut pace = Pace::default();
        let one = progress("capturing", 1 << 20, Some(4 << 20));
        assert_eq!(pace.line(MS(0), &one), None);
        assert_eq!(pace.line(MS(999), &one), None);
        assert!(pace.line(MS(1000), &one).is_some());
        assert_eq!(pace.line(MS(1099), &one), None);
        assert!(pace.line(MS(1100), &one).is_some());
        // A new step is not kept waiting.
        let two = progress("writing", 0, None);
        assert_eq!(pace.line(MS(1110), &two).as_deref(), Some("writing: 0 B"));
        assert_eq!(pace.line(MS(1120), &two), None);
    }

    #[test]
    fn lines_tell_share_amount_and_rate() {
        let mut pace = Pace::default();
        assert_eq!(pace.line(MS(0), &progress("capturing", 1 << 30, Some(4 << 30))), None);
        let line = pace.line(MS(2000), &progress("capturing", 3 << 30, Some(4 << 30)));
        assert_eq!(line.as_deref(), Some("capturing: 75 % (3.0 GiB of 4.0 GiB), 1.0 GiB/s"));
        // A step that begins later has a rate of its own.
        assert!(pace.line(MS(3000), &progress("writing", 0, None)).is_some());
        let line = pace.line(MS(4000), &progress("writing", 1 << 20, None));
        assert_eq!(line.as_deref(), Some("writing: 1.0 MiB, 1.0 MiB/s"));
    }

    #[test]
    fn odd_numbers_and_names_do_no_harm() {
        let mut odd = progress("a\x1b[2J\nb", 5, Some(2));
        odd.unit = Unit::Tenants;
        assert_eq!(text(&odd, MS(0), 0), "a?[2J?b: 100 % (5 of 2)");
        odd.total = Some(0);
        odd.what = "x".repeat(1000);
        assert_eq!(text(&odd, MS(0), 0).chars().count(), MAX_WHAT_CHARS + ": 5".len());
        // Work that goes backwards has no rate.
        let mut pace = Pace::default();
        assert!(pace.line(MS(1000), &progress("w", 9, None)).is_some());
        assert_eq!(pace.line(MS(3000), &progress("w", 1, None)).as_deref(), Some("w: 1 B"));
    }
}
