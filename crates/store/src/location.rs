//! Where an object's bytes are: the 48-bit location, the size classes, and the
//! 64-bit word that binds a location to a reference count.
//!
//! Pure arithmetic; nothing here touches memory.

use strata_units::PAGE_SIZE;

/// Granularity of addresses in both tiers. A smaller one would not fit 48 bits
/// together with the length; it costs half of itself per object.
pub(crate) const UNIT_BYTES: u64 = 64;
/// Addressable bytes of one tier.
pub(crate) const TIER_SPAN_BYTES: u64 = UNIT_BYTES << UNIT_BITS;
/// A compressed page longer than this is kept raw: the gain would not pay for
/// decompression.
pub(crate) const MAX_COMPRESSED: usize = 3072;

const UNIT_BITS: u32 = 33;
const LENGTH_SHIFT: u32 = UNIT_BITS;
const CODEC_SHIFT: u32 = LENGTH_SHIFT + 12;
const TIER_SHIFT: u32 = CODEC_SHIFT + 2;
const LOCATION_BITS: u32 = TIER_SHIFT + 1;
const _: () = assert!(LOCATION_BITS == 48);

/// How the bytes are to be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Codec {
    /// The page itself, still to be compressed. Zero, so that the word of a
    /// staged page at unit 0 is the only one that could look empty; it never
    /// does, because its length field is not zero.
    Staged = 0,
    /// The page itself: it does not compress.
    Raw = 1,
    /// An lz4 block.
    Lz4 = 2,
    /// A zstd frame.
    Zstd = 3,
}

/// Which tier holds the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tier {
    /// The data memory file.
    Dram,
    /// The tier file.
    File,
}

/// Where an object's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub(crate) tier: Tier,
    pub(crate) codec: Codec,
    /// Bytes, 1..=4096.
    pub(crate) len: usize,
    /// Byte address divided by [`UNIT_BYTES`].
    pub(crate) unit: u64,
}

impl Location {
    pub(crate) fn offset(self) -> u64 {
        self.unit * UNIT_BYTES
    }

    pub(crate) fn class(self) -> SizeClass {
        SizeClass::of(self.len)
    }

    pub(crate) fn pack(self) -> u64 {
        debug_assert!(self.unit < 1 << UNIT_BITS && (1..=PAGE_SIZE).contains(&self.len));
        let tier = u64::from(self.tier == Tier::File);
        self.unit
            | ((self.len as u64 - 1) << LENGTH_SHIFT)
            | ((self.codec as u64) << CODEC_SHIFT)
            | (tier << TIER_SHIFT)
    }

    pub(crate) fn unpack(bits: u64) -> Self {
        let codec = match (bits >> CODEC_SHIFT) & 3 {
            0 => Codec::Staged,
            1 => Codec::Raw,
            2 => Codec::Lz4,
            _ => Codec::Zstd,
        };
        Self {
            tier: if bits >> TIER_SHIFT & 1 == 1 { Tier::File } else { Tier::Dram },
            codec,
            len: (bits >> LENGTH_SHIFT & 0xfff) as usize + 1,
            unit: bits & ((1 << UNIT_BITS) - 1),
        }
    }

    /// Whether codec and length agree: what a half-written or damaged word need
    /// not satisfy.
    pub(crate) fn is_consistent(self) -> bool {
        match self.codec {
            Codec::Staged => self.len == PAGE_SIZE && self.tier == Tier::Dram,
            Codec::Raw => self.len == PAGE_SIZE,
            Codec::Lz4 | Codec::Zstd => self.len <= MAX_COMPRESSED,
        }
    }
}

/// An object's word: reference count, overflow flag, location. One atomic, so
/// that moving an object and counting its references never tear.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Word(pub(crate) u64);

impl Word {
    /// The word of an id that is not in use.
    pub(crate) const FREE: Self = Self(0);
    /// Set while further references are counted in the overflow table.
    pub(crate) const OVERFLOW: u64 = 1 << LOCATION_BITS;
    /// One reference.
    pub(crate) const ONE: u64 = 1 << (LOCATION_BITS + 1);
    /// References that a word can count.
    pub(crate) const MAX_REFERENCES: u64 = (1 << (63 - LOCATION_BITS)) - 1;
    const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;

    pub(crate) fn new(location: Location, references: u64) -> Self {
        Self(location.pack() | (references * Self::ONE))
    }

    pub(crate) fn references(self) -> u64 {
        self.0 / Self::ONE
    }

