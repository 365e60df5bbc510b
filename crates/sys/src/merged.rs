//! Pages that the kernel has merged with equal ones (KSM,
//! Documentation/admin-guide/mm/ksm.rst): which they are, and what they cost.
//!
//! Which page a page table names, and what kind of page that is, the kernel tells
//! privileged readers alone (`/proc/PID/pagemap` and `/proc/kpageflags`,
//! Documentation/admin-guide/mm/pagemap.rst). To others a page of a process that has
//! merged ones is taken for merged when others map it too.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use strata_units::{PAGE_SHIFT, PAGE_SIZE};

use crate::Process;
use crate::process::stat_fields;
use crate::smaps::field_bytes;

/// Of a word of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const EXCLUSIVE: u64 = 1 << 56;
const FRAME: u64 = (1 << 55) - 1;
/// Of a word of `/proc/kpageflags`: `KPF_KSM`.
const KSM: u64 = 1 << 21;

/// What a process has of merged memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MergedMemory {
    /// Its pages that are merged.
    pub bytes: u64,
    /// What they do not cost because others map them too: a page that so many map costs
    /// each of them that part of it.
    pub saved_bytes: u64,
}

/// What one page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sight {
    No,
    Yes,
    /// The page of this number tells.
    Frame(u64),
}

/// What can be said from a page table alone. `merged_before`: it was merged when it was
/// looked at last, and as long as others map it nobody has written to it.
fn sight(word: u64, merged_before: bool) -> Sight {
    if word & PRESENT == 0 {
        return Sight::No;
    }
    let shared = word & EXCLUSIVE == 0;
    match word & FRAME {
        // Not told, to us. The page of zeroes is taken for merged, too, and costs nothing.
        0 if shared => Sight::Yes,
        0 => Sight::No,
        _ if shared && merged_before => Sight::Yes,
        frame => Sight::Frame(frame),
    }
}

/// Whether the page of a number is a merged one. Who may not know is not told numbers.
fn is_merged_frame(frame: u64) -> bool {
    static FLAGS: OnceLock<Option<File>> = OnceLock::new();
    let mut word = [0; 8];
    let flags = FLAGS.get_or_init(|| File::open("/proc/kpageflags").ok());
    flags.as_ref().is_some_and(|flags| flags.read_at(&mut word, frame * 8).is_ok_and(|n| n == 8))
        && u64::from_le_bytes(word) & KSM != 0
}

impl Process {
    /// Whether the kernel has merged pages of it. (It notices late that one was written.)
    #[must_use]
    pub fn has_merged_pages(&self) -> bool {
        let text = self.read_file(c"ksm_stat").unwrap_or_default();
        merging_pages(&text) > 0
    }

    /// Its merged memory. Walks its page tables.
    ///
    /// # Errors
    /// It has ended.
    pub fn merged_memory(&self) -> io::Result<MergedMemory> {
        let stat = self.read_file(c"ksm_stat").unwrap_or_default();
        Ok(merged_memory(&self.read_file(c"smaps_rollup")?, &stat))
    }

    /// For each of the pages at `addresses`, in ascending order: whether it is merged.
    /// `merged_before`: they all were when they were looked at last.
    ///
    /// # Errors
    /// The address space is gone.
    pub fn merged(&self, addresses: &[u64], merged_before: bool) -> io::Result<Vec<bool>> {
        let page = PAGE_SIZE as u64;
        let mut found = Vec::with_capacity(addresses.len());
        for run in addresses.chunk_by(|&one, &next| next == one + page) {
            for word in self.page_table_words(run[0], run.len())? {
                found.push(match sight(word, merged_before) {
                    Sight::No => false,
                    Sight::Yes => true,
                    Sight::Frame(frame) => is_merged_frame(frame),
                });
            }
        }
        Ok(found)
    }

    /// Faults of its threads that needed no wait for anybody, the first writes to merged
    /// pages among them.
    #[must_use]
    pub fn minor_faults(&self) -> Option<u64> {
        // minflt, the tenth field of all and the eighth of those.
        stat_fields(&self.read_file(c"stat").ok()?)?.nth(7)?.parse().ok()
    }

