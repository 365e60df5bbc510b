//! Page numbers, byte sizes, ids, and the fixed wire structs of the agent.
//!
//! This is the lowest floor: it depends on nothing, allocates only to format
//! text, and is shared by the daemon and by the library inside the program.
#![forbid(unsafe_code)]

mod decimal;
pub mod handshake;
mod hints;
mod ids;
mod label;
pub mod order;
mod page;
pub mod pool;
pub mod reading;
mod size;
mod sum;
mod swap;
pub mod wire;

pub use decimal::{DECIMAL_DIGITS, decimal};
pub use hints::{HINT_SLOTS, HintKind, HintSlot, Hints};
pub use ids::{Handle, LeafIndex, PageId, SpaceId, TenantId};
pub use label::{MAX_LABEL_BYTES, label_problem};
pub use page::{
    ADDRESSES_END, PAGE, PAGE_SHIFT, PAGE_SIZE, PAGES_PER_LEAF, PageBuffer, PageNumber,
};
pub use size::{ByteSize, ParseByteSizeError};
pub use sum::fnv1a;
pub use swap::{LEAST_SWAP_BYTES, MOST_SWAP_BYTES, is_swap_size};
