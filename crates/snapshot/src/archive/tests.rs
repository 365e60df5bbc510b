//! What is written comes back, and writing fails cleanly at every byte.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;
use strata_units::PAGE_SIZE;

use super::format::{CHUNK_BYTES, MAX_PAGE_NUMBER, fill};
use super::part::part_of;
use super::testing::{Place, noise, text};
use super::*;

/// A page of a sort: the same sort and number is the same page.
fn page_of(sort: u8, number: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    match sort % 4 {
        0 => fill(number as u32, &mut page),
        1 => page = text(number),
        2 => page = noise(number),
        _ => page[number as usize % PAGE_SIZE] = 1,
    }
    page
}

#[derive(Clone, Debug)]
pub(super) struct Sample {
    description: Vec<u8>,
    files: Vec<(String, Vec<u8>)>,
    /// Pages by number, of each process.
    processes: BTreeMap<u32, (Option<u64>, BTreeMap<u64, Page>)>,
}

impl Sample {
    fn write<S: Sink>(&self, mut writer: Writer<S>) -> Result<Written, WriteError> {
        writer.description(&self.description)?;
        let mut files = self.files.iter();
        for (pid, (restart, pages)) in &self.processes {
            writer.process(*pid, *restart)?;
            for (number, page) in pages {
                writer.page(number * PAGE_SIZE as u64, page)?;
            }
            // Files may come in between.
            if let Some((name, bytes)) = files.next() {
                writer.file(name, &bytes[..])?;
            }
        }
        for (name, bytes) in files {
            writer.file(name, &bytes[..])?;
        }
        writer.finish()
    }

    fn check(&self, reader: &Reader, place: &Place) {
        assert_eq!(reader.description(), self.description);
        let infos: Vec<ProcessInfo> = self
            .processes
            .iter()
            .map(|(&pid, (restart, pages))| ProcessInfo {
                pid,
                restart: *restart,
                pages: pages.len() as u64,
            })
            .collect();
        assert_eq!(reader.processes(), infos);
        let mut scratch = Scratch::default();
        let mut out = [0; PAGE_SIZE];
        for (&pid, (_, pages)) in &self.processes {
            let mut all = reader.pages(pid);
            for (&number, page) in pages {
                let address = number * PAGE_SIZE as u64;
                let (at, read) = all.next_into(&mut out).expect("a page");
                assert!(read.is_ok() && at == address && out == *page, "{pid} {address:#x}");
            }
            assert!(all.next_into(&mut out).is_none());
            for (&number, page) in pages.iter().rev() {
                let address = number * PAGE_SIZE as u64;
                assert!(reader.page(pid, address, &mut scratch, &mut out).expect("a whole page"));
                assert!(out == *page, "{pid} {address:#x}");
                for other in [number.wrapping_sub(1), number + 1] {
                    let other_address = other.wrapping_mul(PAGE_SIZE as u64);
                    let has = reader.page(pid, other_address, &mut scratch, &mut out);
                    let known = pages.contains_key(&(other % MAX_PAGE_NUMBER));
                    assert_eq!(has.expect("whole"), known, "{other:#x}");
                }
                assert!(!reader.page(pid, address + 1, &mut scratch, &mut out).expect("whole"));
            }
        }
        assert!(!reader.page(u32::MAX, 0, &mut scratch, &mut out).expect("whole"));
        reader.verify(&mut |_, _| ()).expect("whole");
        let into = place.path("files");
        fs::create_dir(&into).expect("a directory");
        let size = self.files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        reader.extract_files(&into, size).expect("extracted");
        assert_eq!(fs::read_dir(&into).expect("there").count(), self.files.len());
        for (name, bytes) in &self.files {
            assert!(fs::read(into.join(name)).expect("the file") == *bytes, "{name}");
            let mode = fs::metadata(into.join(name)).expect("there").permissions().mode();
            assert_eq!(mode & 0o7777, 0o600);
        }
    }
}

