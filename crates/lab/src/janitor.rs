//! The janitor: a second process that puts the machine back as it was.
//!
//! Swap devices, cgroups and servers outlive the process that made them. Drop
//! guards cover the ways out that unwind; they do not cover a panic that
//! aborts, or `kill -9`. So whatever the lab changes it first registers with
//! a small process of its own, which undoes a change when told to, and all of
//! them, newest first, when its standard input closes for whatever reason. What
//! is left where both were killed the next lab undoes ([`crate::journal`]).

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};
use strata_api::{ENV_CONTROL_SOCKET, Stats, TenantState};

use crate::journal::{self, Journal};
use crate::process;

/// How long an undo is tried again: a killed process needs a moment to go, and
/// swapping off waits for its pages.
const PATIENCE: Duration = Duration::from_secs(20);

/// One change, told by what takes it back.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Undo {
    /// Kill a process, if it is still the one that was started then.
    Kill { pid: u32, start_ticks: u64 },
    /// Stop swapping to a device.
    SwapOff { device: PathBuf },
    /// Empty a zram device and give it its old algorithm.
    ZramReset { sysfs: PathBuf, algorithm: String },
    /// Remove a zram device that was added.
    ZramRemove { number: u32 },
    /// Give a parameter of the kernel its old value.
    WriteBack { path: PathBuf, value: String },
    /// Remove an empty control group.
    RemoveGroup { path: PathBuf },
    /// Remove a directory with sockets and logs.
    RemoveFiles { path: PathBuf },
    /// Kill every process that works in a directory: one that CRIU brought back
    /// there is nobody's child, and has no start that could be known before.
    KillIn { directory: PathBuf },
    /// Have a daemon end a tenant, whatever process it is by then.
    StopTenant { program: PathBuf, socket: PathBuf, name: String },
}

#[derive(Serialize, Deserialize)]
enum Order {
    Register(u64, Undo),
    Undo(u64),
}

/// The lab's end of the janitor.
#[derive(Clone)]
pub(crate) struct Janitor {
    link: Arc<Mutex<Link>>,
}

struct Link {
    /// None only while dropping.
    orders: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
    child: Child,
    next_id: u64,
}

/// A registered change: dropping it takes the change back.
#[must_use]
pub(crate) struct Registered {
    janitor: Janitor,
    id: Option<u64>,
}

impl Janitor {
    /// Starts the second process.
    pub(crate) fn start() -> Result<Self> {
        // Who cannot read it has nothing there.
        if let Ok(directory) = journal::directory() {
            let undone = journal::take_over(&directory)?;
            if undone > 0 {
                eprintln!("strata-lab: {undone} changes of a killed one were taken back");
            }
        }
        let program = std::env::current_exe().context("find this program")?;
        let mut child = Command::new(program)
            .arg("janitor")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C on the terminal is for us: the janitor still has work then.
            .process_group(0)
            .spawn()
            .context("start the janitor")?;
        let orders = child.stdin.take();
        let replies = BufReader::new(child.stdout.take().context("the janitor has no output")?);
        let link = Link { orders, replies, child, next_id: 0 };
        Ok(Self { link: Arc::new(Mutex::new(link)) })
    }

    /// Call this before making the change, or at once after where the undo
    /// needs what the change returned.
    pub(crate) fn register(&self, undo: Undo) -> Result<Registered> {
        let mut link = self.link.lock().expect("no holder panicked");
        let id = link.next_id;
        link.next_id += 1;
        link.order(&Order::Register(id, undo))?;
        Ok(Registered { janitor: self.clone(), id: Some(id) })
    }
}

impl Link {
    fn order(&mut self, order: &Order) -> Result<()> {
        let orders = self.orders.as_mut().context("the janitor is gone")?;
        let line = serde_json::to_string(order).context("encode an order")?;
        writeln!(orders, "{line}").context("the janitor does not listen")?;
        let mut reply = String::new();
        self.replies.read_line(&mut reply).context("the janitor does not answer")?;
        match reply.trim() {
            "ok" => Ok(()),
            "" => bail!("the janitor ended"),
            problem => bail!("{problem}"),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.orders = None;
        if let Err(error) = self.child.wait() {
            eprintln!("strata-lab: wait for the janitor: {error}");
        }
    }
}

impl Registered {
    /// Takes the change back now and says how it went.
    pub(crate) fn undo(mut self) -> Result<()> {
        self.undo_once()
    }

