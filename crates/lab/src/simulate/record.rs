//! `strata-lab trace`: records which pages an unmodified program touches, without
//! Strata, for `strata-lab simulate --trace`.
//!
//! The program runs under valgrind's lackey, which reports every load and store of
//! its main process: exact, and a hundred times slower than the program itself.
//! Touches of the last few pages are left out of the recording: a replacement with
//! more room than that many pages cannot tell (stack deletion; Smith: Two methods
//! for the efficient analysis of memory address trace data, 1977). The main
//! thread's stack is left out too, Strata does not manage stacks.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use clap::Args;

use super::trace;

/// Where valgrind puts the main thread's stack on x86-64.
const STACK: std::ops::Range<u64> = 0x1f_f000_0000..0x20_0000_0000;

/// Options of `strata-lab trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// The file to write.
    #[arg(long)]
    output: PathBuf,
    /// Touches left out at the beginning (start and load).
    #[arg(long, default_value_t = 0)]
    skip_touches: u64,
    /// Touches recorded; then the program is ended.
    #[arg(long, default_value_t = 2_000_000)]
    touches: usize,
    /// A touch of one of this many last pages is left out.
    #[arg(long, default_value_t = 64)]
    recent_pages: usize,
    /// The program (itself: a script's interpreter would be recorded) and its
    /// arguments.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Runs the command and writes the recording.
pub(crate) fn run(args: &TraceArgs) -> anyhow::Result<()> {
    ensure!(args.recent_pages > 0, "--recent-pages 0: a page would be recorded for each byte");
    // A shell moves the report to a descriptor of its own, apart from the program's;
    // a recorder that is killed takes the program with it.
    let mut child = Command::new("sh")
        .arg("-c")
        .arg("exec 9>&1 1>&2; exec setpriv --pdeathsig KILL valgrind -q --tool=lackey --trace-mem=yes --log-fd=9 \"$@\"")
        .arg("sh")
        .args(&args.command)
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a shell for valgrind")?;
    let report = child.stdout.take().context("the report's pipe")?;
    let mut recorder = Recorder::new(args.recent_pages, args.skip_touches);
    for line in BufReader::with_capacity(1 << 20, report).split(b'\n') {
        recorder.line(&line.context("reading valgrind's report")?);
        if recorder.touches.len() >= args.touches {
            child.kill().context("ending the program")?;
            break;
        }
    }
    let status = child.wait().context("waiting for valgrind")?;
    ensure!(
        recorder.touches.len() > 1,
        "valgrind ({status}) reported no touches after the first {}; is it installed, and does \
         the program run?",
        args.skip_touches
    );
    let file = trace::encode(&trace::page_ids(&recorder.touches))?;
    std::fs::write(&args.output, &file)
        .with_context(|| format!("writing {}", args.output.display()))?;
    eprintln!(
        "{} touches of {} accesses, {} bytes",
        recorder.touches.len(),
        recorder.accesses,
        file.len()
    );
    Ok(())
}

/// What is kept of the report.
struct Recorder {
    /// The last pages, the latest first.
    recent: Vec<u64>,
    recent_pages: usize,
    to_skip: u64,
    accesses: u64,
    touches: Vec<u64>,
}

impl Recorder {
    fn new(recent_pages: usize, to_skip: u64) -> Self {
        Self {
            recent: Vec::with_capacity(recent_pages),
            recent_pages,
            to_skip,
            accesses: 0,
            touches: Vec::new(),
        }
    }

    /// ` L address,size`, ` S` or ` M` likewise; everything else (instructions,
    /// messages) is passed over.
    fn line(&mut self, line: &[u8]) {
        let [b' ', b'L' | b'S' | b'M', b' ', rest @ ..] = line else { return };
        let mut address = 0u64;
        for &digit in rest.iter().take_while(|&&byte| byte != b',') {
            let Some(value) = char::from(digit).to_digit(16) else { return };
            address = address << 4 | u64::from(value);
        }
        self.accesses += 1;
        if STACK.contains(&address) {
            return;
        }
        let page = address >> 12;
        if let Some(place) = self.recent.iter().position(|&other| other == page) {
            self.recent[..=place].rotate_right(1);
            return;
        }
        self.recent.truncate(self.recent_pages - 1);
        self.recent.insert(0, page);
        if self.to_skip > 0 {
            self.to_skip -= 1;
        } else {
            self.touches.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_touches_are_kept_and_recent_pages_left_out() {
        let mut recorder = Recorder::new(2, 1);
        for line in [
            "==12== a message",
            "I  04001234,3",
            " S 00001000,8",
            " L 05000ff8,8",
            " S 05001000,4",
            " L 05000000,1",
            " M 1ffefff0a0,8",
            " L 06000000,1",
            " L 05000010,1",
            " L 05001000,1",
        ] {
            recorder.line(line.as_bytes());
        }
        assert_eq!(recorder.touches, [0x5000, 0x5001, 0x6000, 0x5001]);
        assert_eq!(recorder.accesses, 8);
    }
}
