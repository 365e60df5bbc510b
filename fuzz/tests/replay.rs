//! Every target on everything that is kept in `corpus/`, and on changes of it: what a
//! fuzzer found stays mended, without a fuzzer.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use strata_fuzz::{TARGETS, Target};

/// Changed inputs of each target, in all.
const CHANGED: usize = 1500;
/// Longest input.
const MOST_BYTES: usize = 16 << 10;

/// xorshift64*: the same changes in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(&place)
        .expect("a corpus")
        .map(|entry| entry.expect("a file").path())
        .collect();
    paths.sort();
    let inputs: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).expect("an input")).collect();
    assert!(!inputs.is_empty(), "{} is empty", place.display());
    inputs
}

fn changed(input: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            2 => bytes.truncate(at),
            3 => bytes.insert(at, random.next() as u8),
            4 => {
                let from = random.below(other.len());
                bytes.truncate(at);
                bytes.extend(&other[from..]);
            }
            _ => {
                let value = random.next() >> random.below(64);
                for (byte, new) in bytes.iter_mut().skip(at).zip(value.to_le_bytes()) {
                    *byte = new;
                }
            }
        }
    }
    bytes.truncate(MOST_BYTES);
    bytes
}

fn replay(name: &str, target: Target) {
    let inputs = corpus(name);
    for input in &inputs {
        target(input);
    }
    let mut random = Random(0x5374_7261_7461);
    for round in 0..CHANGED {
        let other = &inputs[random.below(inputs.len())];
        let input = changed(&inputs[round % inputs.len()], other, &mut random);
        let outcome = std::panic::catch_unwind(|| target(&input));
        assert!(outcome.is_ok(), "{name}, round {round}: {input:?}");
    }
}

macro_rules! replayed {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            let name = stringify!($name);
            let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a target");
            replay(name, *target);
        })*

        #[test]
        fn all_targets_are_replayed() {
            let replayed = [$(stringify!($name)),*];
            assert!(TARGETS.iter().all(|(name, _)| replayed.contains(name)));
            assert_eq!(replayed.len(), TARGETS.len());
        }
    };
}

replayed!(
    control, agent, handshake, block, archive, claims, store, tier, pages, registry, monitor, nbd,
    pool, reading
);
