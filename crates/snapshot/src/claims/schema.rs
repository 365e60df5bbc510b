//! What CRIU's images may consist of: which kinds there are, and which fields their
//! messages have (CRIU 4.2, `images/*.proto`).
//!
//! Everything is to mean here exactly what it will mean to CRIU. So a message that
//! could be read in two ways is none: one with a field twice, with a number that is
//! written longer than it need be or does not fit, or of a kind or with a field that
//! is not in these tables.

use crate::message::{Message, Value, take};

/// What a field is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Field {
    /// A number of 32 bits, a truth value, or one of a list.
    Int,
    /// A number of 64 bits.
    Long,
    /// Text, bytes, or a message of which nothing is to be known: registers, handlers
    /// and timers are a process's own, whoever it is.
    Bytes,
    /// Eight bytes as they are.
    Fixed,
    /// A message.
    Of(Fields),
}

/// The fields of a message: number, what it is, whether there may be several.
pub(super) type Fields = &'static [(u64, Field, bool)];

use Field::{Bytes, Fixed, Int, Long, Of};

const ONE: bool = false;
const MANY: bool = true;

const OWNER: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Int, ONE), (5, Int, ONE)];

const IDS: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Int, ONE),
    (5, Int, ONE),
    (6, Int, ONE),
    (7, Int, ONE),
    (8, Int, ONE),
    (9, Int, ONE),
    (10, Int, ONE),
    (11, Int, ONE),
    (12, Int, ONE),
];

const CREDENTIALS: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Int, ONE),
    (5, Int, ONE),
    (6, Int, ONE),
    (7, Int, ONE),
    (8, Int, ONE),
    (9, Int, MANY),
    (10, Int, MANY),
    (11, Int, MANY),
    (12, Int, MANY),
    (13, Int, ONE),
    (14, Int, MANY),
    (15, Bytes, ONE),
    (16, Bytes, ONE),
    (17, Bytes, ONE),
    (18, Int, ONE),
    (19, Int, MANY),
];

const LIMIT: Fields = &[(1, Long, ONE), (2, Long, ONE)];
const LIMITS: Fields = &[(1, Of(LIMIT), MANY)];

const TASK: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Int, ONE),
    (5, Long, ONE),
    (6, Bytes, ONE),
    (7, Bytes, ONE),
    (8, Of(LIMITS), ONE),
    (9, Int, ONE),
    (10, Bytes, ONE),
    (11, Int, ONE),
    (12, Int, ONE),
    (13, Int, ONE),
    (14, Int, ONE),
    (15, Bytes, MANY),
    (18, Int, ONE),
    (20, Long, ONE),
    (21, Int, ONE),
    (22, Int, ONE),
];

const THREAD: Fields = &[
    (1, Long, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Int, ONE),
    (5, Int, ONE),
    (6, Long, ONE),
    (7, Bytes, ONE),
    (8, Int, ONE),
    (9, Bytes, ONE),
    (10, Of(CREDENTIALS), ONE),
    (11, Int, ONE),
    (12, Int, ONE),
    (13, Bytes, ONE),
    (14, Long, ONE),
    (15, Bytes, ONE),
    (16, Int, ONE),
];

const CORE: Fields = &[
    (1, Int, ONE),
    (2, Bytes, ONE),
    (3, Of(TASK), ONE),
    (4, Of(IDS), ONE),
    (5, Of(THREAD), ONE),
    (8, Bytes, ONE),
];

const PLUGINS: Fields = &[(12, Bytes, MANY)];

const INVENTORY: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Of(IDS), ONE),
    (4, Int, ONE),
    (5, Int, ONE),
    (6, Int, ONE),
    (8, Long, ONE),
    (9, Int, ONE),
    (10, Int, ONE),
    (11, Int, ONE),
    (12, Of(PLUGINS), ONE),
    (13, Bytes, ONE),
    (14, Int, ONE),
];

const TREE: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Int, ONE), (5, Int, MANY)];

const MAPPING: Fields = &[
    (1, Long, ONE),
    (2, Long, ONE),
    (3, Long, ONE),
    (4, Long, ONE),
    (5, Int, ONE),
    (6, Int, ONE),
    (7, Int, ONE),
    (8, Long, ONE),
    (9, Long, ONE),
    (10, Int, ONE),
];

const RING: Fields = &[(1, Long, ONE), (2, Int, ONE), (3, Int, ONE)];

