//! A large stretch of memory of this process alone, in huge pages: for data that may
//! end with the process, and is to be given back at once. The kernel frees a huge page
//! as fast as a small one.

use std::io;

use crate::words::Words;

/// A huge page, the unit in which memory comes and goes.
pub const HUGE_BYTES: u64 = 2 << 20;

/// Memory that costs nothing until it is written to. Like [`crate::SharedMemory`] it
/// gives no reference to bytes, and offsets outside of it panic.
#[derive(Debug)]
pub struct PrivateMemory {
    words: Words,
    /// The first huge page begins here.
    shift: u64,
    len_bytes: u64,
}

/// Whether the kernel has huge pages for whoever asks.
fn has_huge_pages() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|modes| !modes.contains("[never]"))
}

impl PrivateMemory {
    /// Reserves `len_bytes`, rounded up to huge pages.
    ///
    /// # Errors
    /// `Unsupported`: the kernel gives no huge pages; or what `mmap` and `madvise` say.
    pub fn create(len_bytes: u64) -> io::Result<Self> {
        if !has_huge_pages() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let len_bytes = len_bytes.next_multiple_of(HUGE_BYTES);
        let words = Words::map(len_bytes + HUGE_BYTES, None)?;
        let shift = words.address().next_multiple_of(HUGE_BYTES) - words.address();
        words.advise(shift, len_bytes, libc::MADV_HUGEPAGE)?;
        // Children execute other programs at once: they need none of it.
        words.advise(0, words.len_bytes(), libc::MADV_DONTFORK)?;
        Ok(Self { words, shift, len_bytes })
    }

    /// Its length.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn check(&self, offset: u64, len_bytes: u64) -> u64 {
        assert!(
            offset.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes),
            "bytes {offset:#x}+{len_bytes:#x} outside memory of {:#x} bytes",
            self.len_bytes
        );
        offset + self.shift
    }

    /// Copies bytes out; those that nobody has written to are zero.
    ///
    /// # Panics
    /// When the range leaves it.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        self.words.read(self.check(offset, out.len() as u64), out);
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// When the range leaves it.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.words.write(self.check(offset, bytes.len() as u64), bytes);
    }

    /// Gives the huge page at `offset` back; it reads zero afterwards.
    ///
    /// # Errors
    /// What `madvise` says.
    ///
    /// # Panics
    /// When there is none.
    pub fn give_back(&self, offset: u64) -> io::Result<()> {
        assert!(offset.is_multiple_of(HUGE_BYTES), "no huge page begins at {offset:#x}");
        self.words.advise(self.check(offset, HUGE_BYTES), HUGE_BYTES, libc::MADV_DONTNEED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_come_and_go_as_a_whole() {
        let memory = match PrivateMemory::create(5 << 20) {
            Ok(memory) => memory,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                eprintln!("SKIPPED: this kernel gives no huge pages");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(memory.len_bytes(), 6 << 20);
        for offset in [0, HUGE_BYTES + 9, memory.len_bytes() - 3] {
            memory.write(offset, &[7; 3]);
        }
        memory.give_back(HUGE_BYTES).expect("given back");
        let mut out = [1; 3];
        let mut read = |offset| {
            memory.read(offset, &mut out);
            out
        };
        assert_eq!([read(0), read(HUGE_BYTES + 9), read((6 << 20) - 3)], [[7; 3], [0; 3], [7; 3]]);
    }

    #[test]
    #[should_panic(expected = "outside memory")]
    fn outside_panics() {
        match PrivateMemory::create(HUGE_BYTES) {
            Ok(memory) => memory.read(HUGE_BYTES - 4, &mut [0; 8]),
            Err(_) => panic!("outside memory: this kernel gives no huge pages"),
        }
    }
}
