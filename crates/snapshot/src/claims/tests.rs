use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::message::{Message, Value};

const USER: u32 = 1000;

fn limits() -> String {
    let mut text =
        "Limit                     Soft Limit           Hard Limit           Units\n".to_owned();
    for name in LIMIT_NAMES {
        text += &format!("{name:26}unlimited            unlimited            bytes\n");
    }
    text
}

fn owner() -> Owner {
    Owner { user: USER, groups: BTreeSet::from([USER, 10]), limits: Limits::of(&limits()) }
}

fn numbers(fields: &[(u64, u64)]) -> Message {
    Message(fields.iter().map(|&(field, value)| (field, Value::Number(value))).collect())
}

trait With: Sized {
    fn with(self, field: u64, inner: &Message) -> Self;
    fn saying(self, field: u64, text: &[u8]) -> Self;
    fn and(self, field: u64, value: u64) -> Self;
}

impl With for Message {
    fn with(mut self, field: u64, inner: &Message) -> Self {
        self.0.push((field, Value::Bytes(inner.bytes())));
        self
    }

    fn saying(mut self, field: u64, text: &[u8]) -> Self {
        self.0.push((field, Value::Bytes(text.to_vec())));
        self
    }

    fn and(mut self, field: u64, value: u64) -> Self {
        self.0.push((field, Value::Number(value)));
        self
    }
}

/// An image with these two words, or the one of an inventory.
fn image(magic: u32, rows: &[Message]) -> Vec<u8> {
    let mut out = Vec::new();
    if magic != INVENTORY {
        out.extend(0x5456_4319_u32.to_le_bytes());
    }
    out.extend(magic.to_le_bytes());
    for row in rows {
        let row = row.bytes();
        out.extend((row.len() as u32).to_le_bytes());
        out.extend(row);
    }
    out
}

const INVENTORY: u32 = 0x5831_3116;
const TREE: u32 = 0x5027_3030;
const CORE: u32 = 0x5505_3847;
const IDS: u32 = 0x5443_2030;
const PLACE: u32 = 0x5140_3912;
const MEMORY: u32 = 0x5749_2820;
const TABLE: u32 = 0x5621_3732;
const FILES: u32 = 0x5630_3138;
const MEMORY_FILES: u32 = 0x4845_3499;
const LOCKS: u32 = 0x5432_3616;

fn ids() -> Message {
    numbers(&[(1, 2), (2, 2), (3, 2), (4, 2), (5, 1), (6, 2), (7, 3), (8, 4), (9, 5), (10, 6)])
}

fn nobody() -> Message {
    numbers(&[(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)])
}

fn credentials(user: u32) -> Message {
    let user = u64::from(user);
    let all: Vec<(u64, u64)> = (1..=8).map(|field| (field, user)).collect();
    numbers(&all).and(12, 0xffff_ffff).and(12, 0x1ff).and(13, 0).and(14, 10)
}