const MEMORY: Fields = &[
    (1, Long, ONE),
    (2, Long, ONE),
    (3, Long, ONE),
    (4, Long, ONE),
    (5, Long, ONE),
    (6, Long, ONE),
    (7, Long, ONE),
    (8, Long, ONE),
    (9, Long, ONE),
    (10, Long, ONE),
    (11, Long, ONE),
    (12, Int, ONE),
    (13, Long, MANY),
    (14, Of(MAPPING), MANY),
    (15, Int, ONE),
    (16, Of(RING), MANY),
    (17, Int, ONE),
];

const PLACE: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE)];
const REGULAR: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Long, ONE),
    (5, Of(OWNER), ONE),
    (6, Bytes, ONE),
    (7, Int, ONE),
    (8, Long, ONE),
    (9, Int, ONE),
    (10, Int, ONE),
    (11, Int, MANY),
    (12, Int, ONE),
    (13, Int, ONE),
    (14, Int, ONE),
];

const SOCKET_OPTIONS: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Long, ONE),
    (4, Long, ONE),
    (5, Long, ONE),
    (6, Long, ONE),
    (7, Int, ONE),
    (8, Int, ONE),
    (9, Int, ONE),
    (10, Int, ONE),
    (11, Int, ONE),
    (12, Int, ONE),
    (13, Int, ONE),
    (14, Int, ONE),
    (15, Bytes, ONE),
    (16, Fixed, MANY),
    (17, Int, ONE),
    (18, Int, ONE),
    (19, Int, ONE),
    (20, Int, ONE),
    (21, Int, ONE),
    (22, Int, ONE),
    (23, Int, ONE),
    (24, Int, ONE),
    (25, Int, ONE),
];

const RAW_OPTIONS: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Int, MANY)];
const IP_OPTIONS: Fields =
    &[(1, Int, ONE), (4, Of(RAW_OPTIONS), ONE), (5, Int, ONE), (6, Int, ONE), (7, Int, ONE)];
const TCP_OPTIONS: Fields =
    &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Int, ONE), (5, Int, ONE)];

const INET: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Int, ONE),
    (5, Int, ONE),
    (6, Int, ONE),
    (7, Int, ONE),
    (8, Int, ONE),
    (9, Int, ONE),
    (10, Int, ONE),
    (11, Int, MANY),
    (12, Int, MANY),
    (13, Of(OWNER), ONE),
    (14, Of(SOCKET_OPTIONS), ONE),
    (15, Int, ONE),
    (16, Of(IP_OPTIONS), ONE),
    (17, Bytes, ONE),
    (18, Int, ONE),
    (19, Int, ONE),
    (20, Of(TCP_OPTIONS), ONE),
];

const MODES: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE)];

const UNIX: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Int, ONE),
    (5, Int, ONE),
    (6, Int, ONE),
    (7, Int, ONE),
    (8, Int, ONE),
    (9, Of(OWNER), ONE),
    (10, Of(SOCKET_OPTIONS), ONE),
    (11, Bytes, ONE),
    (12, Int, ONE),
    (13, Of(MODES), ONE),
    (14, Bytes, ONE),
    (15, Int, ONE),
    (16, Int, ONE),
    (17, Int, ONE),
];

const EVENT: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Of(OWNER), ONE), (4, Long, ONE)];

const WATCHED: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Long, ONE),
    (5, Int, ONE),
    (6, Long, ONE),
    (7, Long, ONE),
];
const POLL: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Of(OWNER), ONE), (4, Of(WATCHED), MANY)];

const TIMER: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Of(OWNER), ONE),
    (4, Int, ONE),
    (5, Long, ONE),
    (6, Int, ONE),
    (7, Long, ONE),
    (8, Long, ONE),
    (9, Long, ONE),
    (10, Long, ONE),
];

const PIPE: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Of(OWNER), ONE)];
const FIFO: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE)];
const TERMINAL: Fields =
    &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Of(OWNER), ONE), (6, Int, ONE)];
const MEMORY_FILE: Fields =
    &[(1, Int, ONE), (2, Int, ONE), (3, Long, ONE), (4, Of(OWNER), ONE), (5, Int, ONE)];

