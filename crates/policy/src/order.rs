//! The order in which pages go to the tiers below DRAM.
//!
//! A page leaves DRAM for the first tier that has room, and what is full passes its
//! coldest pages on. Compressed memory counts as full from a part of the budget on
//! ([`crate::budget`]): it is DRAM itself. The way to the file leads through it, so
//! that with the file first it holds what is on its way and no more.

use serde::{Deserialize, Serialize};

use crate::budget::compressed_is_full;

/// A tier below DRAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Lower {
    /// A memory node without processors.
    Node,
    /// Compressed memory.
    Compressed,
    /// The file tier.
    File,
}

impl Lower {
    const ALL: [Self; 3] = [Self::Node, Self::Compressed, Self::File];

    /// As users name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Compressed => "compressed",
            Self::File => "file",
        }
    }
}

/// All tiers below DRAM, those that a tenant has and those that it has not, in the
/// order in which they fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TierOrder([Lower; 3]);

impl Default for TierOrder {
    /// By the price of coming back.
    fn default() -> Self {
        Self(Lower::ALL)
    }
}

impl TierOrder {
    /// Tiers by their names; those that are not named follow in the usual order.
    ///
    /// # Errors
    /// The name that is none, or is there twice.
    pub fn of_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, &'a str> {
        let mut order = Vec::with_capacity(Lower::ALL.len());
        for name in names {
            let tier = Lower::ALL.into_iter().find(|tier| tier.name() == name).ok_or(name)?;
            if order.contains(&tier) {
                return Err(name);
            }
            order.push(tier);
        }
        for tier in Lower::ALL {
            if !order.contains(&tier) {
                order.push(tier);
            }
        }
        let order = order.try_into().expect("each of three tiers is there once");
        Ok(Self(order))
    }

    /// The tiers, the first to be filled first.
    #[must_use]
    pub const fn tiers(self) -> [Lower; 3] {
        self.0
    }

    /// Whether what is stored goes on to the file at once.
    #[must_use]
    pub fn is_file_first(self) -> bool {
        self.is_before(Lower::File, Lower::Compressed)
    }

    /// Whether `tier` is filled before `other`.
    fn is_before(self, tier: Lower, other: Lower) -> bool {
        let place = |wanted| self.0.iter().position(|&tier| tier == wanted);
        place(tier) < place(other)
    }

    /// Whether it is the node's turn: what comes before it is full. `stored_bytes`
    /// is what compressed memory costs, `file_room_bytes` what is left of the file
    /// tier where there is one.
    #[must_use]
    pub fn is_nodes_turn(
        self,
        budget_bytes: u64,
        stored_bytes: u64,
        file_room_bytes: Option<u64>,
    ) -> bool {
        self.0.into_iter().take_while(|&tier| tier != Lower::Node).all(|tier| match tier {
            Lower::Compressed => compressed_is_full(budget_bytes, stored_bytes),
            _ => file_room_bytes.is_none_or(|room| room < FILE_FULL_BYTES),
        })
    }

    /// Whether pages on a full node go on to another tier. `has_file`: there is a
    /// file tier.
    #[must_use]
    pub fn leaves_the_node(self, has_file: bool) -> bool {
        self.is_before(Lower::Node, Lower::Compressed)
            || has_file && self.is_before(Lower::Node, Lower::File)
    }
}

/// Whether pages on their way to a file of memory that comes before compressed memory go
/// there as they are: it is there to be as fast as it can. From half of its size on it is
/// room that counts.
#[must_use]
pub fn passes_unpacked(file_size_bytes: u64, file_bytes: u64) -> bool {
    file_bytes < file_size_bytes / 2
}

/// With less room than this a file tier is full.
const FILE_FULL_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn names_make_an_order_and_the_rest_follows() {
        let named = |names: &[&'static str]| {
            TierOrder::of_names(names.iter().copied()).map(|order| order.tiers().map(Lower::name))
        };
        assert_eq!(named(&[]), Ok(["node", "compressed", "file"]));
        assert_eq!(named(&["file"]), Ok(["file", "node", "compressed"]));
        assert_eq!(named(&["compressed", "file"]), Ok(["compressed", "file", "node"]));
        assert_eq!(named(&["file", "dram"]), Err("dram"));
        assert_eq!(named(&["file", "node", "file"]), Err("file"));
    }

    #[test]
    fn the_nodes_turn_comes_when_what_is_before_it_is_full() {
        let order =
            |names: &[&'static str]| TierOrder::of_names(names.iter().copied()).expect("one");
        assert!(TierOrder::default().is_nodes_turn(100 * MIB, 0, Some(1 << 40)));
        let after_compressed = order(&["compressed", "node", "file"]);
        assert!(!after_compressed.is_nodes_turn(100 * MIB, 49 * MIB, None));
        assert!(after_compressed.is_nodes_turn(100 * MIB, 50 * MIB, Some(1 << 40)));
        let last = order(&["file", "compressed"]);
        for (stored, room, turn) in [(50, 9, false), (50, 0, true), (9, 0, false)] {
            assert_eq!(last.is_nodes_turn(100 * MIB, stored * MIB, Some(room * MIB)), turn);
        }
        assert!(order(&["file"]).is_nodes_turn(100 * MIB, 0, None), "without one it is full");
        assert!(TierOrder::default().leaves_the_node(false));
        assert!(!last.leaves_the_node(true) && !after_compressed.leaves_the_node(false));
        assert!(after_compressed.leaves_the_node(true));
    }
}
