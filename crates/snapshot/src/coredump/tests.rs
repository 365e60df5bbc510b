use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use strata_units::PAGE_SIZE;

use super::write::header;
use super::{CoreError, Process, Writer};
use crate::archive::Page;
use crate::archive::testing::Place;
use crate::message::{Message, Value, image_of};

const BASE: u64 = 0x7000_0000_0000;
const BYTES: u64 = PAGE_SIZE as u64;
const GIB: u64 = 1 << 30;
/// `status` of mappings.
const PRIVATE: u64 = 0x201;
const OF_FILE: u64 = 0x41;
const SHARED: u64 = 0x101;

fn numbers(fields: &[(u64, u64)]) -> Message {
    Message(fields.iter().map(|&(name, value)| (name, Value::Number(value))).collect())
}

fn with(mut message: Message, field: u64, inner: &Message) -> Message {
    message.0.push((field, Value::Bytes(inner.bytes())));
    message
}

fn put(directory: &Path, name: &str, rows: &[Message]) {
    fs::write(directory.join(name), image_of(&[0; 8], rows)).expect("written");
}

fn mapping(start: u64, end: u64, status: u64, file: u64, offset: u64) -> Message {
    numbers(&[(1, start), (2, end), (3, offset), (4, file), (5, 3), (7, status)])
}

/// A thread whose registers are its number and theirs; its stack is at `stack`.
fn core(tid: u64, stack: u64) -> Message {
    let mut registers: Vec<(u64, u64)> = (1..=27).map(|n| (n, tid << 8 | n)).collect();
    registers[19].1 = stack;
    let floating = numbers(&[(7, 0x1f80), (10, 0xaabb_ccdd)]);
    let info = with(with(Message::default(), 2, &numbers(&registers)), 3, &floating);
    let task = Message(vec![(6, Value::Bytes(b"a-program".to_vec()))]);
    let own = with(numbers(&[(3, 5), (6, 0x400)]), 10, &numbers(&[(1, 1000), (2, 100)]));
    with(with(with(numbers(&[(1, 1)]), 2, &info), 3, &task), 5, &own)
}

/// Images of a process 7 with threads 8 and 9: a mapping of a file with one page of its
/// own, memory with some pages at CRIU, address space, shared memory.
fn images(place: &Place) {
    let at = place.path("images");
    fs::create_dir(&at).expect("made");
    put(&at, "pstree.img", &[numbers(&[(1, 7), (2, 1), (3, 7), (4, 7), (5, 7), (5, 8), (5, 9)])]);
    put(&at, "core-7.img", &[core(7, BASE)]);
    put(&at, "core-8.img", &[core(8, BASE)]);
    put(&at, "core-9.img", &[core(9, 0x1000)]);
    let regular = Message(vec![(6, Value::Bytes(b"/bin/a-program".to_vec()))]);
    put(&at, "files.img", &[with(numbers(&[(1, 1), (2, 3)]), 3, &regular)]);
    let mut memory = numbers(&[(8, BASE + 9), (9, BASE + 18), (13, 6), (13, 4096)]);
    for one in [
        mapping(0x40_0000, 0x40_0000 + 3 * BYTES, OF_FILE, 3, BYTES),
        mapping(BASE, BASE + 8 * BYTES, PRIVATE, 0, 0),
        mapping(BASE + GIB, BASE + 6 * GIB, PRIVATE, 0, 0),
        mapping(BASE + 7 * GIB, BASE + 7 * GIB + 2 * BYTES, SHARED, 44, BYTES),
    ] {
        memory = with(memory, 14, &one);
    }
    put(&at, "mm-7.img", &[memory]);
    // One page that it has written to of its file, one that is lazy, one in memory.
    let pages = [
        numbers(&[(1, 1)]),
        numbers(&[(1, 0x40_0000 + BYTES), (2, 1), (4, 4)]),
        numbers(&[(1, BASE), (2, 1), (4, 2)]),
        numbers(&[(1, BASE + 4 * BYTES), (4, 4), (5, 1)]),
    ];
    put(&at, "pagemap-7.img", &pages);
    put(&at, "pagemap-shmem-44.img", &[numbers(&[(1, 2)]), numbers(&[(1, 0), (2, 3), (4, 4)])]);
    let filled = |from: u8, to: u8| (from..to).flat_map(|n| [n; PAGE_SIZE]).collect::<Vec<u8>>();
    fs::write(at.join("pages-1.img"), filled(1, 3)).expect("written");
    fs::write(at.join("pages-2.img"), filled(10, 13)).expect("written");
}