/// Files of kinds that nobody but root may ask for are not looked into.
const FILE: Fields = &[
    (1, Int, ONE),
    (2, Int, ONE),
    (3, Of(REGULAR), ONE),
    (4, Of(INET), ONE),
    (5, Bytes, ONE),
    (6, Bytes, ONE),
    (7, Bytes, ONE),
    (8, Of(EVENT), ONE),
    (9, Of(POLL), ONE),
    (10, Of(EVENT), ONE),
    (11, Bytes, ONE),
    (12, Of(TIMER), ONE),
    (13, Bytes, ONE),
    (14, Bytes, ONE),
    (15, Bytes, ONE),
    (16, Of(UNIX), ONE),
    (17, Of(FIFO), ONE),
    (18, Of(PIPE), ONE),
    (19, Of(TERMINAL), ONE),
    (20, Of(MEMORY_FILE), ONE),
    (21, Bytes, ONE),
    (22, Bytes, ONE),
];

const DESCRIPTOR: Fields =
    &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Int, ONE), (5, Bytes, ONE)];

const MEMORY_INODE: Fields = &[
    (1, Bytes, ONE),
    (2, Int, ONE),
    (3, Int, ONE),
    (4, Long, ONE),
    (5, Int, ONE),
    (6, Int, ONE),
    (7, Long, ONE),
    (8, Int, ONE),
    (9, Int, ONE),
];

const DATA: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE)];
const RIGHTS: Fields = &[(1, Int, ONE), (2, Int, MANY)];
const PACKET: Fields = &[(1, Int, ONE), (2, Int, ONE), (4, Of(RIGHTS), MANY)];
const FILTER: Fields = &[(1, Bytes, ONE), (2, Int, ONE), (3, Int, ONE)];
const FILTERS: Fields = &[(1, Of(FILTER), MANY)];
const LOCK: Fields =
    &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE), (4, Int, ONE), (5, Long, ONE), (6, Long, ONE)];
const REMAP: Fields = &[(1, Int, ONE), (2, Int, ONE), (3, Int, ONE)];
const PAGES_HEAD: Fields = &[(1, Int, ONE)];
const PAGES: Fields =
    &[(1, Long, ONE), (2, Int, ONE), (3, Int, ONE), (4, Int, ONE), (5, Long, ONE)];
const CLOCK: Fields = &[(1, Long, ONE), (2, Long, ONE)];
const CLOCKS: Fields = &[(1, Of(CLOCK), ONE), (2, Of(CLOCK), ONE)];

/// How the rows of an image lie in it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    /// Exactly one.
    One(Fields),
    /// Any number.
    Rows(Fields),
    /// Any number, and behind each as many bytes as its field 2 says.
    WithData(Fields),
    /// One of the first kind, then any number of the second.
    Headed(Fields, Fields),
    /// One, behind it bytes of other forms. It is not looked into further: nobody but
    /// root may ask for what is in it.
    Beginning,
    /// Bytes, none of them looked at: contents of memory.
    Raw,
    /// Not read by whoever restores.
    Ignored,
}

/// A kind of image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// What it is called: before the number, or all of it but `.img`.
    pub(super) name: &'static str,
    /// Its second word (CRIU's `magic.h`); of the inventory the first.
    magic: u32,
    pub(super) form: Form,
}

const COMMON: u32 = 0x5456_4319;
const INVENTORY_NAME: &str = "inventory";

const KINDS: &[Kind] = &[
    Kind { name: INVENTORY_NAME, magic: 0x5831_3116, form: Form::One(INVENTORY) },
    Kind { name: "pstree", magic: 0x5027_3030, form: Form::Rows(TREE) },
    Kind { name: "core-", magic: 0x5505_3847, form: Form::One(CORE) },
    Kind { name: "ids-", magic: 0x5443_2030, form: Form::One(IDS) },
    Kind { name: "fs-", magic: 0x5140_3912, form: Form::One(PLACE) },
    Kind { name: "mm-", magic: 0x5749_2820, form: Form::One(MEMORY) },
    Kind { name: "pagemap-", magic: 0x5608_4025, form: Form::Headed(PAGES_HEAD, PAGES) },
    Kind { name: "pagemap-shmem-", magic: 0x5608_4025, form: Form::Headed(PAGES_HEAD, PAGES) },
    Kind { name: "pages-", magic: 0, form: Form::Raw },
    Kind { name: "fdinfo-", magic: 0x5621_3732, form: Form::Rows(DESCRIPTOR) },
    Kind { name: "files", magic: 0x5630_3138, form: Form::Rows(FILE) },
    Kind { name: "memfd", magic: 0x4845_3499, form: Form::Rows(MEMORY_INODE) },
    Kind { name: "pipes-data", magic: 0x5645_3709, form: Form::WithData(DATA) },
    Kind { name: "fifo-data", magic: 0x5933_3054, form: Form::WithData(DATA) },
    Kind { name: "sk-queues", magic: 0x5626_4026, form: Form::WithData(PACKET) },
    Kind { name: "seccomp", magic: 0x6441_3049, form: Form::One(FILTERS) },
    Kind { name: "filelocks", magic: 0x5432_3616, form: Form::Rows(LOCK) },
    Kind { name: "remap-fpath", magic: 0x5913_3954, form: Form::Rows(REMAP) },
    Kind { name: "timens-", magic: 0x4311_4433, form: Form::One(CLOCKS) },
    Kind { name: "tcp-stream-", magic: 0x5146_5506, form: Form::Beginning },
    Kind { name: "ghost-file-", magic: 0x5258_3605, form: Form::Beginning },
    Kind { name: "tty-info", magic: 0x5945_3036, form: Form::Beginning },
    Kind { name: "tty-data", magic: 0x5941_3026, form: Form::Beginning },
    Kind { name: "stats-dump", magic: 0, form: Form::Ignored },
    // CRIU is told to leave cgroups alone (`IGNORE_CGROUPS`).
    Kind { name: "cgroup", magic: 0x5938_3330, form: Form::Ignored },
];

