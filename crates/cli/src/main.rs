//! strata: the command line. It asks daemons through their control sockets and
//! prints what they answer; it manages nothing itself.
//!
//! `strata run` becomes the program that it starts (exec), so nothing of this
//! process stays between the user and the program.
#![forbid(unsafe_code)]

mod advise;
mod args;
mod client;
mod daemon;
mod failure;
mod guest_again;
mod guest_domain;
mod guest_identity;
mod libvirt;
mod moves;
mod place;
mod pool_disks;
mod pools;
mod program;
mod progress;
mod run;
mod self_balloon;
mod shares;
mod show;
mod snapshots;
mod template;
#[cfg(test)]
mod testing;
mod tiers;
mod top;
mod tree;
mod virsh;
mod vm;

use std::io::Write;
use std::process::ExitCode;

use strata_api::Request;

use args::{CloneArguments, Command, ConfigCommand, VmCommand};
use failure::{Failure, Result};

fn main() -> ExitCode {
    // Not for people, so not part of what they may type.
    let outcome = if let Some(directory) = daemon::detached_directory() {
        daemon::start_detached(&directory).map(|()| ExitCode::SUCCESS)
    } else {
        match args::parse() {
            Ok(command) => execute(command),
            Err(status) => return status,
        }
    };
    match outcome {
        Ok(status) => status,
        Err(failure) => {
            eprintln!("strata: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run(run) => match run::run(&run)? {},
        Command::Ps { json } => {
            let tenants = client::list_all()?.unwrap_or_else(|| {
                // Beside the listing, not in it: an empty one is a good answer.
                eprintln!("strata: no stratad is running; strata run starts a private one");
                Vec::new()
            });
            print(&if json { show::json(&tenants)? } else { show::listing(&tenants) })?;
        }
        Command::Top { once, interval } => top::top(once, interval)?,
        Command::Stats { name, json } => {
            let stats = client::stats(&name)?;
            print(&if json { show::json(&stats)? } else { show::fields(&stats)? })?;
        }
        Command::Tiers { name, json, interval } => {
            print(&tiers::tiers(name.as_deref(), json, interval)?)?;
        }
        Command::Set { name, dram, claim } => {
            let what = format!("cannot set the budget of {name}");
            claim.check(&what)?;
            if let Some(dram) = dram {
                run::check_budget(dram, &what)?;
                let request = Request::Set { name: name.clone(), dram_bytes: dram.0 };
                print(&client::command(&name, request)?)?;
            }
            if let Some(claim) = claim.claim() {
                let request = Request::Claim { name: name.clone(), claim };
                print(&client::command(&name, request)?)?;
            }
        }
        Command::Shares { json } => print(&shares::shares(json)?)?,
        Command::Advise(arguments) => print(&advise::advise(&arguments)?)?,
        Command::Reload => {
            let what = "cannot have the configuration read again";
            print(&client::of_daemon(what, &Request::Reload)?)?;
        }
        Command::Upgrade => {
            print(&client::of_daemon("cannot upgrade stratad", &Request::Upgrade)?)?;
        }
        Command::Release { name } => {
            print(&client::command(&name, Request::Release { name: name.clone() })?)?;
        }
        Command::Stop { name } => {
            print(&client::command(&name, Request::Stop { name: name.clone() })?)?;
        }
        Command::Snapshot(arguments) => return snapshots::snapshot(arguments),
        Command::Snapshots { name, json } => {
            let snapshots = snapshots::list_all(name.as_deref())?.unwrap_or_else(|| {
                eprintln!("strata: no stratad is running; strata run starts a private one");
                Vec::new()
            });
            let now = snapshots::seconds_since_epoch();
            print(&if json { show::json(&snapshots)? } else { tree::tree(&snapshots, now) })?;
        }
        Command::Rollback { name, snapshot } => snapshots::rollback(&name, snapshot)?,
        Command::Restore { snapshot, name } => snapshots::restore(snapshot, name)?,
        Command::Clone(arguments) => snapshots::clone(&arguments)?,
        Command::Move { name, host, settle, copy_disks, at_once } => {
            moves::move_to(&name, &host, moves::How { settle, copy_disks, at_once })?;
        }
        Command::Receive => return moves::receive(),
        Command::Doctor { json } => {
            let mut arguments = vec!["doctor".into()];
            arguments.extend(json.then(|| "--json".into()));
            return daemon::pass_through(&arguments);
        }
        Command::Config { command: ConfigCommand::Check { file } } => {
            let mut arguments = vec!["config-check".into()];
            arguments.extend(file.map(Into::into));
            return daemon::pass_through(&arguments);
        }
        Command::Vm { command: VmCommand::Run(run) } => return vm::run(&run),
        Command::Vm { command: VmCommand::Libvirt(libvirt) } => return libvirt::libvirt(&libvirt),
        Command::Vm { command: VmCommand::Snapshot { name, label, persist } } => {
            snapshots::take(name, label, persist)?;
        }
        Command::Vm { command: VmCommand::Template(arguments) } => template::template(arguments)?,
        Command::Vm { command: VmCommand::Restore { snapshot, name } } => {
            snapshots::restore(snapshot, name)?;
        }
        Command::Vm { command: VmCommand::Clone { snapshot, count, name, network } } => {
            snapshots::clone(&CloneArguments::plain(snapshot, count, name, network))?;
        }
        Command::Vm { command: VmCommand::Resume { name } } => {
            print(&client::command(&name, Request::GuestResume { name: name.clone() })?)?;
        }
        Command::Vm { command: VmCommand::Ls { json } } => print(&vm::list(json)?)?,
        Command::Vm { command: VmCommand::Stats { name, json } } => {
            print(&vm::stats(&name, json)?)?;
        }
        Command::Pool { command } => print(&pools::pool(command)?)?,
        Command::Completions { shell } => print(&args::completions(shell))?,
        Command::Man { directory } => args::write_man_pages(&directory)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints `text`, and a line feed where it lacks one. A reader that has seen
/// enough (`strata ps | head -1`) is no failure.
fn print(text: &str) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let end = if text.ends_with('\n') { "" } else { "\n" };
    let mut out = std::io::stdout().lock();
    match write!(out, "{text}{end}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new("cannot print", error))
        }
        _ => Ok(()),
    }
}
