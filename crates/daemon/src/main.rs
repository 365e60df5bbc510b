//! See ARCHITECTURE.md.
#![forbid(unsafe_code)]
#![allow(dead_code)]
mod config;
mod control;
fn main() {}