fn samples() -> impl Strategy<Value = Sample> {
    let bytes =
        (prop_oneof![0..300usize, CHUNK_BYTES - 1..CHUNK_BYTES + 2, 1..3 * CHUNK_BYTES], 0..9u64)
            .prop_map(|(len, seed)| {
                let pages = len.div_ceil(PAGE_SIZE) as u64;
                let mut bytes: Vec<u8> =
                    (0..pages).flat_map(|n| page_of((seed + n) as u8, seed + n)).collect();
                bytes.truncate(len);
                bytes
            });
    let number = prop_oneof![0..200u64, MAX_PAGE_NUMBER - 200..MAX_PAGE_NUMBER];
    let pages = prop::collection::btree_map(
        number,
        (any::<u8>(), 0..40u64).prop_map(|(sort, number)| page_of(sort, number)),
        0..90,
    );
    let process = (prop::option::of(any::<u64>()), pages);
    (
        prop::collection::vec(any::<u8>(), 0..300),
        prop::collection::vec(bytes, 0..4),
        prop::collection::btree_map(0..99u32, process, 0..4),
    )
        .prop_map(|(description, files, processes)| {
            let name = |(at, bytes)| (format!("core-{at}.img"), bytes);
            let files = files.into_iter().enumerate().map(name).collect();
            Sample { description, files, processes }
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_comes_back(sample in samples()) {
        let place = Place::new("round");
        let path = place.path("x");
        let written = sample.write(Writer::create(&path).expect("a file")).expect("written");
        prop_assert_eq!(written.file_bytes, fs::metadata(&path).expect("there").len());
        sample.check(&Reader::open(&path).expect("whole"), &place);
    }
}

/// Small, with everything in it.
pub(super) fn small() -> Sample {
    let pages = |from: u64, sorts: &[(u8, u64)]| {
        let page =
            |(at, &(sort, number)): (usize, &(u8, u64))| (from + at as u64, page_of(sort, number));
        sorts.iter().enumerate().map(page).collect::<BTreeMap<_, _>>()
    };
    Sample {
        description: b"{\"name\":\"db\"}".to_vec(),
        files: vec![("a.img".into(), b"an image".to_vec()), ("b.img".into(), Vec::new())],
        processes: BTreeMap::from([
            (7, (Some(0x7000), pages(100, &[(1, 1), (2, 1), (0, 0), (1, 2), (1, 1)]))),
            (9, (None, pages(0x7_0000, &[(1, 2), (0, 5), (0, 5), (3, 9)]))),
        ]),
    }
}

impl Sample {
    pub(super) fn write_to(&self, path: &Path) -> Written {
        self.write(Writer::create(path).expect("a file")).expect("written")
    }

    /// The page of process `pid` at `address`.
    pub(super) fn page(&self, pid: u32, address: u64) -> Option<&Page> {
        self.processes.get(&pid)?.1.get(&(address / PAGE_SIZE as u64))
    }
}

#[test]
fn repeated_and_filled_pages_cost_nothing() {
    let place = Place::new("sizes");
    let write = |name: &str, page: &dyn Fn(u64) -> Page| {
        let mut writer = Writer::create(&place.path(name)).expect("a file");
        for pid in 1..3 {
            writer.process(pid, None).expect("begun");
            for n in 0..1000 {
                writer.page(n * PAGE_SIZE as u64, &page(n)).expect("written");
            }
        }
        writer.finish().expect("written")
    };
    let zero = write("zero", &|_| [0; PAGE_SIZE]);
    assert_eq!((zero.pages, zero.filled_pages, zero.stored_pages), (2000, 2000, 0));
    assert!(zero.file_bytes < 500, "{zero:?}");
    let noisy = write("noise", &noise);
    // What a page was is remembered as long as its place is not another's: some
    // few are stored twice.
    assert_eq!(noisy.filled_pages, 0);
    assert!((1000..1020).contains(&noisy.stored_pages), "{noisy:?}");
    // Raw, a sum each, and little else.
    assert!(noisy.file_bytes < noisy.stored_pages * (PAGE_SIZE as u64 + 13), "{noisy:?}");
    let texts = write("texts", &text);
    assert!(texts.file_bytes < noisy.file_bytes / 10, "{texts:?}");
}

#[test]
fn the_callers_mistakes_are_refused_and_end_the_file() {
    type Step = fn(&mut Writer) -> Result<(), WriteError>;
    let steps: [(&str, Step); 9] = [
        ("no process", |w| w.page(0, &noise(1))),
        ("not a page", |w| w.process(1, None).and_then(|()| w.page(8, &noise(1)))),
        ("twice", |w| {
            w.process(1, None)?;
            w.page(0x1000, &noise(1))?;
            w.page(0x1000, &noise(1))
        }),
        ("backwards", |w| {
            w.process(1, None)?;
            w.page(0x2000, &noise(1))?;
            w.page(0x1000, &noise(1))
        }),
        ("process twice", |w| w.process(1, None).and_then(|()| w.process(1, None))),
        ("file twice", |w| w.file("a", io::empty()).and_then(|()| w.file("a", io::empty()))),
        ("a path", |w| w.file("../a", io::empty())),
        ("long description", |w| w.description(&vec![0; MAX_DESCRIPTION_BYTES + 1])),
        ("many processes", |w| (0..=MAX_PROCESSES as u32).try_for_each(|pid| w.process(pid, None))),
    ];
    for (what, step) in steps {
        let place = Place::new("mistakes");
        let mut writer = Writer::create(&place.path("x")).expect("a file");
        let refused = step(&mut writer);
        assert!(matches!(refused, Err(WriteError::Refused(_))), "{what}: {refused:?}");
        assert_eq!(place.names(), [""; 0], "{what}");
        assert!(matches!(writer.description(b""), Err(WriteError::Failed)), "{what}");
        assert!(matches!(writer.finish(), Err(WriteError::Failed)), "{what}");
        assert_eq!(place.names(), [""; 0], "{what}");
    }
}

#[test]
fn a_source_that_fails_ends_the_file() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }
    let place = Place::new("source");
    let mut writer = Writer::create(&place.path("x")).expect("a file");
    let failed = writer.file("a.img", Broken);
    assert!(
        matches!(&failed, Err(WriteError::Source { name, .. }) if name == "a.img"),
        "{failed:?}"
    );
    assert_eq!(place.names(), [""; 0]);
}

