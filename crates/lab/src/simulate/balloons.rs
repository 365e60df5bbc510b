//! `strata-lab balloons`: unlike guests on one host, whose balloons are set once a second by
//! the production function ([`strata_policy::balloon`]) and by what others do. A guest is
//! two sums: memory that its programs use, and files that they read, which it keeps what it
//! has room for of. What is missed is read from its disk, or from its swap. Nothing is timed.

use anyhow::ensure;
use clap::Args;
use strata_policy::balloon::{Past, Seen, Settings, decide};
use strata_policy::shares;
use strata_units::PAGE_SIZE;
use strata_units::reading::Reading;

use crate::table::Table;

const MIB: u64 = 1 << 20;
/// What a guest's kernel needs for itself.
const KERNEL_BYTES: u64 = 96 * MIB;
/// What a guest's programs are promised beside what they use.
const COMMITTED_PART: f64 = 1.25;
/// How long a task waits for a page of a disk, in microseconds.
const READ_US: u64 = 100;
/// Rules of MOM, as its published policy has them (doc/ballooning.rules): below this part of
/// the host free guests shrink, below that one they are made to swap; ...
const MOM_PRESSURE: f64 = 0.20;
const MOM_CRITICAL: f64 = 0.05;
/// ...by so much of what they have in a round; the part that a guest keeps free; ...
const MOM_CHANGE: f64 = 0.05;
const MOM_GUEST_FREE: f64 = 0.201;
/// ...and how often a round is, in seconds.
const MOM_EVERY: u64 = 10;

/// Options of `strata-lab balloons`.
#[derive(Args, Debug)]
pub(crate) struct BalloonsArgs {
    /// DRAM of the host, as a share of what all guests are promised.
    #[arg(long, default_value_t = 0.5)]
    dram: f64,
    /// Simulated seconds.
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
}

/// What a guest does.
struct Plan {
    name: &'static str,
    memory: u64,
    /// What its programs use in a second.
    used: fn(u64) -> u64,
    /// Which files they read in it, by a number, and how much those have.
    files: fn(u64) -> (u64, u64),
    /// How much of them is read in a second.
    read: u64,
}

const GUESTS: [Plan; 4] = [
    Plan {
        name: "web (steady)",
        memory: 2048 * MIB,
        used: |_| 500 * MIB,
        files: |_| (0, 600 * MIB),
        read: 40 * MIB,
    },
    Plan {
        name: "build (ten minutes in thirty)",
        memory: 2048 * MIB,
        used: |second| if second % 1800 < 600 { 1400 * MIB } else { 150 * MIB },
        files: |second| if second % 1800 < 600 { (0, 400 * MIB) } else { (0, 20 * MIB) },
        read: 40 * MIB,
    },
    Plan {
        name: "files (other ones each quarter of an hour)",
        memory: 2048 * MIB,
        used: |_| 200 * MIB,
        files: |second| (second / 900, 900 * MIB),
        read: 40 * MIB,
    },
    Plan {
        name: "idle",
        memory: 2048 * MIB,
        used: |_| 150 * MIB,
        files: |_| (0, 50 * MIB),
        read: MIB,
    },
];

/// A guest under way.
struct Guest {
    plan: &'static Plan,
    /// What its balloon leaves it.
    has: u64,
    /// Which files it reads, and what it has of them; and what else it once read, which it
    /// keeps until it needs the room.
    files: u64,
    cached: u64,
    old: u64,
    free: u64,
    reading: Reading,
    past: Past,
    read_bytes: u64,
    swapped_bytes: u64,
}

impl Guest {
    fn new(plan: &'static Plan, has: u64) -> Self {
        let counted = Some(0);
        let reading = Reading {
            total_bytes: plan.memory - 32 * MIB,
            some_us: counted,
            full_us: counted,
            refaulted_pages: counted,
            swapped_in_pages: counted,
            ..Reading::default()
        };
        Self {
            plan,
            has,
            files: 0,
            cached: 0,
            old: 0,
            free: 0,
            reading,
            past: Past::default(),
            read_bytes: 0,
            swapped_bytes: 0,
        }
    }

    /// A second in which it really has `has` bytes.
    fn second(&mut self, second: u64, has: u64) {
        let room = has.saturating_sub(KERNEL_BYTES);
        let used = (self.plan.used)(second);
        let swapped = used.saturating_sub(room);
        let room = room.saturating_sub(used);
        let (files, size) = (self.plan.files)(second);
        if files != self.files {
            (self.files, self.old, self.cached) = (files, self.old + self.cached, 0);
        }
        // What does not fit goes, the oldest first.
        let before = self.cached.min(size);
        self.cached = before.min(room);
        let dropped = before - self.cached;
        let missing = size - self.cached;
        let missed = (self.plan.read as f64 * missing as f64 / size as f64) as u64;
        let is_known = self.old + self.cached + missed > room || dropped > 0;
        self.cached = (self.cached + missed).min(size).min(room);
        self.old = self.old.min(room - self.cached);
        self.free = room - self.cached - self.old;
        self.read_bytes += missed;
        self.swapped_bytes += swapped;
        let pages = |bytes: u64| bytes / PAGE_SIZE as u64;
        // What was there and had to go is wanted again; what is read first is not.
        let again = if is_known { missed } else { 0 };
        let add = |count: &mut Option<u64>, more| *count = count.map(|count| count + more);
        add(&mut self.reading.refaulted_pages, pages(again));
        add(&mut self.reading.swapped_in_pages, pages(swapped));
        let waited = (pages(again + swapped) * READ_US).min(1_000_000);
        add(&mut self.reading.some_us, waited);
        add(&mut self.reading.full_us, waited / 4);
        self.reading.at_ms = (second + 1) * 1000;
        self.reading.free_bytes = self.free;
        self.reading.available_bytes = self.free + self.cached + self.old;
        self.reading.committed_bytes = Some((used as f64 * COMMITTED_PART) as u64);
    }
}

