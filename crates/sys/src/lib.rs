//! What Strata asks of the kernel, behind safe functions.

pub mod peer;
pub mod probe;
