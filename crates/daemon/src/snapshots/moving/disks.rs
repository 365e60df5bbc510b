//! A guest's disks that go along with it.
//!
//! ```text
//! here                                              there
//! what disks it has                 ── disks ─────▶ an image for each, empty         `room`
//! all memory                        ──────────────▶ a QEMU that waits exports them
//! QEMU mirrors ── socket ── way ── strata move ══ ssh, once more ══ way ── socket ── that QEMU
//! alike; memory that has changed, as in other moves
//! it stands still: alike, ended     ──────────────▶ the export ends, devices are loaded
//! its images are put aside          ── go ────────▶ the images are the guest's
//! ```
//! Until *go* the images there are nobody's: whoever finds them and no decision removes them.
//! After it those here are, and have other names.

mod aside;
mod away;
mod room;
mod ways;

pub(super) use aside::Aside;
pub(super) use away::{Away, Mirroring};
pub(super) use room::{Making, Room};
pub(in super::super) use ways::Ways;
