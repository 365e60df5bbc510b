use super::*;

const LIMIT: u64 = 32 << 20;

/// A page that compresses to about a third, and is like no other.
fn page(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for chunk in page.chunks_exact_mut(24) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk[..8].copy_from_slice(&state.to_le_bytes());
    }
    page
}

fn id(number: u8) -> FileId {
    [number; crate::talk::FILE_ID_BYTES]
}

fn pool(admission: Admission) -> Pool {
    Pool::new(LIMIT, admission).expect("a pool")
}

fn got(pool: &Pool, file: u32, index: u64) -> Option<Page> {
    let mut out = [0xee; PAGE_SIZE];
    pool.get(file, index, &mut out).then_some(out)
}

#[test]
fn a_large_pool_keeps_its_limit_and_hands_all_of_it_back() {
    let pool = Pool::new(LEAST_HUGE_BYTES, Admission::First).expect("a pool");
    let file = pool.open(&id(1)).expect("a file");
    // More than it has room for, and then holes everywhere.
    let count = 3 * LEAST_HUGE_BYTES / PAGE_SIZE as u64;
    for index in 0..count {
        pool.put(file, index, &page(index));
    }
    let figures = pool.figures();
    assert!(figures.cost_bytes > LEAST_HUGE_BYTES / 2, "{figures:?}");
    assert!(figures.cost_bytes <= LEAST_HUGE_BYTES + (16 << 20), "{figures:?}");
    for index in (0..count).filter(|index| index % 4 != 0) {
        pool.forget(file, index, 1);
    }
    for _ in 0..32 {
        pool.tend();
    }
    let less = pool.figures();
    assert!(less.cost_bytes < figures.cost_bytes, "{less:?} after {figures:?}");
    for index in (0..count).step_by(4) {
        assert!(got(&pool, file, index).is_none_or(|found| found == page(index)), "{index}");
    }
    let bytes = pool.empty().expect("an empty one");
    assert_eq!((bytes, pool.figures().pages), (less.cost_bytes, 0));
    assert!(pool.figures().cost_bytes < 8 << 20, "{:?}", pool.figures());
}

#[test]
fn what_was_put_is_got_until_it_is_forgotten() {
    let pool = pool(Admission::First);
    let (a, b) = (pool.open(&id(1)).expect("a"), pool.open(&id(2)).expect("b"));
    assert_ne!(a, b);
    assert_eq!(pool.open(&id(1)), Some(a));
    for index in 0..200 {
        assert!(pool.put(a, index, &page(index)) && pool.put(b, index, &page(index)));
    }
    let figures = pool.figures();
    assert_eq!((figures.pages, figures.deduplicated_pages, figures.files), (400, 200, 2));
    assert!(pool.put(a, 7, &page(1007)));
    assert_eq!(got(&pool, a, 7), Some(page(1007)));
    assert_eq!(got(&pool, b, 7), Some(page(7)));
    pool.forget(a, 10, 5);
    pool.forget(a, 190, u64::MAX - 200);
    for index in 0..200 {
        let is_there = !(10..15).contains(&index) && index < 190;
        assert_eq!(got(&pool, a, index).is_some(), is_there, "{index}");
        assert!(got(&pool, b, index).is_some());
    }
    pool.forget_file(b);
    assert_eq!(got(&pool, b, 0), None);
    assert_eq!(pool.figures().pages, 185);
    pool.content().shards.iter().for_each(|shard| lock(shard).check());
}

#[test]
fn it_costs_no_more_than_its_limit_and_keeps_what_is_asked_for() {
    let pool = pool(Admission::First);
    let file = pool.open(&id(1)).expect("a file");
    let hot = 0..500;
    for index in hot.clone() {
        assert!(pool.put(file, index, &page(index)));
    }
    for index in 1000..30_000 {
        pool.put(file, index, &page(index));
        assert!(got(&pool, file, index % 500).is_none_or(|found| found == page(index % 500)));
        if index % 1000 == 0 {
            assert!(pool.figures().cost_bytes <= LIMIT + LIMIT / 8, "{pool:?}");
        }
    }
    let figures = pool.figures();
    assert!(figures.evicted > 1000 && figures.pages > 5000, "{figures:?}");
    let stayed = hot.filter(|&index| got(&pool, file, index).is_some()).count();
    assert!(stayed > 450, "{stayed} of what is asked for again and again");
    let handed_back = pool.empty().expect("an empty one");
    assert!(handed_back > LIMIT / 2);
    let after = pool.figures();
    assert_eq!((after.pages, after.handed_back), (0, 1));
    assert!(after.cost_bytes < LIMIT / 8 && got(&pool, file, 0).is_none(), "{after:?}");
    assert!(pool.put(file, 0, &page(0)) && got(&pool, file, 0) == Some(page(0)));
}

#[test]
fn admission_is_what_was_said() {
    let (first, second) = (pool(Admission::First), pool(Admission::Second));
    assert!(first.wants(0, 5) && !second.wants(0, 5) && second.wants(0, 5));
    assert!(!second.wants(1, 5), "another file's page");
    assert_eq!(second.figures().passed_over, 2);
    let room = pool(Admission::Room);
    let mut index = 0;
    while room.wants(0, index) {
        room.put(0, index, &page(index));
        index += 1;
        assert!(index < 100_000, "it is never full");
    }
    assert!(index > 5000, "it is full after {index} pages");
    assert!(room.wants(0, index), "the second time");
    room.set_closed(true);
    assert!(!room.wants(0, index) && !room.put(0, 1, &page(77)));
    assert_eq!(got(&room, 0, 1), None, "what was to be replaced is not there any more");
}

#[test]
fn a_private_file_goes_with_the_last_who_has_it_open() {
    let pool = pool(Admission::First);
    let file = pool.open(&id(1)).expect("a file");
    assert_eq!(pool.open(&id(1)), Some(file));
    assert!(pool.put(file, 0, &page(0)));
    pool.close(&id(1), true);
    assert!(got(&pool, file, 0).is_some());
    pool.close(&id(1), true);
    assert!(got(&pool, file, 0).is_none());
    assert_ne!(pool.open(&id(1)), Some(file), "a number is one file's");
    for number in 0..MAX_FILES {
        let mut id = id(9);
        id[..8].copy_from_slice(&number.to_le_bytes());
        pool.close(&id, false);
        assert!(pool.open(&id).is_some() || number == MAX_FILES - 1);
    }
    assert_eq!(pool.open(&id(77)), None, "too many are open");
}

#[test]
fn many_at_once_get_right_bytes_or_none() {
    let pool = pool(Admission::First);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..3000u64 {
                    let (file, index) = ((round % 3) as u32, round * 7 % 401 + thread);
                    match round % 5 {
                        0 | 1 => drop(pool.put(file, index, &page(index))),
                        2 => pool.forget(file, index, 3),
                        3 if round % 500 == 3 => drop(pool.empty()),
                        _ => {
                            let found = got(pool, file, index);
                            assert!(found.is_none_or(|found| found == page(index)));
                        }
                    }
                }
            });
        }
    });
    let content = pool.content();
    let pages: usize = content
        .shards
        .iter()
        .map(|shard| {
            let shard = lock(shard);
            shard.check();
            shard.len()
        })
        .sum();
    assert_eq!(content.pages.load(Relaxed), pages as u64);
    pool.tend();
}
