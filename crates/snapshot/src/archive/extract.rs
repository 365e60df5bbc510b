//! Files of a snapshot's file, made again.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use strata_units::PAGE_SIZE;
use xxhash_rust::xxh3::Xxh3;

use super::blocks::Scratch;
use super::read::Reader;
use super::read_error::ReadError;

/// Of a file that is summed up, at a time.
const SUMMED_BYTES: usize = 1 << 20;

impl Reader {
    /// Makes its files in the directory `into`, for their owner alone; they
    /// overwrite nothing. Not on the device yet: a crash of the machine may lose
    /// them, the archive still has them. After an error none of them is there.
    ///
    /// # Errors
    /// [`ReadError::TooLarge`]: together they have more than `limit_bytes`.
    /// [`ReadError::Extract`]; and what reading says.
    pub fn extract_files(&self, into: &Path, limit_bytes: u64) -> Result<(), ReadError> {
        let sizes = self.directory.files.iter().map(|file| file.size_bytes);
        // Bounded by the number of their blocks.
        let size_bytes = sizes.sum();
        if size_bytes > limit_bytes {
            let path = self.path.clone();
            return Err(ReadError::TooLarge { path, size_bytes, limit_bytes });
        }
        let mut made = Vec::new();
        let outcome = self.extract_all(into, &mut made);
        if outcome.is_err() {
            for path in made {
                let _ = std::fs::remove_file(path);
            }
        }
        outcome
    }

    fn extract_all(&self, into: &Path, made: &mut Vec<PathBuf>) -> Result<(), ReadError> {
        let mut scratch = Scratch::default();
        for (index, file) in self.directory.files.iter().enumerate() {
            // A plain name: the directory's decoder refuses others.
            let path = into.join(&file.name);
            let failed = |source| ReadError::Extract { path: path.clone(), source };
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o600);
            let mut target = options.open(&path).map_err(failed)?;
            made.push(path.clone());
            self.read_file(index, &mut scratch, |chunk| target.write_all(chunk).map_err(failed))?;
        }
        Ok(())
    }

    /// Writes the file at `index` to `to`, which is empty: pages of it that are zero become
    /// holes. `told` hears how many bytes came. Not on the device yet; after an error `to`
    /// has a part of it.
    ///
    /// # Errors
    /// [`ReadError::Extract`]; and what reading says.
    ///
    /// # Panics
    /// There is no such file.
    pub fn unpack_file(
        &self,
        index: usize,
        to: &File,
        told: &mut dyn FnMut(u64),
    ) -> Result<(), ReadError> {
        let file = &self.files()[index];
        let failed = |source| ReadError::Extract { path: PathBuf::from(&file.name), source };
        to.set_len(file.size_bytes).map_err(failed)?;
        let mut at = 0;
        self.read_file(index, &mut Scratch::default(), |chunk| {
            for (start, end) in runs(chunk) {
                to.write_all_at(&chunk[start..end], at + start as u64).map_err(failed)?;
            }
            at += chunk.len() as u64;
            told(chunk.len() as u64);
            Ok(())
        })
    }
}

/// A sum of all bytes of a file that is not in a snapshot's file, and that it needs: XXH3-64,
/// seed 0.
///
/// # Errors
/// What reading says.
pub fn sum_of(file: &File) -> io::Result<u64> {
    let (mut sum, mut at) = (Xxh3::new(), 0);
    let mut piece = vec![0; SUMMED_BYTES];
    loop {
        match file.read_at(&mut piece, at)? {
            0 => return Ok(sum.digest()),
            len => {
                sum.update(&piece[..len]);
                at += len as u64;
            }
        }
    }
}

/// Where pages are that are not zero: neighbours together.
fn runs(chunk: &[u8]) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for (number, page) in chunk.chunks(PAGE_SIZE).enumerate() {
        if page.iter().all(|&byte| byte == 0) {
            continue;
        }
        let start = number * PAGE_SIZE;
        match found.last_mut() {
            Some(last) if last.1 == start => last.1 += page.len(),
            _ => found.push((start, start + page.len())),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;

    use crate::archive::Writer;
    use crate::archive::testing::Place;

    use super::*;

    #[test]
    fn pages_of_zeroes_are_left_out() {
        let mut chunk = vec![0; 4 * PAGE_SIZE + 10];
        assert_eq!(runs(&chunk), []);
        chunk[PAGE_SIZE] = 1;
        chunk[3 * PAGE_SIZE - 1] = 1;
        chunk[4 * PAGE_SIZE + 9] = 1;
        let page = PAGE_SIZE;
        assert_eq!(runs(&chunk), [(page, 3 * page), (4 * page, 4 * page + 10)]);
    }

    #[test]
    fn a_changed_byte_anywhere_changes_the_sum() {
        let place = Place::new("summed");
        let mut content = vec![0; SUMMED_BYTES + 10];
        let sum = |content: &[u8]| {
            std::fs::write(place.path("x"), content).expect("written");
            sum_of(&File::open(place.path("x")).expect("there")).expect("read")
        };
        let first = sum(&content);
        assert_eq!(first, xxhash_rust::xxh3::xxh3_64(&content));
        content[SUMMED_BYTES + 9] = 1;
        assert_ne!(sum(&content), first);
        assert_ne!(sum(&content[..SUMMED_BYTES]), first);
    }

    #[test]
    fn a_file_is_as_it_was_and_has_holes() {
        let place = Place::new("unpacked");
        let mut content = vec![0; (8 << 20) + 5];
        content[3 << 20] = 7;
        content[8 << 20] = 9;
        let path = place.path("x");
        let mut writer = Writer::create(&path).expect("a file");
        writer.file("disk-0", &content[..]).expect("room");
        writer.finish().expect("whole");
        let reader = Reader::open(&path).expect("a snapshot");
        let mut options = File::options();
        let made = options.read(true).write(true).create_new(true).open(place.path("y"));
        let mut made = made.expect("a file");
        let mut told = 0;
        reader.unpack_file(0, &made, &mut |bytes| told += bytes).expect("unpacked");
        let mut back = Vec::new();
        made.read_to_end(&mut back).expect("read");
        assert!(back == content && told == content.len() as u64);
        assert!(made.metadata().expect("there").blocks() * 512 < 1 << 20);
    }
}
