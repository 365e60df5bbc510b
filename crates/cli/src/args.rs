//! What the user may type. Help, completions and man pages all come from here.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use strata_units::ByteSize;

use crate::failure::{Failure, Result, printable};

/// Run programs with less DRAM than they ask for.
///
/// Cold pages of a managed program sink into compressed memory or a file and
/// come back when they are touched; the program notices nothing but time.
#[derive(Parser, Debug)]
#[command(name = "strata", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a program under a DRAM budget
    ///
    /// The program takes the place of strata: pid, signals, terminal and exit
    /// status are its own. Its children belong to the same tenant. If no stratad
    /// runs, a private one is started and ends with its last tenant.
    Run(RunArguments),
    /// List the tenants
    Ps {
        /// Print a JSON array of objects, as `stats --json` prints one
        #[arg(long)]
        json: bool,
    },
    /// Watch the tenants live
    ///
    /// Keys: q quits, left and right choose the column to sort by, r reverses,
    /// up and down select a tenant.
    Top {
        /// Print one frame as text and end
        #[arg(long)]
        once: bool,
        /// Seconds between two looks
        #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
        interval: Duration,
    },
    /// Show everything about one tenant
    Stats {
        /// The tenant
        #[arg(value_parser = tenant_name)]
        name: String,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Change a tenant's budget
    Set {
        /// The tenant
        #[arg(value_parser = tenant_name)]
        name: String,
        /// Its new DRAM budget
        #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
        dram: ByteSize,
    },
    /// Give a tenant all its pages back and stop managing it
    ///
    /// The program runs on natively. Refused when the memory does not suffice.
    Release {
        /// The tenant
        #[arg(value_parser = tenant_name)]
        name: String,
    },
    /// End a tenant's processes (SIGTERM, then SIGKILL)
    Stop {
        /// The tenant
        #[arg(value_parser = tenant_name)]
        name: String,
    },
    /// Tell what this machine allows, and what is lost without the rest
    ///
    /// Exit status 0 when programs can be managed here, 1 when not.
    Doctor {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Look at the daemon's configuration
    Config {
        /// What to do with it.
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write the man pages into a directory
    Man {
        /// The directory; it must exist
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// What to do with the configuration.
#[derive(Subcommand, Debug)]
pub(crate) enum ConfigCommand {
    /// Check a configuration file and print what it resolves to
    Check {
        /// The file; without one, /etc/strata/stratad.toml
        file: Option<PathBuf>,
    },
}

/// How to run a program.
#[derive(Args, Debug)]
pub(crate) struct RunArguments {
    /// Name of the tenant; without one, made of the program's
    #[arg(long, value_parser = tenant_name)]
    pub(crate) name: Option<String>,
    /// Its DRAM budget, like 512MiB or 4GiB; without one, the daemon's default
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) dram: Option<ByteSize>,
    /// Run the program even if it cannot be managed (statically linked, say)
    #[arg(long)]
    pub(crate) allow_unmanaged: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

fn tenant_name(text: &str) -> std::result::Result<String, String> {
    match strata_api::name_problem(text) {
        None => Ok(text.to_owned()),
        Some(problem) => Err(problem.to_owned()),
    }
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    // NaN is in no range.
    if !(0.1..=3600.0).contains(&seconds) {
        return Err("between 0.1 and 3600 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// What was typed; or, with help or a complaint already printed, the exit
/// status.
pub(crate) fn parse() -> std::result::Result<Command, ExitCode> {
    match Arguments::try_parse() {
        Ok(arguments) => Ok(arguments.command),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                // A reader that went away is no failure.
                let _ = error.print();
                Err(ExitCode::SUCCESS)
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                let _ = error.print();
                Err(ExitCode::from(2))
            }
            _ => {
                eprintln!("strata: {}", one_line(&error.to_string()));
                Err(ExitCode::from(2))
            }
        },
    }
}

/// The parser's message, which has paragraphs, as one line: what is wrong (the
/// first), and its tip, if any.
fn one_line(message: &str) -> String {
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let first = message.lines().take_while(|line| !line.trim().is_empty());
    let what = first.map(str::trim).collect::<Vec<_>>().join(" ");
    let tip = message.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    let usage = message.lines().find_map(|line| line.trim().strip_prefix("Usage: "));
    let todo = match (tip, usage) {
        (Some(tip), _) => tip.to_owned(),
        (None, Some(usage)) => format!("usage: {usage}"),
        (None, None) => "see strata --help".to_owned(),
    };
    printable(&format!("usage: {what}; {}", todo.trim_start_matches("usage: ")))
}

/// The completion script for `shell`.
pub(crate) fn completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "strata", &mut script);
    String::from_utf8(script).expect("commands are named in ASCII")
}

/// Writes `strata.1` and one page per subcommand.
pub(crate) fn write_man_pages(directory: &Path) -> Result<()> {
    let command = Arguments::command().disable_help_subcommand(true);
    clap_mangen::generate_to(command, directory).map_err(|error| {
        Failure::new(format!("cannot write man pages to {}", directory.display()), error)
            .todo("name a directory that exists and that you may write to")
    })
}
