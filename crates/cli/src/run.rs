//! `strata run`: examine the program, ask a daemon for a tenant, become the
//! program.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use strata_api::{DEFAULT_SOCKET, ENDING, Reply, Request};
use strata_units::ByteSize;
use strata_units::wire::ENV_REQUIRED;

use crate::args::{ClaimArguments, RunArguments};
use crate::client::{self, NoReply, ask};
use crate::failure::{Failure, Result, printable};
use crate::program::{self, Caller, Program};
use crate::{daemon, place};

/// The library that goes into the program.
pub(crate) const LIBRARY: &str = "libstrata.so";
pub(crate) const LD_PRELOAD: &str = "LD_PRELOAD";
/// The same, for a program whose parent must not have it.
const SUPERVISED_PRELOAD: &str = "STRATA_SUPERVISED_PRELOAD";
pub(crate) const ASAN_OPTIONS: &str = "ASAN_OPTIONS";
/// Bytes of the command line that are sent for display: whoever passes a
/// megabyte of arguments does not want to read them in a table.
const MAX_SHOWN_BYTES: usize = 4096;

/// How often another private daemon is asked, and after what pause: one that is
/// ending takes that long.
const PRIVATE_TRIES: u32 = 20;
const ENDING_PAUSE: Duration = Duration::from_millis(20);

/// Becomes the program; returns only if it cannot.
pub(crate) fn run(arguments: &RunArguments) -> Result<Infallible> {
    let command = &arguments.command;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = program::examine(&command[0], &path, Caller::this())?;
    let shown = command[0].display();
    if let Some(dram) = arguments.dram {
        check_budget(dram, &format!("cannot run {shown}"))?;
    }
    arguments.claim.check(&format!("cannot run {shown}"))?;
    if let Some(obstacle) = &program.obstacle {
        if !arguments.allow_unmanaged {
            let why = format!("the preload cannot enter: {obstacle}");
            return Err(Failure::new(format!("cannot manage {shown}"), why)
                .todo("run it unmanaged with --allow-unmanaged, or without strata"));
        }
        warn(&format!("{shown} runs unmanaged: the preload cannot enter: {obstacle}"));
        return Err(become_program(&program, command, Vec::new()));
    }
    let tenant = make_tenant(&Request::Run {
        name: arguments.name.clone(),
        dram_bytes: arguments.dram.map(|size| size.0),
        command: shown_command(command),
    })?;
    claim(&tenant, &arguments.claim, &format!("cannot run {shown}"))?;
    for warning in &tenant.warnings {
        warn(warning);
    }
    lead_a_session_if_none_is_seen();
    let library = place::installed(LIBRARY);
    let mut environment = environment(tenant.environment, library, std::env::var_os(LD_PRELOAD))?;
    environment.push(required(arguments, std::process::id()));
    environment.push((ASAN_OPTIONS.into(), with_other_libraries(std::env::var_os(ASAN_OPTIONS))));
    if arguments.supervise {
        return Err(become_parent(&program, command, environment, &tenant.socket, &tenant.name));
    }
    Err(become_program(&program, command, environment))
}

/// Has a tenant that was just made claim what it is to.
pub(crate) fn claim(tenant: &Tenant, arguments: &ClaimArguments, what: &str) -> Result<()> {
    let Some(claim) = arguments.claim() else { return Ok(()) };
    let request = Request::Claim { name: tenant.name.clone(), claim };
    match ask(&tenant.socket, &request).map_err(|none| none.failure(what, &tenant.socket))? {
        Reply::Done { .. } => Ok(()),
        Reply::Error { message, hint } => Err(client::refused(what, &message, &hint)),
        _ => Err(client::misunderstood(what)),
    }
}

