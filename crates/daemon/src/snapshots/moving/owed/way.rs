//! The way by which owed pages come: what is asked for, in which order, and who takes the
//! answers. A page that somebody waits for is asked for at once; of the others, few are asked
//! for at a time, so that it comes next.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use strata_api::{FrameKind, MoveWord, read_frame, write_frame};
use strata_snapshot::archive::{MOST_SENT_PAGES, unpack_pages};
use strata_sys::{Priority, log};
use strata_units::PAGE_SIZE;

use super::super::super::lock;
use super::super::Wire;
use super::{Owed, State};

/// Questions in order that are not answered yet.
const ASKED_IN_ORDER: usize = 2;

/// One connection to the host that has the pages.
#[derive(Clone, Debug)]
pub(super) struct Way {
    number: u64,
    to: Arc<Mutex<UnixStream>>,
    /// Not answered yet, in the order in which they were asked.
    asked: Arc<Mutex<VecDeque<Question>>>,
}

#[derive(Debug)]
struct Question {
    pages: Vec<usize>,
    in_order: bool,
}

impl Way {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn end(&self) {
        // Who reads it hears that; whoever writes may be in the middle of it, and fails.
        if let Ok(to) = self.to.try_lock() {
            let _ = to.shutdown(Shutdown::Both);
        }
    }
}

type Frame = (FrameKind, Vec<u8>);

impl Owed {
    /// Has pages come by `wire`, from which words are still to be heard; the number of the way.
    /// Another one ends with this.
    pub(in super::super) fn come_by(self: &Arc<Self>, wire: &mut Wire) -> Result<u64, String> {
        let failed = |error: std::io::Error| format!("the connection: {error}");
        let (words, heard) = channel();
        let from = wire.hand_over(heard).map_err(failed)?;
        let number = {
            let mut state = lock(&self.state);
            if let Some(before) = state.way.take() {
                before.end();
            }
            state.ways += 1;
            state.next = 0;
            state.asked.fill(false);
            let way = Way { number: state.ways, to: wire.writer(), asked: Arc::default() };
            state.way = Some(way);
            state.ways
        };
        let owed = Arc::clone(self);
        let reads = move || owed.read(number, &from, &words);
        let reader = thread::Builder::new().name("owed".into()).spawn(reads);
        if let Err(error) = reader {
            self.is_cut(number);
            return Err(format!("no thread to take pages in: {error}"));
        }
        // Those who wait ask for theirs first.
        self.changed.notify_all();
        if lock(&self.state).runs {
            self.ask_for_all(number);
        }
        Ok(number)
    }

    /// Begins to ask for all of them in order.
    pub(super) fn ask_for_all(&self, number: u64) {
        (0..ASKED_IN_ORDER).for_each(|_| self.ask_in_order(number));
    }

    fn read(&self, number: u64, from: &UnixStream, words: &Sender<Frame>) {
        loop {
            match read_frame(from) {
                Ok(Some((FrameKind::Data, bytes))) => {
                    if let Err(why) = self.came(number, &bytes) {
                        log(Priority::Error, format_args!("{}: {why}", self.head.name));
                        break;
                    }
                }
                Ok(Some(frame)) => {
                    if words.send(frame).is_err() {
                        break;
                    }
                }
                _ => break,
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        self.is_cut(number);
    }

    fn is_cut(&self, number: u64) {
        let mut state = lock(&self.state);
        if state.way.as_ref().is_some_and(|way| way.number == number) {
            state.way = None;
        }
        drop(state);
        self.changed.notify_all();
    }

    fn way(&self, number: u64) -> Option<Way> {
        lock(&self.state).way.clone().filter(|way| way.number == number)
    }

    /// The answer to the first question.
    fn came(&self, number: u64, bytes: &[u8]) -> Result<(), String> {
        let way = self.way(number).ok_or("another connection brings its pages")?;
        let wrong = "the other side sends what was not asked for";
        let question = lock(&way.asked).pop_front().ok_or(wrong)?;
        let pages = unpack_pages(bytes, question.pages.len()).ok_or(wrong)?;
        self.take(&question.pages, &pages).map_err(|error| format!("snapshot_dir: {error}"))?;
        if question.in_order {
            self.ask_in_order(number);
        }
        Ok(())
    }

    /// Asks for the next ones.
    fn ask_in_order(&self, number: u64) {
        let Some(way) = self.way(number) else { return };
        let mut next = |state: &mut State| {
            let mut pages = Vec::new();
            while pages.len() < MOST_SENT_PAGES && state.next < state.sums.len() {
                if state.sums[state.next] == 0 && !state.asked[state.next] {
                    pages.push(state.next);
                }
                state.next += 1;
            }
            pages
        };
        // If it cannot be asked for, whoever reads hears why.
        let _ = self.ask(&way, &mut next, true);
    }

    /// Asks for those of some pages that have not come and were not asked for.
    pub(super) fn ask(
        &self,
        way: &Way,
        which: &mut dyn FnMut(&mut State) -> Vec<usize>,
        in_order: bool,
    ) -> std::io::Result<()> {
        // Held, so that questions are written in the order in which they are noted.
        let to = lock(&way.to);
        let mut pages = {
            let mut state = lock(&self.state);
            if state.way.as_ref().is_none_or(|one| one.number != way.number) {
                return Ok(());
            }
            let mut pages = which(&mut state);
            pages.retain(|&page| state.sums[page] == 0 && !state.asked[page]);
            pages.iter().for_each(|&page| state.asked[page] = true);
            pages
        };
        while let Some(&first) = pages.first() {
            let pid = self.head.pid_of(first);
            let its = |&&page: &&usize| self.head.pid_of(page) == pid;
            let together = pages.iter().take(MOST_SENT_PAGES).take_while(its).count();
            let rest = pages.split_off(together);
            let word = MoveWord::Pages { pid, ranges: self.ranges(&pages) };
            let text = serde_json::to_vec(&word)?;
            // The last answer brings the next question.
            let in_order = in_order && rest.is_empty();
            lock(&way.asked).push_back(Question { pages, in_order });
            write_frame(&*to, FrameKind::Word, &text)?;
            pages = rest;
        }
        Ok(())
    }

    fn ranges(&self, pages: &[usize]) -> Vec<(u64, u32)> {
        let mut ranges: Vec<(u64, u32)> = Vec::new();
        for address in pages.iter().map(|&page| self.addresses[page]) {
            match ranges.last_mut() {
                Some((start, count))
                    if *start + u64::from(*count) * PAGE_SIZE as u64 == address =>
                {
                    *count += 1;
                }
                _ => ranges.push((address, 1)),
            }
        }
        ranges
    }
}