    pub(crate) fn overflows(self) -> bool {
        self.0 & Self::OVERFLOW != 0
    }

    pub(crate) fn location_bits(self) -> u64 {
        self.0 & Self::LOCATION_MASK
    }

    pub(crate) fn location(self) -> Location {
        Location::unpack(self.location_bits())
    }

    /// The same counts at another place.
    pub(crate) fn moved_to(self, location: Location) -> Self {
        Self(self.0 & !Self::LOCATION_MASK | location.pack())
    }

    /// The same place, referenced by nobody.
    pub(crate) fn unreferenced(self) -> Self {
        Self(self.location_bits())
    }
}

/// Slot sizes in bytes: steps of 64 up to 1 KiB, 128 up to 2 KiB, 256 up to
/// [`MAX_COMPRESSED`], and the whole page. From 512 bytes on a slot wastes at
/// most 12.5 %, below that at most 63 bytes.
const SLOT_BYTES: [u16; CLASS_COUNT] = slot_sizes();
/// Number of size classes.
pub(crate) const CLASS_COUNT: usize = 16 + 8 + 4 + 1;
/// Class by length in units, rounded up.
const CLASS_OF_UNITS: [u8; PAGE_SIZE / UNIT_BYTES as usize + 1] = classes_by_units();

const fn slot_sizes() -> [u16; CLASS_COUNT] {
    let mut sizes = [0; CLASS_COUNT];
    let (mut class, mut size) = (0, 0u16);
    while class < CLASS_COUNT - 1 {
        size += match size {
            0..1024 => 64,
            1024..2048 => 128,
            _ => 256,
        };
        sizes[class] = size;
        class += 1;
    }
    assert!(size as usize == MAX_COMPRESSED);
    sizes[CLASS_COUNT - 1] = PAGE_SIZE as u16;
    sizes
}

const fn classes_by_units() -> [u8; PAGE_SIZE / UNIT_BYTES as usize + 1] {
    let mut classes = [0; PAGE_SIZE / UNIT_BYTES as usize + 1];
    let (mut units, mut class) = (0, 0);
    while units < classes.len() {
        if units * UNIT_BYTES as usize > SLOT_BYTES[class] as usize {
            class += 1;
        }
        classes[units] = class as u8;
        units += 1;
    }
    classes
}

/// A size class: index into the table of slot sizes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SizeClass(pub(crate) u8);

impl SizeClass {
    /// The smallest class whose slots hold `len` bytes (1..=4096).
    pub(crate) fn of(len: usize) -> Self {
        Self(CLASS_OF_UNITS[len.div_ceil(UNIT_BYTES as usize)])
    }

    pub(crate) fn slot_bytes(self) -> u64 {
        u64::from(SLOT_BYTES[self.0 as usize])
    }

    pub(crate) fn slot_units(self) -> u64 {
        self.slot_bytes() / UNIT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_length_fits_its_class_and_no_smaller_one() {
        for len in 1..=PAGE_SIZE {
            let class = SizeClass::of(len);
            assert!(class.slot_bytes() >= len as u64, "{len}");
            if class.0 > 0 {
                assert!(SizeClass(class.0 - 1).slot_bytes() < len as u64, "{len}");
            }
            if (512..=MAX_COMPRESSED).contains(&len) {
                assert!((class.slot_bytes() - len as u64) * 8 <= class.slot_bytes(), "{len}");
            }
        }
    }

    proptest! {
        #[test]
        fn words_keep_their_parts(
            unit in 0u64..1 << UNIT_BITS, len in 1usize..=PAGE_SIZE, codec in 0u8..4,
            file: bool, references in 0..=Word::MAX_REFERENCES,
        ) {
            let codec = [Codec::Staged, Codec::Raw, Codec::Lz4, Codec::Zstd][codec as usize];
            let tier = if file { Tier::File } else { Tier::Dram };
            let location = Location { tier, codec, len, unit };
            let word = Word::new(location, references);
            prop_assert_eq!(word.location(), location);
            prop_assert_eq!(word.references(), references);
            prop_assert!(!word.overflows());
            prop_assert_eq!(word.unreferenced().references(), 0);
            let elsewhere = Location { unit: unit ^ 1, ..location };
            prop_assert_eq!(word.moved_to(elsewhere).location(), elsewhere);
            prop_assert_eq!(word.moved_to(elsewhere).references(), references);
            if location.is_consistent() {
                prop_assert_ne!(word.unreferenced(), Word::FREE);
            }
        }
    }
}
