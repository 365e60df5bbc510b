//! What of a process's memory is managed: which mappings are, how they are registered,
//! and what the program says of its ranges.

pub(crate) mod place;
pub(crate) mod registration;
pub(crate) mod standing;

#[cfg(test)]
mod place_tests;
