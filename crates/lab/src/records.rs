//! Realistic JSON records, each a function of (seed, index, version).
//!
//! Random bytes do not compress and a repeated letter compresses to nothing;
//! these are orders as a shop would keep them, so that a page of them shrinks
//! about as a page of real data does (a test keeps the ratios in range). Being
//! a function, any value that a server returns can be checked byte for byte
//! without a copy of it.

use crate::random::{Random, mix};
use std::io::Write;

/// Every record is exactly this long: the note at its end is cut to fit.
pub(crate) const RECORD_BYTES: usize = 1024;

#[rustfmt::skip]
const FIRST_NAMES: [&str; 40] = [
    "Amelia", "Benjamin", "Charlotte", "Dmitri", "Elena", "Farid", "Giulia", "Henrik", "Ingrid",
    "Jamal", "Katarzyna", "Liam", "Marisol", "Nikolai", "Olivia", "Priya", "Quentin", "Rosalind",
    "Santiago", "Tomoko", "Ursula", "Vikram", "Wilhelmina", "Xavier", "Yasmin", "Zoltan", "Anouk",
    "Bashir", "Celeste", "Diego", "Esther", "Fiona", "Gregor", "Hanna", "Isidora", "Jonas",
    "Keiko", "Leopold", "Miriam", "Noor",
];
#[rustfmt::skip]
const LAST_NAMES: [&str; 40] = [
    "Andersson", "Bianchi", "Castillo", "Dubois", "Eriksen", "Fitzgerald", "Grunwald", "Haddad",
    "Ivanova", "Jankowski", "Kobayashi", "Lindqvist", "Moreau", "Nakamura", "Okonkwo", "Petrov",
    "Quispe", "Rossi", "Schneider", "Takahashi", "Ueda", "Vasquez", "Weatherby", "Xiang", "Yilmaz",
    "Zimmermann", "Abernathy", "Brandt", "Chaudhry", "Delacroix", "Ekberg", "Ferreira",
    "Gallagher", "Hoffmann", "Ibrahim", "Jorgensen", "Kowalczyk", "Laurent", "Mazur", "Novak",
];
#[rustfmt::skip]
const CITIES: [&str; 24] = [
    "Rotterdam", "Valencia", "Gothenburg", "Lyon", "Krakow", "Porto", "Leipzig", "Bologna",
    "Ghent", "Aarhus", "Tampere", "Graz", "Brno", "Thessaloniki", "Galway", "Cluj", "Tartu",
    "Kaunas", "Split", "Maribor", "Basel", "Bergen", "Uppsala", "Toulouse",
];
#[rustfmt::skip]
const STREETS: [&str; 16] = [
    "Linden Street", "Harbour Road", "Mill Lane", "Station Square", "Orchard Avenue",
    "Castle Hill", "Bridge Street", "Market Place", "Rose Garden", "Canal Walk", "Church Row",
    "Park View", "Ferry Quay", "Granary Yard", "Abbey Close", "Meadow Drive",
];
#[rustfmt::skip]
const COUNTRIES: [&str; 12] = [
    "NL", "ES", "SE", "FR", "PL", "PT", "DE", "IT", "BE", "DK", "FI", "AT",
];
#[rustfmt::skip]
const STATUSES: [&str; 6] = [
    "pending", "paid", "packed", "shipped", "delivered", "returned",
];
#[rustfmt::skip]
const TAGS: [&str; 16] = [
    "priority", "gift", "fragile", "wholesale", "newsletter", "loyalty", "backorder", "express",
    "insured", "pickup", "taxfree", "seasonal", "clearance", "export", "subscription", "sample",
];
#[rustfmt::skip]
const GOODS: [&str; 32] = [
    "copper kettle", "walnut desk", "linen curtain", "desk lamp", "wool blanket", "garden shears",
    "ceramic bowl", "leather wallet", "travel mug", "cast iron pan", "oak shelf", "cotton towel",
    "paper lantern", "brass hook", "bamboo tray", "steel ruler", "felt slippers", "glass carafe",
    "canvas bag", "pine stool", "silk scarf", "clay planter", "chess set", "picture frame",
    "reading chair", "bread knife", "storm candle", "rain coat", "hiking sock", "pocket atlas",
    "fountain pen", "wall clock",
];
#[rustfmt::skip]
const NOTES: [&str; 8] = [
    "please leave the parcel with a neighbour when nobody answers the door",
    "the invoice should mention the purchase number of the second order",
    "handle with care, the contents break easily",
    "customer asked for delivery before noon",
    "replacement was offered and the refund went to the card",
    "regular buyer, prefers email over phone",
    "courier reported damage on one corner of the box",
    "ring twice, the letterbox is behind the house",
];

/// The function. Cheap to copy; holds only the seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Records {
    seed: u64,
}

fn pick<'a>(random: &mut Random, list: &[&'a str]) -> &'a str {
    list[random.below(list.len() as u64) as usize]
}

