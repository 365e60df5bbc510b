//! Pure decisions: which pages to evict, and how much memory a tenant may cost.
//!
//! Nothing here calls anything, reads a clock or starts a thread: every function
//! sees only its arguments, so that the code that runs in production is the code
//! that runs in the simulator and in property tests. What the decisions cause
//! (moving, compressing, writing pages) is the pager's and the store's business.
#![forbid(unsafe_code)]

pub mod advice;
mod allowance;
pub mod balloon;
pub mod budget;
mod clock;
pub mod curve;
pub mod exchange;
pub mod gap;
mod neighbours;
mod octave;
pub mod order;
pub mod replacement;
pub mod replay;
pub mod room;
pub mod sampler;
pub mod shares;
pub mod stall;
mod table;
pub mod warmth;

pub use allowance::Allowance;
pub use clock::Clock;
pub use gap::Level;
pub use replacement::{Census, Pages, Replacement};