/// Whether the program may run unmanaged, as its library is told: empty, it may. What it
/// starts may always; it is in the tenant's memory cgroup.
fn required(arguments: &RunArguments, own: u32) -> (String, OsString) {
    let value = match (arguments.allow_unmanaged, arguments.supervise) {
        (true, _) => String::new(),
        // This process becomes the program, or else its parent.
        (false, false) => own.to_string(),
        (false, true) => format!("+{own}"),
    };
    (ENV_REQUIRED.to_owned(), value.into())
}

/// Tells the user on standard error.
pub(crate) fn warn(text: &str) {
    eprintln!("strata: warning: {}", printable(text));
}

/// Refuses a budget that the machine cannot give. The daemon refuses it too;
/// here it is refused before one is started.
pub(crate) fn check_budget(dram: ByteSize, what: &str) -> Result<()> {
    // Without /proc the daemon's check is enough.
    match machine_memory() {
        Some(memory) if dram > memory => {
            let why = format!("--dram {dram} is more than this machine has ({memory})");
            Err(Failure::new(what, why).todo("give less: a budget is a share of DRAM"))
        }
        _ => Ok(()),
    }
}

/// How much memory this machine has.
pub(crate) fn machine_memory() -> Option<ByteSize> {
    memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

/// `MemTotal` of a `/proc/meminfo`.
fn memory(meminfo: &str) -> Option<ByteSize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ByteSize(kib << 10))
}

/// The command line for display, cut where it becomes unreadable.
pub(crate) fn shown_command(command: &[OsString]) -> Vec<String> {
    let mut left = MAX_SHOWN_BYTES;
    let mut shown = Vec::new();
    for word in command {
        let mut word = word.to_string_lossy().into_owned();
        if word.len() >= left {
            let end = (0..=left).rev().find(|end| word.is_char_boundary(*end)).unwrap_or(0);
            word.truncate(end);
            shown.push(word + "…");
            break;
        }
        // The word and what JSON puts around it, so that many empty words end too.
        left = left.saturating_sub(word.len() + 3);
        shown.push(word);
    }
    shown
}

/// What a daemon gave.
pub(crate) struct Tenant {
    /// The daemon's.
    pub(crate) socket: PathBuf,
    pub(crate) name: String,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) warnings: Vec<String>,
}

/// Asks the daemon that the environment names; or the system's; or the caller's
/// private one, which is started if need be.
pub(crate) fn make_tenant(request: &Request) -> Result<Tenant> {
    const WHAT: &str = "cannot make a tenant";
    if let Some(socket) = place::named_socket() {
        let reply = ask(&socket, request).map_err(|none| none.failure(WHAT, &socket))?;
        return understood(reply, socket);
    }
    let system = Path::new(DEFAULT_SOCKET);
    match ask(system, request) {
        Ok(reply) => return understood(reply, system.to_owned()),
        Err(NoReply::Absent) => {}
        Err(no_reply) => return Err(no_reply.failure(WHAT, system)),
    }
    // A private daemon may be ending just when it is asked; then a new one is.
    let mut tries = 0;
    loop {
        let socket = daemon::private()?;
        let reply = ask(&socket, request);
        let is_ending = match &reply {
            Ok(Reply::Error { message, .. }) => message == ENDING,
            Err(NoReply::Absent | NoReply::HungUp) => true,
            _ => false,
        };
        if !is_ending || tries == PRIVATE_TRIES {
            return understood(reply.map_err(|no_reply| no_reply.failure(WHAT, &socket))?, socket);
        }
        tries += 1;
        std::thread::sleep(ENDING_PAUSE);
    }
}

fn understood(reply: Reply, socket: PathBuf) -> Result<Tenant> {
    const WHAT: &str = "cannot make a tenant";
    match reply {
        Reply::Run { name, environment, warnings, .. } => {
            Ok(Tenant { socket, name, environment, warnings })
        }
        Reply::Error { message, hint } => Err(client::refused(WHAT, &message, &hint)),
        _ => Err(client::misunderstood(WHAT)),
    }
}

