//! Pages of a tenant that runs here and that the host it came from still has. They are pages
//! of a file which fills as they come: who touches one that has not come waits for it, and
//! asks for it; the others come in order, once it runs.
//!
//! ```text
//! head │ of each page its address there │ of each its sum, 0: it has not come │ pages
//! ```
//! The file has no name, and what it says is true whoever dies: the page first, then its sum.

mod way;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, Weak};

use serde::{Deserialize, Serialize};
use strata_pager::{GetError, PageFile, ReadBytes, Wait};
use strata_snapshot::archive::{Page, SentPage, sum_of_page};
use strata_sys::{Priority, log};
use strata_units::{ByteSize, PAGE_SIZE};

use super::super::lock;
use way::Way;

const MAGIC: [u8; 16] = *b"strata-owed 1\n\0\0";
const HEAD_BYTES: u64 = PAGE_SIZE as u64;
/// The sum of a page that nobody has any more.
const LOST: u64 = u64::MAX;
const ZERO: Page = [0; PAGE_SIZE];

/// Those that are there, by the number of their move.
static ALL: Mutex<BTreeMap<String, Weak<Owed>>> = Mutex::new(BTreeMap::new());

/// What its file begins with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Head {
    /// Of the move.
    pub(super) id: String,
    /// The tenant.
    pub(super) name: String,
    /// The host that has the pages.
    pub(super) from: String,
    /// Whose the first of them are there, and from which page on others'.
    pub(super) pid: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) others: Vec<(u32, u32)>,
    pub(super) pages: u32,
}

impl Head {
    /// Whose a page is.
    fn pid_of(&self, page: usize) -> u32 {
        let after = self.others.partition_point(|&(first, _)| first as usize <= page);
        after.checked_sub(1).map_or(self.pid, |which| self.others[which].1)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Owed {
    pub(super) head: Head,
    file: File,
    addresses: Vec<u64>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// As in the file.
    sums: Vec<u64>,
    /// By the way that there is.
    asked: Vec<bool>,
    left: u64,
    lost: u64,
    /// Those after it have not been asked for in order.
    next: usize,
    way: Option<Way>,
    /// How many ways there have been.
    ways: u64,
    /// It runs, or may: whoever needs a page waits, whether there is a way or not.
    runs: bool,
    /// Nobody needs any page any more.
    is_over: bool,
}

/// What it came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// All of them are here, but for so many that are lost.
    Whole(u64),
    /// Nobody needs them any more.
    Over,
    /// The way is gone.
    Cut,
}

/// The pages, as the store sees them. With it goes the need of them.
#[derive(Debug)]
pub(crate) struct OwedPages(Arc<Owed>);

impl Drop for OwedPages {
    fn drop(&mut self) {
        lock(&ALL).remove(&self.0.head.id);
        lock(&self.0.state).is_over = true;
        self.0.changed.notify_all();
    }
}

impl PageFile for OwedPages {
    fn place(&self, page: u32) -> Option<(u64, usize)> {
        (page < self.0.head.pages).then(|| (self.0.place(page as usize), PAGE_SIZE))
    }

    fn get(&self, page: u32, read: ReadBytes<'_>, out: &mut Page) -> Result<(), GetError> {
        read(self.0.place(page as usize), out)?;
        match lock(&self.0.state).sums.get(page as usize) {
            Some(&sum) if sum == sum_of_page(out) => Ok(()),
            _ => Err(GetError::Corrupt),
        }
    }

    fn until_there(&self, start: u64, len: usize) -> Option<Wait> {
        let page = |at: u64| (at.saturating_sub(self.0.place(0)) / PAGE_SIZE as u64) as usize;
        let pages = page(start)..page(start + len as u64 - 1) + 1;
        let is_there = {
            let state = lock(&self.0.state);
            state.sums.get(pages.clone()).is_some_and(|sums| !sums.iter().any(is_missing))
        };
        let owed = Arc::clone(&self.0);
        (!is_there).then(|| Box::new(move || owed.wait_for(pages)) as Wait)
    }
}

fn is_missing(sum: &u64) -> bool {
    *sum == 0 || *sum == LOST
}

/// Those of a move that is under way, or was.
pub(super) fn of(id: &str) -> Option<Arc<Owed>> {
    lock(&ALL).get(id).and_then(Weak::upgrade)
}

/// What a tenant of this daemon's that runs is owed still, as a sentence; none: nothing.
pub(in super::super) fn refusal(name: &str) -> Option<String> {
    let all: Vec<Arc<Owed>> = lock(&ALL).values().filter_map(Weak::upgrade).collect();
    let owed = all.into_iter().find(|owed| owed.head.name == name && owed.is_needed())?;
    let (left, from) = (owed.left(), &owed.head.from);
    Some(format!(
        "{name} runs here and waits for {} of its memory, which {from} still has (strata move --settle {name} HOST there gives it)",
        ByteSize(left * PAGE_SIZE as u64)
    ))
}

/// The pages of such a file, if it is one.
pub(in super::super) fn open(file: &File) -> Option<io::Result<Box<dyn PageFile>>> {
    let mut magic = [0; MAGIC.len()];
    file.read_exact_at(&mut magic, 0).ok().filter(|()| magic == MAGIC)?;
    Some(file.try_clone().and_then(Owed::again).map(|owed| Box::new(owed.known()) as _))
}

impl Owed {
    /// Makes such a file of one that is empty: of a process's pages there, none of which has
    /// come.
    pub(super) fn create(file: File, head: Head, addresses: Vec<u64>) -> io::Result<Self> {
        let text = serde_json::to_vec(&head)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text);
        if bytes.len() as u64 > HEAD_BYTES {
            return Err(io::Error::other("it has too many processes, or its names are too long"));
        }
        file.write_all_at(&bytes, 0)?;
        let table: Vec<u8> = addresses.iter().flat_map(|one| one.to_le_bytes()).collect();
        file.write_all_at(&table, HEAD_BYTES)?;
        let sums = vec![0; addresses.len()];
        let owed = Self::new(file, head, addresses, sums, false);
        owed.file.set_len(owed.place(owed.addresses.len()))?;
        Ok(owed)
    }

