//! `strata vm`: complete QEMU's command line, ask a daemon for a tenant and a directory
//! for the guest, become QEMU; and show guests. What QEMU needs is decided in `strata-vm`,
//! which knows of no process; what is there to be known for that is found out here.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use strata_api::{
    DEFAULT_SOCKET, GuestSpec, GuestStats, Launch, Reply, Request, Stats, name_problem,
};
use strata_units::wire::ENV_GUEST;
use strata_units::{ByteSize, PAGE_SIZE};
use strata_vm::{Plan, Version, Wish, kvm_problem, plan};

use crate::args::VmRunArguments;
use crate::client::{self, ask};
use crate::failure::{Failure, Result, printable};
use crate::pool_disks::{self, Exports};
use crate::program::{self, Caller, Program};
use crate::{place, run, self_balloon, show};

/// For QEMU to print its version: it does so in a few hundredths of a second.
const VERSION_PATIENCE: Duration = Duration::from_secs(20);
const VERSION_POLL: Duration = Duration::from_millis(5);
/// Bytes of that which are read.
const MAX_VERSION_BYTES: u64 = 4096;

/// Becomes QEMU, or prints how it would.
pub(crate) fn run(arguments: &VmRunArguments) -> Result<ExitCode> {
    let command = &arguments.command;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = program::examine(&command[0], &path, Caller::this())?;
    let what = format!("cannot start {} as a guest", command[0].display());
    if let Some(obstacle) = &program.obstacle {
        let why = format!("the preload cannot enter: {obstacle}");
        return Err(Failure::new(what, why).todo("start it without strata"));
    }
    let version = version(&program, &what)?;
    let here = std::env::current_dir().unwrap_or_default();
    let wish = (arguments.name.as_deref(), arguments.memory);
    let mut plan = planned(&command[0], &command[1..], wish, version, &here, &what)?;
    plan.disks = pool_disks::read(&arguments.disk, &here, &what)?;
    plan.swap =
        arguments.swap.map(|size| pool_disks::check_swap(size, &what)).transpose()?.is_some();
    if arguments.balloon.settings(plan.memory, &what)?.is_some() {
        plan.balloon_by_itself().map_err(|refusal| refusal_of(&what, refusal))?;
    }
    if let Some(problem) = name_problem(&plan.name) {
        let why = format!("it is called {}, and {problem}", plan.name);
        return Err(Failure::new(what, why).todo("give -name another one"));
    }
    if arguments.print {
        let words = words(&plan, &likely_directory(&plan.name), &what)?;
        let line = std::iter::once(&command[0]).chain(&words).map(|word| quoted(word));
        println!("{}", line.collect::<Vec<_>>().join(" "));
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(dram) = arguments.dram {
        run::check_budget(dram, &what)?;
    }
    arguments.claim.check(&what)?;
    Err(start(&program, arguments, version, &plan, &what)?)
}

/// Executes QEMU as a tenant; returns only with why it could not be.
fn start(
    program: &Program,
    arguments: &VmRunArguments,
    version: Version,
    plan: &Plan,
    what: &str,
) -> Result<Failure> {
    // Before there is a tenant: what cannot be served starts no guest, and who serves a
    // disk is nobody's tenant.
    let mut exports = Exports::start(&plan.disks, &likely_socket(), what)?;
    if let Some(size) = arguments.swap {
        exports.add_swap(size, &plan.name, &likely_socket(), what)?;
    }
    let tenant = run::make_tenant(&Request::Run {
        name: Some(plan.name.clone()),
        dram_bytes: arguments.dram.map(|size| size.0),
        command: run::shown_command(&arguments.command),
    })?;
    run::claim(&tenant, &arguments.claim, what)?;
    let guest = GuestSpec {
        memory_bytes: plan.memory.0,
        machine: plan.machine.clone(),
        balloon: plan.balloon.clone(),
        launch: launch(arguments, version),
        disks: Vec::new(),
        self_balloon: arguments.balloon.settings(plan.memory, what)?,
        libvirt: None,
        agent: plan.agent,
    };
    let request = Request::Guest { name: tenant.name.clone(), guest: Box::new(guest) };
    let reply = ask(&tenant.socket, &request).map_err(|none| none.failure(what, &tenant.socket))?;
    let directory = match reply {
        Reply::Guest { directory } => PathBuf::from(directory),
        Reply::Error { message, hint } => return Err(client::refused(what, &message, &hint)),
        _ => return Err(client::misunderstood(what)),
    };
    if !directory.is_dir() {
        let why = format!("{} is not to be seen from here", directory.display());
        let todo = "start it where the file systems are stratad's, or run a stratad here";
        return Err(Failure::new(what, why).todo(todo));
    }
    for warning in tenant.warnings.iter().chain(&plan.notes) {
        run::warn(warning);
    }
    let words = words(plan, &directory, what)?;
    exports.serve_in(&directory, what)?;
    announce(version, plan, &directory, what)?;
    run::lead_a_session_if_none_is_seen();
    let library = place::installed(run::LIBRARY);
    let preload = std::env::var_os(run::LD_PRELOAD);
    let mut environment = run::environment(tenant.environment, library, preload)?;
    let sanitizer = std::env::var_os(run::ASAN_OPTIONS);
    environment.push((run::ASAN_OPTIONS.into(), run::with_other_libraries(sanitizer)));
    environment.push((ENV_GUEST.into(), directory.into()));
    let command: Vec<OsString> =
        std::iter::once(arguments.command[0].clone()).chain(words).collect();
    exports.end_with_what_is_executed(what)?;
    Ok(run::become_program(program, &command, environment))
}

/// How it is started once more.
fn launch(arguments: &VmRunArguments, version: Version) -> Option<Launch> {
    let text = |word: &OsString| word.to_str().map(str::to_owned);
    let directory = std::env::current_dir().ok()?.into_os_string().into_string().ok()?;
    let command = arguments.command.iter().map(text).collect::<Option<_>>()?;
    let disks = arguments.disk.clone();
    let swap_bytes = arguments.swap.map(|size| size.0);
    Some(Launch { command, directory, version: version.to_string(), disks, swap_bytes })
}

/// Says what the guest is, and what was added for it.
fn announce(version: Version, plan: &Plan, directory: &Path, what: &str) -> Result<()> {
    let Plan { name, memory, machine, accelerator, .. } = plan;
    let tell = |text: String| eprintln!("strata: {name}: {}", printable(&text));
    tell(format!("QEMU {version}, {machine}, {memory} promised; {accelerator}"));
    let line = |pairs: Vec<[String; 2]>| {
        let words: Vec<String> = pairs.iter().flatten().map(|word| quoted(word.as_ref())).collect();
        words.join(" ")
    };
    let refused = |refusal| refusal_of(what, refusal);
    let changed = plan.changed(directory).map_err(refused)?;
    if !changed.is_empty() {
        tell(format!("completed: {}", line(changed)));
    }
    tell(format!("added: {}", line(plan.added(directory).map_err(refused)?)));
    Ok(())
}

pub(crate) fn refusal_of(what: &str, refusal: strata_vm::Refusal) -> Failure {
    Failure::new(what, refusal.why).todo(refusal.todo)
}

pub(crate) fn words(plan: &Plan, directory: &Path, what: &str) -> Result<Vec<OsString>> {
    plan.words(directory).map_err(|refusal| refusal_of(what, refusal))
}

/// `wish`: the name and the memory that are given beside the command line.
pub(crate) fn planned(
    program: &OsStr,
    line: &[OsString],
    wish: (Option<&str>, Option<ByteSize>),
    version: Version,
    here: &Path,
    what: &str,
) -> Result<Plan> {
    let opened = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    let opened = opened.map(drop).map_err(|error| error.to_string());
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let problem = kvm_problem(opened, &cpuinfo, std::env::consts::ARCH);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let wish = Wish {
        name: wish.0,
        memory: wish.1,
        version,
        kvm_problem: problem.as_deref(),
        default_machine: default_machine(program),
        huge_pages: &huge_pages(&mounts),
        here,
    };
    plan(line, &wish).map_err(|refusal| refusal_of(what, refusal))
}

/// The machine that a QEMU takes that is told of none; empty: it insists on being told.
fn default_machine(command: &OsStr) -> &'static str {
    let name = Path::new(command).file_name().unwrap_or_default().to_string_lossy();
    match name.rsplit('-').next() {
        Some("x86_64" | "i386" | "kvm") => "pc",
        _ => "",
    }
}

