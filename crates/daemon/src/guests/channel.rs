//! The way to the agent in a guest: numbered questions, and the readings that answer them.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use strata_units::reading::{Lines, MAX_READING_BYTES, Reading, question};

/// An agent that has not answered is asked again after this.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Questions that may be answered: an older one would be answered too late anyway.
const MOST_ASKED: usize = 32;
/// What is read from an agent at one time: some lines. Who says more is heard later.
const MOST_PIECES: usize = 8;

/// The way to an agent.
pub(super) struct Channel {
    stream: UnixStream,
    lines: Lines,
    /// Numbers of questions, and when they were asked.
    asked: VecDeque<(u64, Instant)>,
}

impl Channel {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, lines: Lines::default(), asked: VecDeque::new() })
    }

    /// The newest reading that answers a question, and when that was asked.
    pub(super) fn hear(&mut self) -> io::Result<Option<(Reading, Instant)>> {
        let mut newest = None;
        let mut piece = [0; 4 * MAX_READING_BYTES];
        for _ in 0..MOST_PIECES {
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    let asked = &self.asked;
                    self.lines.take(&piece[..count], &mut |line| {
                        let Some(reading) = Reading::parse(line) else { return };
                        let question = asked.iter().find(|(number, _)| *number == reading.heard);
                        if let Some((_, at)) = question {
                            newest = Some((reading, *at));
                        }
                    });
                }
                Err(error) if is_for_later(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(newest)
    }

    /// Asks, unless the last question was just asked and not yet answered.
    pub(super) fn ask(&mut self, answered: Option<Instant>, now: Instant) -> io::Result<()> {
        let is_open = self.asked.back().is_some_and(|(_, at)| {
            answered.is_none_or(|answered| answered < *at) && now < *at + ASK_AGAIN
        });
        if is_open {
            return Ok(());
        }
        let number = number();
        match self.stream.write(question(number).as_bytes()) {
            // A part of a question is no question: the agent does not know its number.
            Ok(_) => {
                self.asked.push_back((number, now));
                if self.asked.len() > MOST_ASKED {
                    self.asked.pop_front();
                }
                Ok(())
            }
            Err(error) if is_for_later(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// One that no worker before this one has used: an agent may still answer that one's.
pub(super) fn number() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(0) & ((1 << 51) - 1)
}

pub(super) fn is_for_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