fn core(thread: &Message) -> Message {
    let task = numbers(&[(1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]).saying(6, b"own");
    numbers(&[(1, 1)]).saying(2, b"registers").with(3, &task).with(5, thread)
}

fn thread(credentials: &Message) -> Message {
    numbers(&[(1, 0), (2, 24), (3, 0), (4, 0), (5, 0)]).with(10, credentials)
}

fn file(kind: u64, id: u64, field: u64, inner: &Message) -> Message {
    numbers(&[(1, kind), (2, id)]).with(field, inner)
}

fn regular(id: u64, path: &str, flags: u64) -> Message {
    let inner =
        numbers(&[(1, id), (2, flags), (3, 0)]).with(5, &nobody()).saying(6, path.as_bytes());
    file(1, id, 3, &inner)
}

/// Which file is open as what.
fn opened(id: u64, kind: u64, number: u64) -> Message {
    numbers(&[(1, id), (2, 0), (3, kind), (4, number)])
}

/// Images of one process, 7, that asks for nothing but to be the user.
fn images() -> Images {
    let inventory = numbers(&[(1, 2), (2, 1)]).with(3, &ids()).and(4, 1);
    let mapping = numbers(&[
        (1, 0x40_0000),
        (2, 0x40_1000),
        (3, 0),
        (4, 1),
        (5, 5),
        (6, 2),
        (7, 0x41),
        (8, u64::MAX),
    ]);
    let mut memory = Message::default();
    for field in 1..=11 {
        memory = memory.and(field, 0x40_0000);
    }
    let memory = memory.and(12, 1).with(14, &mapping).and(15, 1);
    let of = |rows: &[Message], magic| image(magic, rows);
    [
        ("inventory.img", of(&[inventory], INVENTORY)),
        ("pstree.img", of(&[numbers(&[(1, 7), (2, 0), (3, 3), (4, 3), (5, 7)])], TREE)),
        ("core-7.img", of(&[core(&thread(&credentials(USER)))], CORE)),
        ("ids-7.img", of(&[ids()], IDS)),
        ("fs-7.img", of(&[numbers(&[(1, 2), (2, 2), (3, 0o22)])], PLACE)),
        ("mm-7.img", of(&[memory], MEMORY)),
        ("fdinfo-2.img", of(&[opened(3, 1, 0), opened(9, 9, 4)], TABLE)),
        (
            "files.img",
            of(
                &[
                    regular(1, "/usr/bin/own", 0),
                    regular(2, "/", 0o200_000),
                    regular(3, "/dev/null", 2),
                ],
                FILES,
            ),
        ),
        ("pages-1.img", Vec::new()),
    ]
    .into_iter()
    .map(|(name, bytes)| (name.to_owned(), bytes))
    .collect()
}

fn anywhere(_: &Path, _: u32) -> Result<(), String> {
    Ok(())
}

/// What the owner has no right to, in words.
fn beyond(images: &Images) -> Vec<String> {
    check(&read(images), &owner(), &anywhere).iter().map(ToString::to_string).collect()
}

#[test]
fn a_plain_program_asks_for_itself_alone() {
    assert_eq!(beyond(&images()), [""; 0]);
    let words: Vec<String> = read(&images()).iter().map(ToString::to_string).collect();
    assert_eq!(
        words,
        [
            "process 7: user 1000",
            "process 7: group 10",
            "process 7: group 1000",
            "process 7: file / to read",
            "process 7: file /dev/null to read and write",
            "process 7: file /usr/bin/own to read",
        ]
    );
}

/// The images with another core of the process.
fn with_core(core: Message) -> Images {
    let mut images = images();
    images.insert("core-7.img".into(), image(CORE, &[core]));
    images
}

/// The images with one more open file of the process.
fn with_file(kind: u64, field: u64, inner: &Message) -> Images {
    let mut images = images();
    let files = images.get_mut("files.img").expect("files");
    let row = file(kind, 9, field, inner).bytes();
    files.extend((row.len() as u32).to_le_bytes());
    files.extend(row);
    images
}

fn assert_refused(images: &Images, expected: &str) {
    let found = beyond(images);
    assert!(found.iter().any(|words| words.starts_with(expected)), "{expected}: {found:?}");
}

#[test]
fn what_a_process_is_to_be_is_its_owners_or_refused() {
    for field in [1, 3, 5, 7] {
        let mut other = credentials(USER);
        other.set(field, Value::Number(0));
        assert_refused(&with_core(core(&thread(&other))), "process 7: user 0");
        other.set(field, Value::Number(u64::from(USER)));
        other.set(field + 1, Value::Number(0));
        assert_refused(&with_core(core(&thread(&other))), "process 7: group 0");
    }
    let own = || credentials(USER);
    for (changed, expected) in [
        (own().and(14, 0), "process 7: group 0"),
        (own().and(10, 0).and(10, 1 << 7), "process 7: permitted capabilities: cap_bpf"),
        (own().and(11, 1 << 21), "process 7: effective capabilities: cap_sys_admin"),
        (own().and(19, 1), "process 7: ambient capabilities: cap_chown"),
        (own().and(9, 1), "process 7: inheritable capabilities: cap_chown"),
        (own().saying(15, b"unconfined_t"), "process 7: security label unconfined_t"),
    ] {
        assert_refused(&with_core(core(&thread(&changed))), expected);
    }
    let mut bits = own();
    bits.set(13, Value::Number(0x2f));
    assert_refused(&with_core(core(&thread(&bits))), "process 7: securebits 0x2f");
    // Without any, CRIU leaves it what CRIU is.
    assert_refused(&with_core(core(&numbers(&[(1, 0), (2, 24)]))), "process 7: user 0");
    // A filter is one's own only for one who cannot gain privileges.
    let filtered = |own: &Message| core(&thread(own).and(11, 2));
    assert_refused(&with_core(filtered(&own())), "process 7: seccomp filter without");
    assert_eq!(beyond(&with_core(filtered(&own().and(18, 1)))), [""; 0]);
    for (policy, words) in [(1, "policy 1, priority 50"), (6, "policy 6, priority 50")] {
        let mut real = thread(&own());
        real.set(4, Value::Number(policy));
        real.set(5, Value::Number(50));
        assert_refused(&with_core(core(&real)), &format!("process 7: scheduling: {words}"));
    }
    let mut nice = thread(&own());
    nice.set(3, Value::Number(39));
    assert_refused(&with_core(core(&nice)), "process 7: scheduling: nice -20");
    let task = |field, value| {
        let task = numbers(&[(1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]).saying(6, b"own");
        numbers(&[(1, 1)]).with(3, &task.and(field, value)).with(5, &thread(&own()))
    };
    assert_refused(&with_core(task(13, 0)), "process 7: login user 0");
    assert_eq!(beyond(&with_core(task(13, u64::from(u32::MAX)))), [""; 0]);
    assert_refused(
        &with_core(task(14, (-1000i64).cast_unsigned())),
        "process 7: oom_score_adj -1000",
    );
    assert_refused(&with_core(task(11, 2)), "process 7: seccomp filter");
}

#[test]
fn limits_are_those_that_users_have() {
    let limit = numbers(&[(1, 5), (2, u64::MAX)]);
    let limits = Message::default().with(1, &limit).with(1, &numbers(&[(1, 5), (2, 64)]));
    let task =
        numbers(&[(1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]).saying(6, b"own").with(8, &limits);
    let images = with_core(numbers(&[(1, 1)]).with(3, &task).with(5, &thread(&credentials(USER))));
    assert_eq!(beyond(&images), [""; 0]);
    let few = Owner {
        limits: Limits::of(
            "\nMax cpu time              9   9  seconds\nMax file size             9                    63                   bytes\n",
        ),
        ..owner()
    };
    let found: Vec<String> =
        check(&read(&images), &few, &anywhere).iter().map(ToString::to_string).collect();
    assert_eq!(
        found,
        [
            "process 7: hard limit of processor time: unlimited",
            "process 7: hard limit of file size: 64",
        ]
    );
}

#[test]
fn files_are_asked_of_whoever_knows_the_file_system() {
    let refuse = |path: &Path, flags: u32| match (path.to_str(), flags) {
        (Some("/dev/null"), 2) => Err("no".to_owned()),
        _ => Ok(()),
    };
    let found: Vec<String> =
        check(&read(&images()), &owner(), &refuse).iter().map(ToString::to_string).collect();
    assert_eq!(found, ["process 7: file /dev/null to read and write (no)"]);
    let inner = |path: &[u8], flags| {
        numbers(&[(1, 9), (2, flags), (3, 0)]).with(5, &nobody()).saying(6, path)
    };
    assert_refused(
        &with_file(1, 3, &inner(b"/tmp/x", 0o1100)),
        "process 7: file /tmp/x to read (flags 1100",
    );
    for path in [&b"tmp/x"[..], b"", b"/a\0b", b"/\xff"] {
        assert_refused(
            &with_file(1, 3, &inner(path, 0)),
            "the snapshot: unknown: file without a path",
        );
    }
    let plugins = inner(b"/x", 0).and(9, 1);
    assert_refused(&with_file(1, 3, &plugins), "process 7: file of a plug-in");
    // Signals go to the processes of the snapshot, and as their owner.
    let mut signals = inner(b"/x", 0);
    signals.set(5, Value::Bytes(numbers(&[(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]).bytes()));
    assert_refused(&with_file(1, 3, &signals), "process 7: signals to process 1");
    signals.set(5, Value::Bytes(numbers(&[(1, 0), (2, 0), (3, 0), (4, 1), (5, 7)]).bytes()));
    assert_refused(&with_file(1, 3, &signals), "process 7: user 0");
}

#[test]
fn open_files_that_need_a_right_are_refused() {
    let empty = Message::default();
    for (kind, field, expected) in [
        (3, 17, "process 7: named pipe"),
        (8, 13, "process 7: inotify"),
        (10, 6, "process 7: packet socket"),
        (11, 19, "process 7: terminal"),
        (12, 14, "process 7: fanotify"),
        (13, 7, "process 7: netlink"),
        (14, 5, "process 7: namespace"),
        (15, 11, "process 7: network device"),
        (16, 15, "process 7: file of a plug-in"),
        (19, 21, "process 7: BPF map"),
        (20, 22, "process 7: descriptor of a process"),
        (21, 22, "the snapshot: unknown: open file of kind 21"),
        (1, 17, "the snapshot: unknown: open file 9 is not of its kind"),
    ] {
        assert_refused(&with_file(kind, field, &empty), expected);
    }
    for kind in [(2, 18), (6, 8), (7, 9), (9, 10), (17, 12), (18, 20)] {
        assert_eq!(beyond(&with_file(kind.0, kind.1, &empty)), [""; 0], "{kind:?}");
    }
    assert_refused(&with_file(17, 12, &numbers(&[(4, 9)])), "process 7: timer that wakes");
}

#[test]
fn sockets_that_reach_further_are_refused() {
    let options =
        |field, value| numbers(&[(1, 9), (2, 9), (3, 0), (4, 0), (5, 0), (6, 0), (field, value)]);
    let inet = |state: u64, port: u64, protocol: u64| {
        numbers(&[(1, 9), (2, 5), (3, 2), (4, 1), (5, protocol), (6, state), (7, port), (8, 0)])
    };
    assert_eq!(beyond(&with_file(4, 4, &inet(10, 8080, 6))), [""; 0]);
    for (socket, expected) in [
        (inet(10, 80, 6), "process 7: port 80"),
        (inet(1, 8080, 6), "process 7: established connection"),
        (inet(10, 8080, 1), "process 7: socket: family 2, type 1, protocol 1"),
        (inet(10, 8080, 6).with(14, &options(10, 5)), "process 7: socket: mark 5"),
        (inet(10, 8080, 6).with(14, &options(8, 7)), "process 7: socket: priority 7"),
        (inet(10, 8080, 6).saying(17, b"eth0"), "process 7: socket: bound to the device eth0"),
    ] {
        assert_refused(&with_file(4, 4, &socket), expected);
    }
    let unix = |name: &[u8], uflags| {
        numbers(&[(1, 9), (2, 5), (3, 1), (4, 10), (5, 0), (6, uflags)]).saying(11, name)
    };
    assert_eq!(beyond(&with_file(5, 16, &unix(b"\0abstract", 0))), [""; 0]);
    assert_eq!(beyond(&with_file(5, 16, &unix(b"", 0))), [""; 0]);
    assert_refused(
        &with_file(5, 16, &unix(b"/run/x.sock\0", 0)),
        "process 7: unix socket at /run/x.sock",
    );
    assert_refused(&with_file(5, 16, &unix(b"", 1)), "process 7: socket: stands for");
    let modes = unix(b"", 0).with(13, &numbers(&[(1, 0o777), (2, 0), (3, 0)]));
    assert_refused(&with_file(5, 16, &modes), "process 7: socket: permissions");
}

#[test]
fn what_is_around_a_process_is_its_own_or_refused() {
    let change = |name: &str, bytes: Vec<u8>| {
        let mut images = images();
        images.insert(name.to_owned(), bytes);
        images
    };
    let tree = |rows: &[Message]| change("pstree.img", image(TREE, rows));
    let row = |pid, parent, group, session| {
        numbers(&[(1, pid), (2, parent), (3, group), (4, session), (5, pid)])
    };
    let two = |second: Message| {
        let mut images = tree(&[row(7, 0, 3, 3), second]);
        images.insert("core-8.img".into(), image(CORE, &[core(&thread(&credentials(USER)))]));
        images
    };
    assert_eq!(beyond(&two(row(8, 7, 3, 3))), [""; 0]);
    assert_eq!(beyond(&two(row(8, 7, 8, 7))), [""; 0]);
    assert_refused(&two(row(8, 7, 3, 1)), "process 8: session 1, of others");
    assert_refused(&two(row(8, 7, 5, 3)), "process 8: process group 5, of others");
    assert_refused(&two(row(8, 1, 3, 3)), "process 8: parent 1, of others");
    assert_refused(&two(row(7, 0, 3, 3)), "the snapshot: unknown: process 7 is there twice");
    assert_refused(&tree(&[]), "the snapshot: unknown: no list of processes");
    assert_refused(&tree(&[row(7, 0, 3, 3).and(5, 99)]), "the snapshot: unknown: thread 99");
    let mut spaces = ids();
    spaces.set(10, Value::Number(9));
    assert_refused(&change("ids-7.img", image(IDS, &[spaces])), "process 7: user namespace");
    let elsewhere = numbers(&[(1, 2), (2, 3), (3, 0)]);
    assert_refused(
        &change("fs-7.img", image(PLACE, &[elsewhere])),
        "process 7: root directory /dev/null",
    );
    let memory = |fields: &[(u64, u64)]| {
        let memory = numbers(&[(12, 1)]).with(14, &numbers(fields));
        change("mm-7.img", image(MEMORY, &[memory]))
    };
    let mapping = |start, end, flags, status| {
        memory(&[(1, start), (2, end), (3, 0), (4, 0), (5, 3), (6, flags), (7, status)])
    };
    assert_eq!(beyond(&mapping(1 << 20, 2 << 20, 0x22, 0x201)), [""; 0]);
    for (images, expected) in [
        (mapping(0, 4096, 0x22, 0x201), "process 7: memory: from 0x0"),
        (mapping(1 << 20, 1 << 20, 0x22, 0x201), "process 7: memory: from 0x100000"),
        (mapping(1 << 20, u64::MAX, 0x22, 0x201), "process 7: memory: up to"),
        (mapping(1 << 20, 2 << 20, 0x40022, 0x201), "process 7: memory: with flags 0x40000"),
        (mapping(1 << 20, 2 << 20, 0x21, 0x501), "process 7: memory: of kind 0x400"),
        (mapping(1 << 20, 2 << 20, 0x22, 1 << 27), "process 7: memory: of kind 0x8000000"),
    ] {
        assert_refused(&images, expected);
    }
    let claims = read(&mapping(1 << 20, 2 << 20, 0x2022, 0x201));
    let locked = Claim { process: Some(7), what: What::LockedMemory(1 << 20) };
    assert!(claims.contains(&locked));
    let memory_file = numbers(&[(2, 5), (3, u64::from(USER)), (4, 9), (9, 0o777)]).saying(1, b"x");
    let refused = change("memfd.img", image(MEMORY_FILES, &[memory_file]));
    assert_refused(&refused, "the snapshot: memory file of user 5");
    let lease =
        change("filelocks.img", image(LOCKS, &[numbers(&[(1, 32), (2, 0), (3, 7), (4, 0)])]));
    assert_refused(&lease, "process 7: file lock of kind 0x20");
    for (name, expected) in [
        ("mountpoints-12.img", "the snapshot: unknown: image mountpoints-12.img"),
        ("userns-9.img", "the snapshot: unknown: image userns-9.img"),
        ("core-99.img", "the snapshot: unknown: image core-99"),
        ("parent", "the snapshot: unknown: image parent"),
        ("ghost-file-1.img", "the snapshot: deleted file ghost-file-1"),
        ("tcp-stream-5.img", "the snapshot: established connection tcp-stream-5"),
        ("tty-info.img", "the snapshot: terminal"),
    ] {
        assert_refused(&change(name, Vec::new()), expected);
    }
    for name in ["inventory.img", "core-7.img"] {
        let mut images = images();
        images.remove(name);
        assert!(!beyond(&images).is_empty(), "without {name}");
    }
    let setup = |field, value| {
        let mut inventory = numbers(&[(1, 2), (2, 1)]).with(3, &ids()).and(4, 1);
        inventory.set(field, Value::Number(value));
        change("inventory.img", image(INVENTORY, &[inventory]))
    };
    for (field, value) in [(1, 1), (2, 0), (4, 0), (9, 1), (14, 1)] {
        assert_refused(&setup(field, value), "the snapshot: set-up");
    }
}

proptest! {
    /// One bit of one image changed: nothing that was refused is allowed by it, and
    /// nothing of it panics.
    #[test]
    fn damage_gives_no_right(at in any::<prop::sample::Index>(), bit in 0u8..8, which in any::<prop::sample::Index>()) {
        let mut images = with_file(4, 4, &numbers(&[(1, 9), (2, 5), (3, 2), (4, 1), (5, 6), (6, 10), (7, 8080)]));
        let names: Vec<String> = images.keys().filter(|name| !images[*name].is_empty()).cloned().collect();
        let name = which.get(&names);
        let bytes = images.get_mut(name).expect("there");
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        for claim in read(&images) {
            let found = check(std::slice::from_ref(&claim), &owner(), &anywhere);
            match claim.what {
                What::User(user) => prop_assert_eq!(found.is_empty(), user == USER),
                What::Unknown(_) | What::Setup(_) => prop_assert!(!found.is_empty()),
                _ => {}
            }
        }
    }
}
