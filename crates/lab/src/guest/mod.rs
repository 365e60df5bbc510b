//! Guests of the lab: a Debian under QEMU whose first process is this program,
//! told over a serial line what to do. Host and guest are two halves of one
//! binary: what one says the other understands.
//!
//! On the host: `site.rs` (what was fetched and built), `archive.rs` (the
//! initramfs), `machine.rs` (QEMU's command line, the line to the guest), `demo.rs`
//! (a guest to try). In the guest: `agent.rs`, and behind it `boot.rs`, `servers.rs`,
//! `database.rs`, `paced.rs`. `words.rs` is what they say to each other.

pub(crate) mod agent;
mod archive;
mod boot;
mod database;
pub(crate) mod demo;
pub(crate) mod machine;
pub(crate) mod paced;
mod servers;
pub(crate) mod site;
pub(crate) mod words;