impl Records {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Replaces `out` with the record. Who the customer is depends on the index
    /// alone; what they ordered changes with every version.
    pub(crate) fn fill(&self, index: u64, version: u32, out: &mut Vec<u8>) {
        out.clear();
        let identity = mix(self.seed ^ mix(index));
        let mut who = Random::new(identity);
        let mut what = Random::new(identity ^ mix(u64::from(version) + 1));
        self.write_fields(index, version, &mut who, &mut what, out)
            .expect("writing to a Vec cannot fail");
        while out.len() < RECORD_BYTES - 2 {
            out.extend_from_slice(pick(&mut what, &NOTES).as_bytes());
            out.extend_from_slice(b"; ");
        }
        out.truncate(RECORD_BYTES - 2);
        out.extend_from_slice(b"\"}");
    }

    fn write_fields(
        &self,
        index: u64,
        version: u32,
        who: &mut Random,
        what: &mut Random,
        out: &mut Vec<u8>,
    ) -> std::io::Result<()> {
        let (first, last) = (pick(who, &FIRST_NAMES), pick(who, &LAST_NAMES));
        write!(
            out,
            "{{\"id\":{index},\"version\":{version},\"customer\":{{\"first\":\"{first}\",\
             \"last\":\"{last}\",\"email\":\"{first}.{last}@example.org\"}},\"address\":{{\"street\":\"{} {}\",\"city\":\"{}\",\
             \"postcode\":\"{:04}\",\"country\":\"{}\"}},",
            pick(who, &STREETS),
            1 + who.below(180),
            pick(who, &CITIES),
            who.below(10_000),
            pick(who, &COUNTRIES),
        )?;
        write_date(out, "created", who)?;
        write_date(out, "updated", what)?;
        write!(
            out,
            "\"status\":\"{}\",\"total\":{}.{}0,\"items\":[",
            pick(what, &STATUSES),
            10 + what.below(2000),
            what.below(10),
        )?;
        for item in 0..ITEMS {
            write!(
                out,
                "{}{{\"title\":\"{}\",\"quantity\":{},\"unit_price\":{}.{}0,\
                 \"discount\":0.00,\"warehouse\":\"central\",\"returned\":false}}",
                if item == 0 { "" } else { "," },
                pick(what, &GOODS),
                1 + what.below(4),
                1 + what.below(100),
                what.below(10),
            )?;
        }
        write!(out, "],\"tag\":\"{}\",\"note\":\"", pick(what, &TAGS))
    }
}

/// Lines of an order.
const ITEMS: usize = 5;

fn write_date(out: &mut Vec<u8>, name: &str, random: &mut Random) -> std::io::Result<()> {
    write!(
        out,
        "\"{name}\":\"20{:02}-{:02}-{:02}T{:02}:{:02}:00Z\",",
        20 + random.below(6),
        1 + random.below(12),
        1 + random.below(28),
        random.below(24),
        random.below(60),
    )
}

/// Prints records, one a line: to look at them, or to load them elsewhere.
pub(crate) fn print(count: u64, seed: u64, version: u32) {
    let records = Records::new(mix(seed));
    let mut record = Vec::new();
    for index in 0..count {
        records.fill(index, version, &mut record);
        println!("{}", String::from_utf8_lossy(&record));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seed: u64, index: u64, version: u32) -> Vec<u8> {
        let mut out = Vec::new();
        Records::new(seed).fill(index, version, &mut out);
        out
    }

    #[test]
    fn records_are_valid_json_of_fixed_length() {
        for index in 0..2000 {
            let bytes = record(1, index * 397, index as u32 % 5);
            assert_eq!(bytes.len(), RECORD_BYTES);
            let value: serde_json::Value = serde_json::from_slice(&bytes).expect("valid JSON");
            assert_eq!(value["id"], index * 397);
            assert_eq!(value["version"], index % 5);
        }
    }

    #[test]
    fn a_record_depends_on_seed_index_and_version_only() {
        assert_eq!(record(1, 2, 3), record(1, 2, 3));
        assert_ne!(record(1, 2, 3), record(2, 2, 3));
        assert_ne!(record(1, 2, 3)[20..], record(1, 3, 3)[20..]);
        assert_ne!(record(1, 2, 3)[20..], record(1, 2, 4)[20..]);
    }

    /// Pages of records must shrink as real ones do, or every ratio that the
    /// lab reports is worth nothing.
    #[test]
    fn pages_compress_like_real_data() {
        let mut stream = Vec::new();
        let mut one = Vec::new();
        for index in 0..2000 {
            Records::new(9).fill(index, 0, &mut one);
            stream.extend_from_slice(&one);
        }
        let pages = stream.chunks_exact(4096);
        let original = pages.len() * 4096;
        let lz4: usize = pages
            .clone()
            .map(|page| lz4::block::compress(page, None, false).expect("compresses").len())
            .sum();
        let zstd: usize =
            pages.map(|page| zstd::bulk::compress(page, 1).expect("compresses").len()).sum();
        let (lz4, zstd) = (original as f64 / lz4 as f64, original as f64 / zstd as f64);
        println!("lz4 {lz4:.2}, zstd -1 {zstd:.2}");
        assert!((2.3..2.9).contains(&lz4), "lz4 {lz4:.2}");
        assert!((3.4..4.8).contains(&zstd), "zstd-1 {zstd:.2}");
    }
}
