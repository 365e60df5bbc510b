//! DAMON's directory as the kernel keeps it, as far as it matters here: counts make
//! directories anew, what runs keeps its own, and any step can be refused.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::*;

/// The kernel's side.
#[derive(Default)]
struct Kernel {
    files: BTreeMap<String, String>,
    runs: bool,
    operations: &'static str,
    locked: bool,
    /// What a snapshot brings: start, end, nr_accesses.
    regions: Vec<[String; 3]>,
    writes: usize,
    /// The write with this number, or each from it on, fails so.
    refuses: Option<(usize, bool, i32)>,
    pauses: std::cell::Cell<usize>,
    /// The worker is killed at this write.
    killed_at: Option<usize>,
}

impl Kernel {
    fn new() -> Self {
        let files = BTreeMap::from([(COUNT.to_owned(), "0\n".to_owned())]);
        Self { files, operations: "vaddr\nfvaddr\npaddr\n", ..Self::default() }
    }

    fn set(&mut self, path: &str, text: &str) {
        self.files.insert(path.into(), format!("{text}\n"));
    }

    fn make(&mut self, root: &str, names: &[(&str, &str)]) {
        for (name, text) in names {
            self.set(&format!("{root}/{name}"), text);
        }
    }

    fn store(&mut self, path: &str, text: &str) -> io::Result<()> {
        let errno = |number| Err(io::Error::from_raw_os_error(number));
        let number = self.writes;
        self.writes += 1;
        if let Some((at, for_good, why)) = self.refuses
            && (number == at || (for_good && number > at))
        {
            return errno(why);
        }
        if self.killed_at.is_some_and(|at| number >= at) {
            return errno(libc::EIO);
        }
        if !self.files.contains_key(path) {
            return errno(libc::ENOENT);
        }
        let Some((
            directory,
            "nr_kdamonds" | "nr_contexts" | "nr_targets" | "nr_regions" | "nr_schemes",
        )) = path.rsplit_once('/').or(Some(("", path)))
        else {
            if path == STATE {
                return self.command(text);
            }
            self.set(path, text);
            return Ok(());
        };
        if path == COUNT && self.runs {
            return errno(libc::EBUSY);
        }
        let count: usize = text.parse().expect("a count");
        let root = if directory.is_empty() { String::new() } else { format!("{directory}/") };
        self.files.retain(|name, _| {
            let rest = name.strip_prefix(&root).unwrap_or("");
            !rest.starts_with(|c: char| c.is_ascii_digit())
        });
        self.set(path, text);
        for n in 0..count {
            let each = format!("{root}{n}");
            match path.rsplit('/').next() {
                Some("nr_kdamonds") => {
                    self.make(
                        &each,
                        &[("state", "off"), ("pid", "-1"), ("contexts/nr_contexts", "0")],
                    );
                }
                Some("nr_contexts") => {
                    let operations = self.operations;
                    self.make(
                        &each,
                        &[
                            ("avail_operations", operations.trim()),
                            ("operations", "vaddr"),
                            ("monitoring_attrs/intervals/sample_us", "5000"),
                            ("monitoring_attrs/intervals/aggr_us", "100000"),
                            ("monitoring_attrs/nr_regions/min", "10"),
                            ("monitoring_attrs/nr_regions/max", "1000"),
                            ("targets/nr_targets", "0"),
                            ("schemes/nr_schemes", "0"),
                        ],
                    );
                }
                Some("nr_targets") => {
                    self.make(&each, &[("pid_target", "0"), ("regions/nr_regions", "0")]);
                }
                Some("nr_regions") => self.make(&each, &[("start", "0"), ("end", "0")]),
                _ => {
                    self.make(&each, &[("action", "stat")]);
                    for name in ["sz", "nr_accesses", "age"] {
                        let pattern = format!("{each}/access_pattern/{name}");
                        self.make(&pattern, &[("min", "0"), ("max", "0")]);
                    }
                }
            }
        }
        Ok(())
    }

    fn command(&mut self, text: &str) -> io::Result<()> {
        let refused = |number| Err(io::Error::from_raw_os_error(number));
        match (text, self.runs) {
            ("on", true) => return refused(libc::EBUSY),
            ("on", false) => self.runs = true,
            ("off", false) => return refused(libc::EPERM),
            ("off", true) => self.runs = false,
            ("update_schemes_tried_regions", true) => {
                for (n, [start, end, hits]) in self.regions.clone().into_iter().enumerate() {
                    let region = format!("{TRIED}/{n}");
                    self.make(&region, &[("start", &start), ("end", &end), ("nr_accesses", &hits)]);
                }
            }
            _ => return refused(libc::EINVAL),
        }
        let state = if self.runs { "on" } else { "off" };
        self.set(STATE, state);
        Ok(())
    }
}

#[derive(Clone)]
struct Fake(Arc<Mutex<Kernel>>);

impl Fake {
    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn damon(&self) -> Damon {
        Damon { files: Box::new(self.clone()), pid: None }
    }
}

