//! The pages of a swap disk at one moment, and pages for an empty one: what goes between the
//! process that serves the disk and whoever takes a snapshot of its guest, at a socket of its
//! own. All numbers are little-endian.
//!
//! ```text
//! 'T'  ─▶                       the pages of this moment are wanted
//!      ◀─ 1                     it has passed: what the guest writes from now on is not seen
//!      ◀─ index, page … end     in order; `broken` instead: there is no such moment
//! 'G'  ─▶ index, page … end     what is to be in the disk, and nothing else
//!      ◀─ 1                     it is
//! ```
//! `end` is an index that no page has, and how many there were. The process holds a reference
//! to each page until the connection ends; what it costs meanwhile is what the guest
//! overwrites.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use strata_units::{PAGE_SIZE, PageBuffer};

use crate::disk::Image;
use crate::persistent::Persistent;

const TAKE: u8 = b'T';
const GIVE: u8 = b'G';
const DONE: u8 = 1;
/// Instead of the index of a page.
const END: u64 = u64::MAX;
const BROKEN: u64 = u64::MAX - 1;

fn nonsense(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

fn number(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
}

/// Pages as they come: in order, none twice, none beyond the disk.
struct Coming<R> {
    from: R,
    size_bytes: u64,
    /// The least index that the next one can have, and how many there were.
    next: u64,
    count: u64,
}

impl<R: Read> Coming<R> {
    fn new(from: R, size_bytes: u64) -> Self {
        Self { from, size_bytes, next: 0, count: 0 }
    }

    /// The next page, and its index; none: that were all.
    fn page(&mut self, out: &mut PageBuffer) -> io::Result<Option<u64>> {
        let index = number(&mut self.from)?;
        if index == END {
            return match number(&mut self.from)? {
                count if count == self.count => Ok(None),
                _ => Err(nonsense("some of its pages are missing")),
            };
        }
        if index == BROKEN {
            return Err(nonsense("a page of it is not what was written"));
        }
        if index < self.next || index >= self.size_bytes / PAGE_SIZE as u64 {
            return Err(nonsense("it names pages that it cannot have"));
        }
        self.from.read_exact(&mut out.0)?;
        (self.next, self.count) = (index + 1, self.count + 1);
        Ok(Some(index))
    }
}

/// Pages as they go.
struct Going<W> {
    to: W,
    count: u64,
}

impl<W: Write> Going<W> {
    fn page(&mut self, index: u64, page: &PageBuffer) -> io::Result<()> {
        self.to.write_all(&index.to_le_bytes())?;
        self.to.write_all(&page.0)?;
        self.count += 1;
        Ok(())
    }

    fn end(mut self) -> io::Result<()> {
        self.to.write_all(&END.to_le_bytes())?;
        self.to.write_all(&self.count.to_le_bytes())?;
        self.to.flush()
    }
}

/// The disk's end of one connection.
///
/// # Errors
/// The connection's; or it cannot be done, which the other end sees by that it ends.
pub fn attend(stream: &UnixStream, disk: &Arc<Persistent>) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut order = [0];
    reader.read_exact(&mut order)?;
    let mut buffer = PageBuffer::zeroed();
    match order[0] {
        TAKE => {
            let moment = disk.freeze();
            (&*stream).write_all(&[DONE])?;
            let mut going = Going { to: BufWriter::new(stream), count: 0 };
            for index in moment.pages() {
                if moment.get(index, &mut buffer.0).is_err() {
                    going.to.write_all(&BROKEN.to_le_bytes())?;
                    return going.to.flush();
                }
                going.page(moment.number(index), &buffer)?;
            }
            going.end()
        }
        GIVE => {
            // Of what a guest has swapped out nothing is overwritten.
            if disk.figures().pages > 1 {
                return Err(nonsense("pages are given to a disk that has some"));
            }
            let size_bytes = disk.size_bytes();
            disk.discard(0..size_bytes / PAGE_SIZE as u64);
            let mut coming = Coming::new(reader, size_bytes);
            while let Some(index) = coming.page(&mut buffer)? {
                disk.put(index, &buffer.0)?;
            }
            (&*stream).write_all(&[DONE])
        }
        _ => Err(nonsense("nobody asks that")),
    }
}

fn done(stream: &mut impl Read) -> io::Result<()> {
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    if answer == [DONE] { Ok(()) } else { Err(nonsense("it answers what was not asked")) }
}

/// The pages of a disk at the moment in which they were asked for.
pub struct Taken(Coming<BufReader<UnixStream>>);

/// Asks for the pages of a disk of that size as they are now. Whatever is written to it from
/// when this returns is not seen.
///
/// # Errors
/// There is no such moment.
pub fn take(mut stream: UnixStream, size_bytes: u64) -> io::Result<Taken> {
    stream.write_all(&[TAKE])?;
    done(&mut stream)?;
    Ok(Taken(Coming::new(BufReader::new(stream), size_bytes)))
}

impl Taken {
    /// The next page that is not zero, and its index; none: that were all.
    ///
    /// # Errors
    /// The connection's; or a page is not what was written: none of them is of use.
    pub fn page(&mut self, out: &mut PageBuffer) -> io::Result<Option<u64>> {
        self.0.page(out)
    }
}

/// Gives an empty disk the pages that `each` brings to what it is called with, in order.
///
/// # Errors
/// The disk has not got them all, and must not be used.
pub fn give(
    stream: &UnixStream,
    each: impl FnOnce(&mut dyn FnMut(u64, &PageBuffer) -> io::Result<()>) -> io::Result<()>,
) -> io::Result<()> {
    let mut to = BufWriter::new(stream);
    to.write_all(&[GIVE])?;
    let mut going = Going { to, count: 0 };
    each(&mut |index, page| going.page(index, page))?;
    going.end()?;
    done(&mut &*stream)
}

#[cfg(test)]
#[path = "moment_tests.rs"]
mod tests;