    fn undo_once(&mut self) -> Result<()> {
        let Some(id) = self.id.take() else { return Ok(()) };
        self.janitor.link.lock().expect("no holder panicked").order(&Order::Undo(id))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Err(error) = self.undo_once() {
            eprintln!("strata-lab: clean up: {error:#}");
        }
    }
}

/// The second process: obeys until its input ends, then undoes what is left.
///
/// Signals that ask a program to end do not end it: whoever sends them to the
/// lab's processes one by one wants the machine back as it was, too.
pub(crate) fn serve() -> Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, Arc::default()).context("ignore a signal")?;
    }
    let mut registered: BTreeMap<u64, Undo> = BTreeMap::new();
    // The second line of defence: without it the first one holds.
    let mut journal = journal::directory().and_then(Journal::open).ok();
    let mut out = std::io::stdout();
    for line in std::io::stdin().lines() {
        let Ok(line) = line else { break };
        let reply = match serde_json::from_str(&line) {
            Ok(Order::Register(id, undo)) => {
                registered.insert(id, undo);
                "ok".to_owned()
            }
            Ok(Order::Undo(id)) => match registered.remove(&id).map(|undo| undo.perform()) {
                Some(Ok(())) => "ok".to_owned(),
                Some(Err(error)) => format!("{error:#}").replace('\n', " "),
                None => format!("nothing registered as {id}"),
            },
            Err(error) => format!("bad order: {error}"),
        };
        if let Some(journal) = &mut journal
            && let Err(error) = journal.write(registered.values())
        {
            eprintln!("strata-lab: what is to be undone is not on file: {error:#}");
        }
        if writeln!(out, "{reply}").and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    for (_, undo) in registered.into_iter().rev() {
        if let Err(error) = undo.perform() {
            eprintln!("strata-lab: clean up: {error:#}");
        }
    }
    journal.map_or(Ok(()), |mut journal| journal.write([].iter()))
}