/// A core file's program headers: kind, flags, offset, address, bytes in the file and in memory.
fn segments(file: &[u8]) -> Vec<(u32, u32, u64, u64, u64, u64)> {
    let half = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four"));
    let word = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("eight"));
    assert_eq!(&file[..7], b"\x7fELF\x02\x01\x01");
    assert_eq!((half(16), word(40)), (62 << 16 | 4, 0));
    let count = half(56) & 0xffff;
    let of = |n: u32| word(32) as usize + 56 * n as usize;
    let row = |n: u32| {
        let [offset, address, _, in_file, in_memory] =
            [8, 16, 24, 32, 40].map(|at| word(of(n) + at));
        (half(of(n)), half(of(n) + 4), offset, address, in_file, in_memory)
    };
    (0..count).map(row).collect()
}

fn written(place: &Place, pages: &[(u64, u8)]) -> Vec<u8> {
    let process = Process::read(&place.path("images"), 7, &(0..0x2000)).expect("read");
    let path = place.path("core");
    let mut writer = Writer::create(&path, process).expect("begun");
    for &(address, value) in pages {
        writer.page(address, &[value; PAGE_SIZE]).expect("room");
    }
    let length = writer.finish().expect("written");
    assert!(!place.path("core.part").exists());
    let metadata = fs::metadata(&path).expect("there");
    assert_eq!((metadata.len(), metadata.mode() & 0o7777), (length, 0o600));
    fs::read(&path).expect("read")
}

#[test]
fn pages_of_all_sources_are_at_their_addresses() {
    let place = Place::new("core-pages");
    images(&place);
    // One in no mapping, and one that CRIU has as well.
    let own =
        [(BASE, b'a'), (BASE + 3 * BYTES, 21), (BASE + 4 * BYTES, 22), (BASE + 9 * BYTES, 23)];
    let file = written(&place, &own);
    let shape: Vec<_> =
        segments(&file).iter().skip(1).map(|s| (s.3, s.4 / BYTES, s.5 / BYTES)).collect();
    let expected = [
        (0x40_0000, 0, 1),
        (0x40_0000 + BYTES, 1, 1),
        (0x40_0000 + 2 * BYTES, 0, 1),
        (BASE, 8, 8),
        (BASE + GIB, 0, 5 * GIB / BYTES),
        (BASE + 7 * GIB, 2, 2),
    ];
    assert_eq!(shape, expected);
    let byte = |address: u64| {
        let found = segments(&file).into_iter().find(|s| s.3 <= address && address < s.3 + s.4);
        let (_, flags, offset, start, ..) = found.expect("in the file");
        assert_eq!(flags, 6, "to read and to write");
        assert_eq!((offset % BYTES, start % BYTES), (0, 0));
        let page: &Page =
            file[(offset + address - start) as usize..][..PAGE_SIZE].try_into().expect("a page");
        assert!(page.iter().all(|byte| *byte == page[0]));
        page[0]
    };
    let found: Vec<u8> = (0..8).map(|n| byte(BASE + n * BYTES)).collect();
    assert_eq!(found, [b'a', 0, 0, 21, 2, 0, 0, 0]);
    assert_eq!(byte(0x40_0000 + BYTES), 1);
    assert_eq!([byte(BASE + 7 * GIB), byte(BASE + 7 * GIB + BYTES)], [11, 12]);
}

#[test]
fn address_space_without_pages_is_left_out_around_those_that_there_are() {
    let place = Place::new("core-space");
    images(&place);
    let file = written(&place, &[(BASE + 3 * GIB, 5), (BASE + 3 * GIB + 4 * BYTES, 6)]);
    let shape: Vec<_> =
        segments(&file).iter().filter(|s| s.3 >= BASE + GIB).map(|s| (s.3, s.4, s.5)).collect();
    let (start, end) = (BASE + 3 * GIB, BASE + 3 * GIB + 5 * BYTES);
    let expected = [
        (BASE + GIB, 0, 2 * GIB),
        (start, 5 * BYTES, 5 * BYTES),
        (end, 0, BASE + 6 * GIB - end),
        (BASE + 7 * GIB, 2 * BYTES, 2 * BYTES),
    ];
    assert_eq!(shape, expected);
}

/// The notes of a file: kind and content.
fn notes(file: &[u8]) -> Vec<(u32, &[u8])> {
    let (kind, _, offset, _, length, _) = segments(file)[0];
    assert_eq!(kind, 4);
    let mut rest = &file[offset as usize..(offset + length) as usize];
    let mut found = Vec::new();
    while !rest.is_empty() {
        let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().expect("four"));
        let (owner, content) = (word(0) as usize, word(4) as usize);
        let at = 12 + owner.next_multiple_of(4);
        found.push((word(8), &rest[at..at + content]));
        rest = &rest[at + content.next_multiple_of(4)..];
    }
    found
}

