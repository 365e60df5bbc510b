//! scratch
#![forbid(unsafe_code)]
mod random;
mod records;
fn main() {}