/// The variables to set: what the daemon says, with the library before what the
/// user preloads already (an allocator, say).
pub(crate) fn environment(
    given: Vec<(String, String)>,
    installed: Option<PathBuf>,
    own_preload: Option<OsString>,
) -> Result<Vec<(String, OsString)>> {
    let what = format!("cannot load {LIBRARY}");
    let (preload, others): (Vec<_>, Vec<_>) =
        given.into_iter().partition(|(name, _)| name == LD_PRELOAD);
    let library = match preload.into_iter().next() {
        Some((_, value)) => value.into(),
        None => installed
            .ok_or_else(|| {
                Failure::new(what.as_str(), "it is not there")
                    .todo("install it beside strata or in /usr/lib/strata")
            })?
            .into_os_string(),
    };
    let split = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    if library.as_encoded_bytes().iter().any(split) {
        let why = format!("the loader would split its path {} in two", library.display());
        return Err(Failure::new(what, why).todo("install it where no blank or colon is"));
    }
    if !Path::new(&library).is_file() {
        let why = format!("there is no {}", library.display());
        return Err(Failure::new(what, why).todo("correct the key preload in stratad.toml"));
    }
    let mut value = library;
    if let Some(own) = own_preload.filter(|own| !own.is_empty()) {
        value.push(":");
        value.push(own);
    }
    let mut environment: Vec<(String, OsString)> =
        others.into_iter().map(|(name, value)| (name, value.into())).collect();
    environment.push((LD_PRELOAD.to_owned(), value));
    Ok(environment)
}

/// AddressSanitizer's options, with one more: where its runtime is a library, it ends
/// a program in which another one comes first, for fear of what that may define. Ours
/// defines nothing that the runtime does too and does not call on.
pub(crate) fn with_other_libraries(own: Option<OsString>) -> OsString {
    const OPTION: &str = "verify_asan_link_order";
    let mut options = own.unwrap_or_default();
    let set = options.to_string_lossy().contains(OPTION);
    if !set {
        if !options.is_empty() {
            options.push(":");
        }
        options.push(format!("{OPTION}=0"));
    }
    options
}

/// Where the session is led from outside of this pid namespace (`nsenter`, or
/// what a container's manager runs in it), no snapshot can hold it, and without
/// a terminal nothing is lost by leaving it.
pub(crate) fn lead_a_session_if_none_is_seen() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if session_is_outside(&status) && std::fs::File::open("/dev/tty").is_err() {
        // Fails for the leader of a group: then a snapshot names the reason.
        let _ = rustix::process::setsid();
    }
}

/// By a `/proc/PID/status`.
fn session_is_outside(status: &str) -> bool {
    let session = status.lines().find_map(|line| line.strip_prefix("NSsid:"));
    session.is_some_and(|numbers| numbers.split_ascii_whitespace().last() == Some("0"))
}

/// Becomes the program's parent, which is a part of stratad: it outlives rollbacks.
fn become_parent(
    program: &Program,
    command: &[OsString],
    mut environment: Vec<(String, OsString)>,
    socket: &Path,
    name: &str,
) -> Failure {
    let stratad = match daemon::stratad() {
        Ok(stratad) => stratad,
        Err(failure) => return failure,
    };
    for (variable, _) in &mut environment {
        if variable == LD_PRELOAD {
            // For the program alone.
            SUPERVISED_PRELOAD.clone_into(variable);
        }
    }
    let error = Command::new(&stratad)
        .arg0("strata")
        .arg("supervise")
        .args([socket.as_os_str(), OsStr::new(name), &command[0], OsStr::new("--")])
        .arg(&program.path)
        .args(&command[1..])
        .env_remove(LD_PRELOAD)
        .envs(environment)
        .exec();
    Failure::new(format!("cannot run {}", stratad.display()), error).todo("reinstall stratad")
}