/// Where huge pages are mounted, by a `/proc/PID/mounts`.
fn huge_pages(mounts: &str) -> Vec<PathBuf> {
    let place = |line: &str| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        (kind == "hugetlbfs").then(|| PathBuf::from(place.replace("\\040", " ")))
    };
    mounts.lines().filter_map(place).collect()
}

/// Where a guest's directory would be: the daemon that would be asked is not asked.
fn likely_directory(name: &str) -> PathBuf {
    let socket = likely_socket();
    let folder = format!("{}.{name}", place::uid());
    socket.parent().unwrap_or(Path::new("/")).join("guests").join(folder)
}

/// The control socket of the daemon that would be asked.
fn likely_socket() -> PathBuf {
    place::named_socket().unwrap_or_else(|| {
        let private = || place::private_directory().ok().map(|place| place.join("control.sock"));
        let system = PathBuf::from(DEFAULT_SOCKET);
        if system.exists() { system } else { private().unwrap_or(system) }
    })
}

/// Has QEMU print its version.
pub(crate) fn version(program: &Program, what: &str) -> Result<Version> {
    let failed = |why: String| {
        Failure::new(what, why).todo("name a qemu-system program that starts by itself")
    };
    let mut child = Command::new(&program.path)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    let until = Instant::now() + VERSION_PATIENCE;
    // A few lines fit the pipe: who writes more than that waits, and runs out of time.
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed("it does not say its version".to_owned()));
        }
        std::thread::sleep(VERSION_POLL);
    }
    let mut printed = Vec::new();
    if let Some(out) = child.stdout.take() {
        let _ = out.take(MAX_VERSION_BYTES).read_to_end(&mut printed);
    }
    Version::parse(&String::from_utf8_lossy(&printed))
        .ok_or_else(|| failed("it does not say that it is QEMU when asked for its version".into()))
}