impl Guest {
    /// Its balloon follows it, within what the host has for it.
    fn follow(&mut self, fits_bytes: Option<u64>) {
        let seen = Seen {
            memory_bytes: self.plan.memory,
            balloon_bytes: self.has,
            had_bytes: self.has,
            seconds: 1.0,
            reading: Some((self.reading, 0.5)),
            fits_bytes,
        };
        self.has = decide(&settings(self.plan.memory), &mut self.past, &seen).bytes;
    }
}

/// What the host has for each guest.
struct Shares {
    budgets: Vec<u64>,
    past: Vec<shares::Past>,
}

impl Shares {
    fn new(guests: &[Guest], each: u64) -> Self {
        let past = guests.iter().map(|_| shares::Past::default()).collect();
        Self { budgets: vec![each; guests.len()], past }
    }

    /// As the daemon has them moved: what its balloon keeps from a guest counts as what is
    /// out.
    fn move_them(&mut self, guests: &[Guest], dram: u64) {
        let seen = guests.iter().zip(&self.budgets).map(|(guest, &budget_bytes)| {
            let wish = guest.past.wish();
            let lack = wish.map_or(0, |wish| wish.bytes.saturating_sub(guest.has));
            shares::Seen {
                limit_bytes: guest.plan.memory,
                weight: 1.0,
                budget_bytes,
                used_bytes: guest.has.min(budget_bytes),
                whole_bytes: guest.has + lack,
                returned_bytes: wish.map_or(0, |wish| wish.returned_bytes as u64),
                stall: wish.map_or(0.0, |wish| wish.stall.min(1.0)),
                busy: 1.0,
                ..shares::Seen::default()
            }
        });
        let seen: Vec<_> = seen.collect();
        let shares = shares::share(dram, &seen, &mut self.past, 1.0);
        self.budgets = shares.iter().map(|share| share.budget_bytes).collect();
    }
}

/// Who sets the balloons.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Setter {
    Static,
    Equal,
    Mom,
    Themselves,
    /// Within what the host's moving shares have for each.
    Shared,
}

impl Setter {
    const ALL: [Self; 5] = [Self::Static, Self::Equal, Self::Mom, Self::Themselves, Self::Shared];

    const fn name(self) -> &'static str {
        match self {
            Self::Static => "fixed, by what programs use on average",
            Self::Equal => "equal, whatever the pressure (DMC)",
            Self::Mom => "by the host's pressure (MOM)",
            Self::Themselves => "self-ballooning (production)",
            Self::Shared => "self-ballooning within moving shares (production)",
        }
    }
}

/// As `strata vm run` has them for a guest of that size.
fn settings(memory: u64) -> Settings {
    Settings {
        floor_bytes: memory / 4,
        headroom_bytes: memory / 16,
        headroom_percent: 10,
        committed_percent: 100,
        hysteresis_bytes: memory / 64,
        up_bytes: memory / 2,
        down_bytes: memory / 64,
        some_percent: 10,
        full_percent: 2,
        swap_in_bytes: memory / 512,
        low_percent: 50,
        refault_bytes: memory / 256,
        calm_s: 30,
        remember_s: 300,
        stale_s: 5,
    }
}

fn mom(guests: &mut [Guest], dram: u64) {
    let used: u64 = guests.iter().map(|guest| guest.has - guest.free.min(guest.has)).sum();
    let host_free = 1.0 - used.min(dram) as f64 / dram as f64;
    for guest in guests {
        let (has, all) = (guest.has as f64, guest.plan.memory as f64);
        let used = has - guest.free as f64;
        guest.has = if host_free < MOM_PRESSURE {
            let free = if host_free <= MOM_CRITICAL {
                host_free - 0.05
            } else {
                MOM_GUEST_FREE * host_free / MOM_PRESSURE
            };
            let least = (used + free * has).max(all / 4.0);
            (has * (1.0 - MOM_CHANGE)).max(least).min(has)
        } else {
            let least = used + MOM_GUEST_FREE * all;
            (has * (1.0 + MOM_CHANGE)).max(least).min(all)
        } as u64;
    }
}