/// Executes the program in place of this process.
pub(crate) fn become_program(
    program: &Program,
    command: &[OsString],
    environment: Vec<(String, OsString)>,
) -> Failure {
    let error = Command::new(&program.path)
        // The name that the user typed: programs like busybox look at it.
        .arg0(OsStr::new(&command[0]))
        .args(&command[1..])
        .envs(environment)
        .exec();
    let what = format!("cannot run {}", command[0].display());
    Failure::new(what, error).todo("see to the file, or to the length of the arguments")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sanitizer_is_told_once() {
        let options = |own: Option<&str>| with_other_libraries(own.map(Into::into));
        assert_eq!(options(None), "verify_asan_link_order=0");
        assert_eq!(options(Some("")), "verify_asan_link_order=0");
        assert_eq!(options(Some("a=1")), "a=1:verify_asan_link_order=0");
        assert_eq!(options(Some("verify_asan_link_order=1")), "verify_asan_link_order=1");
    }

    #[test]
    fn the_library_comes_before_what_is_preloaded_already() {
        // Any file serves as a library here.
        let library = "/bin/sh";
        let given = vec![
            (LD_PRELOAD.to_owned(), library.to_owned()),
            ("STRATA_TOKEN".to_owned(), "1".to_owned()),
        ];
        let value = |own: Option<&str>| {
            let set = environment(given.clone(), None, own.map(Into::into)).expect("set");
            assert!(set.contains(&("STRATA_TOKEN".into(), "1".into())));
            let preloads: Vec<_> = set.into_iter().filter(|(name, _)| name == LD_PRELOAD).collect();
            assert_eq!(preloads.len(), 1);
            preloads[0].1.clone()
        };
        assert_eq!(value(None), "/bin/sh");
        assert_eq!(value(Some("")), "/bin/sh");
        assert_eq!(value(Some("/lib/jemalloc.so:/x.so")), "/bin/sh:/lib/jemalloc.so:/x.so");
    }

    #[test]
    fn without_a_library_nothing_is_run() {
        for (installed, why) in [
            (None, "it is not there"),
            (Some("/no/libstrata.so"), "there is no /no/libstrata.so"),
            (Some("/a b/libstrata.so"), "would split its path"),
            (Some("/a:b/libstrata.so"), "would split its path"),
        ] {
            let failure = environment(Vec::new(), installed.map(Into::into), None);
            let line = failure.expect_err(why).to_string();
            assert!(line.contains(why), "{line}");
        }
    }

    #[test]
    fn a_session_outside_has_no_number_here() {
        assert!(session_is_outside("Pid:\t7\nNSsid:\t0\n"));
        assert!(session_is_outside("NSsid:\t812\t0\n"));
        assert!(!session_is_outside("NSsid:\t0\t812\nKthread:\t0\n"));
        assert!(!session_is_outside(""));
    }

    #[test]
    fn a_budget_is_no_more_than_the_machine() {
        assert_eq!(memory("MemTotal: 2048 kB\n"), Some(ByteSize(2 << 20)));
        let line = check_budget(ByteSize(1 << 60), "cannot run x").expect_err("huge").to_string();
        assert!(line.starts_with("cannot run x: --dram 1048576.0 TiB is more than"), "{line}");
        check_budget(ByteSize(1 << 20), "cannot run x").expect("small");
    }

    #[test]
    fn long_command_lines_are_shown_in_part() {
        let words = |texts: &[&str]| texts.iter().map(OsString::from).collect::<Vec<_>>();
        assert_eq!(shown_command(&words(&["a", "", "b c"])), ["a", "", "b c"]);
        let long = "ä".repeat(MAX_SHOWN_BYTES);
        let shown = shown_command(&words(&["a", &long, "c"]));
        assert_eq!(shown.len(), 2);
        assert!(shown[1].ends_with("ä…") && shown[1].len() < MAX_SHOWN_BYTES + 4);
        let many = vec![OsString::new(); 1_000_000];
        assert!(shown_command(&many).len() < MAX_SHOWN_BYTES);
    }
}
