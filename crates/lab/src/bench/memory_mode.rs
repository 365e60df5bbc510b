//! DRAM as a cache of slower memory, with a noisy neighbour in it, against DRAM that is
//! given out: simulated. Each repetition has a seed of its own.

use super::{
    Bench,
    report::{PartResults, Series, Side},
};
use crate::{
    interrupt,
    simulate::memory_mode::{Mode, Trial, ran},
};
use anyhow::Result;
use serde_json::json;

const REQUESTS: usize = 200_000;
const SCALE_DOWN: usize = 20;
/// The server's memory as a share of DRAM: it fits, and it does not.
const SIZES: [f64; 2] = [0.8, 1.5];
/// Pages that the neighbour walks through for each request of the server.
const NEIGHBOURS: [f64; 3] = [0.0, 0.1, 1.0];
const CACHES: [(Mode, &str); 2] = [
    (Mode::Cache { ways: 1 }, "memory mode, direct-mapped"),
    (Mode::Cache { ways: 8 }, "memory mode, 8 places a line"),
];
const GIVEN: [(Mode, &str); 2] =
    [(Mode::Replacement, "production's replacement"), (Mode::Pins, "pinned by the program")];

/// All sizes and neighbours, each placement beside each cache.
pub(super) fn memory_mode(bench: &Bench, results: &mut PartResults) -> Result<()> {
    for size in SIZES {
        for neighbour in NEIGHBOURS {
            let mut side = |(mode, name): (Mode, &str)| {
                let mut side = Side::new(name);
                for repetition in 0..bench.repetitions {
                    interrupt::check()?;
                    let trial = Trial {
                        mode,
                        size,
                        neighbour,
                        requests: if bench.quick { REQUESTS / 10 } else { REQUESTS },
                        scale_down: SCALE_DOWN,
                        seed: repetition as u64 + 1,
                    };
                    let ran = ran(&trial);
                    side.samples.push(ran.speed);
                    results.raw.push(json!({ "trial": trial, "ran": ran }));
                }
                Ok::<Side, anyhow::Error>(side)
            };
            let caches = CACHES.map(&mut side);
            let [direct, sets] = caches;
            let caches = [direct?, sets?];
            for given in GIVEN {
                let left = side(given)?;
                results.series.extend(caches.iter().map(|right| Series {
                    name: format!("server of {size} × DRAM, neighbour {neighbour} pages a request"),
                    unit: "of all DRAM".into(),
                    left: left.clone(),
                    right: Some(right.clone()),
                }));
            }
        }
    }
    results.text = "\nSimulated: no memory is moved. Throughput of a server (Gaussian keys, a request \
        reads two lines and a value of 16) as a share of that with all of its memory in DRAM; \
        a repetition is a seed, of its keys and of where its pages lie in slower memory. A line of that \
        takes 305 ns at random and 169 in order, in DRAM 101 and 81 (Izraelevitz et al., 2019), a \
        fault 18 µs. Placed by production's replacement all that is not in DRAM costs a fault; pinned by the \
        program three quarters of DRAM hold its hottest pages, and the rest is used in place. \
        Bandwidth is left out; it would slow the server further where the neighbour's lines pass \
        through its cache.\n"
        .into();
    Ok(())
}
