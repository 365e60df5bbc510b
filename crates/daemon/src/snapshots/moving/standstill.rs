//! Where the time goes in which a tenant stands still.

use std::fmt;
use std::time::{Duration, Instant};

/// The steps up to now.
pub(super) struct Standstill {
    since: Instant,
    last: Instant,
    steps: Vec<(&'static str, Duration)>,
}

impl Standstill {
    pub(super) fn begin(since: Instant) -> Self {
        Self { since, last: since, steps: Vec::new() }
    }

    /// What was done until `then`.
    pub(super) fn step(&mut self, what: &'static str, then: Instant) {
        self.steps.push((what, then.saturating_duration_since(self.last)));
        self.last = then;
    }
}

impl fmt::Display for Standstill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        write!(f, "{:.1} ms", ms(self.last.saturating_duration_since(self.since)))?;
        for (number, (what, time)) in self.steps.iter().enumerate() {
            write!(f, "{} {:.1} {what}", if number == 0 { " (of it" } else { "," }, ms(*time))?;
        }
        if self.steps.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_has_the_time_since_the_one_before() {
        let began = Instant::now();
        let mut still = Standstill::begin(began);
        assert_eq!(still.to_string(), "0.0 ms");
        still.step("to stop it", began + Duration::from_millis(6));
        still.step("until it ran", began + Duration::from_micros(40_500));
        assert_eq!(still.to_string(), "40.5 ms (of it 6.0 to stop it, 34.5 until it ran)");
    }
}