/// A file on a device that is full after some bytes, or fails at some step.
struct Failing {
    file: PartFile,
    room_bytes: usize,
    syncs: bool,
    publishes: bool,
}

impl Sink for Failing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let fits = bytes.len().min(self.room_bytes);
        self.file.write(&bytes[..fits])?;
        self.room_bytes -= fits;
        if fits < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.syncs { self.file.sync() } else { Err(io::Error::other("the device is gone")) }
    }

    fn publish(&mut self) -> io::Result<()> {
        self.sync()?;
        if self.publishes { self.file.publish() } else { Err(io::Error::other("no rename")) }
    }
}

fn write_failing(
    sample: &Sample,
    path: &Path,
    room: usize,
    good: (bool, bool),
) -> Result<Written, WriteError> {
    let file = PartFile::create(path).expect("a file");
    let sink = Failing { file, room_bytes: room, syncs: good.0, publishes: good.1 };
    sample.write(Writer::to(sink, path, 7)?)
}

#[test]
fn a_full_device_leaves_nothing_at_whatever_byte() {
    let place = Place::new("full");
    let sample = small();
    let path = place.path("x");
    let whole = sample.write(Writer::create(&path).expect("a file")).expect("written").file_bytes;
    fs::remove_file(&path).expect("there");
    for room in 0..whole as usize {
        let failed = write_failing(&sample, &path, room, (true, true));
        match failed {
            Err(WriteError::Io { source, .. }) => {
                assert_eq!(source.kind(), io::ErrorKind::StorageFull)
            }
            other => panic!("{room}: {other:?}"),
        }
        assert_eq!(place.names(), [""; 0], "{room}");
    }
    for good in [(false, true), (true, false)] {
        let failed = write_failing(&sample, &path, usize::MAX, good);
        assert!(matches!(failed, Err(WriteError::Io { .. })), "{failed:?}");
        assert_eq!(place.names(), [""; 0]);
    }
    write_failing(&sample, &path, whole as usize, (true, true)).expect("just enough room");
    sample.check(&Reader::open(&path).expect("whole"), &place);
}

/// A small file system; unmounted when it goes.
struct Tiny(Place);

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path("tiny")).status();
    }
}

#[test]
fn a_file_system_that_is_full_is_said_and_left_clean() {
    let place = Place::new("tmpfs");
    let directory = place.path("tiny");
    fs::create_dir(&directory).expect("a directory");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs"])
        .arg(&directory)
        .output();
    if !mounted.is_ok_and(|done| done.status.success()) {
        return println!("skipped: a small tmpfs cannot be mounted here");
    }
    let tiny = Tiny(place);
    let path = directory.join("x");
    let mut writer = Writer::create(&path).expect("a file");
    writer.process(1, None).expect("begun");
    let failed = (0..1000).find_map(|n| writer.page(n * PAGE_SIZE as u64, &noise(n)).err());
    let error = failed.expect("4 MB do not fit into 256 KiB");
    let chain = format!("{error}: {}", std::error::Error::source(&error).expect("a cause"));
    assert!(
        chain.starts_with(&format!("cannot write {}: No space left", path.display())),
        "{chain}"
    );
    assert_eq!(fs::read_dir(&directory).expect("there").count(), 0);
    drop(tiny);
}

#[test]
fn what_a_killed_writer_left_is_no_snapshot_and_is_in_nobodys_way() {
    let place = Place::new("killed");
    let sample = small();
    let (path, whole) = (place.path("x"), place.path("whole"));
    sample.write_to(&whole);
    let bytes = fs::read(&whole).expect("there");
    for len in [0, 1, 31, 32, 500, bytes.len() - 1, bytes.len()] {
        fs::write(part_of(&path), &bytes[..len]).expect("written");
        let opened = Reader::open(&path);
        assert!(matches!(opened, Err(ReadError::Io { .. })), "{len}: {opened:?}");
        assert!(len == bytes.len() || Reader::open(part_of(&path).as_ref()).is_err(), "{len}");
        sample.write_to(&path);
        assert_eq!(place.names(), ["whole", "x"], "{len}");
        fs::remove_file(&path).expect("there");
    }
}

#[test]
fn a_file_of_that_name_is_not_overwritten() {
    let place = Place::new("exists");
    let path = place.path("x");
    let writer = Writer::create(&path).expect("a file");
    fs::write(&path, "a letter").expect("written");
    assert!(matches!(Writer::create(&path), Err(WriteError::Exists(_))));
    let failed = small().write(writer);
    assert!(matches!(failed, Err(WriteError::Exists(_))), "{failed:?}");
    assert_eq!(fs::read(&path).expect("there"), b"a letter");
    assert_eq!(place.names(), ["x"]);
}
