//! A web-like graph in compressed sparse rows, with a label for each vertex.
//!
//! Degrees follow a power law. A vertex copies a part of its links from a
//! vertex shortly before it (the copying model: Kumar et al., "Stochastic
//! models for the web graph", FOCS 2000), the others go nearby or to popular
//! vertices, scattered over all memory. Real crawls have both, and for the
//! same reason their pages shrink.

use super::Rounds;
use crate::{
    histogram::Histogram,
    keys::{KeyStream, Keys, Pattern},
    random::{Random, mix},
    records::{RECORD_BYTES, Records},
};
use anyhow::{Result, bail};
use std::{collections::VecDeque, time::Instant};
use strata_units::ByteSize;

/// A label is a piece of a record.
const LABEL_BYTES: usize = 64;
const LABELS_PER_RECORD: usize = RECORD_BYTES / LABEL_BYTES;
/// Exponent of the degrees' power law: about that of the web's in-links.
const DEGREE_EXPONENT: f64 = 2.1;
const MIN_DEGREE: f64 = 4.0;
/// A hub's list then still fits a quarter of a page, so that copies of it are
/// found in the same page.
const MAX_DEGREE: f64 = 256.0;
/// What a vertex takes, with its links and its share of the marks: for turning
/// a size into a number of vertices.
const BYTES_PER_VERTEX: u64 = 136;
/// A vertex copies from one at most this far before it.
const PROTOTYPE_DISTANCE: u64 = 7;
/// And from so many at most.
const MAX_PROTOTYPES: u32 = 4;
/// Nearby links end within this distance.
const NEAR: u64 = 4096;
const STEPS_PER_WALK: u64 = 16;
/// Of so many walks one is a breadth-first search.
const SEARCH_EVERY: u64 = 32;
/// Vertices that a search visits at most.
const SEARCH_VERTICES: usize = 256;
/// Links of one vertex that a search follows: a hub has thousands.
const SEARCH_LINKS: usize = 32;
const WALKS_PER_ROUND: u64 = 512;

pub(super) struct Graph {
    /// Where the links of each vertex begin; one more than there are vertices.
    offsets: Vec<u64>,
    links: Vec<u32>,
    labels: Vec<[u8; LABEL_BYTES]>,
    /// The search that came by last.
    marks: Vec<u32>,
    searches: u32,
    starts: KeyStream,
    random: Random,
    walks: u64,
    seed: u64,
    /// Of offsets and links as they were made.
    fingerprint: u64,
}

impl Graph {
    pub(super) fn new(size: ByteSize, seed: u64) -> Result<Self> {
        let vertices = size.0 / BYTES_PER_VERTEX;
        if vertices < 1000 || vertices > u64::from(u32::MAX) {
            bail!("--size must be between 1MiB and 600GiB for a graph");
        }
        let mut random = Random::new(seed);
        let mut offsets = Vec::with_capacity(vertices as usize + 1);
        let mut total = 0;
        offsets.push(0);
        for _ in 0..vertices {
            total += degree(&mut random);
            offsets.push(total);
        }
        let mut links = Vec::with_capacity(total as usize);
        for vertex in 0..vertices {
            add_links(vertex, vertices, &offsets, &mut links, &mut random);
        }
        let records = Records::new(mix(seed));
        let mut labels = Vec::with_capacity(vertices as usize);
        let mut record = Vec::new();
        for vertex in 0..vertices as usize {
            labels.push(label(&records, vertex, &mut record));
        }
        let starts = Keys::new(Pattern::ZipfScrambled, vertices).stream(mix(seed));
        let fingerprint = fingerprint(&offsets, &links);
        Ok(Self {
            offsets,
            links,
            labels,
            marks: vec![0; vertices as usize],
            searches: 0,
            starts,
            random,
            walks: 0,
            seed,
            fingerprint,
        })
    }

    fn neighbours(&self, vertex: u32) -> &[u32] {
        let vertex = vertex as usize;
        &self.links[self.offsets[vertex] as usize..self.offsets[vertex + 1] as usize]
    }

