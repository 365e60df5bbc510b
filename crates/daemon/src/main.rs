//! See ARCHITECTURE.md.
#![forbid(unsafe_code)]
#![allow(dead_code)]
mod control;
fn main() {}