/// What is to be said if it is another QEMU than a guest ran in.
pub(crate) fn other_version(own: Version, ran_in: &str, what: &str) -> Option<Failure> {
    let why = || format!("this is QEMU {own}, and the guest ran in {ran_in}");
    let failure = || Failure::new(what, why()).todo("start it with the QEMU that it ran in");
    (own.to_string() != ran_in).then(failure)
}

/// A word as a shell takes it.
fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.,:/=+@%".contains(&b);
    if !text.is_empty() && text.bytes().all(plain) {
        text.into_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// The guests, a line each.
pub(crate) fn list(json: bool) -> Result<String> {
    let mut tenants = client::list_all()?.unwrap_or_default();
    tenants.retain(|stats| stats.guest.is_some());
    if json { show::json(&tenants) } else { Ok(listing(&tenants)) }
}

fn listing(guests: &[Stats]) -> String {
    let head = [
        "NAME", "STATE", "GUEST", "ACCEL", "MEMORY", "BUDGET", "RESIDENT", "STORED", "FREED",
        "STALL", "BALLOON", "SWAPPED", "TARGET",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (stats, guest) in guests.iter().filter_map(|stats| Some((stats, stats.guest.as_ref()?))) {
        let bytes = |bytes| ByteSize(bytes).to_string();
        let word = |text: &str| if text.is_empty() { "-".to_owned() } else { printable(text) };
        rows.push(vec![
            printable(&stats.name),
            show::state_name(stats.state).to_owned(),
            word(runs(guest)),
            word(&guest.accelerator),
            bytes(guest.memory_bytes),
            bytes(stats.budget_bytes),
            bytes(stats.resident_bytes),
            bytes(stats.stored_bytes),
            bytes(freed_bytes(stats)),
            show::short_percent(stats.stall.some.avg10),
            guest.balloon_bytes.map_or_else(|| "-".to_owned(), bytes),
            guest.swap.map_or_else(|| "-".to_owned(), |swap| bytes(swap.page_bytes)),
            self_balloon::target(guest),
        ]);
    }
    show::columns(&rows, 4)
}

/// What is known of whether it runs.
fn runs(guest: &GuestStats) -> &str {
    match (guest.monitor.is_empty(), guest.trouble.is_empty()) {
        (false, _) => &guest.monitor,
        (true, true) => &guest.status,
        (true, false) => "silent",
    }
}

/// The same, and what to do if it does not.
fn whether_it_runs(stats: &Stats, guest: &GuestStats) -> String {
    match guest.status.as_str() {
        "" => "not known".to_owned(),
        "io-error" => format!(
            "no (io-error): a disk of it failed. When its image can be written (df: is there room?): \
             strata vm resume {}",
            printable(&stats.name)
        ),
        word => printable(word),
    }
}

/// What the guest gave back while it was managed.
fn freed_bytes(stats: &Stats) -> u64 {
    stats.discarded_pages_total.saturating_mul(PAGE_SIZE as u64)
}

/// What there is to know of one guest's memory.
pub(crate) fn stats(name: &str, json: bool) -> Result<String> {
    let stats = client::stats(name)?;
    let Some(guest) = &stats.guest else {
        let what = format!("{name} is no guest");
        return Err(Failure::new(what, "it is no single QEMU with a name").todo("see strata stats"));
    };
    if json { show::json(&stats) } else { Ok(figures(&stats, guest)) }
}

fn figures(stats: &Stats, guest: &GuestStats) -> String {
    let bytes = |bytes| ByteSize(bytes).to_string();
    let told = |figure: Option<u64>| figure.map_or_else(|| "not told".to_owned(), bytes);
    let word = |text: &str| if text.is_empty() { "not known".to_owned() } else { printable(text) };
    let pids: Vec<String> = stats.pids.iter().map(u32::to_string).collect();
    let mut rows = vec![
        ["guest".to_owned(), printable(&stats.name)],
        ["state".to_owned(), show::state_name(stats.state).to_owned()],
        ["runs".to_owned(), whether_it_runs(stats, guest)],
        ["machine".to_owned(), word(&guest.machine)],
        ["accelerator".to_owned(), word(&guest.accelerator)],
        ["process".to_owned(), pids.join(" ")],
        ["memory promised".to_owned(), bytes(guest.memory_bytes)],
        ["balloon leaves it".to_owned(), told(guest.balloon_bytes)],
        ["free, it says".to_owned(), told(guest.free_bytes)],
        ["available, it says".to_owned(), told(guest.available_bytes)],
        ["freed so far".to_owned(), bytes(freed_bytes(stats))],
        ["budget".to_owned(), bytes(stats.budget_bytes)],
        ["in DRAM".to_owned(), bytes(stats.dram_bytes())],
        ["resident".to_owned(), bytes(stats.resident_bytes)],
        ["stored".to_owned(), bytes(stats.stored_bytes)],
        ["stored, compressed".to_owned(), bytes(stats.compressed_bytes + stats.file_bytes)],
        ["not managed".to_owned(), bytes(show::unmanaged_bytes(stats))],
        ["group".to_owned(), stats.group.clone().unwrap_or_else(|| "-".into())],
        ["waited".to_owned(), show::short_percent(stats.stall.some.avg10)],
    ];
    rows.extend(self_balloon::rows(guest));
    if !guest.monitor.is_empty() {
        let why = format!("{}, and not asked", printable(&guest.monitor));
        rows.push(["monitor".to_owned(), why]);
    }
    if let Some(swap) = &guest.swap {
        rows.push(["swap disk".to_owned(), bytes(swap.size_bytes)]);
        rows.push(["swapped out".to_owned(), bytes(swap.page_bytes)]);
        rows.push(["swapped out, costs".to_owned(), bytes(swap.cost_bytes)]);
    }
    if stats.snapshot_file_bytes > 0 {
        let what = "stored, in a snapshot's file";
        rows.push([what.to_owned(), bytes(stats.snapshot_file_bytes)]);
    }
    if stats.merged_bytes > 0 {
        rows.push(["merged (KSM)".to_owned(), bytes(stats.merged_bytes)]);
        rows.push(["merged, saves it".to_owned(), bytes(stats.merged_saved_bytes)]);
    }
    if !guest.trouble.is_empty() {
        rows.push(["monitor".to_owned(), printable(&guest.trouble)]);
    }
    rows.extend(stats.notes.iter().map(|note| ["note".to_owned(), printable(note)]));
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    show::columns(&rows, 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_api::SwapStats;

    fn guest() -> Stats {
        let guest = GuestStats {
            memory_bytes: 4 << 30,
            machine: "q35".into(),
            accelerator: "tcg".into(),
            status: "running".into(),
            trouble: String::new(),
            monitor: String::new(),
            balloon_bytes: Some(3 << 30),
            free_bytes: None,
            available_bytes: Some(1 << 30),
            swap: Some(SwapStats { size_bytes: 2 << 30, page_bytes: 5 << 20, cost_bytes: 1 << 20 }),
            self_balloon: None,
        };
        let stats = crate::testing::stats("web1");
        Stats { guest: Some(guest), discarded_pages_total: 512, ..stats }
    }

    #[test]
    fn guests_are_listed_with_what_they_cost() {
        let text = listing(&[guest()]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("NAME  STATE    GUEST    ACCEL"), "{text}");
        let words: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(words[..4], ["web1", "managed", "running", "tcg"], "{text}");
        assert!(
            lines[1].contains("  4.0 GiB  ") && lines[1].ends_with("3.0 GiB  5.0 MiB  -"),
            "{text}"
        );
        assert!(lines[1].contains("  2.0 MiB  "), "{text}");
        let mut libvirts = guest();
        libvirts.guest.as_mut().expect("a guest").monitor = "libvirt's".into();
        assert!(listing(std::slice::from_ref(&libvirts)).contains("  libvirt's  "));
        let text = figures(&libvirts, libvirts.guest.as_ref().expect("a guest"));
        assert!(text.contains("monitor             libvirt's, and not asked"), "{text}");
        let mut silent = guest();
        let said = silent.guest.as_mut().expect("a guest");
        (said.trouble, said.balloon_bytes) = ("gone".into(), None);
        assert!(listing(&[silent]).contains("  silent  "));
        assert_eq!(listing(&[]).lines().count(), 1);
    }

    #[test]
    fn one_guest_is_shown_with_what_it_did_not_tell() {
        let mut stats = guest();
        stats.guest.as_mut().expect("a guest").trouble = "hung\nup".into();
        (stats.merged_bytes, stats.merged_saved_bytes) = (6 << 20, 3 << 20);
        let text = figures(&stats, stats.guest.as_ref().expect("a guest"));
        for line in [
            "memory promised     4.0 GiB",
            "free, it says       not told",
            "freed so far        2.0 MiB",
            "swapped out         5.0 MiB",
            "merged (KSM)        6.0 MiB",
            "merged, saves it    3.0 MiB",
            "monitor             hung?up",
            "note                a note",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        for (word, text) in [
            ("-object", "-object"),
            ("size=1G,mem-path=/run/x", "size=1G,mem-path=/run/x"),
            ("", "''"),
            ("a b", "'a b'"),
            ("it's", "'it'\\''s'"),
            ("$HOME", "'$HOME'"),
        ] {
            assert_eq!(quoted(word.as_ref()), text);
        }
    }

    #[test]
    fn what_is_known_of_the_machine_is_read_right() {
        let mounts = "a / ext4 rw 0 0\nhugetlbfs /dev/hugepages hugetlbfs rw 0 0\n\
                      x /mnt/hugetlbfs tmpfs rw 0 0\nn /mnt/a\\040b hugetlbfs rw 0 0\n";
        let expected = [PathBuf::from("/dev/hugepages"), "/mnt/a b".into()];
        assert_eq!(huge_pages(mounts), expected);
        assert_eq!(default_machine("/usr/bin/qemu-system-x86_64".as_ref()), "pc");
        assert_eq!(default_machine("kvm".as_ref()), "pc");
        assert_eq!(default_machine("qemu-system-aarch64".as_ref()), "");
    }
}
