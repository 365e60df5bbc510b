//! Ranges, the lines that ask the daemon, and programs that nobody manages.

use super::*;

#[test]
fn ranges_become_pages() {
    let pages = |start, end| Ok(Some(Pages { start, end }));
    assert_eq!(pages_of(0x1001, 1, false), pages(0x1000, 0x2000));
    assert_eq!(pages_of(0x1001, 1, true), Ok(None));
    assert_eq!(pages_of(0x1fff, 0x1002, false), pages(0x1000, 0x4000));
    assert_eq!(pages_of(0x1fff, 0x1002, true), pages(0x2000, 0x3000));
    assert_eq!(pages_of(0x1000, 0, false), Ok(None));
    for (start, bytes) in
        [(0x1000, usize::MAX), (u64::MAX, 2), (ADDRESSES_END - 1, 2), (1 << 63, 0)]
    {
        assert_eq!(pages_of(start, bytes, false), Err(Failure::Invalid), "{start:#x}");
    }
    assert_eq!(
        pages_of(ADDRESSES_END - PAGE, PAGE_SIZE, true),
        pages(ADDRESSES_END - PAGE, ADDRESSES_END)
    );
}

#[test]
fn requests_are_lines_that_the_daemon_reads() {
    let mut line = RequestLine::new();
    line.ask_where(0x7fff_ffff_f000, MOST_PAGES);
    let expected = "{\"request\":\"where\",\"start\":140737488351232,\"pages\":65536}\n";
    assert_eq!(line.bytes(), expected.as_bytes());
    let mut line = RequestLine::new();
    line.begin_place("sequential");
    for _ in 0..MOST_RANGES {
        line.add_range(Pages { start: ADDRESSES_END - PAGE, end: ADDRESSES_END });
    }
    line.add("]}\n");
    let text = std::str::from_utf8(line.bytes()).expect("text");
    assert!(text.ends_with(",[140737488351232,140737488355328]]}\n"), "{text}");
    assert_eq!(text.matches("[140737488351232,").count(), MOST_RANGES);
}

#[test]
fn nobody_manages_this_process() {
    let byte = [0_u8; 1];
    let start = byte.as_ptr().cast::<c_void>();
    for advice in 0..7 {
        assert_eq!(strata_advise(start, 1, advice), -libc::ENOSYS, "{advice}");
    }
    for advice in [-1, 7, c_int::MAX] {
        assert_eq!(strata_advise(start, 1, advice), -libc::EINVAL, "{advice}");
    }
    assert_eq!(strata_advise(start, usize::MAX, 1), -libc::EINVAL);
    let mut tiers = [9_u8; 2];
    let mut memory = ptr::dangling_mut::<c_void>();
    // SAFETY: pointers to what is asked for; one byte touches one page.
    unsafe {
        assert_eq!(strata_where(start, 1, tiers.as_mut_ptr()), -libc::ENOSYS);
        assert_eq!(strata_where(start, 0, ptr::null_mut()), 0);
        assert_eq!(strata_where(start, 1, ptr::null_mut()), -libc::EINVAL);
        for tier in 1..5 {
            assert_eq!(strata_alloc(&raw mut memory, 1, tier), -libc::ENOSYS);
            assert!(memory.is_null());
        }
        for (bytes, tier) in [(0, 1), (usize::MAX, 1), (1, 0), (1, 5)] {
            assert_eq!(strata_alloc(&raw mut memory, bytes, tier), -libc::EINVAL);
        }
        assert_eq!(strata_advise_ranges(ptr::null(), 0, 1), 0);
        assert_eq!(strata_advise_ranges(ptr::null(), 1, 1), -libc::EINVAL);
        assert_eq!(strata_free(ptr::null_mut(), 1), 0);
        assert_eq!(strata_free(ptr::dangling_mut::<u8>().cast(), 1), -libc::EINVAL);
    }
    assert_eq!(tiers, [9; 2], "nothing is written");
}