impl Undo {
    pub(crate) fn perform(&self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.attempt() {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Succeeds also when there is nothing to undo any more.
    fn attempt(&self) -> Result<()> {
        match self {
            Self::Kill { pid, start_ticks } => kill(*pid, *start_ticks),
            Self::SwapOff { device } => {
                let swaps = fs::read_to_string("/proc/swaps").context("read /proc/swaps")?;
                let name = device.to_string_lossy();
                if swaps.lines().any(|line| line.split_whitespace().next() == Some(&name)) {
                    run_tool("swapoff", &[], device)?;
                }
                Ok(())
            }
            Self::ZramReset { sysfs, algorithm } => {
                if sysfs.exists() {
                    write(&sysfs.join("reset"), "1")?;
                    write(&sysfs.join("comp_algorithm"), algorithm)?;
                }
                Ok(())
            }
            Self::ZramRemove { number } => {
                if Path::new(&format!("/sys/block/zram{number}")).exists() {
                    write(Path::new("/sys/class/zram-control/hot_remove"), &number.to_string())?;
                }
                Ok(())
            }
            Self::WriteBack { path, value } => write(path, value),
            Self::RemoveGroup { path } => {
                if path.exists() {
                    fs::remove_dir(path)
                        .with_context(|| format!("remove the control group {}", path.display()))?;
                }
                Ok(())
            }
            Self::RemoveFiles { path } => {
                if path.exists() {
                    fs::remove_dir_all(path)
                        .with_context(|| format!("remove {}", path.display()))?;
                }
                Ok(())
            }
            Self::KillIn { directory } => kill_in(directory),
            Self::StopTenant { program, socket, name } => stop_tenant(program, socket, name),
        }
    }
}

fn kill_in(directory: &Path) -> Result<()> {
    let mut left = 0;
    for pid in process::all() {
        let works_in = fs::read_link(format!("/proc/{pid}/cwd"));
        if works_in.is_ok_and(|place| place == directory)
            && let Some(times) = process::times(pid)
            && kill(pid, times.start_ticks).is_err()
        {
            left += 1;
        }
    }
    if left > 0 {
        bail!("{left} processes in {} do not end", directory.display());
    }
    Ok(())
}

fn stop_tenant(program: &Path, socket: &Path, name: &str) -> Result<()> {
    if UnixStream::connect(socket).is_err() {
        // Without its daemon there is no tenant.
        return Ok(());
    }
    let ask = |arguments: &[&str]| {
        Command::new(program)
            .args(arguments)
            .env(ENV_CONTROL_SOCKET, socket)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("run {}", program.display()))
    };
    let stopped = ask(&["stop", name])?;
    if stopped.status.success() {
        return Ok(());
    }
    // Not there any more, or there for its snapshots only, is what was wanted.
    let output = ask(&["stats", name, "--json"])?;
    let stats = serde_json::from_slice::<Stats>(&output.stdout);
    if stats.is_ok_and(|stats| stats.state != TenantState::Ended) {
        bail!("{}", String::from_utf8_lossy(&stopped.stderr).trim());
    }
    Ok(())
}

fn kill(pid: u32, start_ticks: u64) -> Result<()> {
    match process::times(pid) {
        Some(times) if times.start_ticks == start_ticks && !process::is_zombie(pid) => {
            let target = Pid::from_raw(pid as i32).context("a pid is never zero")?;
            match kill_process(target, Signal::KILL) {
                Ok(()) => bail!("process {pid} does not end"),
                Err(rustix::io::Errno::SRCH) => Ok(()),
                Err(error) => Err(error).with_context(|| format!("kill process {pid}")),
            }
        }
        _ => Ok(()),
    }
}

/// Writes one value to a file of sysfs or of a control group.
pub(crate) fn write(path: &Path, value: &str) -> Result<()> {
    fs::write(path, value).with_context(|| format!("write {value:?} to {}", path.display()))
}

/// Runs a system tool on a device; its complaint becomes the error.
pub(crate) fn run_tool(tool: &str, options: &[&str], device: &Path) -> Result<()> {
    // Not everybody's PATH has the administrator's directories.
    let found = ["/usr/sbin", "/sbin", "/usr/bin"]
        .iter()
        .map(|directory| Path::new(directory).join(tool))
        .find(|path| path.exists())
        .with_context(|| format!("{tool} is not installed (Debian: util-linux, mount)"))?;
    let output = Command::new(found)
        .args(options)
        .arg(device)
        .output()
        .with_context(|| format!("run {tool}"))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!("{tool} {}: {}", device.display(), complaint.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_survive_the_pipe() {
        let undo = Undo::ZramReset { sysfs: "/sys/block/zram7".into(), algorithm: "lzo".into() };
        let line = serde_json::to_string(&Order::Register(3, undo.clone())).expect("encodes");
        let Ok(Order::Register(3, back)) = serde_json::from_str(&line) else { panic!("{line}") };
        assert_eq!(back, undo);
    }

    #[test]
    fn a_pid_with_a_new_owner_is_left_alone() {
        let me = std::process::id();
        let start_ticks = process::times(me).expect("this process").start_ticks;
        Undo::Kill { pid: me, start_ticks: start_ticks + 1 }.perform().expect("nothing to do");
    }

    #[test]
    fn a_parameter_gets_its_old_value_back() {
        let path = std::env::temp_dir().join(format!("strata-lab-back-{}", std::process::id()));
        fs::write(&path, "new").expect("written");
        let undo = Undo::WriteBack { path: path.clone(), value: "old".into() };
        undo.perform().expect("written back");
        assert_eq!(fs::read_to_string(&path).expect("read"), "old");
        fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn processes_are_killed_by_where_they_work() {
        let path = std::env::temp_dir().join(format!("strata-lab-in-{}", std::process::id()));
        fs::create_dir_all(&path).expect("made");
        let sleep = |place: &Path| Command::new("sleep").arg("600").current_dir(place).spawn();
        let mut inside = sleep(&path).expect("sleep runs");
        let mut outside = sleep(Path::new("/")).expect("sleep runs");
        Undo::KillIn { directory: path.clone() }.perform().expect("killed");
        assert!(!inside.wait().expect("it ended").success());
        assert!(outside.try_wait().expect("looked at").is_none(), "it works elsewhere");
        outside.kill().expect("killed");
        outside.wait().expect("it ended");
        fs::remove_dir(&path).expect("removed");
    }

    #[test]
    fn without_a_daemon_there_is_no_tenant_to_stop() {
        let nowhere = PathBuf::from("/nonexistent");
        let undo = Undo::StopTenant {
            program: nowhere.join("strata"),
            socket: nowhere.join("control.sock"),
            name: "db".into(),
        };
        undo.perform().expect("nothing to do");
    }

    #[test]
    fn a_process_and_its_files_are_removed() {
        let path = std::env::temp_dir().join(format!("strata-lab-undo-{}", std::process::id()));
        fs::create_dir_all(path.join("below")).expect("made");
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep runs");
        let start_ticks = process::times(child.id()).expect("it runs").start_ticks;
        Undo::Kill { pid: child.id(), start_ticks }.perform().expect("killed");
        assert!(!child.wait().expect("it ended").success());
        let files = Undo::RemoveFiles { path: path.clone() };
        files.perform().expect("removed");
        assert!(!path.exists());
        files.perform().expect("removing twice is no error");
    }
}
