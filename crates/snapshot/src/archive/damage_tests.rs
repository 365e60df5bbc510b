//! Damaged, truncated and hostile files: refused, or read as they were written.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;
use strata_units::PAGE_SIZE;

use super::directory::Directory;
use super::format::{
    BlockEntry, BlockHead, Content, Extent, FOOTER_BYTES, Footer, HEAD_BYTES, Kind,
    MAX_EXTENT_PAGES, encode_header, page_sum, sum,
};
use super::testing::{Place, noise};
use super::tests::small;
use super::*;

/// The first trouble that opening and verifying find.
fn trouble(path: &Path) -> Option<ReadError> {
    Reader::open(path).and_then(|reader| reader.verify(&mut |_, _| ())).err()
}

/// Reads everything; `judge` sees each page that is given as whole. Also says
/// which pages are not.
fn read_all(reader: &Reader, mut judge: impl FnMut(u32, u64, &Page)) -> Vec<(u32, u64)> {
    let mut damaged = Vec::new();
    let mut out = [0; PAGE_SIZE];
    let pids: Vec<u32> = reader.processes().iter().map(|process| process.pid).collect();
    for pid in pids {
        let mut pages = reader.pages(pid);
        // A hostile one may have 2^32.
        for _ in 0..100 {
            let Some((address, read)) = pages.next_into(&mut out) else { break };
            match read {
                Ok(()) => judge(pid, address, &out),
                Err(ReadError::DamagedPage { pid: named, address: at, .. }) => {
                    assert_eq!((named, at), (pid, address));
                    damaged.push((pid, address));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    damaged
}

#[test]
fn every_flipped_bit_is_found_and_no_wrong_page_is_given() {
    let place = Place::new("bits");
    let path = place.path("x");
    let sample = small();
    let whole = sample.write_to(&path).file_bytes;
    let bytes = fs::read(&path).expect("there");
    let all: Vec<(u32, u64)> = {
        let reader = Reader::open(&path).expect("whole");
        let mut all = Vec::new();
        assert!(read_all(&reader, |pid, address, _| all.push((pid, address))).is_empty());
        all
    };
    assert_eq!(all.len(), 9);
    let file = File::options().write(true).open(&path).expect("there");
    let mut named = 0;
    for at in 0..whole {
        for bit in 0..8 {
            let byte = bytes[at as usize];
            file.write_all_at(&[byte ^ 1 << bit], at).expect("written");
            let found = trouble(&path).unwrap_or_else(|| panic!("byte {at}, bit {bit}: not seen"));
            if let Ok(reader) = Reader::open(&path) {
                let damaged = read_all(&reader, |pid, address, page| {
                    assert!(Some(page) == sample.page(pid, address), "byte {at}, bit {bit}");
                });
                match found {
                    ReadError::DamagedPage { pid, address, .. } => {
                        assert!(damaged.contains(&(pid, address)), "byte {at}, bit {bit}");
                        named += 1;
                    }
                    _ => assert!(damaged.is_empty(), "byte {at}, bit {bit}: {found}"),
                }
            }
            file.write_all_at(&[byte], at).expect("written");
        }
    }
    assert!(named > 8 * PAGE_SIZE, "{named}");
    assert!(trouble(&path).is_none());
}

#[test]
fn a_flipped_bit_of_a_raw_page_is_that_pages() {
    let place = Place::new("raw");
    let path = place.path("x");
    let mut writer = Writer::create(&path).expect("a file");
    writer.process(42, None).expect("begun");
    for n in 0..40 {
        writer.page(0x7f00_0000_0000 + 2 * n * PAGE_SIZE as u64, &noise(n)).expect("written");
    }
    writer.finish().expect("written");
    let bytes = fs::read(&path).expect("there");
    for n in [0, 15, 16, 39] {
        let page = noise(n);
        let at = bytes.windows(PAGE_SIZE).position(|window| *window == page).expect("raw");
        let mut bytes = bytes.clone();
        bytes[at + 4095] ^= 0x80;
        fs::write(&path, bytes).expect("written");
        let address = 0x7f00_0000_0000 + 2 * n * PAGE_SIZE as u64;
        let message = trouble(&path).expect("damage").to_string();
        let named = format!("damaged: the page at {address:#x} of process 42");
        assert!(message.ends_with(&named), "{message}");
        let reader = Reader::open(&path).expect("its index is whole");
        assert_eq!(read_all(&reader, |_, _, _| ()), [(42, address)]);
    }
}

#[test]
fn every_other_length_is_refused() {
    let place = Place::new("lengths");
    let path = place.path("x");
    let sample = small();
    sample.write_to(&path);
    let bytes = fs::read(&path).expect("there");
    for len in (0..bytes.len()).rev() {
        File::options().write(true).open(&path).expect("there").set_len(len as u64).expect("cut");
        let opened = Reader::open(&path);
        let refused = matches!(opened, Err(ReadError::Incomplete(_) | ReadError::NotASnapshot(_)));
        assert!(refused, "{len}: {opened:?}");
    }
    for more in [&b"\0"[..], &bytes, &bytes[bytes.len() - FOOTER_BYTES..]] {
        fs::write(&path, [&bytes, more].concat()).expect("written");
        assert!(matches!(Reader::open(&path), Err(ReadError::Incomplete(_))));
    }
}

#[test]
fn other_versions_and_other_files_are_named_so() {
    let place = Place::new("others");
    let path = place.path("x");
    small().write_to(&path);
    let file = File::options().write(true).open(&path).expect("there");
    file.write_all_at(&[2], 8).expect("written");
    assert!(matches!(Reader::open(&path), Err(ReadError::Version { version: 2, .. })));
    let mut header = encode_header(SEED);
    header[12..16].copy_from_slice(&16_384_u32.to_le_bytes());
    let sound = sum(&header[..24], 0);
    header[24..].copy_from_slice(&sound.to_le_bytes());
    file.write_all_at(&header, 0).expect("written");
    let Err(refused) = Reader::open(&path) else { panic!("pages of another size are read") };
    assert!(refused.to_string().contains("its pages have 16384 bytes"), "{refused}");
    assert!(matches!(Reader::open(&place.path("")), Err(ReadError::NotASnapshot(_))));
    let pipe = place.path("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).expect("a pipe");
    assert!(matches!(Reader::open(&pipe), Err(ReadError::NotASnapshot(_))));
}

/// A file with sound checksums around whatever it is told to say.
struct Forger {
    bytes: Vec<u8>,
    table: Vec<u8>,
    blocks: u32,
}

const SEED: u64 = 3;

type Forge<'a> = &'a dyn Fn(&mut Forger);

impl Forger {
    fn new() -> Self {
        Self { bytes: encode_header(SEED).to_vec(), table: Vec::new(), blocks: 0 }
    }

    fn block(&mut self, kind: Kind, owner: u16, items: u32, sums: &[u8], raw: u32, stored: &[u8]) {
        let head = BlockHead {
            kind,
            owner,
            items,
            raw_bytes: raw,
            stored_bytes: stored.len() as u32,
            number: self.blocks,
            stored_sum: sum(stored, SEED),
        };
        // More than the format has room for is not a block; the table still says so.
        let fitting = &sums[..sums.len().min(128)];
        self.bytes.extend(head.encode(fitting, SEED));
        self.bytes.extend(fitting);
        self.bytes.extend(stored);
        let len_bytes = (HEAD_BYTES + fitting.len() + stored.len()) as u32;
        self.table.extend(BlockEntry { len_bytes, kind, owner }.encode());
        self.blocks += 1;
    }

    fn page(&mut self, page: &Page) {
        let page_sum = page_sum(page, SEED).to_le_bytes();
        self.block(Kind::Pages, 0, 1, &page_sum, PAGE_SIZE as u32, page);
    }

    fn extents(&mut self, owner: u16, extents: &[Extent]) {
        let bytes: Vec<u8> = extents.iter().flat_map(Extent::encode).collect();
        let raw = bytes.len() as u32;
        self.block(Kind::Extents, owner, extents.len() as u32, &[], raw, &bytes);
    }

    fn directory(&mut self, directory: &Directory) {
        let bytes = directory.encode();
        self.block(Kind::Directory, 0, 0, &[], bytes.len() as u32, &bytes);
    }

    fn finish(mut self, contents: u64, path: &Path) {
        let footer = Footer {
            table_offset: self.bytes.len() as u64,
            blocks: self.blocks.into(),
            contents,
            table_sum: sum(&self.table, SEED),
            len_bytes: (self.bytes.len() + self.table.len() + FOOTER_BYTES) as u64,
        };
        self.bytes.extend(self.table);
        self.bytes.extend(footer.encode(SEED));
        fs::write(path, self.bytes).expect("written");
    }
}

fn directory(pages: &[u64], files: &[(&str, u64)]) -> Directory {
    let process =
        |(at, &pages): (usize, &u64)| ProcessInfo { pid: at as u32, restart: None, pages };
    let file = |&(name, size_bytes): &(&str, u64)| FileInfo { name: name.into(), size_bytes };
    Directory {
        description: Vec::new(),
        processes: pages.iter().enumerate().map(process).collect(),
        files: files.iter().map(file).collect(),
    }
}

fn extent(first: u64, count: u32, content: Content) -> Extent {
    Extent { first, count, content }
}

#[test]
fn what_contradicts_itself_is_refused() {
    use Content::{Filled, Stored};
    let place = Place::new("forged");
    let path = place.path("x");
    let forge = |contents: u64, make: Forge<'_>| {
        let mut forger = Forger::new();
        forger.page(&noise(1));
        make(&mut forger);
        forger.finish(contents, &path);
        trouble(&path)
    };
    let fine = forge(1, &|f| {
        f.extents(0, &[extent(5, 1, Stored(0)), extent(6, 9, Filled(7))]);
        f.directory(&directory(&[10], &[]));
    });
    assert!(fine.is_none(), "{fine:?}");
    let one = [extent(5, 1, Stored(0))];
    let cases: [(&str, u64, Forge<'_>); 11] = [
        ("no directory", 1, &|f| f.extents(0, &one)),
        ("two directories", 1, &|f| {
            f.directory(&directory(&[], &[]));
            f.directory(&directory(&[], &[]));
        }),
        ("more contents than blocks", 17, &|f| f.directory(&directory(&[], &[]))),
        ("more contents than the block", 2, &|f| f.directory(&directory(&[], &[]))),
        ("an extent beyond the contents", 1, &|f| {
            f.extents(0, &[extent(5, 2, Stored(0))]);
            f.directory(&directory(&[2], &[]));
        }),
        ("extents that overlap", 1, &|f| {
            f.extents(0, &[extent(5, 9, Filled(0)), extent(13, 1, Filled(1))]);
            f.directory(&directory(&[10], &[]));
        }),
        ("extents of nobody", 1, &|f| {
            f.extents(1, &one);
            f.directory(&directory(&[1], &[]));
        }),
        ("another number of pages", 1, &|f| {
            f.extents(0, &one);
            f.directory(&directory(&[2], &[]));
        }),
        ("too many pages", 1, &|f| {
            let count = MAX_EXTENT_PAGES;
            let all = [0u64, 1, 2].map(|n| extent(n * u64::from(count), count, Filled(0)));
            f.extents(0, &all);
            f.directory(&directory(&[3 * u64::from(count)], &[]));
        }),
        ("a file longer than its blocks", 1, &|f| {
            f.block(Kind::File, 0, 0, &[], 4, b"abcd");
            f.directory(&directory(&[], &[("a", 1 << 60)]));
        }),
        ("a file of nobody", 1, &|f| {
            f.block(Kind::File, 1, 0, &[], 4, b"abcd");
            f.directory(&directory(&[], &[("a", 0)]));
        }),
    ];
    for (what, contents, make) in cases {
        let found = forge(contents, make);
        let refused =
            matches!(found, Some(ReadError::Damaged { .. } | ReadError::DamagedPage { .. }));
        assert!(refused, "{what}: {found:?}");
    }
}

#[test]
fn a_file_of_another_length_than_its_piece_is_refused() {
    let place = Place::new("pieces");
    let path = place.path("x");
    for (size, whole) in [(4, true), (3, false), (5, false)] {
        let mut forger = Forger::new();
        forger.block(Kind::File, 0, 0, &[], 4, b"abcd");
        forger.directory(&directory(&[], &[("a", size)]));
        forger.finish(0, &path);
        assert_eq!(trouble(&path).is_none(), whole, "{size}");
        let reader = Reader::open(&path).expect("its index is sound");
        assert_eq!(reader.extract_files(&place.path(""), 99).is_ok(), whole);
        assert_eq!(place.names().contains(&"a".to_owned()), whole, "{size}");
        let _ = fs::remove_file(place.path("a"));
    }
}

#[test]
fn files_are_extracted_within_bounds_and_overwrite_nothing() {
    let place = Place::new("extract");
    let path = place.path("x");
    let into = place.path("into");
    fs::create_dir(&into).expect("a directory");
    let mut writer = Writer::create(&path).expect("a file");
    writer.file("a", &[0; 1 << 20][..]).expect("written");
    writer.file("b", &b"bytes"[..]).expect("written");
    writer.finish().expect("written");
    let reader = Reader::open(&path).expect("whole");
    let small = reader.extract_files(&into, 1 << 20);
    assert!(matches!(small, Err(ReadError::TooLarge { .. })), "{small:?}");
    assert_eq!(fs::read_dir(&into).expect("there").count(), 0);
    fs::write(into.join("b"), "mine").expect("written");
    let there = reader.extract_files(&into, 2 << 20);
    assert!(matches!(&there, Err(ReadError::Extract { path, .. }) if path.ends_with("b")));
    assert_eq!(fs::read(into.join("b")).expect("there"), b"mine");
    assert!(!into.join("a").exists());
}

#[test]
fn one_scratch_serves_many_readers() {
    let place = Place::new("scratch");
    let readers: Vec<Reader> = (0..2)
        .map(|n| {
            let path = place.path(&n.to_string());
            let mut forger = Forger::new();
            forger.page(&noise(n));
            forger.extents(0, &[extent(1, 1, Content::Stored(0))]);
            forger.directory(&directory(&[1], &[]));
            forger.finish(1, &path);
            Reader::open(&path).expect("whole")
        })
        .collect();
    let mut scratch = Scratch::default();
    let mut out = [0; PAGE_SIZE];
    for n in [0, 1, 0, 0, 1] {
        assert!(readers[n].page(0, 0x1000, &mut scratch, &mut out).expect("a page"));
        assert!(out == noise(n as u64));
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Pages), Just(Kind::Extents), Just(Kind::File), Just(Kind::Directory)]
}

fn extents() -> impl Strategy<Value = Extent> {
    let content = prop_oneof![
        (0..40u32).prop_map(Content::Stored),
        any::<u32>().prop_map(Content::Stored),
        any::<u32>().prop_map(Content::Filled)
    ];
    (prop_oneof![0..99u64, any::<u64>()], 0..=MAX_EXTENT_PAGES, prop::bool::ANY, content).prop_map(
        |(first, count, few, content)| extent(first, if few { count % 9 } else { count }, content),
    )
}

#[derive(Clone, Debug)]
enum Piece {
    Any(Kind, u16, u32, Vec<u8>, u32, Vec<u8>),
    Pages(u64),
    Extents(u16, Vec<Extent>),
    Directory(Vec<u64>, u64),
}

fn pieces() -> impl Strategy<Value = Piece> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..200);
    let lengths = prop_oneof![0..300u32, any::<u32>()];
    prop_oneof![
        (kinds(), 0..3u16, 0..20u32, bytes(), lengths, bytes())
            .prop_map(|(k, o, i, s, r, b)| Piece::Any(k, o, i, s, r, b)),
        any::<u64>().prop_map(Piece::Pages),
        (0..3u16, prop::collection::vec(extents(), 0..5)).prop_map(|(o, e)| Piece::Extents(o, e)),
        (prop::collection::vec(prop_oneof![0..9u64, any::<u64>()], 0..3), 0..300u64)
            .prop_map(|(pages, size)| Piece::Directory(pages, size)),
    ]
}

/// Does all that can be done with a file.
fn exercise(path: &Path, into: &Path) {
    let Ok(reader) = Reader::open(path) else { return };
    let mut scratch = Scratch::default();
    let mut out = [0; PAGE_SIZE];
    for process in reader.processes() {
        for address in [0, 0x5000, u64::MAX - 4095, u64::MAX] {
            let _ = reader.page(process.pid, address, &mut scratch, &mut out);
        }
    }
    let _ = read_all(&reader, |_, _, _| ());
    let _ = reader.verify(&mut |_, _| ());
    let _ = reader.extract_files(into, 1 << 20);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn forged_files_do_no_harm(pieces in prop::collection::vec(pieces(), 0..6), contents in 0..40u64) {
        let place = Place::new("forgeries");
        let mut forger = Forger::new();
        for piece in pieces {
            match piece {
                Piece::Any(kind, owner, items, sums, raw, stored) => {
                    forger.block(kind, owner, items, &sums, raw, &stored);
                }
                Piece::Pages(seed) => forger.page(&noise(seed)),
                Piece::Extents(owner, extents) => forger.extents(owner, &extents),
                Piece::Directory(pages, size) => {
                    forger.directory(&directory(&pages, &[("a", size)]));
                }
            }
        }
        forger.finish(contents, &place.path("x"));
        exercise(&place.path("x"), &place.path(""));
    }

    #[test]
    fn garbage_does_no_harm(mut bytes in prop::collection::vec(any::<u8>(), 0..500), begin in any::<bool>()) {
        let place = Place::new("garbage");
        if begin {
            bytes.splice(..bytes.len().min(32), encode_header(SEED));
        }
        fs::write(place.path("x"), bytes).expect("written");
        prop_assert!(Reader::open(&place.path("x")).is_err());
    }

    #[test]
    fn bursts_of_damage_are_found(at in any::<prop::sample::Index>(), burst in prop::collection::vec(any::<u8>(), 1..99)) {
        let place = Place::new("bursts");
        let path = place.path("x");
        let sample = small();
        let whole = sample.write_to(&path).file_bytes;
        let before = fs::read(&path).expect("there");
        let at = at.index(whole as usize);
        let burst = &burst[..burst.len().min(whole as usize - at)];
        let file = File::options().write(true).open(&path).expect("there");
        file.write_all_at(burst, at as u64).expect("written");
        prop_assert_eq!(trouble(&path).is_some(), before[at..at + burst.len()] != *burst);
        if let Ok(reader) = Reader::open(&path) {
            read_all(&reader, |pid, address, page| {
                assert!(Some(page) == sample.page(pid, address), "{address:#x}");
            });
        }
    }
}

#[test]
fn a_page_that_came_wrong_is_read_anew() {
    let place = Place::new("anew");
    let path = place.path("x");
    small().write_to(&path);
    let reader = Reader::open(&path).expect("whole");
    let blocks = reader.page_blocks();
    let (mut scratch, mut out) = (Scratch::default(), [0; PAGE_SIZE]);
    let mut reads = 0;
    let mut read = |offset: u64, bytes: &mut [u8]| {
        reads += 1;
        reader.file().read_exact_at(bytes, offset)?;
        if reads == 1 {
            // Behind the head and the pages' sums.
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
        }
        Ok(())
    };
    let last = u32::try_from(blocks.count.min(16)).expect("few") - 1;
    assert!(!blocks.get(last, &mut scratch, &mut read, &mut out).expect("read"));
    assert!(blocks.get(last, &mut scratch, &mut read, &mut out).expect("read"), "better bytes");
    assert!(blocks.get(last, &mut scratch, &mut read, &mut out).expect("read"));
    assert_eq!(reads, 2, "a block that is right is at hand");
}
