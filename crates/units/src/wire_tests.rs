//! Messages as bytes, and the name of the way back.

use super::*;

#[test]
fn messages_survive_their_bytes() {
    let hello = Hello {
        magic: MAGIC,
        kind: 2,
        pid: 3,
        token: 4,
        transfer: 5,
        probe: 6,
        own_start: 7,
        own_end: 8,
        restart: 9,
        library: 10,
    };
    let bytes = hello.to_bytes();
    assert_eq!(bytes.len(), size_of::<Hello>());
    let again = Hello::from_bytes(&bytes).expect("whole");
    assert_eq!(again.to_bytes(), bytes);
    assert_eq!((again.kind, again.own_end, again.restart, again.library), (2, 8, 9, 10));
    assert!(Hello::from_bytes(&bytes[1..]).is_none());
    assert_eq!(Hello::heard(&bytes).map(|hello| hello.to_bytes()), Some(bytes.clone()));
    // As the version before says it, and that alone.
    let before = HelloBefore::from(Hello { magic: MAGIC_BEFORE, ..hello }).to_bytes();
    let heard = Hello::heard(&before).expect("whole");
    assert_eq!((heard.magic, heard.restart, heard.library), (MAGIC_BEFORE, 9, 0));
    assert!(Hello::heard(&HelloBefore::from(hello).to_bytes()).is_none(), "cut short");
    assert!(Hello::heard(&before[1..]).is_none());
    let versions = ["0.1.0", "0.1.1", "0.2.0", "1.0.0", "1.0.10", "70.1"].map(version_number);
    assert!(versions[..5].is_sorted() && versions[4] == 1 << 32 | 10, "{versions:x?}");
    assert!(Welcome::from_bytes(&bytes).is_none());
}

#[test]
fn the_way_back_has_a_name() {
    assert_eq!(&back_name(0x0123_4567_89ab_cdef), b"strata-0123456789abcdef");
    assert_eq!(&back_name(1), b"strata-0000000000000001");
}
