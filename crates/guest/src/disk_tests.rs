use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use super::*;
use crate::pool::{Admission, Pool, lock};

const SIZE: usize = 40 * PAGE_SIZE + 1234;

/// In memory; a write fails, if it is to, after half of it.
struct Bytes {
    bytes: Mutex<Vec<u8>>,
    fails: AtomicBool,
    stamps: Mutex<Vec<FileStamp>>,
}

impl Image for std::sync::Arc<Bytes> {
    fn size_bytes(&self) -> u64 {
        SIZE as u64
    }

    fn read_pages(&self, offset: u64, pages: &mut [PageBuffer]) -> io::Result<()> {
        let bytes = lock(&self.bytes);
        let from = &bytes[offset as usize..(offset as usize + size_of_val(pages)).min(SIZE)];
        let to = page_bytes_mut(pages);
        to[..from.len()].copy_from_slice(from);
        to[from.len()..].fill(0);
        Ok(())
    }

    fn write_pages(&self, offset: u64, pages: &[PageBuffer]) -> io::Result<()> {
        let mut bytes = lock(&self.bytes);
        let from = page_bytes(pages);
        let end = (offset as usize + from.len()).min(SIZE);
        let fails = self.fails.load(SeqCst);
        let end = if fails { offset as usize + (end - offset as usize) / 2 } else { end };
        let to = &mut bytes[offset as usize..end];
        to.copy_from_slice(&from[..to.len()]);
        if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn sync(&self) -> io::Result<()> {
        if self.fails.load(SeqCst) { Err(io::Error::other("no")) } else { Ok(()) }
    }

    fn zero_pages(&self, offset: u64, bytes: u64, keep_room: bool) -> io::Result<bool> {
        if !keep_room {
            lock(&self.bytes)[offset as usize..(offset + bytes) as usize].fill(0);
        }
        Ok(!keep_room)
    }

    fn allocation(&self, offset: u64) -> Allocation {
        let page = offset / PAGE_SIZE as u64;
        let end = (page + 1) * PAGE_SIZE as u64;
        Allocation { hole: page.is_multiple_of(3), end: end.min(SIZE as u64) }
    }

    fn stamp(&self) -> io::Result<Option<FileStamp>> {
        let mut stamps = lock(&self.stamps);
        let stamp = stamps.pop();
        if let Some(stamp) = stamp.filter(|_| stamps.is_empty()) {
            stamps.push(stamp);
        }
        Ok(stamp)
    }
}

fn bytes() -> std::sync::Arc<Bytes> {
    let bytes = Mutex::new((0..SIZE).map(|at| (at / 7) as u8).collect());
    std::sync::Arc::new(Bytes { bytes, fails: AtomicBool::new(false), stamps: Mutex::default() })
}

/// A pool that wants all, without a socket.
struct ToPool<'a>(&'a Pool);

impl ToPool<'_> {
    fn file(stamp: Stamp) -> u32 {
        match stamp {
            Stamp::Own => 1,
            Stamp::Shared(stamp) => stamp.size_bytes as u32,
        }
    }
}

impl Cache for ToPool<'_> {
    fn get(&mut self, stamp: Stamp, first: u64, pages: &mut [PageBuffer], found: &mut [Found]) {
        for ((index, page), found) in (first..).zip(pages).zip(found) {
            let hit = self.0.get(Self::file(stamp), index, &mut page.0);
            *found = if hit { talk::HIT } else { talk::WANTED };
        }
    }

    fn put(&mut self, stamp: Stamp, first: u64, pages: &[PageBuffer]) {
        for (index, page) in (first..).zip(pages) {
            self.0.put(Self::file(stamp), index, &page.0);
        }
    }

    fn forget(&mut self, first: u64, count: u64) {
        self.0.forget(1, first, count);
    }
}

fn pool() -> Pool {
    Pool::new(16 << 20, Admission::First).expect("a pool")
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as usize % limit
    }

    fn range(&mut self) -> (u64, u32) {
        let offset = self.below(SIZE);
        let most = [1, 600, 5000, SIZE][self.below(4)].min(SIZE - offset);
        (offset as u64, 1 + self.below(most) as u32)
    }
}

fn read(disk: &Disk, cache: &mut dyn Cache, range: (u64, u32)) -> Vec<u8> {
    disk.read(cache, &mut Vec::new(), range, &mut || (), <[u8]>::to_vec).expect("read")
}

fn write(
    disk: &Disk,
    cache: &mut dyn Cache,
    range: (u64, u32),
    data: &[u8],
) -> Result<(), Failure> {
    let (mut pages, ()) = in_pages(range, |place| {
        place.copy_from_slice(data);
        Ok(())
    })
    .expect("pages");
    disk.write(cache, &mut pages, range, false)
}