impl Files for Fake {
    fn read(&self, path: &str) -> io::Result<String> {
        let text = self.kernel().files.get(path).cloned();
        text.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }

    fn write(&mut self, path: &str, text: &str) -> io::Result<()> {
        self.kernel().store(path, text)
    }

    fn lock(&mut self) -> io::Result<bool> {
        Ok(!self.kernel().locked)
    }

    fn pause(&self) {
        let kernel = self.kernel();
        kernel.pauses.set(kernel.pauses.get() + 1);
    }
}

fn fake() -> Fake {
    Fake(Arc::new(Mutex::new(Kernel::new())))
}

fn ranges(count: u64) -> Vec<Range> {
    (0..count).map(|n| Range { start: n << 21, end: (n << 21) + 0x8000 }).collect()
}

/// As somebody else sets it up.
fn occupy(fake: &Fake) {
    let mut kernel = fake.kernel();
    for (path, text) in [(COUNT, "1"), (CONTEXT_COUNT, "1")] {
        kernel.store(path, text).expect("theirs");
    }
}

#[test]
fn a_look_takes_the_directory_and_gives_it_back() {
    let fake = fake();
    let mut damon = fake.damon();
    assert_eq!((damon.owner(), damon.operations()), (DamonOwner::Nobody, None));
    damon.watch(77, &ranges(5)).expect("watched");
    assert_eq!(damon.owner(), DamonOwner::Strata);
    {
        let kernel = fake.kernel();
        let file = |path: &str| kernel.files[&format!("0/contexts/0/{path}")].trim().to_owned();
        assert!(kernel.runs);
        assert_eq!(file("operations"), "fvaddr");
        assert_eq!(file("targets/0/pid_target"), "77");
        assert_eq!(file("targets/0/regions/4/end"), ((4 << 21) + 0x8000).to_string());
        assert_eq!(file("monitoring_attrs/nr_regions/min"), "5");
        assert_eq!(file("schemes/0/action"), "stat");
        assert_eq!(file("schemes/0/access_pattern/sz/max"), u64::MAX.to_string());
    }
    fake.kernel().regions = vec![
        ["4096".into(), "8192".into(), "3".into()],
        ["8192".into(), "12288".into(), "99".into()],
    ];
    let range = |start, end, hits| DamonRange { range: Range { start, end }, hits };
    let expected = [range(4096, 8192, 3), range(8192, 12288, DAMON_SAMPLES)];
    assert_eq!(damon.seen().expect("seen"), expected);
    damon.give_back().expect("given back");
    assert_eq!(fake.kernel().files, Kernel::new().files);
    // Nothing runs, nothing is seen; and the next look is as the first one.
    assert!(damon.seen().is_err());
    damon.watch(78, &ranges(1)).expect("again");
    damon.give_back().expect("given back");
    assert_eq!(damon.try_operations().expect("there"), ["vaddr", "fvaddr", "paddr"]);
    assert_eq!(fake.kernel().files, Kernel::new().files);
}

#[test]
fn what_is_somebody_elses_is_left_as_it_is() {
    for runs in [false, true] {
        let fake = fake();
        occupy(&fake);
        fake.kernel().runs = runs;
        let before = fake.kernel().files.clone();
        let written = fake.kernel().writes;
        let mut damon = fake.damon();
        assert_eq!(damon.owner(), DamonOwner::Other);
        assert_eq!(damon.watch(77, &ranges(2)), Err(DamonRefusal::Taken));
        assert_eq!(damon.give_back(), Ok(()));
        assert_eq!(damon.try_operations().expect("theirs says it").len(), 3);
        let kernel = fake.kernel();
        assert_eq!((&kernel.files, kernel.writes), (&before, written), "no write");
    }
    // Several, marked or not, are nobody's of ours.
    let fake = fake();
    let mut damon = fake.damon();
    damon.watch(77, &ranges(1)).expect("watched");
    fake.kernel().set(COUNT, "2");
    assert_eq!(damon.owner(), DamonOwner::Other);
    assert_eq!(damon.seen(), Err(DamonRefusal::Taken));
}

#[test]
fn another_strata_and_a_kernel_without_are_said() {
    let fake = fake();
    fake.damon().watch(76, &ranges(1)).expect("the other one's");
    let theirs = fake.kernel().files.clone();
    fake.kernel().locked = true;
    let mut damon = fake.damon();
    assert_eq!(damon.watch(77, &ranges(1)), Err(DamonRefusal::Shared));
    assert_eq!(damon.give_back(), Ok(()));
    assert_eq!(damon.owner(), DamonOwner::Strata);
    assert_eq!(fake.kernel().files, theirs);
    fake.kernel().locked = false;
    damon.give_back().expect("left over now");
    assert_eq!(fake.kernel().files, Kernel::new().files);
    fake.kernel().operations = "paddr\n";
    let mut damon = fake.damon();
    assert_eq!(damon.watch(77, &ranges(1)), Err(DamonRefusal::Unable));
    damon.give_back().expect("given back");
    assert_eq!(fake.kernel().files, Kernel::new().files);
    fake.kernel().files.clear();
    let mut damon = fake.damon();
    assert_eq!(damon.owner(), DamonOwner::Absent);
    assert_eq!(damon.watch(77, &ranges(1)), Err(DamonRefusal::Absent));
}

