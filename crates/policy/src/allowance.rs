//! How often something may be said: a few times at once, then now and then, with
//! the number of times that it was not. Reads no clock.

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance {
    most: u32,
    every_ms: u64,
    left: u32,
    /// Up to when what came back is counted in `left`.
    counted_ms: u64,
    left_out: u64,
}

impl Allowance {
    /// `most` times at once, and once more each `every_ms`.
    ///
    /// # Panics
    /// If either is 0.
    #[must_use]
    pub const fn new(most: u32, every_ms: u64) -> Self {
        assert!(most > 0 && every_ms > 0, "then nothing would ever be said");
        Self { most, every_ms, left: most, counted_ms: 0, left_out: 0 }
    }

    /// Whether to say it at `now_ms`: then, how often it was not said since the last
    /// time.
    pub fn take(&mut self, now_ms: u64) -> Option<u64> {
        let back = now_ms.saturating_sub(self.counted_ms) / self.every_ms;
        let room = u64::from(self.most - self.left);
        if back >= room {
            self.left = self.most;
            self.counted_ms = now_ms.max(self.counted_ms);
        } else {
            self.left += back as u32;
            self.counted_ms += back * self.every_ms;
        }
        if self.left == 0 {
            self.left_out += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_too_often_is_counted() {
        let mut once_a_minute = Allowance::new(1, 60_000);
        assert_eq!(once_a_minute.take(5), Some(0));
        for now in 6..60_000 {
            assert_eq!(once_a_minute.take(now), None);
        }
        assert_eq!(once_a_minute.take(60_005), Some(59_994));
        assert_eq!(once_a_minute.take(60_006), None);
        assert_eq!(once_a_minute.take(300_000), Some(1));
    }

    #[test]
    fn a_few_at_once_then_one_at_a_time() {
        let mut few = Allowance::new(3, 1000);
        let said = |few: &mut Allowance, now| (0..5).filter(|_| few.take(now).is_some()).count();
        assert_eq!(said(&mut few, 0), 3);
        assert_eq!(said(&mut few, 999), 0);
        assert_eq!(said(&mut few, 1000), 1);
        assert_eq!(said(&mut few, 3500), 2);
        // Half of the next one's time had gone.
        assert_eq!(said(&mut few, 4000), 1);
        assert_eq!(said(&mut few, 1_000_000), 3);
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing() {
        let mut one = Allowance::new(1, 10);
        assert_eq!(one.take(100), Some(0));
        assert_eq!(one.take(50), None);
        assert_eq!(one.take(110), Some(1));
    }
}
