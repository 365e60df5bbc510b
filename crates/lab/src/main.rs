//! scratch
#![forbid(unsafe_code)]
#![allow(dead_code)]
mod cgroup;
mod histogram;
mod interrupt;
mod janitor;
mod keys;
mod process;
mod random;
mod records;
mod redis;
mod statistics;
mod strata;
mod zram;
fn main() {}
