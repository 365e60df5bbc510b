//! What a program that is far below its budget notices of Strata: nothing, it is
//! promised. Each program natively and under Strata, in turn; each times its own
//! work, so that its start does not count. Two of them consist of starts, and for
//! those is said what one more process costs.

use super::{
    Bench,
    report::{PartResults, Series, Side},
};
use crate::{interrupt, redis::server::Wrapping, strata::Strata, subject::scratch};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A budget that none of them comes near.
const PLENTY_BYTES: u64 = 1 << 30;

/// How a program is made of its source, and called.
#[derive(Clone, Copy)]
enum Language {
    C,
    Cpp,
    Python,
    Shell,
}

/// One program, and how much it has to do.
struct Work {
    name: &'static str,
    language: Language,
    source: &'static str,
    amount: u64,
    quick_amount: u64,
    /// Processes that it starts, for each of its amount; 0: none.
    processes: u64,
}

const WORKS: [Work; 5] = [
    Work {
        name: "stdio, a character at a time",
        language: Language::C,
        source: include_str!("../../programs/stdio.c"),
        amount: 100_000_000,
        quick_amount: 10_000_000,
        processes: 0,
    },
    Work {
        name: "copies of shared_ptr",
        language: Language::Cpp,
        source: include_str!("../../programs/shared_pointers.cpp"),
        amount: 40_000,
        quick_amount: 4_000,
        processes: 0,
    },
    Work {
        name: "a CPython script",
        language: Language::Python,
        source: include_str!("../../programs/objects.py"),
        amount: 20,
        quick_amount: 2,
        processes: 0,
    },
    Work {
        name: "forks",
        language: Language::C,
        source: include_str!("../../programs/forks.c"),
        amount: 500,
        quick_amount: 50,
        processes: 1,
    },
    Work {
        name: "200 commands of a shell",
        language: Language::Shell,
        source: include_str!("../../programs/commands.sh"),
        amount: 100,
        quick_amount: 10,
        // `echo` is the shell's own, but a part of a pipeline: it is forked.
        processes: 3,
    },
];

/// All programs, as often as is asked for.
pub(super) fn unseen(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let (directory, _files) = scratch(&bench.janitor, "unseen")?;
    let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    strata.keep(&bench.janitor)?;
    let mut missing = Vec::new();
    for (number, work) in WORKS.iter().enumerate() {
        match command_of(work, &directory.join(number.to_string())) {
            Ok(command) => measure(bench, &strata, number, work, &command, results)?,
            Err(error) => missing.push(format!("{}: {error:#}", work.name)),
        }
    }
    strata.stop()?;
    if missing.is_empty() { Ok(()) } else { bail!("{}", missing.join("; ")) }
}

/// Builds what is to be built; the command without its amount.
fn command_of(work: &Work, place: &Path) -> Result<Vec<PathBuf>> {
    let compiled = |compiler: &str, extension: &str| -> Result<Vec<PathBuf>> {
        let source = place.with_extension(extension);
        fs::write(&source, work.source).context("write its source")?;
        let status = Command::new(compiler)
            .arg("-O2")
            .arg("-o")
            .arg(place)
            .arg(&source)
            .status()
            .with_context(|| format!("run {compiler}"))?;
        if !status.success() {
            bail!("{compiler} cannot build it ({status})");
        }
        Ok(vec![place.to_owned()])
    };
    let interpreted = |interpreter: &str| -> Result<Vec<PathBuf>> {
        fs::write(place, work.source).context("write its source")?;
        Ok(vec![interpreter.into(), place.to_owned()])
    };
    match work.language {
        Language::C => compiled("cc", "c"),
        Language::Cpp => compiled("c++", "cpp"),
        Language::Python => interpreted("python3"),
        Language::Shell => interpreted("sh"),
    }
}

fn measure(
    bench: &Bench,
    strata: &Strata,
    number: usize,
    work: &Work,
    command: &[PathBuf],
    results: &mut PartResults,
) -> Result<()> {
    let amount = if bench.quick { work.quick_amount } else { work.amount };
    let mut sides = [Side::new("Strata"), Side::new("native")];
    for repetition in 0..bench.repetitions {
        for turn in 0..sides.len() {
            interrupt::check()?;
            // Who goes first alternates.
            let place = (repetition + turn) % sides.len();
            let name = format!("unseen-{}-{number}-{repetition}", std::process::id());
            let wrapping =
                if place == 0 { strata.wrapping(&name, PLENTY_BYTES) } else { Wrapping::default() };
            sides[place].samples.push(seconds(&wrapping, command, amount)?);
        }
    }
    for side in &sides {
        results.raw.push(serde_json::json!({ "work": work.name, "amount": amount, "side": side }));
    }
    let per_second = |side: &Side| Side {
        name: side.name.clone(),
        samples: side.samples.iter().map(|seconds| amount as f64 / seconds).collect(),
    };
    if work.processes == 0 {
        results.series.push(Series {
            name: work.name.to_owned(),
            unit: "/s".to_owned(),
            left: per_second(&sides[0]),
            right: Some(per_second(&sides[1])),
        });
        return Ok(());
    }
    let processes = (amount * work.processes) as f64;
    let each = |seconds: &f64| seconds * 1000.0 / processes;
    let [managed, native] = sides;
    let added = managed.samples.iter().zip(&native.samples);
    let added: Vec<f64> = added.map(|(with, without)| each(with) - each(without)).collect();
    let milliseconds =
        |side: Side| Side { samples: side.samples.iter().map(each).collect(), name: side.name };
    results.series.extend([
        Series {
            name: format!("{}: a process", work.name),
            unit: "ms".to_owned(),
            left: milliseconds(managed),
            right: Some(milliseconds(native)),
        },
        Series {
            name: format!("{}: added to a process", work.name),
            unit: "ms".to_owned(),
            left: Side { name: "added".to_owned(), samples: added },
            right: None,
        },
    ]);
    Ok(())
}

/// Runs it once; the seconds that it says.
fn seconds(wrapping: &Wrapping, command: &[PathBuf], amount: u64) -> Result<f64> {
    let mut run = wrapping.command(command);
    run.arg(amount.to_string()).stdin(Stdio::null());
    let output = run.output().with_context(|| format!("run {:?}", run.get_program()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("the measured program failed ({}): {}", output.status, said.trim());
    }
    let text = String::from_utf8(output.stdout).context("read what a program printed")?;
    text.trim().parse().with_context(|| format!("a program printed {text:?}"))
}
