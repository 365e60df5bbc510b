//! stratad: wiring only. Reads the configuration, binds the sockets, and lets a
//! supervisor keep a worker alive.
#![forbid(unsafe_code)]

mod admission;
mod advice;
mod agents;
mod belonging;
mod cgroup;
mod commands;
mod config;
mod control;
mod current;
mod doctor;
mod doors;
mod groups;
mod guests;
mod holder;
mod lobby;
mod lock;
mod logbook;
mod manager;
mod metrics;
mod naming;
mod parent;
mod place;
mod places;
mod pools;
mod program;
mod pulse;
mod quota;
mod reload;
mod schedule;
mod shares;
mod snapshots;
mod statistics;
mod supervisor;
mod surveyor;
mod takeover;
mod tenants;
mod tier;
mod turnstile;
mod upgrade;
mod watcher;
mod worker;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use strata_sys::{Priority, log};

use crate::config::{Config, Machine};
use crate::supervisor::Origin;

/// Exit status when the command line was typed wrong.
const USAGE: u8 = 2;

/// The memory machine's daemon: holds the pages of managed programs.
#[derive(Parser, Debug)]
#[command(name = "stratad", version)]
struct Arguments {
    /// Configuration file [default: /etc/strata/stratad.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve one user from DIR and end with the last tenant (`strata run`
    /// starts such a daemon when no other runs)
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    private: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Task>,
}

#[derive(Subcommand, Debug)]
enum Task {
    /// Tell what this machine allows, and what is lost without it
    Doctor {
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Check a configuration file and print it with all defaults
    ConfigCheck {
        /// The file [default: /etc/strata/stratad.toml, if it exists]
        file: Option<PathBuf>,
    },
    /// Say which version this is, and what it can take over
    #[command(hide = true, name = upgrade::QUESTION)]
    CanTakeOver,
    /// Be a program's parent (`strata run --supervise` becomes this)
    #[command(hide = true)]
    Supervise {
        socket: PathBuf,
        name: String,
        /// The name that the program is called by
        first: OsString,
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    abort_on_panic();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() => {
            eprintln!("stratad: usage: {}; see stratad --help", first_line(&error.to_string()));
            return ExitCode::from(USAGE);
        }
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let outcome = match &arguments.command {
        Some(Task::Doctor { json }) => doctor(*json),
        Some(Task::ConfigCheck { file }) => config_check(file.as_deref()),
        Some(Task::Supervise { socket, name, first, program }) => {
            parent::supervise(socket, name, first, program).map(|()| ExitCode::SUCCESS)
        }
        Some(Task::CanTakeOver) => {
            print(&format!("{}\n", upgrade::what_is_here())).map(|()| ExitCode::SUCCESS)
        }
        None => serve(&arguments),
    };
    outcome.unwrap_or_else(|error| {
        // What is wrong with a configuration can be several lines.
        format!("{error:#}").lines().for_each(|line| log(Priority::Error, line));
        ExitCode::FAILURE
    })
}

/// A panic is our own bug: what a thread was in the middle of is not to be gone on
/// with by another. A release aborts by its profile; builds that unwind, for the sake
/// of their tests, do the same here.
fn abort_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
}

/// What is wrong, of the parser's message, which has paragraphs.
fn first_line(message: &str) -> String {
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let line = message.lines().next().unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).collect()
}

/// Prints `text`. A reader that left early has seen what it wanted.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot print")
        }
        _ => Ok(()),
    }
}

fn doctor(json: bool) -> anyhow::Result<ExitCode> {
    let report = doctor::examine();
    print(&if json { format!("{}\n", report.to_json()) } else { report.to_string() })?;
    Ok(if report.ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The file that was named, or the default one where there is one.
fn configuration(named: Option<&std::path::Path>) -> anyhow::Result<Config> {
    Config::load(named, &Machine::this()?).map_err(|problems| anyhow::anyhow!("{problems}"))
}

fn config_check(file: Option<&std::path::Path>) -> anyhow::Result<ExitCode> {
    print(&configuration(file)?.resolved())?;
    Ok(ExitCode::SUCCESS)
}

fn serve(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    // Before anything is opened.
    let (mut notifier, mut handed) = strata_sys::take_from_service_manager()
        .context("cannot take the sockets that the service manager listens at")?;
    if arguments.private.is_some() {
        // What a manager wants to know is of the service in which `strata run` was called.
        (notifier, handed) = Default::default();
        // A private daemon outlives the command that started it and must not hold what
        // that one had open.
        strata_sys::close_inherited_fds().context("cannot close the caller's descriptors")?;
    }
    let config = match &arguments.private {
        Some(directory) => {
            let mut config = Config::defaults(&Machine::this()?);
            config.socket_dir.clone_from(directory);
            config.snapshot_dir = directory.join(strata_api::PRIVATE_SNAPSHOTS_NAME);
            config
        }
        None => configuration(arguments.config.as_deref())?,
    };
    if let Some(obstacle) = doctor::obstacle() {
        anyhow::bail!("no program can be managed here: {obstacle}");
    }
    let origin = Origin {
        config_file: arguments.config.clone(),
        private: arguments.private.is_some(),
        notifier,
        handed,
    };
    supervisor::run(config, origin)
}
