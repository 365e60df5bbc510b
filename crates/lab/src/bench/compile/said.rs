//! What the trials say: medians of each division, and the last one beside the first.

use super::{Division, FIXED_MIB, GUESTS, MEMORY_MIB, ONE_POOL_MIB, OWN_POOL_MIB, Trial};
use crate::{
    bench::report::{Series, Side},
    statistics::spread,
    table::{Table, three_digits},
};

const SECTOR: f64 = 512.0;

/// The last division beside the first.
pub(super) fn series(trials: &[Trial]) -> Vec<Series> {
    type Figure = (&'static str, &'static str, fn(&Trial) -> f64);
    let figures: [Figure; 4] = [
        ("elapsed", "s", |trial| trial.seconds),
        ("read from the host's disk", "sectors", |trial| trial.read_bytes / SECTOR),
        ("read from disk and swap, as the guests count", "sectors", |trial| {
            trial.sectors(|built| built.disk, 0) + trial.sectors(|built| built.swap, 0)
        }),
        ("processor time, of QEMU and Strata", "s", |trial| {
            trial.guest_seconds + trial.daemon_seconds
        }),
    ];
    let side = |division: Division, of: fn(&Trial) -> f64| {
        let mut side = Side::new(division.name());
        let ours = trials.iter().filter(|trial| trial.division == division);
        side.samples.extend(ours.map(of));
        side
    };
    let all = figures.into_iter().map(|(name, unit, of)| Series {
        name: name.to_owned(),
        unit: unit.to_owned(),
        left: side(Division::OnePool, of),
        right: Some(side(Division::Fixed, of)),
    });
    let pool = Series {
        name: "cost of one pool for four equal images, of a pool for one".to_owned(),
        unit: "MiB".to_owned(),
        left: side(Division::OnePool, pool_mebibytes),
        right: Some(side(Division::OwnPools, pool_mebibytes)),
    };
    all.chain([pool]).collect()
}

/// Of a pool, on average.
fn pool_mebibytes(trial: &Trial) -> f64 {
    let all = trial.pool_bytes(|pool| pool.cost_bytes) / f64::from(1 << 20);
    all / trial.pools.len().max(1) as f64
}

/// Medians of each division.
pub(super) fn said(trials: &[Trial]) -> String {
    let mut table = Table::new(&[
        "",
        "n",
        "elapsed, s",
        "processor time of QEMU, s",
        "the guests' disks: read, sectors",
        "written",
        "their swap disks: read",
        "written",
        "the host's disk: read",
        "written",
        "processor time of Strata, s",
        "through their balloons, MiB",
        "DRAM at the end, MiB",
        "pools hold, MiB",
        "cost, MiB",
    ]);
    for division in Division::ALL {
        let ours: Vec<&Trial> = trials.iter().filter(|one| one.division == division).collect();
        let median = |of: &dyn Fn(&Trial) -> f64| {
            let samples: Vec<f64> = ours.iter().map(|&trial| of(trial)).collect();
            spread(&samples).map_or_else(|| "–".to_owned(), |found| three_digits(found.median))
        };
        let mebibytes = f64::from(1 << 20);
        table.row(vec![
            division.name().to_owned(),
            ours.len().to_string(),
            median(&|trial| trial.seconds),
            median(&|trial| trial.guest_seconds),
            median(&|trial| trial.sectors(|built| built.disk, 0)),
            median(&|trial| trial.sectors(|built| built.disk, 1)),
            median(&|trial| trial.sectors(|built| built.swap, 0)),
            median(&|trial| trial.sectors(|built| built.swap, 1)),
            median(&|trial| trial.read_bytes / SECTOR),
            median(&|trial| trial.written_bytes / SECTOR),
            median(&|trial| trial.daemon_seconds),
            median(&|trial| {
                trial.guests.iter().map(|built| built.balloon_pages).sum::<u64>() as f64 / 256.0
            }),
            median(&|trial| trial.dram_bytes as f64 / mebibytes),
            median(&|trial| trial.pool_bytes(|pool| pool.page_bytes) / mebibytes),
            median(&|trial| trial.pool_bytes(|pool| pool.cost_bytes) / mebibytes),
        ]);
    }
    format!(
        "\n{GUESTS} guests, emulated. All memory: plain QEMU, {MEMORY_MIB} MiB each, and DRAM for it. \
         Fixed parts: plain QEMU, {FIXED_MIB} MiB each. The others: {MEMORY_MIB} MiB each, \
         promised, in the DRAM that the four processes with fixed parts took; a pool each has {OWN_POOL_MIB} MiB of it, one pool for all {ONE_POOL_MIB}. Medians; all guests together.\n\n{}",
        table.markdown()
    )
}

#[cfg(test)]
mod tests {
    use super::{super::tests::trial, *};

    #[test]
    fn sums_are_of_all_guests() {
        let trials = [trial(Division::Fixed, 0), trial(Division::OnePool, 0)];
        let series = series(&trials);
        let read = |name: &str| {
            let found = series.iter().find(|one| one.name.starts_with(name)).expect("there");
            (found.left.samples.clone(), found.right.as_ref().expect("two").samples.clone())
        };
        assert_eq!(read("read from the host's disk"), (vec![10.0], vec![10.0]));
        assert_eq!(read("read from disk and swap"), (vec![432.0], vec![432.0]));
        assert_eq!(read("processor"), (vec![1.5], vec![1.5]));
        assert!(said(&trials).contains("fixed parts"));
    }
}
