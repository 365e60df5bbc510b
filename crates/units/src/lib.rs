//! Page numbers, byte sizes, ids, and the fixed wire structs of the agent.
//!
//! This is the lowest floor: it depends on nothing, allocates only to format
//! text, and is shared by the daemon and by the library inside the program.
#![forbid(unsafe_code)]

mod ids;
mod page;
mod size;
pub mod wire;

pub use ids::{Handle, LeafIndex, PageId, SpaceId, TenantId};
pub use page::{PAGE_SHIFT, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer, PageNumber};
pub use size::{ByteSize, ParseByteSizeError};
