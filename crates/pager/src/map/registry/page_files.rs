//! The slots of the files that pages are read from where they lie.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{BUILDING, FREE, LIVE, PAGE_FILE_BYTES, PAGE_FILES, PAGE_FILES_AT, Registry};

// Within a page file's slot.
const P_LIVE: u64 = 0;
const P_FD: u64 = 4;
const P_NUMBER: u64 = 8;
const P_FAMILY: u64 = 16;

impl Registry {
    fn page_file(&self, slot: u32, field: u64) -> &AtomicU32 {
        self.memory.atomic_u32(PAGE_FILES_AT + u64::from(slot) * PAGE_FILE_BYTES + field)
    }

    fn page_file_family(&self, slot: u32) -> &AtomicU64 {
        self.memory.atomic_u64(PAGE_FILES_AT + u64::from(slot) * PAGE_FILE_BYTES + P_FAMILY)
    }

    /// Notes a file that pages of `family` are read from; its slot. None: all are taken.
    pub(crate) fn add_page_file(&self, family: u64, number: u16, fd: RawFd) -> Option<u32> {
        let slot = (0..PAGE_FILES).find(|&slot| {
            self.page_file(slot, P_LIVE)
                .compare_exchange(FREE, BUILDING, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })?;
        self.page_file(slot, P_FD).store(fd as u32, Ordering::Relaxed);
        self.page_file(slot, P_NUMBER).store(u32::from(number), Ordering::Relaxed);
        self.page_file_family(slot).store(family, Ordering::Relaxed);
        self.page_file(slot, P_LIVE).store(LIVE, Ordering::Release);
        Some(slot)
    }

    pub(crate) fn remove_page_file(&self, slot: u32) {
        self.page_file(slot, P_LIVE).store(FREE, Ordering::Release);
    }

    /// Slot, family, number and descriptor of each of them.
    pub(crate) fn page_files(&self) -> Vec<(u32, u64, u16, RawFd)> {
        (0..PAGE_FILES)
            .filter(|&slot| self.page_file(slot, P_LIVE).load(Ordering::Acquire) == LIVE)
            .map(|slot| {
                let field = |field| self.page_file(slot, field).load(Ordering::Relaxed);
                let family = self.page_file_family(slot).load(Ordering::Relaxed);
                (slot, family, field(P_NUMBER) as u16, field(P_FD) as RawFd)
            })
            .collect()
    }

    /// Frees the slots of files that no tenant of a `family` can have, and those that
    /// were never filled.
    pub(crate) fn forget_page_files(&self, family: impl Fn(u64) -> bool) {
        for slot in 0..PAGE_FILES {
            let is_live = match self.page_file(slot, P_LIVE).load(Ordering::Acquire) {
                FREE => continue,
                state => state == LIVE,
            };
            if !is_live || !family(self.page_file_family(slot).load(Ordering::Relaxed)) {
                self.remove_page_file(slot);
            }
        }
    }
}
