//! What the user may type. Help, completions and man pages all come from here.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand};
use strata_api::{PortForward, SnapshotRef};
use strata_units::ByteSize;

use crate::failure::{Failure, Result, printable};
use crate::pools::PoolCommand;

mod snapshot;
mod vm;

pub(crate) use snapshot::{
    CloneArguments, NetArgument, NetworkArguments, RollbackTarget, SnapshotArguments,
    SnapshotCommand, TcpArgument,
};
pub(crate) use vm::{VmCommand, VmLibvirtArguments, VmRunArguments};

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
        #[arg(value_parser = named_tenant)]
        name: String,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show each tenant's tiers: size, use, latency, pages in and out per second
    Tiers {
        /// The tenant; without one, all
        #[arg(value_parser = named_tenant)]
        name: Option<String>,
        /// Print a JSON array of objects
        #[arg(long)]
        json: bool,
        /// Seconds over which pages in and out are counted
        #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
        interval: Duration,
    },
    /// Change a tenant's budget, or what it claims of a host's DRAM
    #[command(group(
        ArgGroup::new("wish").required(true).multiple(true)
            .args(["dram", "reserve", "limit", "weight"])
    ))]
    Set {
        /// The tenant
        #[arg(value_parser = named_tenant)]
        name: String,
        /// Its new DRAM budget; without a claim, it does not move
        #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
        dram: Option<ByteSize>,
        /// What it claims.
        #[command(flatten)]
        claim: ClaimArguments,
    },
    /// Show how a host's DRAM is shared out, and why
    ///
    /// For each tenant: what it has, uses and wants, its reserve, limit and weight, how
    /// long it waited for pages in the last second, what others lose by what it has
    /// beyond its reserve, and why it has that.
    Shares {
        /// Print a JSON array of objects, one for each daemon
        #[arg(long)]
        json: bool,
    },
    /// Tell how much DRAM tenants need
    ///
    /// The tenant is watched from the first question on: a sample of its pages is
    /// moved out in turn, to see when each is used next. Prints and plots what
    /// budgets would cost it in speed. With --all, shares a total out so that all
    /// together lose least.
    Advise(AdviseArguments),
    /// Have the system's stratad read its configuration again
    ///
    /// Programs go on. What cannot change while stratad runs is named.
    Reload,
    /// Have stratad become the version that is installed now
    ///
    /// Programs go on; they wait for a moment. Refused where that version cannot take
    /// over what this one has.
    Upgrade,
    /// Give a tenant all its pages back and stop managing it
    ///
    /// The program runs on natively. Refused when the memory does not suffice.
    Release {
        /// The tenant
        #[arg(value_parser = named_tenant)]
        name: String,
    },
    /// End a tenant's processes (SIGTERM, then SIGKILL)
    Stop {
        /// The tenant
        #[arg(value_parser = named_tenant)]
        name: String,
    },
    /// Take a snapshot of a tenant, or look after one
    ///
    /// The tenant stands still for some milliseconds and runs on; its memory is
    /// captured behind its back. Prints the snapshot's identity, NAME@N. A
    /// tenant that is called like one of the commands below: strata snapshot --
    /// NAME.
    #[command(
        args_conflicts_with_subcommands = true,
        subcommand_negates_reqs = true,
        disable_help_subcommand = true
    )]
    Snapshot(SnapshotArguments),
    /// List snapshots as a tree: each below the one that it came from
    Snapshots {
        /// Only those taken of this tenant, which need not be there any more
        #[arg(value_parser = named_tenant)]
        name: Option<String>,
        /// Print a JSON array of objects
        #[arg(long)]
        json: bool,
    },
    /// Put a living tenant back to a snapshot
    ///
    /// Its processes end; those of the snapshot take their place, under the same
    /// name and budget. Established TCP connections are closed.
    Rollback {
        /// The tenant
        #[arg(value_parser = named_tenant)]
        name: String,
        /// N or LABEL of one of its own snapshots, or NAME@N, NAME@LABEL
        #[arg(value_name = "SNAP", value_parser = rollback_target)]
        snapshot: RollbackTarget,
    },
    /// Bring a tenant back that crashed or ended
    Restore {
        /// The snapshot: NAME@N or NAME@LABEL
        #[arg(value_name = "SNAP")]
        snapshot: SnapshotRef,
        /// Another name for the tenant; without one, the old one
        #[arg(long, value_parser = tenant_name)]
        name: Option<String>,
    },
    /// Start further tenants from a snapshot, beside the original
    ///
    /// Clones have their own process numbers and share all memory that they do
    /// not write. Prints their names, one a line.
    Clone(CloneArguments),
    /// Move a program or a guest to another host while it runs
    ///
    /// Its memory is sent while it runs, then what has changed; it stands still for
    /// a moment, and runs on there. Its files have to be at the same places there,
    /// a guest's disks where both hosts see them, or --copy-disks.
    Move {
        /// The tenant
        #[arg(value_parser = named_tenant)]
        name: String,
        /// The host, as ssh knows it (USER@HOST), which runs strata receive there;
        /// or unix:SOCKET, another stratad's control socket on this machine
        host: String,
        /// Only ask the host what became of a move that was cut, and end it
        #[arg(long)]
        settle: bool,
        /// Copy a guest's disks there as well, while it runs: to the same paths, where
        /// nothing is. The images here are put aside, as IMAGE.moved
        #[arg(long, conflicts_with = "settle")]
        copy_disks: bool,
        /// Have it run there before all of its memory has come: it stands still for less,
        /// and depends on both hosts until the last page is there
        #[arg(long, conflicts_with_all = ["settle", "copy_disks"])]
        at_once: bool,
    },
    /// Take a program or a guest in that another host moves here
    ///
    /// strata move starts this by ssh: it speaks with it by standard input and output.
    Receive,
    /// Run virtual machines, and look at them
    Vm {
        /// What to do.
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Make and look at pools: caches that guests' disks are read through
    Pool {
        /// What to do.
        #[command(subcommand)]
        command: PoolCommand,
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

/// What a tenant claims of the DRAM that its host shares out: its budget moves then.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct ClaimArguments {
    /// DRAM that it always gets back when it wants it
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) reserve: Option<ByteSize>,
    /// The most DRAM that it may have
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<ByteSize>,
    /// Its share of the rest, beside those of others: 1 if it is not named
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) weight: Option<f64>,
}

