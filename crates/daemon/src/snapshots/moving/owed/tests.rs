//! Pages that come by a connection, of which this has both ends.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use strata_api::{FrameKind, MoveWord, read_frame, write_frame};
use strata_pager::PageFile;
use strata_snapshot::archive::pack_pages;

use super::super::Wire;
use super::*;

const FIRST: u64 = 0x7000_0000_0000;
const HANGS: Duration = Duration::from_secs(60);

fn file() -> File {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("strata-owed-{}-{number}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.expect("a file in the temporary directory");
    std::fs::remove_file(&path).expect("ours");
    file
}

fn address(page: usize) -> u64 {
    FIRST + (2 * page * PAGE_SIZE) as u64
}

/// Owed pages, and their file.
fn owed(id: &str, pages: usize) -> (OwedPages, File) {
    owed_of(id, pages, Vec::new())
}

/// The same, those from some pages on of other processes.
fn owed_of(id: &str, pages: usize, others: Vec<(u32, u32)>) -> (OwedPages, File) {
    let file = file();
    let (name, from) = (format!("tenant-{id}"), "other".to_owned());
    let count = pages as u32;
    let head = Head { id: id.to_owned(), name, from, pid: 7, others, pages: count };
    let addresses = (0..pages).map(address).collect();
    let owed = Owed::create(file.try_clone().expect("a descriptor"), head, addresses);
    (owed.expect("made").known(), file)
}

fn read(pages: &dyn PageFile, file: &File, page: u32) -> Result<Page, GetError> {
    let mut out = [0; PAGE_SIZE];
    let mut bytes = |at: u64, out: &mut [u8]| {
        pages.until_there(at, out.len()).map_or(Ok(()), |wait| wait())?;
        file.read_exact_at(out, at)
    };
    pages.get(page, &mut bytes, &mut out).map(|()| out)
}

fn page(number: usize) -> SentPage {
    SentPage::Bytes(Box::new([(number % 251) as u8 + 1; PAGE_SIZE]))
}

/// The other side: what it was asked for.
struct Lender(UnixStream);

impl Lender {
    fn connect(owed: &Arc<Owed>) -> (Self, Wire, u64) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let mut wire = Wire::new(ours).expect("a wire");
        read_frame(&theirs).expect("begun");
        let way = owed.come_by(&mut wire).expect("a thread");
        (Self(theirs), wire, way)
    }

    /// The pages of the next question.
    fn asked(&self) -> Vec<usize> {
        let (pid, pages) = self.asked_of();
        assert_eq!(pid, 7);
        pages
    }

    /// The same, and of which process.
    fn asked_of(&self) -> (u32, Vec<usize>) {
        let frame = read_frame(&self.0).expect("a frame").expect("asked");
        let word = serde_json::from_slice(&frame.1).expect("a word");
        let MoveWord::Pages { pid, ranges } = word else { panic!("{word:?}") };
        let page = |at: u64| ((at - FIRST) as usize) / (2 * PAGE_SIZE);
        assert!(ranges.iter().all(|&(_, count)| count == 1), "{ranges:?}");
        (pid, ranges.into_iter().map(|(at, _)| page(at)).collect())
    }

    fn answer(&self, pages: &[SentPage]) {
        write_frame(&self.0, FrameKind::Data, &pack_pages(pages)).expect("sent");
    }

    fn give(&self, asked: &[usize]) {
        self.answer(&asked.iter().map(|&number| page(number)).collect::<Vec<_>>());
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let hangs = Instant::now() + HANGS;
    while !is_so() {
        assert!(Instant::now() < hangs, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn pages_come_in_order_and_those_that_are_waited_for_first() {
    let (pages, file) = owed("order", 300);
    let owed = of("order").expect("known");
    owed.runs(true);
    let (lender, _wire, way) = Lender::connect(&owed);
    let (first, second) = (lender.asked(), lender.asked());
    assert_eq!((first.len(), second.len(), first[0], second[0]), (64, 64, 0, 64));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| read(&pages, &file, 250));
        assert_eq!(lender.asked(), [250], "it is not in line with the others");
        assert!(!waiter.is_finished());
        lender.give(&first);
        lender.give(&second);
        lender.give(&[250]);
        assert_eq!(waiter.join().expect("read").expect("sound"), [251; PAGE_SIZE]);
    });
    assert_eq!(owed.left(), 300 - 64 - 64 - 1);
    let (third, fourth) = (lender.asked(), lender.asked());
    lender.give(&third);
    lender.give(&fourth);
    let fifth = lender.asked();
    assert!(!fifth.contains(&250), "it has come");
    lender.answer(&vec![SentPage::Zero; fifth.len()]);
    assert_eq!(owed.wait_whole(way), Came::Whole(0));
    assert_eq!(read(&pages, &file, fifth[0] as u32).expect("sound"), ZERO);
    assert_eq!(read(&pages, &file, 130).expect("sound"), [131; PAGE_SIZE]);
    assert!(refusal("tenant-order").is_none(), "nothing is owed any more");
}

#[test]
fn each_process_is_asked_for_its_own_pages() {
    let (pages, file) = owed_of("several", 70, vec![(2, 8), (68, 9)]);
    let owed = of("several").expect("known");
    owed.runs(true);
    let (lender, _wire, way) = Lender::connect(&owed);
    let mut asked = Vec::new();
    while asked.iter().map(|(_, pages): &(u32, Vec<usize>)| pages.len()).sum::<usize>() < 70 {
        let more = lender.asked_of();
        lender.give(&more.1);
        asked.push(more);
    }
    let of = |pid| asked.iter().filter(move |one| one.0 == pid).flat_map(|one| one.1.clone());
    assert_eq!(of(7).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(of(8).collect::<Vec<_>>(), (2..68).collect::<Vec<_>>());
    assert_eq!(of(9).collect::<Vec<_>>(), [68, 69]);
    assert_eq!(owed.wait_whole(way), Came::Whole(0));
    assert_eq!(read(&pages, &file, 68).expect("sound"), [69; PAGE_SIZE]);
    // The next worker knows whose they are as well.
    let again = Owed::again(file).expect("sound");
    assert_eq!((&again.head, again.head.pid_of(1), again.head.pid_of(2)), (&owed.head, 7, 8));
}

#[test]
fn a_cut_makes_wait_and_another_way_goes_on() {
    let (pages, file) = owed("cut", 100);
    let owed = of("cut").expect("known");
    owed.runs(true);
    let (lender, wire, way) = Lender::connect(&owed);
    let first = lender.asked();
    lender.give(&first);
    until("it comes", || owed.left() == 36);
    drop((lender, wire));
    assert_eq!(owed.wait_whole(way), Came::Cut);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| read(&pages, &file, 90));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!waiter.is_finished(), "it has not come");
        assert!(
            refusal("tenant-cut").is_some_and(|why| why.contains("144.0 KiB")),
            "{:?}",
            refusal("tenant-cut")
        );
        let (lender, _wire, way) = Lender::connect(&owed);
        let mut asked = Vec::new();
        while asked.len() < 36 {
            let more = lender.asked();
            lender.give(&more);
            asked.extend(more);
        }
        asked.sort_unstable();
        assert_eq!(asked, (64..100).collect::<Vec<_>>(), "each once, and none that has come");
        assert_eq!(waiter.join().expect("read").expect("sound"), [91; PAGE_SIZE]);
        assert_eq!(owed.wait_whole(way), Came::Whole(0));
    });
}