/// An image by its name: its kind, and the number in the name, if that kind has one.
/// None: an unknown kind.
pub(super) fn kind_of(file: &str) -> Option<(&'static Kind, Option<u64>)> {
    let name = file.strip_suffix(".img").unwrap_or(file);
    if let Some(kind) = KINDS.iter().find(|kind| kind.name == name && !name.ends_with('-')) {
        return Some((kind, None));
    }
    let numbered = |kind: &&Kind| {
        let digits = name.strip_prefix(kind.name).filter(|_| kind.name.ends_with('-'))?;
        let radix = if matches!(kind.form, Form::Beginning) { 16 } else { 10 };
        let number = u64::from_str_radix(digits, radix).ok()?;
        // As CRIU writes it, and no other way.
        let text = if radix == 16 { format!("{number:x}") } else { number.to_string() };
        (text == digits).then_some(number)
    };
    KINDS.iter().find_map(|kind| Some((kind, Some(numbered(&kind)?))))
}

/// Whether a message is one of these fields, read in no other way by anybody; else
/// the number of the field that is not, after those of the messages that it is in.
fn check(bytes: &[u8], fields: Fields) -> Result<Message, String> {
    let message = Message::parse(bytes).ok_or("it is no message")?;
    if message.bytes() != bytes {
        return Err("it is not written as CRIU writes".into());
    }
    let mut seen = 0u64;
    for (number, value) in &message.0 {
        let Some(&(_, field, many)) = fields.iter().find(|(known, ..)| known == number) else {
            return Err(format!("field {number} is not known"));
        };
        // All of them are below 64.
        let bit = 1u64 << (number & 63);
        if seen & bit != 0 && !many {
            return Err(format!("field {number} is there twice"));
        }
        seen |= bit;
        let fits = match (field, value) {
            (Int, Value::Number(value)) => {
                // A negative one has 64 bits in any case.
                u32::try_from(*value).is_ok() || i32::try_from(value.cast_signed()).is_ok()
            }
            (Long, Value::Number(_)) | (Bytes, Value::Bytes(_)) => true,
            (Fixed, Value::Fixed(bytes)) => bytes.len() == 8,
            (Of(fields), Value::Bytes(bytes)) => {
                check(bytes, fields).map_err(|why| format!("field {number}: {why}"))?;
                true
            }
            _ => false,
        };
        if !fits {
            return Err(format!("field {number} is not what it should be"));
        }
    }
    Ok(message)
}

fn row<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], String> {
    let cut = || "it is cut off".to_owned();
    let length = take(rest, 4).and_then(|bytes| bytes.try_into().ok()).ok_or_else(cut)?;
    take(rest, u32::from_le_bytes(length) as usize).ok_or_else(cut)
}

