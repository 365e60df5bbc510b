use super::reply::Extent;
use super::*;

const INFO: Info = Info { size_bytes: 1 << 20, read_only: false };
const ALL: Agreed = Agreed { structured: true, allocation: true };

fn option(option: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((value.len() as u32).to_be_bytes());
    bytes.extend(value);
    bytes
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    let mut value = (name.len() as u32).to_be_bytes().to_vec();
    value.extend(name.as_bytes());
    value.extend(rest);
    value
}

fn contexts(name: &str, contexts: &[&str]) -> Vec<u8> {
    let mut rest = (contexts.len() as u32).to_be_bytes().to_vec();
    for context in contexts {
        rest.extend(named(context, &[]));
    }
    named(name, &rest)
}

/// What a client that sends these bytes hears, and what it comes to.
fn heard(flags: u32, mut bytes: &[u8]) -> Result<(Vec<u8>, Next), Nonsense> {
    let mut handshake = Handshake::new(INFO);
    let mut answers = handshake.hear(&flags.to_be_bytes())?.answer;
    loop {
        let wanted = handshake.wanted();
        if wanted > bytes.len() || bytes.is_empty() {
            return Ok((answers, Next::More));
        }
        let (piece, rest) = bytes.split_at(wanted);
        bytes = rest;
        let step = handshake.hear(piece)?;
        answers.extend(step.answer);
        if step.next != Next::More {
            assert_eq!(handshake.wanted(), 0);
            assert!(handshake.hear(&[]).is_err(), "nothing more is heard");
            return Ok((answers, step.next));
        }
    }
}

/// Kinds and values of the replies.
fn replies(mut bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let mut numbers = Numbers(bytes);
        assert_eq!(numbers.u64(), Some(0x0003_e889_0455_65a9));
        let _option = numbers.u32().expect("an option");
        let kind = numbers.u32().expect("a kind");
        let length = numbers.u32().expect("a length");
        found.push((kind, numbers.take(length as usize).expect("all of it").to_vec()));
        bytes = numbers.0;
    }
    found
}

#[test]
fn a_client_gets_as_far_as_it_asks() {
    assert_eq!(&Handshake::greeting()[..], b"NBDMAGICIHAVEOPT\0\x03");
    let mut bytes = option(8, &[]);
    bytes.extend(option(10, &contexts("", &["base:allocation", "qemu:x"])));
    bytes.extend(option(7, &named("disk", &[0, 1, 0, 3])));
    let (answers, next) = heard(3, &bytes).expect("a client");
    assert_eq!(next, Next::Transmission(ALL));
    let replies = replies(&answers);
    let kinds: Vec<u32> = replies.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [1, 4, 1, 3, 3, 1]);
    assert_eq!(&replies[1].1[..], b"\0\0\0\x01base:allocation");
    assert_eq!(&replies[3].1[2..10], &(1u64 << 20).to_be_bytes());
    assert_eq!(&replies[4].1[..], b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");
}

#[test]
fn the_old_way_in_has_124_zeroes_unless_they_are_declined() {
    for (flags, bytes) in [(1, 134), (3, 10)] {
        let (answers, next) = heard(flags, &option(1, b"disk")).expect("a client");
        assert_eq!((answers.len(), next), (bytes, Next::Transmission(Agreed::default())));
    }
    assert!(heard(3, &option(1, b"other")).is_err());
}

#[test]
fn what_is_not_known_is_answered_and_the_handshake_goes_on() {
    let mut bytes = option(5, &[]);
    bytes.extend(option(99, b"whatever"));
    bytes.extend(option(3, b"x"));
    bytes.extend(option(3, &[]));
    bytes.extend(option(6, &named("other", &[0, 0])));
    bytes.extend(option(6, b"\xff\xff\xff\xff"));
    // Contexts without structured replies, and a list that says more than it has.
    bytes.extend(option(10, &contexts("", &["base:allocation"])));
    bytes.extend(option(9, &named("", &[0xff; 4])));
    bytes.extend(option(9, &contexts("", &["base:"])));
    bytes.extend(option(9, &contexts("", &[])));
    bytes.extend(option(2, &[]));
    let (answers, next) = heard(3, &bytes).expect("a client");
    let kinds: Vec<u32> =
        replies(&answers).iter().map(|(kind, _)| kind & 0xf | kind >> 31 << 4).collect();
    let expected = [0x11, 0x11, 0x13, 2, 1, 0x16, 0x13, 0x13, 0x13, 4, 1, 4, 1, 1];
    assert_eq!((kinds, next), (expected.to_vec(), Next::End));
}

#[test]
fn nonsense_ends_the_connection() {
    let mut wrong = option(7, &named("", &[0, 0]));
    wrong[0] ^= 1;
    let mut long = option(7, &[]);
    long[12..16].copy_from_slice(&u32::MAX.to_be_bytes());
    let many = option(99, &[]).repeat(257);
    for (flags, bytes) in [(0, vec![]), (4, vec![]), (3, wrong), (3, long), (3, many)] {
        assert!(heard(flags, &bytes).is_err(), "{flags} {}", bytes.len());
    }
    assert!(Handshake::new(INFO).hear(&[0; 3]).is_err());
}

