//! What went wrong, as the user sees it: one line, "what: why; what to do".

use std::fmt;

/// A failure of the command line, for its last line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    what: String,
    why: String,
    todo: String,
}

/// With a [`Failure`].
pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// `what` was being done, to what; `why` it failed.
    pub(crate) fn new(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { what: what.into(), why: why.to_string(), todo: String::new() }
    }

    /// What the user can do about it.
    pub(crate) fn todo(mut self, todo: impl Into<String>) -> Self {
        self.todo = todo.into();
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.what.clone();
        for (separator, part) in [(": ", &self.why), ("; ", &self.todo)] {
            if !part.is_empty() {
                line += separator;
                line += part;
            }
        }
        f.write_str(&printable(&line))
    }
}

/// Text from elsewhere (a daemon, a file name), fit for a terminal and for one
/// line: no control characters.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::new("cannot run x", "no\nsuch\u{1b}[2J file").todo("look");
        assert_eq!(failure.to_string(), "cannot run x: no?such?[2J file; look");
        assert_eq!(Failure::new("cannot run x", "").to_string(), "cannot run x");
    }
}
