//! One trial of a program that says where it stands (`walk::Gate`): started in
//! its place, led from gate to gate, measured, verified, ended.

use super::figures::{Done, Figures};
use crate::{
    interrupt,
    janitor::Janitor,
    meter::Meter,
    progress::Progress,
    redis::server::Wrapping,
    stage::{Setup, Surroundings},
    subject::{Subject, last_line, scratch},
    walk::{Gate, Work},
};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    fs::File,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{ChildStdin, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    thread,
    time::{Duration, Instant},
};

/// A program that says nothing for this long hangs.
const PATIENCE: Duration = Duration::from_secs(240);
/// How often a waiting lab looks around.
const LOOK: Duration = Duration::from_millis(100);
/// Under a limit the kernel sometimes kills the program although it could swap;
/// some programs cannot live at a limit at all. So many attempts at each limit,
/// and so many limits, each a tenth of the first above the one before. Kills are
/// counted, and the limit that was lived with is in the result.
const ATTEMPTS_PER_LIMIT: u32 = 2;
const LIMITS: u32 = 5;

/// What is run, whatever surrounds it.
pub(super) struct Job {
    pub name: &'static str,
    pub line: Vec<OsString>,
    /// About what it holds.
    pub data_bytes: u64,
}

/// A trial's figures, and what the program said itself.
pub(super) struct Trial {
    pub figures: Figures,
    pub work: Work,
}

/// A program with its gates.
struct Gated {
    subject: Subject,
    answers: ChildStdin,
    lines: Receiver<std::io::Result<String>>,
    log: PathBuf,
}

impl Gated {
    fn start(janitor: &Janitor, job: &Job, wrapping: &Wrapping, directory: &Path) -> Result<Self> {
        let log = directory.join("log");
        let mut command = wrapping.command(&job.line);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(File::create(&log).context("make the program's log")?);
        let mut subject = Subject::spawn(janitor, &mut command)?;
        let answers = subject.child().stdin.take().context("the program has no input")?;
        let output = subject.child().stdout.take().context("the program has no output")?;
        let (sender, lines) = sync_channel(4);
        // Ends with the program's output, or when nobody listens any more.
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { subject, answers, lines, log })
    }

    /// The next gate; `tick` is called while waiting.
    fn gate(&mut self, mut tick: impl FnMut() -> Result<()>) -> Result<Gate> {
        let until = Instant::now() + PATIENCE;
        loop {
            interrupt::check()?;
            match self.lines.recv_timeout(LOOK) {
                Ok(line) => {
                    let line = line.context("read what the program said")?;
                    return serde_json::from_str(&line)
                        .with_context(|| format!("the program said {line:.80}"));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= until => {
                    bail!("the program says nothing for {} s", PATIENCE.as_secs())
                }
                Err(RecvTimeoutError::Timeout) => tick()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.subject.child().wait().context("wait for the program")?;
                    bail!("the program ended ({status}): {}", last_line(&self.log))
                }
            }
        }
    }

    fn answer(&mut self) -> Result<()> {
        // One that has died says so at the next gate.
        match writeln!(self.answers) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(error).context("answer the program")
            }
            _ => Ok(()),
        }
    }
}

/// Runs a job in a setup; whatever it sets up is gone afterwards, also on an
/// error.
pub(super) fn trial(
    janitor: &Janitor,
    binaries: &Path,
    setup: Setup,
    job: &Job,
    progress: &Progress,
) -> Result<Trial> {
    let (mut found, oom_kills) = again(setup, |setup| {
        let around = Surroundings::start(janitor, setup, job.name, job.data_bytes, binaries)?;
        let found = lead(janitor, &around, job, progress);
        let oom_killed = around.was_oom_killed();
        around.stop()?;
        Ok((found, oom_killed))
    })?;
    found.figures.oom_kills = oom_kills;
    Ok(found)
}

/// The setup with its limit as it is after so many kills.
fn eased(setup: Setup, oom_kills: u32) -> Setup {
    match setup {
        Setup::Zram { resident_limit_bytes } => {
            let raises = u64::from(oom_kills / ATTEMPTS_PER_LIMIT);
            let raised = resident_limit_bytes + resident_limit_bytes / 10 * raises;
            Setup::Zram { resident_limit_bytes: raised }
        }
        other => other,
    }
}

/// Tries again what the kernel's OOM killer ended; the result, and how often
/// that was. `attempt` says besides its result whether anything was killed.
pub(super) fn again<T>(
    setup: Setup,
    mut attempt: impl FnMut(Setup) -> Result<(Result<T>, bool)>,
) -> Result<(T, u32)> {
    let mut oom_kills = 0;
    loop {
        match attempt(eased(setup, oom_kills))? {
            (Ok(found), _) => return Ok((found, oom_kills)),
            (Err(_), true) if oom_kills + 1 < ATTEMPTS_PER_LIMIT * LIMITS => oom_kills += 1,
            (Err(error), true) => {
                return Err(error.context("the kernel's OOM killer ended it, again and again"));
            }
            (Err(error), false) => return Err(error),
        }
    }
}