fn request(flags: u16, kind: u16, offset: u64, bytes: u32) -> Request {
    let mut raw = 0x2560_9513u32.to_be_bytes().to_vec();
    raw.extend(flags.to_be_bytes());
    raw.extend(kind.to_be_bytes());
    raw.extend(77u64.to_be_bytes());
    raw.extend(offset.to_be_bytes());
    raw.extend(bytes.to_be_bytes());
    let mut raw: [u8; REQUEST_BYTES] = raw.try_into().expect("its length");
    let parsed = Request::parse(&raw).expect("a request");
    raw[3] ^= 1;
    assert!(Request::parse(&raw).is_err());
    parsed
}

#[test]
fn ranges_and_flags_are_checked() {
    let end = INFO.size_bytes;
    let read_only = Info { read_only: true, ..INFO };
    let ask = |flags, kind, offset, bytes| request(flags, kind, offset, bytes).command(INFO, ALL);
    assert_eq!(ask(4, 0, end - 1, 1), Ok(Command::Read { offset: end - 1, bytes: 1 }));
    assert_eq!(ask(1, 1, 0, 512), Ok(Command::Write { offset: 0, bytes: 512, fua: true }));
    assert_eq!(ask(0, 3, 0, 0), Ok(Command::Flush));
    assert_eq!(
        ask(3, 6, 5, 7),
        Ok(Command::Zero { offset: 5, bytes: 7, fua: true, keep_room: true })
    );
    assert_eq!(ask(8, 7, 0, 4096), Ok(Command::Status { offset: 0, bytes: 4096, one: true }));
    assert_eq!(ask(0, 2, 9, 9), Ok(Command::Disconnect));
    for (flags, kind, offset, bytes, error) in [
        (0, 0, end, 1, Error::Invalid),
        (0, 0, u64::MAX, 2, Error::Invalid),
        (0, 0, 0, 0, Error::Invalid),
        (0, 1, end - 1, 2, Error::NoSpace),
        (0, 6, end, 1, Error::NoSpace),
        (0, 4, end, 1, Error::Invalid),
        (2, 1, 0, 1, Error::Invalid),
        (16, 6, 0, 1, Error::Invalid),
        (0, 3, 1, 0, Error::Invalid),
        (0, 5, 0, 1, Error::Invalid),
        (0, 999, 0, 1, Error::Invalid),
    ] {
        assert_eq!(ask(flags, kind, offset, bytes), Err(error), "{kind} {offset} {bytes}");
    }
    for kind in [1, 4, 6] {
        let asked = request(0, kind, 0, 1).command(read_only, ALL);
        assert_eq!(asked, Err(Error::Permission));
    }
    let plain = Agreed { structured: false, allocation: false };
    assert_eq!(request(4, 0, 0, 1).command(INFO, plain), Err(Error::Invalid));
    assert_eq!(request(0, 7, 0, 1).command(INFO, plain), Err(Error::Invalid));
    let large = Info { size_bytes: 1 << 40, read_only: false };
    let too_much = MAX_PAYLOAD_BYTES + 1;
    assert_eq!(request(0, 0, 0, too_much).command(large, ALL), Err(Error::Invalid));
    assert!(request(0, 1, 0, too_much).payload_bytes().is_err());
    assert_eq!(request(0, 1, 0, 9).payload_bytes(), Ok(9));
    assert_eq!(request(0, 6, 0, u32::MAX).payload_bytes(), Ok(0));
}

#[test]
fn replies_are_as_the_specification_says() {
    let read = request(0, 0, 4096, 512);
    let plain = Agreed::default();
    assert_eq!(reply::done(&read), b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x4d");
    assert_eq!(reply::read(&read, plain, 4096, 512), reply::done(&read));
    let structured = reply::read(&read, ALL, 4096, 512);
    assert_eq!(&structured[..8], b"\x66\x8e\x33\xef\0\x01\0\x01");
    assert_eq!(&structured[16..], b"\0\0\x02\x08\0\0\0\0\0\0\x10\0");
    assert_eq!(&reply::failed(&read, plain, Error::Io)[4..8], &5u32.to_be_bytes());
    let failed = reply::failed(&read, ALL, Error::Io);
    assert_eq!(&failed[4..8], b"\0\x01\x80\x01");
    assert_eq!(&failed[16..], b"\0\0\0\x06\0\0\0\x05\0\0");
    // Writes are answered simply.
    let write = request(0, 1, 0, 1);
    assert_eq!(reply::failed(&write, ALL, Error::NoSpace).len(), 16);
    let extents = [Extent { bytes: 1, hole: false }, Extent { bytes: 2, hole: true }];
    let status = reply::status(&request(0, 7, 0, 3), &extents);
    assert_eq!(&status[16..], b"\0\0\0\x14\0\0\0\x01\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\x03");
}
