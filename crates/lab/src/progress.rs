//! Progress on the terminal: one line for the step under way, one kept line for
//! every step that is done. Silent where standard error is no terminal, except
//! for the kept lines.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Steps of the bar; the terminal shows no finer.
const LENGTH: u64 = 1000;

/// The line of one step.
pub(crate) struct Progress {
    bar: ProgressBar,
    started: Instant,
}

impl Progress {
    pub(crate) fn start(what: &str) -> Self {
        let style =
            ProgressStyle::with_template("  {prefix:34} {bar:30.cyan/dim} {percent:>3} %  {msg}")
                .expect("the template is right")
                .progress_chars("━━─");
        let bar = ProgressBar::new(LENGTH).with_style(style).with_prefix(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, started: Instant::now() }
    }

    /// How much is done, 0 to 1, and a few words.
    pub(crate) fn set(&self, done: f64, words: String) {
        self.bar.set_position((done.clamp(0.0, 1.0) * LENGTH as f64) as u64);
        self.bar.set_message(words);
    }

    /// Names the part that comes next and starts its bar anew.
    pub(crate) fn part(&self, what: &str) {
        self.bar.set_prefix(what.to_owned());
        self.bar.set_position(0);
        self.bar.set_message("");
    }

    /// Replaces the bar by one line that stays.
    pub(crate) fn finish(self, line: &str) {
        self.bar.finish_and_clear();
        eprintln!("  {line}  ({:.0} s)", self.started.elapsed().as_secs_f64());
    }
}
