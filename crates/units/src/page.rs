//! The page, the unit of placement.

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;
/// Bytes of a page.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;
/// The same, for addresses and sums of bytes.
pub const PAGE: u64 = PAGE_SIZE as u64;
/// Entries of one page-map leaf: an aligned 2 MiB piece of an address space.
pub const PAGES_PER_LEAF: usize = 512;

/// Where the addresses that a program can have end (x86-64 with four levels of page tables).
pub const ADDRESSES_END: u64 = 1 << 47;

/// A virtual address divided by [`PAGE_SIZE`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PageNumber(pub u64);

impl PageNumber {
    /// The page that contains `address`.
    #[must_use]
    pub const fn containing(address: u64) -> Self {
        Self(address >> PAGE_SHIFT)
    }

    /// The first byte's virtual address.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.0 << PAGE_SHIFT
    }
}

/// One page of bytes, aligned as the kernel wants it for `UFFDIO_COPY` sources
/// and O_DIRECT buffers.
#[repr(C, align(4096))]
#[derive(Clone)]
pub struct PageBuffer(pub [u8; PAGE_SIZE]);

impl PageBuffer {
    /// A page of zeroes.
    #[must_use]
    pub fn zeroed() -> Box<Self> {
        Box::new(Self([0; PAGE_SIZE]))
    }
}
