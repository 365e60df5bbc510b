//! See ARCHITECTURE.md.
#![forbid(unsafe_code)]
#![allow(dead_code)]
mod config;
mod control;
mod metrics;
mod program;
fn main() {}