fn lead(janitor: &Janitor, around: &Surroundings, job: &Job, progress: &Progress) -> Result<Trial> {
    let (directory, files) = scratch(janitor, job.name)?;
    let mut program = Gated::start(janitor, job, around.wrapping(), &directory)?;
    let mut meter = Meter::new(around, program.subject.pid());
    progress.part("loading");
    let Gate::Loaded { .. } = program.gate(|| meter.tick())? else { bail!(OUT_OF_TURN) };
    program.answer()?;
    progress.part("warming up");
    let Gate::Warm = program.gate(|| meter.tick())? else { bail!(OUT_OF_TURN) };
    meter.begin()?;
    program.answer()?;
    progress.part("measuring");
    let Gate::Done(work) = program.gate(|| meter.tick())? else { bail!(OUT_OF_TURN) };
    let window = meter.end()?;
    program.answer()?;
    progress.part("verifying every value");
    let Gate::Verified { values } = program.gate(|| meter.tick())? else { bail!(OUT_OF_TURN) };
    if values == 0 || work.operations == 0 {
        bail!("the program did or verified nothing");
    }
    program.answer()?;
    let status = program.subject.wait(PATIENCE, || Ok(())).context("wait for the program")?;
    if !status.success() {
        bail!("the program failed at its end ({status}): {}", last_line(&program.log));
    }
    drop(program.subject);
    files.undo()?;
    let done = Done {
        operations: work.operations,
        seconds: work.seconds,
        p50_us: Some(work.p50_us),
        p99_us: work.p99_us,
    };
    let figures = Figures::new(job.name, around.setup, &meter, &window, (done, 0));
    Ok(Trial { figures, work })
}

const OUT_OF_TURN: &str = "the program said its gates out of turn";

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn shell(script: &str) -> Job {
        let line = ["sh", "-c", script].map(OsString::from).to_vec();
        Job { name: "shell", line, data_bytes: 0 }
    }

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("strata-lab-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("made");
        path
    }

    /// Without a janitor: what it does is tested in its own file.
    fn gated(script: &str, directory: &Path) -> Gated {
        let job = shell(script);
        let mut command = Wrapping::default().command(&job.line);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let log = directory.join("log");
        command.stderr(File::create(&log).expect("a log"));
        let mut child = command.spawn().expect("sh runs");
        let answers = child.stdin.take().expect("piped");
        let output = child.stdout.take().expect("piped");
        let (sender, lines) = sync_channel(4);
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Gated { subject: Subject::of(child), answers, lines, log }
    }

    #[test]
    fn a_program_is_led_through_its_gates() {
        let directory = directory("gates");
        let script = r#"echo '{"gate":"loaded","bytes":5}'; read answer; echo '{"gate":"warm"}'
            read answer; echo nonsense"#;
        let mut program = gated(script, &directory);
        assert!(matches!(program.gate(|| Ok(())), Ok(Gate::Loaded { bytes: 5 })));
        program.answer().expect("answered");
        assert!(matches!(program.gate(|| Ok(())), Ok(Gate::Warm)));
        program.answer().expect("answered");
        let error = program.gate(|| Ok(())).expect_err("no gate");
        assert!(format!("{error:#}").contains("nonsense"), "{error:#}");
        fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn a_program_that_dies_is_a_failure_with_its_reason() {
        let directory = directory("dies");
        let mut program = gated("echo wrong value >&2; exit 3", &directory);
        let error = format!("{:#}", program.gate(|| Ok(())).expect_err("it died"));
        assert!(error.contains("wrong value") && error.contains('3'), "{error}");
        fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn only_what_the_oom_killer_ended_is_tried_again() {
        let setup = Setup::Zram { resident_limit_bytes: 1000 };
        let mut limits = Vec::new();
        let found = again(setup, |setup| {
            let Setup::Zram { resident_limit_bytes } = setup else { panic!("{setup:?}") };
            limits.push(resident_limit_bytes);
            let died = Err(anyhow::anyhow!("died"));
            Ok(if limits.len() < 4 { (died, true) } else { (Ok("lived"), false) })
        });
        assert_eq!(found.expect("the fourth"), ("lived", 3));
        assert_eq!(limits, [1000, 1000, 1100, 1100]);
        let wrong = Err::<(), _>("wrong value");
        assert!(again(setup, |_| Ok((wrong.map_err(anyhow::Error::msg), false))).is_err());
        let mut attempts = 0;
        let died = again(setup, |_| {
            attempts += 1;
            Ok((Err::<(), _>(anyhow::anyhow!("died")), true))
        });
        assert!(died.is_err() && attempts == ATTEMPTS_PER_LIMIT * LIMITS);
    }
}
