//! What of a process's memory is managed: which mappings are, how they are registered,
//! and what the program says of its ranges.

pub(crate) mod eligibility;
pub(crate) mod place;
pub(crate) mod registration;

#[cfg(test)]
mod place_tests;