#[test]
fn the_next_worker_knows_what_has_come() {
    let (pages, file) = owed("again", 3);
    let before = of("again").expect("known");
    before.take(&[1, 2], &[page(1), SentPage::Lost]).expect("written");
    // The worker is dead: nothing of it is asked for what it knew.
    std::mem::forget(pages);
    let opened = open(&file).expect("it is such a file").expect("sound");
    let owed = of("again").expect("known");
    assert!(!Arc::ptr_eq(&owed, &before));
    assert_eq!((owed.left(), &owed.head), (1, &before.head));
    assert_eq!(read(&*opened, &file, 1).expect("sound"), [2; PAGE_SIZE]);
    assert!(matches!(read(&*opened, &file, 2), Err(GetError::Io(_))), "it is lost, not zero");
    assert!(opened.until_there(opened.place(0).expect("a page").0, PAGE_SIZE).is_some());
    // A page whose bytes are not what came is not handed out.
    file.write_all_at(&[9], opened.place(1).expect("a page").0).expect("written");
    assert!(matches!(read(&*opened, &file, 1), Err(GetError::Corrupt)));
    assert!(open(&self::file()).is_none(), "another file is none");
}

#[test]
fn nobody_waits_for_what_nobody_needs_or_what_does_not_run() {
    let (pages, file) = owed("over", 5);
    let owed = of("over").expect("known");
    assert!(read(&pages, &file, 0).is_err(), "it does not run yet, and there is no way");
    owed.runs(true);
    let wait = pages.until_there(pages.place(0).expect("a page").0, PAGE_SIZE).expect("not come");
    let waiter = std::thread::spawn(wait);
    until("it waits", || !waiter.is_finished());
    drop(pages);
    waiter.join().expect("it ends").expect_err("nobody needs it");
    assert_eq!(owed.wait_whole(1), Came::Over);
    assert!(of("over").is_none() && refusal("tenant-over").is_none());
}

#[test]
fn an_answer_that_is_none_ends_the_way_and_nothing_is_taken_in() {
    let (_pages, _file) = owed("wrong", 5);
    let owed = of("wrong").expect("known");
    let (lender, _wire, way) = Lender::connect(&owed);
    // Nothing is asked for in order before it runs.
    owed.runs(true);
    assert_eq!(lender.asked().len(), 5);
    lender.give(&[0]);
    assert_eq!(owed.wait_whole(way), Came::Cut);
    assert_eq!(owed.left(), 5);
}
