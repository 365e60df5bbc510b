//! What one client thread counts, and the error that wrong values are.

use crate::histogram::Histogram;
use std::fmt;

/// Counts of one thread, or of all together.
#[derive(Default)]
pub(crate) struct Tally {
    pub latency: Histogram,
    pub operations: u64,
    pub reads: u64,
    /// Operations of a walk over all keys.
    pub scanned: u64,
    pub verified: u64,
    pub wrong: u64,
    pub missing: u64,
    first_wrong: Option<u64>,
}

impl Tally {
    pub(crate) fn merge(&mut self, other: &Self) {
        self.latency.merge(&other.latency);
        self.operations += other.operations;
        self.reads += other.reads;
        self.scanned += other.scanned;
        self.verified += other.verified;
        self.wrong += other.wrong;
        self.missing += other.missing;
        self.first_wrong = self.first_wrong.or(other.first_wrong);
    }

    /// Counts a value that was compared.
    pub(crate) fn check(&mut self, ok: bool, index: u64) {
        self.verified += 1;
        if !ok {
            self.wrong += 1;
            self.first_wrong.get_or_insert(index);
        }
    }
}

/// The one failure that nothing excuses: a server that lost or changed data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WrongValues {
    wrong: u64,
    missing: u64,
    verified: u64,
    first_wrong: Option<u64>,
}

impl fmt::Display for WrongValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wrong, missing, verified, first_wrong } = self;
        write!(f, "{wrong} of {verified} values were wrong and {missing} missing")?;
        first_wrong.map_or(Ok(()), |index| write!(f, " (first wrong: record {index})"))
    }
}

impl std::error::Error for WrongValues {}

impl Tally {
    /// An error when one value was not right.
    pub(crate) fn refuse_wrong(&self) -> Result<(), WrongValues> {
        let &Self { wrong, missing, verified, first_wrong, .. } = self;
        if wrong + missing > 0 {
            return Err(WrongValues { wrong, missing, verified, first_wrong });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_values_are_a_failure() {
        let mut tally = Tally::default();
        tally.check(true, 1);
        assert!(tally.refuse_wrong().is_ok());
        tally.check(false, 2);
        let text = tally.refuse_wrong().expect_err("wrong").to_string();
        assert!(text.contains("1 of 2") && text.contains("record 2)"), "{text}");
        let missing = Tally { missing: 1, ..Tally::default() };
        assert!(missing.refuse_wrong().is_err());
    }
}