/// The messages of an image, checked.
///
/// # Errors
/// What is wrong with it.
pub(super) fn read(kind: &Kind, image: &[u8]) -> Result<Vec<Message>, String> {
    let mut rest = image;
    if matches!(kind.form, Form::Raw | Form::Ignored) {
        return Ok(Vec::new());
    }
    let words = if kind.name == INVENTORY_NAME { &[kind.magic][..] } else { &[COMMON, kind.magic] };
    for word in words {
        if take(&mut rest, 4) != Some(&word.to_le_bytes()[..]) {
            return Err("it is of another kind than its name says".into());
        }
    }
    let mut found = Vec::new();
    match kind.form {
        Form::Raw | Form::Ignored | Form::Beginning => {}
        Form::One(fields) => {
            found.push(check(row(&mut rest)?, fields)?);
            if !rest.is_empty() {
                return Err("there is more in it".into());
            }
        }
        Form::Headed(head, fields) => {
            found.push(check(row(&mut rest)?, head)?);
            while !rest.is_empty() {
                found.push(check(row(&mut rest)?, fields)?);
            }
        }
        Form::Rows(fields) => {
            while !rest.is_empty() {
                found.push(check(row(&mut rest)?, fields)?);
            }
        }
        Form::WithData(fields) => {
            while !rest.is_empty() {
                let message = check(row(&mut rest)?, fields)?;
                let length = message.number(2).unwrap_or(0) as u32 as usize;
                take(&mut rest, length).ok_or("it is cut off")?;
                found.push(message);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_one_kind() {
        let name = |file| kind_of(file).map(|(kind, number)| (kind.name, number));
        assert_eq!(name("core-12.img"), Some(("core-", Some(12))));
        assert_eq!(name("pagemap-3.img"), Some(("pagemap-", Some(3))));
        assert_eq!(name("pagemap-shmem-3.img"), Some(("pagemap-shmem-", Some(3))));
        assert_eq!(name("tcp-stream-af.img"), Some(("tcp-stream-", Some(0xaf))));
        assert_eq!(name("files.img"), Some(("files", None)));
        let unknown = [
            "core-.img",
            "core-012.img",
            "core-+1.img",
            "core--1.img",
            "core-1.img.img",
            "core-1x.img",
            "core.img",
            "files-1.img",
            "mountpoints-12.img",
            "userns-9.img",
            "netns-10.img",
            "x",
            "pidns-1.img",
            "autofs-1.img",
            "apparmor.img",
            "creds-1.img",
            ".img",
            "",
        ];
        for file in unknown {
            assert_eq!(name(file), None, "{file}");
        }
    }

    fn image(magic: u32, rows: &[&[u8]]) -> Vec<u8> {
        let mut out = [COMMON.to_le_bytes(), magic.to_le_bytes()].concat();
        for row in rows {
            out.extend((row.len() as u32).to_le_bytes());
            out.extend(*row);
        }
        out
    }

    /// Why an image of pids is refused with this as its row.
    fn refused(row: &[u8]) -> Option<String> {
        let (kind, _) = kind_of("pstree.img").expect("a kind");
        read(kind, &image(kind.magic, &[row])).err()
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        assert_eq!(refused(&[8, 1, 16, 0, 24, 1, 32, 1, 40, 1, 40, 2]), None);
        for (row, why) in [
            (&[8, 1, 8, 2][..], "field 1 is there twice"),
            (&[72, 1], "field 9 is not known"),
            (&[8, 0x81, 0], "not written as CRIU writes"),
            (&[10, 1, 7], "field 1 is not what it should be"),
            (&[8, 0xff, 0xff, 0xff, 0xff, 0x1f], "field 1 is not what it should be"),
            (&[0x88, 0, 1], "not written as CRIU writes"),
            (&[11], "no message"),
            // Several numbers in one: CRIU takes them, too.
            (&[42, 2, 1, 2], "field 5 is not what it should be"),
        ] {
            let found = refused(row).unwrap_or_default();
            assert!(found.contains(why), "{row:?}: {found}");
        }
        // Minus one.
        let negative = [&[8][..], &[0xff; 9], &[1]].concat();
        assert_eq!(refused(&negative), None);
    }

    #[test]
    fn what_is_cut_off_or_of_another_kind_is_refused() {
        let (kind, _) = kind_of("pipes-data.img").expect("a kind");
        let whole = [image(kind.magic, &[&[8, 7, 16, 3]]), b"abc".to_vec()].concat();
        assert_eq!(read(kind, &whole).expect("whole").len(), 1);
        for length in 0..whole.len() {
            assert_eq!(read(kind, &whole[..length]).is_ok(), length == 8, "{length}");
        }
        let (other, _) = kind_of("fifo-data.img").expect("a kind");
        assert!(read(other, &whole).is_err_and(|why| why.contains("another kind")));
        let (one, _) = kind_of("ids-1.img").expect("a kind");
        let two = image(one.magic, &[&[8, 1], &[8, 1]]);
        assert!(read(one, &two).is_err_and(|why| why.contains("more")));
    }
}