    /// Reads a vertex as a ranking would: its name, how many links it has.
    fn visit(&self, vertex: u32) -> u64 {
        let label = &self.labels[vertex as usize];
        let words = label
            .chunks_exact(8)
            .map(|word| word.iter().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte)));
        words.fold(u64::from(vertex), |sum, word| sum.rotate_left(5) ^ word)
    }

    fn walk(&mut self) -> (u64, u64) {
        let mut vertex = self.starts.draw() as u32;
        let mut checksum = 0;
        for _ in 0..STEPS_PER_WALK {
            checksum = mix(checksum ^ self.visit(vertex));
            let neighbours = self.neighbours(vertex);
            let choice = mix(checksum ^ self.walks) % neighbours.len() as u64;
            vertex = neighbours[choice as usize];
        }
        (STEPS_PER_WALK, checksum)
    }

    fn search(&mut self) -> (u64, u64) {
        self.searches += 1;
        let start = self.starts.draw() as u32;
        self.marks[start as usize] = self.searches;
        let mut waiting = VecDeque::from([start]);
        let (mut visited, mut checksum) = (0, 0);
        while let Some(vertex) = waiting.pop_front() {
            checksum = mix(checksum ^ self.visit(vertex));
            visited += 1;
            let from = self.offsets[vertex as usize] as usize;
            let to = (self.offsets[vertex as usize + 1] as usize).min(from + SEARCH_LINKS);
            for link in from..to {
                let next = self.links[link];
                if visited + waiting.len() >= SEARCH_VERTICES {
                    break;
                }
                if self.marks[next as usize] != self.searches {
                    self.marks[next as usize] = self.searches;
                    waiting.push_back(next);
                }
            }
        }
        (visited as u64, checksum)
    }
}

fn degree(random: &mut Random) -> u64 {
    let uniform = 1.0 - random.unit();
    let drawn = MIN_DEGREE * uniform.powf(-1.0 / (DEGREE_EXPONENT - 1.0));
    drawn.min(MAX_DEGREE) as u64
}

fn add_links(
    vertex: u64,
    vertices: u64,
    offsets: &[u64],
    links: &mut Vec<u32>,
    random: &mut Random,
) {
    let place = |index: u64| offsets[index as usize] as usize;
    let wanted = place(vertex + 1) - place(vertex);
    // In runs, as neighbouring pages of a site share their navigation; one with
    // many links shares with several.
    let mut copied = 0;
    for _ in 0..MAX_PROTOTYPES {
        let prototype = vertex.saturating_sub(1 + random.below(PROTOTYPE_DISTANCE));
        if prototype < vertex {
            let length = place(prototype + 1) - place(prototype);
            let run = length.min(wanted * 8 / 10 - copied);
            links.extend_from_within(place(prototype)..place(prototype) + run);
            copied += run;
        }
    }
    for _ in copied..wanted {
        let target = if random.below(2) == 0 {
            let low = vertex.saturating_sub(NEAR / 2).min(vertices.saturating_sub(NEAR));
            low + random.below(NEAR.min(vertices))
        } else {
            // The cube makes few ranks popular; hashing scatters them.
            let rank = (random.unit().powi(3) * vertices as f64) as u64;
            ((u128::from(mix(rank)) * u128::from(vertices)) >> 64) as u64
        };
        links.push(target as u32);
    }
}

fn label(records: &Records, vertex: usize, record: &mut Vec<u8>) -> [u8; LABEL_BYTES] {
    let (number, part) = (vertex / LABELS_PER_RECORD, vertex % LABELS_PER_RECORD);
    // Made once for its labels, which are asked for in order.
    if part == 0 || record.is_empty() {
        records.fill(number as u64, 0, record);
    }
    let mut label = [0; LABEL_BYTES];
    label.copy_from_slice(&record[part * LABEL_BYTES..(part + 1) * LABEL_BYTES]);
    label
}

fn fingerprint(offsets: &[u64], links: &[u32]) -> u64 {
    let sum = offsets.iter().fold(0, |sum, &offset| mix(sum ^ offset));
    links.chunks(2).fold(sum, |sum, pair| {
        mix(sum ^ pair.iter().fold(0, |word, &link| word << 32 | u64::from(link)))
    })
}

