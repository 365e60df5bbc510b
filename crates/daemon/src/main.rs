//! See ARCHITECTURE.md.
#![forbid(unsafe_code)]
#![allow(dead_code)]
mod config;
mod control;
mod doctor;
mod metrics;
mod program;
fn main() {
    println!("{}", doctor::examine());
}
