//! What is said of pools.

use serde::{Deserialize, Serialize};

/// Which pages that guests miss a pool takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolAdmission {
    /// All as long as there is room; then those that were missed before.
    #[default]
    Room,
    /// All.
    First,
    /// Those that were missed before, by whichever guest.
    Second,
}

/// A pool in numbers. Sums are since it was made, or since the worker began.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PoolStats {
    /// Its name.
    pub name: String,
    /// Whose it is.
    pub uid: u32,
    /// The guest whose swap disk it is, of which nothing is dropped; none: a cache of disks.
    /// What a swap disk's process says of itself.
    #[serde(default)]
    pub guest: Option<String>,
    /// Which pages it takes.
    pub admission: PoolAdmission,
    /// The most that it may cost.
    pub limit_bytes: u64,
    /// What it costs.
    pub cost_bytes: u64,
    /// What is in it, as guests see it.
    pub page_bytes: u64,
    /// Part of that which is another page's content.
    pub deduplicated_bytes: u64,
    /// Part of that which is one value throughout, and costs nothing.
    pub fill_bytes: u64,
    /// Files that it knows, by their content.
    pub files: u64,
    /// Disks' connections.
    pub connections: u64,
    /// It takes nothing: the machine has little memory left.
    pub closed: bool,
    /// Pages that were asked for.
    pub gets_total: u64,
    /// Those that were there.
    pub hits_total: u64,
    /// Pages that it took.
    pub puts_total: u64,
    /// Pages for which there was no room: of a swap disk, writes that failed.
    pub refused_total: u64,
    /// Pages that were missed and not wanted.
    pub passed_over_total: u64,
    /// Pages that went because they were written, or their disk went; of a swap disk, those
    /// that the guest gave up.
    pub forgotten_total: u64,
    /// Pages that went for others.
    pub evicted_total: u64,
    /// Pages whose checksum was wrong, which were read from the disk instead; of a swap
    /// disk, reads that failed.
    pub corrupt_total: u64,
    /// How often all its memory was handed back.
    pub handed_back_total: u64,
    /// How much that was.
    pub handed_back_bytes_total: u64,
}