impl Rounds for Graph {
    fn bytes(&self) -> u64 {
        let (offsets, labels) = (size_of_val(&*self.offsets), size_of_val(&*self.labels));
        (offsets + labels + size_of_val(&*self.links) + size_of_val(&*self.marks)) as u64
    }

    /// An operation is a visited vertex; the latency is that of a walk.
    fn round(&mut self, latencies: &mut Histogram) -> (u64, u64) {
        let (mut operations, mut checksum) = (0, self.random.next());
        for _ in 0..WALKS_PER_ROUND {
            self.walks += 1;
            let (visited, seen) = if self.walks.is_multiple_of(SEARCH_EVERY) {
                self.search()
            } else {
                let started = Instant::now();
                let walked = self.walk();
                latencies.record(started.elapsed().as_nanos() as u64, 1);
                walked
            };
            operations += visited;
            checksum = mix(checksum ^ seen);
        }
        (operations, checksum)
    }

    fn verify(&self) -> Result<u64> {
        if fingerprint(&self.offsets, &self.links) != self.fingerprint {
            bail!("links are not what was written");
        }
        let records = Records::new(mix(self.seed));
        let mut record = Vec::new();
        for (vertex, seen) in self.labels.iter().enumerate() {
            if *seen != label(&records, vertex, &mut record) {
                bail!("the label of vertex {vertex} is not what was written");
            }
        }
        if let Some(mark) = self.marks.iter().find(|&&mark| mark > self.searches) {
            bail!("a vertex is marked by search {mark} of {}", self.searches);
        }
        Ok((self.offsets.len() + self.links.len() + self.labels.len() + self.marks.len()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Graph {
        Graph::new(ByteSize(16 << 20), 3).expect("built")
    }

    #[test]
    fn it_has_the_size_that_was_asked_for() {
        let bytes = small().bytes() as f64 / f64::from(16 << 20);
        assert!((0.9..1.1).contains(&bytes), "{bytes}");
        assert!(Graph::new(ByteSize(1000), 3).is_err());
    }

    #[test]
    fn degrees_and_popularity_are_skewed() {
        let graph = small();
        let vertices = graph.labels.len() as u32;
        let mut degrees: Vec<usize> = (0..vertices).map(|v| graph.neighbours(v).len()).collect();
        degrees.sort_unstable();
        assert_eq!(degrees[0], MIN_DEGREE as usize);
        assert!(degrees[degrees.len() / 2] < 10 && degrees[degrees.len() - 1] > 200);
        let mut popularity = vec![0u32; vertices as usize];
        for &link in &graph.links {
            popularity[link as usize] += 1;
        }
        popularity.sort_unstable_by(|one, other| other.cmp(one));
        let hot: u32 = popularity[..popularity.len() / 100].iter().sum();
        let share = f64::from(hot) / graph.links.len() as f64;
        assert!(share > 0.08, "a hundredth of the vertices has {share:.3} of the links");
    }

    #[test]
    fn pages_of_it_compress_as_graphs_do() {
        let graph = small();
        let links: Vec<u8> = graph.links.iter().flat_map(|link| link.to_le_bytes()).collect();
        let labels: Vec<u8> = graph.labels.concat();
        let ratio = |bytes: &[u8]| {
            let pages = bytes.chunks_exact(4096);
            let (count, packed) = pages.fold((0, 0), |(count, packed), page| {
                let page = lz4::block::compress(page, None, false).expect("compresses");
                (count + 1, packed + page.len())
            });
            f64::from(count * 4096) / packed as f64
        };
        let (links, labels) = (ratio(&links), ratio(&labels));
        println!("links {links:.2}, labels {labels:.2}");
        assert!((1.3..2.5).contains(&links), "links {links:.2}");
        assert!((2.2..2.9).contains(&labels), "labels {labels:.2}");
    }

    #[test]
    fn damage_is_noticed() {
        let mut graph = small();
        graph.verify().expect("as it was made");
        graph.links[12_345] ^= 1;
        assert!(graph.verify().is_err());
        graph.links[12_345] ^= 1;
        graph.labels[999][17] ^= 1;
        assert!(graph.verify().is_err());
        graph.labels[999][17] ^= 1;
        graph.marks[5] = 77;
        assert!(graph.verify().is_err());
    }
}