/// Writes of a look with so many ranges.
fn writes_of_a_look(count: u64) -> usize {
    let fake = fake();
    fake.damon().watch(77, &ranges(count)).expect("watched");
    let kernel = fake.kernel();
    kernel.writes
}

#[test]
fn whatever_the_kernel_refuses_nothing_is_left() {
    for at in 0..writes_of_a_look(3) {
        for why in [libc::EINVAL, libc::ENOMEM, libc::EACCES, libc::ENOENT, libc::EBUSY] {
            let fake = fake();
            fake.kernel().refuses = Some((at, false, why));
            let mut damon = fake.damon();
            let watched = damon.watch(77, &ranges(3));
            // Busy passes; whatever else does not.
            assert_eq!(watched.is_ok(), why == libc::EBUSY, "write {at}: {watched:?}");
            damon.give_back().expect("given back");
            assert_eq!(fake.kernel().files, Kernel::new().files, "write {at}, errno {why}");
            assert!(!fake.kernel().runs);
        }
    }
    // Busy for good: it gives up, and the next look finds what is left.
    let fake = fake();
    fake.kernel().refuses = Some((10, true, libc::EBUSY));
    let mut damon = fake.damon();
    assert!(matches!(damon.watch(77, &ranges(3)), Err(DamonRefusal::Refused(..))));
    assert!(damon.give_back().is_err());
    fake.kernel().refuses = None;
    damon.watch(77, &ranges(3)).expect("taken over");
}

#[test]
fn what_a_killed_one_left_is_taken_over() {
    for at in 0..=writes_of_a_look(3) {
        let fake = fake();
        fake.kernel().killed_at = Some(at);
        let watched = fake.damon().watch(77, &ranges(3));
        assert_eq!(watched.is_ok(), at == writes_of_a_look(3));
        fake.kernel().killed_at = None;
        let watched = fake.damon().watch(78, &ranges(3));
        // Before the mark there is nothing to know it by.
        let expected = if (1..3).contains(&at) { Err(DamonRefusal::Taken) } else { Ok(()) };
        assert_eq!(watched, expected, "killed at write {at}");
    }
}

#[test]
fn garbage_in_a_snapshot_is_passed_over() {
    let fake = fake();
    let mut damon = fake.damon();
    damon.watch(77, &ranges(3)).expect("watched");
    let region = |start: &str, end: &str, hits: &str| [start.into(), end.into(), hits.into()];
    fake.kernel().regions = vec![
        region("x", "8192", "1"),
        region("8192", "4096", "1"),
        region("4096", "4096", "1"),
        region("", "", ""),
        region("-5", "8192", "1"),
        region("99999999999999999999999", "8192", "1"),
        region("4096", "8192", "4294967296"),
        region("4096", "0x2000", "1"),
        region("4096", "8192", "1 1"),
        region("4096", "8192", "7"),
    ];
    let hits: Vec<u32> = damon.seen().expect("seen").iter().map(|seen| seen.hits).collect();
    assert_eq!(hits, [DAMON_SAMPLES, 7]);
    // Whatever the bytes are, no panic, and nothing that is not a range.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..300 {
        let mut word = || -> String {
            let length = next() % 24;
            (0..length).map(|_| b"0123456789 -x\n."[(next() % 15) as usize] as char).collect()
        };
        let regions = (0..20).map(|_| [word(), word(), word()]).collect();
        fake.kernel().regions = regions;
        for seen in damon.seen().expect("seen") {
            assert!(seen.range.start < seen.range.end && seen.hits <= DAMON_SAMPLES);
        }
    }
    // The mark itself unreadable: not ours to touch any more.
    fake.kernel().set(SAMPLE_US, "49937x");
    assert_eq!(damon.seen(), Err(DamonRefusal::Taken));
    damon.give_back().expect("left alone");
    assert!(fake.kernel().runs);
}

#[test]
fn real_files_are_locked_by_one_alone() {
    let root = std::env::temp_dir().join(format!("strata-damon-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a directory");
    let mut damon = Damon::at(&root);
    assert_eq!(damon.owner(), DamonOwner::Absent);
    std::fs::write(root.join(COUNT), "0\n").expect("written");
    assert_eq!(damon.owner(), DamonOwner::Nobody);
    // An ordinary directory makes no other files, so it is refused and put back.
    assert!(matches!(damon.watch(77, &ranges(1)), Err(DamonRefusal::Refused(..))));
    assert_eq!(Damon::at(&root).watch(77, &ranges(1)), Err(DamonRefusal::Shared));
    assert_eq!(std::fs::read_to_string(root.join(COUNT)).expect("there").trim(), "0");
    drop(damon);
    assert!(matches!(Damon::at(&root).watch(77, &ranges(1)), Err(DamonRefusal::Refused(..))));
    std::fs::remove_dir_all(&root).expect("removed");
}
