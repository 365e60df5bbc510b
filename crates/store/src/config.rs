//! What the store is told, what it says about itself, and how it fails: plain
//! types without behaviour.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

/// How to keep a new page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Put {
    /// Raw for now; [`crate::Store::settle`] compresses it.
    Staged,
    /// The fast way: lz4, or zstd with the store's dictionary once one pays
    /// ([`crate::Store::train_dictionary`]); raw if that gains too little.
    Fast,
    /// zstd, with the dictionary if there is one; raw if that gains too little.
    Zstd,
}

/// Where a page came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// From the handle alone: one value throughout.
    Fill,
    /// From its staged raw copy.
    Staged,
    /// From DRAM, compressed or found incompressible.
    Compressed,
    /// From the tier file.
    File,
}

/// The tier file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileConfig {
    /// Where to make it. Must not exist; the file is nameless once it is open.
    pub path: PathBuf,
    /// How much it may hold.
    pub limit_bytes: u64,
}

/// What a store is made with.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoreConfig {
    /// Most DRAM for stored data, staged pages apart; none: no limit. Can be
    /// changed later ([`crate::Store::set_compressed_limit`]).
    pub compressed_limit: Option<u64>,
    /// A slower tier behind DRAM.
    pub file: Option<FileConfig>,
}

/// The descriptors that must survive the worker: borrowed to keep them, owned
/// to recover from them.
#[derive(Debug)]
pub struct Descriptors<F = OwnedFd> {
    /// The object table.
    pub table: F,
    /// The data in DRAM.
    pub data: F,
    /// The tier file.
    pub file: Option<F>,
}

/// [`Descriptors`] of a store that is in use.
pub type BorrowedDescriptors<'a> = Descriptors<BorrowedFd<'a>>;

/// A store could not be made or taken over.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No memory file.
    #[error("cannot make the store's memory file {name}")]
    Memory {
        /// Which.
        name: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No tier file.
    #[error(
        "cannot make the tier file {path}: its directory must exist and be writable, \
         and the file must not exist yet"
    )]
    File {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The tier file's limit makes no sense.
    #[error(
        "the tier file's limit of {limit_bytes} bytes is not between {min_bytes} and {max_bytes}"
    )]
    FileLimit {
        /// The limit.
        limit_bytes: u64,
        /// The least that is allowed.
        min_bytes: u64,
        /// The most.
        max_bytes: u64,
    },
    /// The dead worker's memory is not what it should be.
    #[error("cannot take over the dead worker's {name}")]
    Attach {
        /// Which part.
        name: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A page could not be stored; nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// The limit is reached, and nothing can go to the tier file.
    #[error("the store is full")]
    Full,
    /// The page could not be written.
    #[error("cannot write to the store")]
    Io(#[from] io::Error),
}

/// A page could not be read back.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// Its checksum is wrong: the bytes are lost.
    #[error("a stored page is corrupt")]
    Corrupt,
    /// Its tier cannot be read; a later try may succeed.
    #[error("cannot read a stored page")]
    Io(#[from] io::Error),
}

/// A handle in the page map that recovery cannot honour: the page is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RecoverError {
    /// It names no object.
    #[error("the handle names no stored object")]
    Unknown,
    /// Its object's entry is damaged.
    #[error("the stored object's entry is damaged")]
    Damaged,
}

/// The store in numbers. Sizes in bytes; a moment's values, each exact by
/// itself, not together, while other threads work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreStats {
    /// Pages stored: references, duplicates and filled pages included, those that are
    /// set aside left out.
    pub stored_pages: u64,
    /// The same times the page size.
    pub stored_bytes: u64,
    /// Distinct pages that have an object.
    pub objects: u64,
    /// Part of `stored_pages` that is another reference to an object.
    pub deduplicated_pages: u64,
    /// Part of `stored_pages` that is one value throughout and costs nothing.
    pub fill_pages: u64,
    /// Part of `stored_pages` that lies in page files, and costs nothing here.
    pub filed_pages: u64,
    /// What data costs in DRAM: staged pages, unused ends of slots, unused
    /// slots and empty slabs included.
    pub dram_bytes: u64,
    /// Bytes of objects in DRAM as they are stored.
    pub payload_bytes: u64,
    /// Part of `payload_bytes` that is staged.
    pub staged_bytes: u64,
    /// Objects in DRAM packed with lz4, before packing.
    pub fast_original_bytes: u64,
    /// Part of `payload_bytes` that is lz4.
    pub fast_payload_bytes: u64,
    /// What data costs in the tier file.
    pub file_bytes: u64,
    /// Bytes of objects in the tier file as they are stored.
    pub file_payload_bytes: u64,
    /// How many those are.
    pub file_objects: u64,
    /// Dictionaries that pages can be unpacked with.
    pub dictionaries: u32,
    /// What they cost, prepared forms included.
    pub dictionary_bytes: u64,
    /// New pages are packed with a dictionary, not with lz4: what [`Put::Fast`]
    /// and [`crate::Store::settle`] make does not count in `fast_*` any more,
    /// but for pages that the dictionary does not help.
    pub lands_dense: bool,
    /// Strata's own memory: object table, dedup index, sets, allocators,
    /// dictionaries.
    pub metadata_bytes: u64,
    /// Failed accesses to the tier file.
    pub tier_errors: u64,
    /// Objects found corrupt while they were being moved.
    pub corrupt_objects: u64,
}

/// The part of a page's 128-bit digest that its object does not keep. With the
/// 32 bits that it does, equal fingerprints mean equal pages but for one chance in
/// 2^96; the digest is seeded with a secret of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fingerprint(pub(crate) u64);

/// What [`crate::Store::foretell`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Foretelling {
    /// Pages of the sample.
    pub pages: u64,
    /// Those of one value throughout, which will cost nothing.
    pub fill_pages: u64,
    /// What each other would take in bytes of its slot, on average. None: too few to
    /// tell.
    pub packed_bytes: Option<u64>,
}

/// What [`crate::Store::train_dictionary`] did; its display is a line for a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Training {
    /// Nothing: another thread is at it.
    Busy,
    /// Nothing: the store has all the dictionaries that it may have.
    NoRoom,
    /// Nothing: there are not enough pages in DRAM.
    TooFewPages {
        /// Found.
        pages: u32,
    },
    /// No dictionary came out.
    NothingInCommon {
        /// Trained from.
        pages: u32,
    },
    /// A dictionary was trained and compared on pages that it had not seen. The
    /// sums are of these pages, in bytes of slots.
    Judged {
        /// It paid: new pages are packed with it.
        adopted: bool,
        /// The dictionary's id in the store, if it was adopted.
        dictionary: u32,
        /// What it costs itself, if it was adopted: content and prepared forms.
        dictionary_bytes: u64,
        /// Pages it was trained from.
        trained_pages: u32,
        /// Pages it was judged by.
        judged_pages: u32,
        /// Packed with lz4.
        lz4_bytes: u64,
        /// With the dictionary in use, if there was one.
        current_bytes: Option<u64>,
        /// With the new one.
        new_bytes: u64,
    },
}

/// What [`crate::Store::compact`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Compacted {
    /// Bytes of objects moved.
    pub moved_bytes: u64,
    /// DRAM given back to the kernel.
    pub freed_bytes: u64,
    /// There is more to do now.
    pub unfinished: bool,
}