    /// `count` words of its page table from `address` on; zero where there are none.
    fn page_table_words(&self, address: u64, count: usize) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; count * 8];
        self.pagemap().read_at(&mut bytes, (address >> PAGE_SHIFT) * 8)?;
        let words = bytes.chunks_exact(8);
        Ok(words.map(|word| u64::from_le_bytes(word.try_into().expect("eight"))).collect())
    }
}

/// Whether the kernel has merged any pages at all.
#[must_use]
pub fn kernel_has_merged_pages() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/ksm/pages_shared").is_ok_and(|text| text.trim() != "0")
}

fn merging_pages(stat: &str) -> u64 {
    count(stat, "ksm_merging_pages ")
}

fn count(stat: &str, name: &str) -> u64 {
    let word = stat.lines().find_map(|line| line.strip_prefix(name));
    word.and_then(|word| word.trim().parse().ok()).unwrap_or(0)
}

fn merged_memory(text: &str, stat: &str) -> MergedMemory {
    // Pages of zeroes may be merged with the kernel's own, and are nobody's then.
    let zero_bytes = count(stat, "ksm_zero_pages ") << PAGE_SHIFT;
    let bytes = field_bytes(text, "KSM:").saturating_sub(zero_bytes);
    // All of that is other processes' part of pages that several map; of a forked
    // process's, more than its merged ones.
    let others = field_bytes(text, "Anonymous:").saturating_sub(field_bytes(text, "Pss_Anon:"));
    MergedMemory { bytes, saved_bytes: others.min(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_merging_is_read() {
        let text = "ksm_rmap_items 900\nksm_zero_pages 7\nksm_merging_pages 42\n";
        assert_eq!(merging_pages(text), 42);
        assert_eq!(merging_pages("ksm_rmap_items 900\n"), 0);
        let rollup = "Rss:  900 kB\nPss_Anon:  300 kB\nAnonymous:  800 kB\nKSM:  600 kB\n";
        let merged = MergedMemory { bytes: 600 << 10, saved_bytes: 500 << 10 };
        assert_eq!(merged_memory(rollup, "ksm_zero_pages 0\n"), merged);
        assert_eq!(merged_memory(rollup, text).bytes, (600 - 7 * 4) << 10);
        let forked = "Pss_Anon: 300 kB\nAnonymous: 800 kB\nKSM: 200 kB\n";
        assert_eq!(merged_memory(forked, "").saved_bytes, 200 << 10);
        let none = merged_memory("Pss_Anon: 3 kB\nAnonymous: 8 kB\n", "");
        assert_eq!(none, MergedMemory::default());
    }

    #[test]
    fn who_is_not_told_numbers_goes_by_who_else_maps_a_page() {
        assert_eq!(sight(0, true), Sight::No, "not there");
        assert_eq!(sight(PRESENT | EXCLUSIVE, false), Sight::No);
        assert_eq!(sight(PRESENT, false), Sight::Yes);
        assert_eq!(sight(PRESENT | EXCLUSIVE | 77, true), Sight::Frame(77), "the last to map it");
        assert_eq!(sight(PRESENT | 77, false), Sight::Frame(77), "perhaps a fork's");
        assert_eq!(sight(PRESENT | 77, true), Sight::Yes);
    }

    #[test]
    fn pages_of_ones_own_are_not_merged() {
        let memory = crate::OwnMemory::create(4).expect("memory");
        let page = PAGE_SIZE as u64;
        let start = memory.range().start;
        for index in [0, 1, 3] {
            // SAFETY: inside the mapping, of which no reference exists.
            unsafe { ((start + index * page) as *mut u8).write_volatile(1) };
        }
        let own = Process::open(std::process::id()).expect("this process");
        let addresses = [0, 1, 3].map(|index| start + index * page);
        assert_eq!(own.merged(&addresses, true).expect("it lives"), [false; 3]);
        assert_eq!(own.merged_memory().expect("it lives").bytes, 0);
        assert!(!own.has_merged_pages() && own.minor_faults().is_some_and(|faults| faults > 2));
    }
}