/// On whom to advise, and how.
#[derive(Args, Debug)]
pub(crate) struct AdviseArguments {
    /// The tenant
    #[arg(value_parser = named_tenant, required_unless_present = "all")]
    pub(crate) name: Option<String>,
    /// Propose a budget for every tenant
    #[arg(long, conflicts_with = "name")]
    pub(crate) all: bool,
    /// What all budgets together may be; without one, what they are now
    #[arg(long, value_name = "SIZE", conflicts_with = "name", allow_hyphen_values = true)]
    pub(crate) total: Option<ByteSize>,
    /// Set the proposed budgets
    #[arg(long, conflicts_with = "name")]
    pub(crate) apply: bool,
    /// Stop watching the tenant, instead of ten minutes after the last question
    #[arg(long, conflicts_with_all = ["all", "wait", "json"])]
    pub(crate) stop: bool,
    /// Wait so many seconds at most until there is something to say
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = wait_seconds)]
    pub(crate) wait: Duration,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
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
    /// What it claims of a host's DRAM.
    #[command(flatten)]
    pub(crate) claim: ClaimArguments,
    /// Run the program even if it cannot be managed
    ///
    /// Without this a program that cannot have its budget (it is statically linked, the
    /// daemon does not answer, a quota is used up) does not run: status 1, or 125 if it
    /// was begun. What it starts itself may run unmanaged, in the tenant's memory cgroup.
    #[arg(long)]
    pub(crate) allow_unmanaged: bool,
    /// Stay as the program's parent, also when it is rolled back
    ///
    /// Whoever waits for strata then waits for what the program has become, and hears how
    /// that ended. Signals are passed on. Without this, a rollback looks to them like
    /// the program's death.
    #[arg(long)]
    pub(crate) supervise: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

pub(crate) fn tenant_name(text: &str) -> std::result::Result<String, String> {
    match strata_api::name_problem(text) {
        None => Ok(text.to_owned()),
        Some(problem) => Err(problem.to_owned()),
    }
}

/// A tenant that is there: its name, or, said by root, whose it is as well.
pub(crate) fn named_tenant(text: &str) -> std::result::Result<String, String> {
    match strata_api::named_problem(text) {
        None => Ok(text.to_owned()),
        Some(problem) => Err(problem.to_owned()),
    }
}

pub(crate) fn label(text: &str) -> std::result::Result<String, String> {
    match strata_api::label_problem(text) {
        None => Ok(text.to_owned()),
        Some(problem) => Err(problem.to_owned()),
    }
}

fn rollback_target(text: &str) -> std::result::Result<RollbackTarget, String> {
    if text.contains('@') {
        text.parse().map(RollbackTarget::Named)
    } else {
        text.parse().map(RollbackTarget::Own)
    }
}

fn forward(text: &str) -> std::result::Result<PortForward, String> {
    let parsed = text.split_once(':').and_then(|(host, guest)| {
        // Digits alone: u16 would take a sign, too.
        let port = |text: &str| {
            text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u16>().ok()).flatten()
        };
        Some(PortForward { host: port(host)?, guest: port(guest)? })
    });
    parsed.ok_or_else(|| "two ports, the one here and the clone's: 7000:6379".to_owned())
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    // NaN is in no range.
    if !(0.1..=3600.0).contains(&seconds) {
        return Err("between 0.1 and 3600 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn wait_seconds(text: &str) -> std::result::Result<Duration, String> {
    if text == "0" { Ok(Duration::ZERO) } else { seconds(text) }
}

/// What was typed; or, with help or a complaint already printed, the exit
/// status.
pub(crate) fn parse() -> std::result::Result<Command, ExitCode> {
    match Arguments::try_parse() {
        Ok(Arguments { command }) => {
            // What the parser cannot express: options that exclude each other.
            let request = match &command {
                Command::Clone(clone) => clone.request(clone.snapshot.clone(), Vec::new()),
                Command::Vm { command: VmCommand::Clone { snapshot, count, name, network } } => {
                    let (name, network) = (name.clone(), network.clone());
                    CloneArguments::plain(snapshot.clone(), *count, name, network)
                        .request(snapshot.clone(), Vec::new())
                }
                _ => return Ok(command),
            };
            match request.snapshot_problem() {
                None => Ok(command),
                Some(problem) => {
                    eprintln!("strata: usage: {}; see strata clone --help", printable(&problem));
                    Err(ExitCode::from(2))
                }
            }
        }
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
