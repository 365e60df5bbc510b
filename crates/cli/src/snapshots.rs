//! The commands about snapshots: which daemon to ask, what to ask it, and what
//! to print of its answer. What a snapshot is and does is the daemon's business.
//!
//! Standard output has what a script wants: the identity of a new snapshot, the
//! name of each tenant that came to life, a line each.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use strata_api::{Claim, DEFAULT_SOCKET, Reply, Request, RevivedTenant, SnapshotInfo, SnapshotRef};

use crate::args::{
    CloneArguments, NetArgument, RollbackTarget, SnapshotArguments, SnapshotCommand, TcpArgument,
};
use crate::client::{self, NoReply, ask_each, ask_watching, misunderstood, refused};
use crate::failure::{Failure, Result, printable};
use crate::guest_identity::GuestNet;
use crate::progress::Meter;
use crate::run::warn;
use crate::{daemon, guest_again, guest_domain, place, print};

/// Names that a message lists before it says "…".
const SHOWN_NAMES: usize = 5;

/// `strata snapshot …`.
pub(crate) fn snapshot(arguments: SnapshotArguments) -> Result<ExitCode> {
    match arguments.command {
        None => {
            let name = arguments.name.expect("the parser demands a name or a command");
            take(name, arguments.label, arguments.persist)?;
        }
        Some(SnapshotCommand::Rm { snapshots }) => return remove(snapshots),
        Some(SnapshotCommand::Persist { snapshot }) => {
            let (socket, found) = find(&snapshot)?;
            let request = Request::SnapshotPersist { snapshot: found.id.into() };
            print_taken(&socket, &request, &format!("cannot persist {snapshot}"))?;
        }
        Some(SnapshotCommand::Export { snapshot, file }) => {
            let what = format!("cannot export {snapshot} to {}", file.display());
            let wish = |snapshot, path| Request::SnapshotExport { snapshot, path };
            write(&snapshot, &file, wish, &what)?;
        }
        Some(SnapshotCommand::Core { snapshot, pid, file }) => {
            let shown = file.display();
            let what = format!("cannot write process {pid} of {snapshot} to {shown}");
            let wish = |snapshot, path| Request::SnapshotCore { snapshot, pid, path };
            write(&snapshot, &file, wish, &what)?;
        }
        Some(SnapshotCommand::Import { file, name, any_cpu, trust, dry_run }) => {
            let wish = |path| Request::SnapshotImport { path, name, any_cpu, trust, dry_run };
            import(&file, wish, dry_run)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn take(name: String, label: Option<String>, persist: bool) -> Result<()> {
    let what = format!("cannot take a snapshot of {name}");
    let (socket, _) = client::find(&name)?;
    print_taken(&socket, &Request::Snapshot { name, label, persist }, &what)
}

/// Removes all that it can; a failure is told at once, or, the last one, by the
/// caller.
fn remove(snapshots: Vec<SnapshotRef>) -> Result<ExitCode> {
    let mut last = None;
    for snapshot in snapshots {
        if let Err(failure) = remove_one(&snapshot)
            && let Some(earlier) = last.replace(failure)
        {
            eprintln!("strata: {earlier}");
        }
    }
    last.map_or(Ok(ExitCode::SUCCESS), Err)
}

fn remove_one(snapshot: &SnapshotRef) -> Result<()> {
    let what = format!("cannot remove {snapshot}");
    let (socket, found) = find(snapshot)?;
    // By number: the label may have moved on to another in the meantime.
    match long(&socket, &Request::SnapshotRemove { snapshot: found.id.into() }, &what)? {
        Reply::Done { note } => print(&printable(&note)),
        _ => Err(misunderstood(&what)),
    }
}

/// Has a file written that is not there yet.
fn write(
    snapshot: &SnapshotRef,
    file: &Path,
    wish: impl FnOnce(SnapshotRef, String) -> Request,
    what: &str,
) -> Result<()> {
    let path = absolute(file, what)?;
    if file.symlink_metadata().is_ok() {
        // A file that is there has readers of its own perhaps; the new one holds
        // all of a tenant's memory.
        return Err(Failure::new(what, "there is a file of this name already")
            .todo("remove it, or name another"));
    }
    let directory = Path::new(&path).parent().unwrap_or(Path::new("/"));
    if !directory.is_dir() {
        let why = format!("there is no directory {}", directory.display());
        return Err(Failure::new(what, why).todo("make it, or name another"));
    }
    let (socket, found) = find(snapshot)?;
    let request = wish(found.id.into(), path);
    check(&request, what)?;
    match long(&socket, &request, what)? {
        Reply::Done { note } => print(&printable(&note)),
        _ => Err(misunderstood(what)),
    }
}

fn import(file: &Path, wish: impl FnOnce(String) -> Request, dry_run: bool) -> Result<()> {
    let what = format!("cannot import {}", file.display());
    let path = absolute(file, &what)?;
    let readable = std::fs::File::open(file).and_then(|opened| opened.metadata());
    match readable {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => {
            return Err(Failure::new(what, "it is not a file").todo("name what export wrote"));
        }
        Err(error) => {
            return Err(Failure::new(what, error).todo("name a file that you may read"));
        }
    }
    let request = wish(path);
    check(&request, &what)?;
    let socket = some_daemon(&what)?;
    if !dry_run {
        return print_taken(&socket, &request, &what);
    }
    match long(&socket, &request, &what)? {
        Reply::Claims { owner, claims } => print_claims(owner, &claims),
        _ => Err(misunderstood(&what)),
    }
}

/// What a file asks for, a line each, and of whose rights that is more.
fn print_claims(owner: Option<u32>, claims: &[Claim]) -> Result<()> {
    for claim in claims {
        match owner {
            Some(owner) if claim.is_beyond => {
                print(&printable(&format!("{}; more than user {owner} may", claim.text)))?;
            }
            _ => print(&printable(&claim.text))?,
        }
    }
    Ok(())
}

/// `strata rollback`.
pub(crate) fn rollback(name: &str, target: RollbackTarget) -> Result<()> {
    let snapshot = match target {
        RollbackTarget::Own(which) => SnapshotRef { tenant: name.to_owned(), which },
        RollbackTarget::Named(snapshot) => snapshot,
    };
    let what = format!("cannot roll {name} back to {snapshot}");
    let (socket, _) = client::find(name)?;
    let (holder, found) = find(&snapshot)?;
    if socket != holder {
        let why =
            format!("the tenant is at {}, the snapshot at {}", socket.display(), holder.display());
        return Err(Failure::new(what, why).todo("restore the snapshot under another name"));
    }
    if found.libvirt {
        let guests = guest_domain::rollback(&socket, name, &found, &what)?;
        return print(&guests.iter().map(revived).collect::<String>());
    }
    if found.guest {
        let wish =
            guest_again::Wish { rollback: true, ..guest_again::Wish::one(name, found.servers) };
        return print_guests(&socket, &found.id.into(), &wish, &what);
    }
    let request = Request::Rollback { name: name.to_owned(), snapshot: found.id.into() };
    print_revived(&socket, &request, &what)
}

/// `strata restore`.
pub(crate) fn restore(snapshot: SnapshotRef, name: Option<String>) -> Result<()> {
    let what = format!("cannot restore {snapshot}");
    let (socket, found) = find(&snapshot)?;
    if found.guest {
        let name = name.unwrap_or(found.tenant);
        let wish = guest_again::Wish::one(&name, found.servers);
        return print_guests(&socket, &found.id.into(), &wish, &what);
    }
    print_revived(&socket, &Request::Restore { snapshot: found.id.into(), name }, &what)
}

/// `strata clone`.
pub(crate) fn clone(arguments: &CloneArguments) -> Result<()> {
    let what = format!("cannot clone {}", arguments.snapshot);
    let mut copy_dirs = Vec::new();
    for directory in &arguments.copy_dir {
        // Resolved here: the daemon knows nothing of this working directory.
        let resolved = directory.canonicalize().map_err(|error| {
            Failure::new(format!("{what}: cannot copy {}", directory.display()), error)
                .todo("name a directory that the program uses")
        })?;
        if !resolved.is_dir() {
            return Err(Failure::new(
                format!("{what}: cannot copy {}", directory.display()),
                "it is not a directory",
            )
            .todo("name the directory that it is in"));
        }
        copy_dirs.push(absolute(&resolved, &what)?);
    }
    // Before any daemon is asked, or even started.
    check(&arguments.request(arguments.snapshot.clone(), copy_dirs.clone()), &what)?;
    let (socket, found) = find(&arguments.snapshot)?;
    if found.guest {
        let own = guest_again::only_for_programs;
        own(arguments.network.net == Some(NetArgument::Shared), "--net shared", &what)?;
        own(matches!(arguments.tcp, TcpArgument::Keep), "--tcp keep", &what)?;
        own(!arguments.copy_dir.is_empty(), "--copy-dir", &what)?;
        let name = match (&arguments.name, arguments.count) {
            (None, count) if count > 1 => Some(format!("{}-clone", found.tenant)),
            (name, _) => name.clone(),
        };
        let (name, count) = (name.as_deref(), arguments.count);
        let servers = found.servers;
        let net = GuestNet::wished(&arguments.network, &what)?;
        let wish =
            guest_again::Wish { name, count, rollback: false, rehearse: false, net, servers };
        return print_guests(&socket, &found.id.into(), &wish, &what);
    }
    if let Some(NetArgument::Bridge(_)) = arguments.network.net {
        let why = "--net bridge=NAME is for clones of guests, and this is a program";
        return Err(refused(&what, why, "give it a network of its own: --net new"));
    }
    print_revived(&socket, &arguments.request(found.id.into(), copy_dirs), &what)
}

fn print_guests(
    socket: &Path,
    snapshot: &SnapshotRef,
    wish: &guest_again::Wish<'_>,
    what: &str,
) -> Result<()> {
    let guests = guest_again::revive(socket, snapshot, wish, what)?;
    print(&guests.iter().map(revived).collect::<String>())
}

/// Refuses paths that the daemon would refuse without looking; the rest was
/// checked as it was typed.
fn check(request: &Request, what: &str) -> Result<()> {
    match request.snapshot_problem() {
        None => Ok(()),
        Some(problem) => Err(Failure::new(what, problem).todo("choose another path")),
    }
}

/// `path` as the daemon, whose working directory is another, must be told it.
fn absolute(path: &Path, what: &str) -> Result<String> {
    let absolute = std::path::absolute(path)
        .map_err(|error| Failure::new(what, error).todo("name another path"))?;
    absolute.into_os_string().into_string().map_err(|_| {
        Failure::new(what, "its path is not UTF-8").todo("give it a plain name, by a link say")
    })
}

/// The time, as snapshots have it.
pub(crate) fn seconds_since_epoch() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Snapshots with the socket of the daemon that has them; `brief`: without what they
/// cost.
fn list_by_daemon(name: Option<&str>, brief: bool) -> Result<Vec<(PathBuf, Vec<SnapshotInfo>)>> {
    const WHAT: &str = "cannot list snapshots";
    let request = Request::Snapshots { name: name.map(str::to_owned), brief };
    let replies = ask_each(WHAT, &request)?.into_iter();
    replies
        .map(|(socket, reply)| match reply {
            Reply::Snapshots { snapshots } => Ok((socket, snapshots)),
            _ => Err(misunderstood(WHAT)),
        })
        .collect()
}

/// The caller's snapshots, of one tenant or all, in order of tenant and number;
/// None when no daemon is alive.
pub(crate) fn list_all(name: Option<&str>) -> Result<Option<Vec<SnapshotInfo>>> {
    let daemons = list_by_daemon(name, false)?;
    if daemons.is_empty() {
        return Ok(None);
    }
    let mut snapshots: Vec<SnapshotInfo> =
        daemons.into_iter().flat_map(|(_, snapshots)| snapshots).collect();
    snapshots.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(Some(snapshots))
}

/// The snapshot of that name and the daemon that has it. A private daemon that
/// ended and left snapshots is started again.
fn find(named: &SnapshotRef) -> Result<(PathBuf, SnapshotInfo)> {
    let what = format!("no snapshot is named {named}");
    let mut daemons = list_by_daemon(Some(&named.tenant), true)?;
    let held = |daemons: &[(PathBuf, Vec<SnapshotInfo>)]| {
        daemons.iter().any(|(_, snapshots)| snapshots.iter().any(|info| named.names(info)))
    };
    if !held(&daemons) && place::named_socket().is_none() && place::private_snapshots_wait() {
        daemon::private()?;
        daemons = list_by_daemon(Some(&named.tenant), true)?;
    }
    if daemons.is_empty() {
        return Err(Failure::new(what, "no stratad is running").todo(
            "start it (sudo systemctl start stratad): it knows the snapshots that were persisted",
        ));
    }
    let mut found: Vec<(PathBuf, SnapshotInfo)> = Vec::new();
    let mut others = Vec::new();
    for (socket, snapshots) in daemons {
        for info in snapshots {
            if named.names(&info) {
                found.push((socket.clone(), info));
            } else {
                others.push(match &info.label {
                    Some(label) => format!("{} ({label})", info.id),
                    None => info.id.to_string(),
                });
            }
        }
    }
    if found.len() > 1 {
        let sockets: Vec<String> =
            found.iter().map(|(socket, _)| socket.display().to_string()).collect();
        let why = format!("several daemons have it: {}", sockets.join(", "));
        return Err(Failure::new(format!("{named} is ambiguous"), why)
            .todo("name one of them with STRATA_SOCKET"));
    }
    found.pop().ok_or_else(|| {
        let tenant = &named.tenant;
        if others.is_empty() {
            return Failure::new(what, format!("{tenant} has none")).todo("see strata snapshots");
        }
        // The newest are those that one means.
        others.reverse();
        let dots = if others.len() > SHOWN_NAMES { ", …" } else { "" };
        others.truncate(SHOWN_NAMES);
        let why = format!("{tenant} has {}{dots}", others.join(", "));
        Failure::new(what, why).todo(format!("see strata snapshots {tenant}"))
    })
}

/// A daemon that could take something in: the one that the environment names; or
/// the system's; or the caller's private one, which is started if need be.
pub(crate) fn some_daemon(what: &str) -> Result<PathBuf> {
    if let Some(socket) = place::named_socket() {
        return Ok(socket);
    }
    let system = PathBuf::from(DEFAULT_SOCKET);
    match client::ask(&system, &Request::Ping) {
        Ok(_) => Ok(system),
        Err(NoReply::Absent) => daemon::private(),
        Err(no_reply) => Err(no_reply.failure(what, &system)),
    }
}

/// The daemon's answer to what may take long; a refusal is a failure of `what`.
pub(crate) fn long(socket: &Path, request: &Request, what: &str) -> Result<Reply> {
    let mut meter = Meter::new();
    let reply = ask_watching(socket, request, &mut |progress| meter.update(progress));
    // Its line goes before anything else is printed.
    drop(meter);
    match reply {
        Ok(Reply::Error { message, hint }) => Err(refused(what, &message, &hint)),
        Ok(reply) => Ok(reply),
        Err(no_reply) => Err(no_reply.failure(what, socket)),
    }
}

fn print_taken(socket: &Path, request: &Request, what: &str) -> Result<()> {
    match long(socket, request, what)? {
        Reply::Snapshot { snapshot, warnings } => {
            warnings.iter().for_each(|warning| warn(warning));
            print(&snapshot.id.to_string())
        }
        _ => Err(misunderstood(what)),
    }
}

fn print_revived(socket: &Path, request: &Request, what: &str) -> Result<()> {
    match long(socket, request, what)? {
        Reply::Revived { tenants, warnings } => {
            warnings.iter().for_each(|warning| warn(warning));
            print(&tenants.iter().map(revived).collect::<String>())
        }
        _ => Err(misunderstood(what)),
    }
}

/// A tenant's line: its name, and where its ports are reached.
fn revived(tenant: &RevivedTenant) -> String {
    let mut line = printable(&tenant.name);
    for forward in &tenant.forwards {
        line += &format!(" 127.0.0.1:{}->{}", forward.host, forward.guest);
    }
    line + "\n"
}