    /// Of a worker that has died.
    fn again(file: File) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let mut head = vec![0; HEAD_BYTES as usize];
        file.read_exact_at(&mut head, 0)?;
        let (len, text) = head[MAGIC.len()..].split_first_chunk::<4>().ok_or_else(invalid)?;
        let text = text.get(..u32::from_le_bytes(*len) as usize).ok_or_else(invalid)?;
        let head: Head = serde_json::from_slice(text)?;
        let table = |at: u64| {
            let mut bytes = vec![0; 8 * head.pages as usize];
            file.read_exact_at(&mut bytes, at)?;
            let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            io::Result::Ok(words.collect::<Vec<u64>>())
        };
        let addresses = table(HEAD_BYTES)?;
        let sums = table(HEAD_BYTES + 8 * u64::from(head.pages))?;
        // Whether it runs is not known here: then it does, for whoever needs a page.
        Ok(Self::new(file, head, addresses, sums, true))
    }

    fn new(file: File, head: Head, addresses: Vec<u64>, sums: Vec<u64>, runs: bool) -> Self {
        let count = |wanted: u64| sums.iter().filter(|&&sum| sum == wanted).count() as u64;
        let state = State {
            left: count(0),
            lost: count(LOST),
            asked: vec![false; sums.len()],
            sums,
            next: 0,
            way: None,
            ways: 0,
            runs,
            is_over: false,
        };
        Self { head, file, addresses, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// From now on it is known by its number.
    pub(super) fn known(self) -> OwedPages {
        let owed = Arc::new(self);
        lock(&ALL).insert(owed.head.id.clone(), Arc::downgrade(&owed));
        OwedPages(owed)
    }

    /// Where a page is in the file.
    fn place(&self, page: usize) -> u64 {
        let tables = HEAD_BYTES + 16 * u64::from(self.head.pages);
        tables.next_multiple_of(PAGE_SIZE as u64) + (page * PAGE_SIZE) as u64
    }

    /// Pages that have not come.
    pub(super) fn left(&self) -> u64 {
        lock(&self.state).left
    }

    fn is_needed(&self) -> bool {
        let state = lock(&self.state);
        state.runs && state.left > 0 && !state.is_over
    }

    /// From now on it runs, or may; or (`false`) whoever brings it up gives up rather than wait
    /// for what does not come.
    pub(super) fn runs(&self, runs: bool) {
        let way = {
            let mut state = lock(&self.state);
            state.runs = runs;
            state.way.as_ref().map(Way::number)
        };
        self.changed.notify_all();
        if let Some(way) = way.filter(|_| runs) {
            self.ask_for_all(way);
        }
    }

    /// Waits for pages that somebody needs.
    fn wait_for(&self, pages: std::ops::Range<usize>) -> io::Result<()> {
        let mut state = lock(&self.state);
        loop {
            let sums = state.sums.get(pages.clone()).ok_or(io::ErrorKind::InvalidInput)?;
            if sums.contains(&LOST) {
                return Err(io::Error::other(format!("{} has lost it", self.head.from)));
            }
            if !sums.contains(&0) {
                return Ok(());
            }
            if state.is_over || !state.runs && state.way.is_none() {
                return Err(io::Error::other(super::CUT));
            }
            let asked = pages.clone().all(|page| state.sums[page] != 0 || state.asked[page]);
            if let Some(way) = state.way.clone().filter(|_| !asked) {
                drop(state);
                // If it cannot be asked for by this way, then by the next one.
                let _ = self.ask(&way, &mut |_| pages.clone().collect(), false);
                state = lock(&self.state);
                continue;
            }
            state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// Takes in the answer for `pages`.
    fn take(&self, pages: &[usize], came: &[SentPage]) -> io::Result<()> {
        for (&page, came) in pages.iter().zip(came) {
            if lock(&self.state).sums[page] != 0 {
                continue;
            }
            let bytes = match came {
                SentPage::Bytes(bytes) => Some(&**bytes),
                SentPage::Zero => Some(&ZERO),
                SentPage::Lost => None,
            };
            let sum = match bytes {
                Some(bytes) => {
                    self.file.write_all_at(bytes, self.place(page))?;
                    sum_of_page(bytes)
                }
                None => {
                    log(
                        Priority::Error,
                        format_args!(
                            "{}: {} has lost the page that was at {:#x} there",
                            self.head.name, self.head.from, self.addresses[page]
                        ),
                    );
                    LOST
                }
            };
            let sums = HEAD_BYTES + 8 * u64::from(self.head.pages);
            self.file.write_all_at(&sum.to_le_bytes(), sums + 8 * page as u64)?;
            let mut state = lock(&self.state);
            state.sums[page] = sum;
            state.left -= 1;
            state.lost += u64::from(sum == LOST);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until all of them are here, as long as that way is there.
    pub(super) fn wait_whole(&self, way: u64) -> Came {
        let mut state = lock(&self.state);
        loop {
            if state.is_over {
                return Came::Over;
            }
            if state.left == 0 {
                return Came::Whole(state.lost);
            }
            if state.way.as_ref().is_none_or(|one| one.number() != way) {
                return Came::Cut;
            }
            state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests;