/// What became of all guests, and the most and the mean that they had of the host's DRAM.
struct Outcome {
    read: Vec<u64>,
    swapped: u64,
    mean: f64,
    most: f64,
}

fn run_with(setter: Setter, dram: u64, seconds: u64) -> Outcome {
    let equal = dram / GUESTS.len() as u64;
    let mean = |plan: &Plan| (0..seconds).map(|second| (plan.used)(second)).sum::<u64>() / seconds;
    let means: u64 = GUESTS.iter().map(mean).sum();
    let begins = |plan: &Plan| match setter {
        Setter::Static => (dram as f64 * mean(plan) as f64 / means as f64) as u64,
        Setter::Equal => equal,
        Setter::Mom | Setter::Themselves | Setter::Shared => plan.memory,
    };
    let mut guests: Vec<Guest> =
        GUESTS.iter().map(|plan| Guest::new(plan, begins(plan).min(plan.memory))).collect();
    let mut shares = Shares::new(&guests, equal);
    let (mut sum, mut most) = (0.0, 0.0_f64);
    for second in 0..seconds {
        let all: u64 = guests.iter().map(|guest| guest.has).sum();
        // What the host does not have it takes from all alike, behind their backs.
        let part = (dram as f64 / all as f64).min(1.0);
        for guest in &mut guests {
            guest.second(second, (guest.has as f64 * part) as u64);
        }
        sum += all.min(dram) as f64 / dram as f64;
        most = most.max(all as f64 / dram as f64);
        match setter {
            Setter::Mom if second.is_multiple_of(MOM_EVERY) => mom(&mut guests, dram),
            Setter::Themselves => guests.iter_mut().for_each(|guest| guest.follow(None)),
            Setter::Shared => {
                shares.move_them(&guests, dram);
                for (guest, &budget) in guests.iter_mut().zip(&shares.budgets) {
                    guest.follow(Some(budget));
                }
            }
            _ => {}
        }
    }
    Outcome {
        read: guests.iter().map(|guest| guest.read_bytes).collect(),
        swapped: guests.iter().map(|guest| guest.swapped_bytes).sum(),
        mean: sum / seconds as f64,
        most,
    }
}

/// Runs what the arguments ask for and prints a table.
pub(crate) fn run(args: &BalloonsArgs) -> anyhow::Result<()> {
    ensure!(args.dram > 0.2 && args.dram <= 1.0, "--dram {} is no share from 0.2 to 1", args.dram);
    ensure!(args.seconds > 0, "--seconds 0 leaves nothing to simulate");
    let promised: u64 = GUESTS.iter().map(|plan| plan.memory).sum();
    let dram = (promised as f64 * args.dram) as u64;
    println!(
        "{} guests, {} MiB promised, {} MiB of DRAM, {} s; MiB read from disks, and from swap",
        GUESTS.len(),
        promised / MIB,
        dram / MIB,
        args.seconds
    );
    let mut header = vec!["balloons are set"];
    header.extend(GUESTS.iter().map(|plan| plan.name));
    header.extend(["swap", "sum", "DRAM given, mean", "most"]);
    let mut table = Table::new(&header);
    for setter in Setter::ALL {
        let outcome = run_with(setter, dram, args.seconds);
        let mut cells = vec![setter.name().to_owned()];
        cells.extend(outcome.read.iter().map(|bytes| (bytes / MIB).to_string()));
        let sum: u64 = outcome.read.iter().sum();
        cells.push((outcome.swapped / MIB).to_string());
        cells.push(((sum + outcome.swapped) / MIB).to_string());
        cells.push(format!("{:.0} %", outcome.mean * 100.0));
        cells.push(format!("{:.0} %", outcome.most * 100.0));
        table.row(cells);
    }
    print!("{}", table.plain());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_asks_for_it_gets_it_and_an_idle_one_gives_it() {
        let dram = GUESTS.iter().map(|plan| plan.memory).sum::<u64>() / 2;
        let reads = |setter| {
            let outcome = run_with(setter, dram, 3600);
            outcome.read.iter().sum::<u64>() + outcome.swapped
        };
        let (fixed, own) = (reads(Setter::Equal), reads(Setter::Themselves));
        assert!(own < fixed, "{own} is not less than {fixed}");
        let shared = reads(Setter::Shared);
        assert!(shared < own / 2, "{shared} is not much less than {own}");
    }

    #[test]
    fn a_guest_misses_what_it_has_no_room_for() {
        let mut guest = Guest::new(&GUESTS[0], 2048 * MIB);
        (0..200).for_each(|second| guest.second(second, 2048 * MIB));
        let warm = guest.read_bytes;
        assert!(guest.cached > 590 * MIB && guest.swapped_bytes == 0);
        assert_eq!(guest.reading.refaulted_pages, Some(0));
        (200..260).for_each(|second| guest.second(second, 800 * MIB));
        assert!(guest.read_bytes > warm + 500 * MIB && guest.free == 0);
        assert!(guest.reading.refaulted_pages > Some(0));
        guest.second(260, 500 * MIB);
        assert_eq!(guest.swapped_bytes, 96 * MIB);
    }
}
