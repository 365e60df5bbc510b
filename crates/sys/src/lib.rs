//! See ARCHITECTURE.md.

mod shared_memory;

pub use shared_memory::{SharedMemory, punch_hole};