#[test]
fn notes_say_who_it_is_and_the_agents_thread_is_none_of_it() {
    let place = Place::new("core-notes");
    images(&place);
    let file = written(&place, &[(BASE, b'a')]);
    let notes = notes(&file);
    let kinds: Vec<u32> = notes.iter().map(|note| note.0).collect();
    let each = [1, 2, 0x202];
    assert_eq!(kinds, [&[1, 3, 0x5349_4749, 6, 0x4649_4c45, 2, 0x202][..], &each].concat());
    let word =
        |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8"));
    for (note, tid) in [(0, 7u64), (7, 8)] {
        let status = notes[note].1;
        assert_eq!(
            (status.len(), word(status, 32) as u32, word(status, 24)),
            (336, tid as u32, 0x400)
        );
        assert_eq!((word(status, 112), word(status, 112 + 8 * 19)), (tid << 8 | 1, BASE));
    }
    let info = notes[1].1;
    assert_eq!(
        (info.len(), &info[40..50], &info[56..66]),
        (136, &b"a-program\0"[..], &b"aaaaaaaaa\0"[..])
    );
    assert_eq!((word(info, 16), word(info, 24)), (100 << 32 | 1000, 1 << 32 | 7));
    assert_eq!([word(notes[3].1, 0), word(notes[3].1, 8)], [6, 4096]);
    let files = notes[4].1;
    let place = [1, BYTES, 0x40_0000, 0x40_0000 + 3 * BYTES, 1];
    assert_eq!([0, 8, 16, 24, 32].map(|at| word(files, at)), place);
    assert_eq!(&files[40..], b"/bin/a-program\0");
    let extended = notes[6].1;
    assert_eq!((extended.len(), word(extended, 464), word(extended, 512)), (832, 7, 3));
    assert_eq!(word(extended, 160), 0xaabb_ccdd);
}

#[test]
fn what_is_no_image_of_criu_is_refused() {
    let place = Place::new("core-refused");
    images(&place);
    let at = place.path("images");
    let refused = || Process::read(&at, 7, &(0..0)).expect_err("refused").to_string();
    let no_process = Process::read(&at, 8, &(0..0)).expect_err("a thread");
    assert!(matches!(no_process, CoreError::NoProcess { pid: 8, .. }), "{no_process}");
    let file = with(Message::default(), 14, &mapping(BASE, BASE, PRIVATE, 0, 0));
    put(&at, "mm-7.img", &[file]);
    assert_eq!(refused(), "its image mm-7.img has mappings that no program has");
    put(&at, "core-8.img", &[numbers(&[(1, 2)])]);
    assert!(refused().contains("64-bit x86"));
    fs::remove_file(at.join("core-9.img")).expect("removed");
    put(&at, "core-8.img", &[core(8, BASE)]);
    assert_eq!(refused(), "its image core-9.img is missing");
    fs::write(at.join("pstree.img"), [1; 13]).expect("written");
    assert_eq!(refused(), "its image pstree.img is none that this version knows");
}

#[test]
fn nothing_is_left_where_pages_are_missing() {
    let place = Place::new("core-cut");
    images(&place);
    fs::write(place.path("images").join("pages-1.img"), [1; 5000]).expect("written");
    let process = Process::read(&place.path("images"), 7, &(0..0)).expect("read");
    let writer = Writer::create(&place.path("core"), process).expect("begun");
    assert!(matches!(writer.finish(), Err(CoreError::Images(_))));
    assert_eq!(place.names(), ["images"]);
    fs::write(place.path("core"), "mine").expect("written");
    let process = Process::read(&place.path("images"), 7, &(0..0)).expect("read");
    let there = Writer::create(&place.path("core"), process);
    assert!(matches!(there, Err(CoreError::Exists(_))));
}

#[test]
fn more_segments_than_the_header_counts_are_in_a_section() {
    let (short, none) = header(0xfffe, 4096, 8192);
    assert_eq!((short.len(), &short[56..58], none), (64, &[0xfe, 0xff][..], None));
    let (long, section) = header(70_000, 4096, 8192);
    let section = section.expect("a section");
    assert_eq!((&long[56..58], &long[60..62], section.len()), (&[0xff; 2][..], &[1, 0][..], 64));
    assert_eq!(
        (section[44..48].to_vec(), long[40..48].to_vec()),
        (70_000u32.to_le_bytes().to_vec(), 8192u64.to_le_bytes().to_vec())
    );
}