#[test]
fn what_is_read_is_what_is_in_the_image() {
    let (image, pool) = (bytes(), pool());
    let disk = Disk::new(Box::new(std::sync::Arc::clone(&image)), false);
    let mut cache = ToPool(&pool);
    let mut random = Random(7);
    let mut model = lock(&image.bytes).clone();
    for round in 0..4000 {
        let range = random.range();
        let at = range.0 as usize..range.0 as usize + range.1 as usize;
        let fails = random.below(10) == 0;
        image.fails.store(fails, SeqCst);
        match random.below(8) {
            0 | 1 => {
                let data: Vec<u8> = (0..range.1).map(|at| (at + round) as u8).collect();
                let written = write(&disk, &mut cache, range, &data);
                assert_eq!(
                    written.map_err(|failure| failure.error),
                    if fails { Err(Error::NoSpace) } else { Ok(()) }
                );
                model[at].copy_from_slice(&data);
            }
            2 if random.below(4) == 0 => {
                let keep = random.below(2) == 0;
                let zeroed = disk.zero(&mut cache, range, keep, false);
                assert!(fails || zeroed.is_ok());
                model[at].fill(0);
            }
            3 if random.below(4) == 0 => {
                disk.trim(&mut cache, range, false).expect("trimmed");
                model.clone_from(&lock(&image.bytes));
            }
            _ => assert_eq!(read(&disk, &mut cache, range), model[at], "round {round}"),
        }
        if fails {
            // What is in the image then, nobody said; but it is what is read.
            model.clone_from(&lock(&image.bytes));
        }
        image.fails.store(false, SeqCst);
        assert!(*lock(&image.bytes) == model, "round {round}");
    }
    let figures = pool.figures();
    assert!(figures.hits > 1000 && figures.forgotten > 1000, "{figures:?}");
    let empty = disk.status((0, SIZE as u32), false);
    assert_eq!(empty.iter().map(|extent| extent.bytes as usize).sum::<usize>(), SIZE);
    assert!(empty.windows(2).all(|pair| pair[0].hole != pair[1].hole));
    let one = disk.status((100, 9000), true);
    assert_eq!(one, [Extent { bytes: 4096 - 100, hole: true }]);
    image.fails.store(true, SeqCst);
    assert_eq!(disk.flush().expect_err("it fails").error, Error::Io);
}

#[test]
fn those_who_write_to_one_page_lose_nothing_of_each_other() {
    const PIECE: usize = 700;
    let (image, pool) = (bytes(), pool());
    let disk = Disk::new(Box::new(image), false);
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (disk, pool) = (&disk, &pool);
            scope.spawn(move || {
                let mut cache = ToPool(pool);
                let mut random = Random(thread as u64 + 1);
                let mut mine = [None; SIZE / PIECE / 4];
                for round in 0..1500usize {
                    let piece = random.below(mine.len());
                    let range = (((piece * 4 + thread) * PIECE) as u64, PIECE as u32);
                    if round % 3 == 0 {
                        let value = round as u8;
                        write(disk, &mut cache, range, &[value; PIECE]).expect("written");
                        mine[piece] = Some(value);
                    } else {
                        let found = read(disk, &mut cache, range);
                        assert!(mine[piece].is_none_or(|value| found == [value; PIECE]));
                    }
                }
            });
        }
    });
    assert!(pool.figures().hits > 100);
}

#[test]
fn a_file_that_others_change_is_never_read_as_it_was() {
    let stamp = |size_bytes, age_s: i128| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("now").as_nanos() as i128;
        let touched_ns = now - age_s * 1_000_000_000;
        FileStamp { file: (1, 2), size_bytes, changed_ns: 0, touched_ns }
    };
    let (image, pool) = (bytes(), pool());
    let disk = Disk::new(Box::new(std::sync::Arc::clone(&image)), true);
    let mut cache = ToPool(&pool);
    let old = lock(&image.bytes)[..PAGE_SIZE].to_vec();
    let hits = || pool.figures().hits;
    // Just changed: it may change again without its times telling.
    *lock(&image.stamps) = vec![stamp(10, 1)];
    for _ in 0..2 {
        assert_eq!(read(&disk, &mut cache, (0, 4096)), old);
    }
    assert_eq!((pool.figures().puts, pool.figures().gets), (0, 0));
    // It changes while it is read.
    let (before, after) = (stamp(10, 60), stamp(11, 50));
    *lock(&image.stamps) = vec![after, before];
    assert_eq!(read(&disk, &mut cache, (0, 4096)), old);
    assert_eq!(pool.figures().puts, 0);
    assert_eq!(read(&disk, &mut cache, (0, 4096)), old);
    assert_eq!((pool.figures().puts, hits()), (1, 0));
    assert_eq!(read(&disk, &mut cache, (0, 4096)), old);
    assert_eq!(hits(), 1);
    // It changed.
    lock(&image.bytes)[0] ^= 1;
    *lock(&image.stamps) = vec![stamp(12, 40)];
    assert_ne!(read(&disk, &mut cache, (0, 4096)), old);
    assert_eq!(hits(), 1);
    // A device does not tell.
    lock(&image.stamps).clear();
    let gets = pool.figures().gets;
    read(&disk, &mut cache, (0, 4096));
    assert_eq!(pool.figures().gets, gets);
}
