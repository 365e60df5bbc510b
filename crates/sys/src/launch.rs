//! Starts a program without copying this process.
//!
//! A fork copies the page tables of all private memory, which takes milliseconds
//! in a process with much of it, and afterwards each page that either side
//! writes is copied. Here the child borrows our memory (`CLONE_VM`) until it
//! executes the program, and the thread that starts it waits for that
//! (`CLONE_VFORK`, see `clone(2)`); other threads go on. What the child does in
//! between is system calls on values that were made ready before.

use std::ffi::{CString, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use crate::answer::install_and_send;
use crate::poll::poll_readable;
use crate::process::Pidfd;

/// For the child until it executes the program; it needs two pages.
const STACK_BYTES: usize = 64 << 10;
/// What the stack's end must be a multiple of, on every architecture.
const STACK_ALIGNMENT: usize = 16;
/// The highest signal of Linux.
const SIGNALS: libc::c_int = 64;
/// What a shell says of a program that it could not start.
const NOT_STARTED: libc::c_int = 127;

/// A program to start, in a session of its own, where signals of our terminal do
/// not reach it. Files that it makes are for its user alone.
#[derive(Debug)]
pub struct Launch {
    words: Vec<OsString>,
    inherited: Vec<OwnedFd>,
    group: Option<File>,
    question: Option<(u32, UnixStream)>,
}

impl Launch {
    /// The program at this path.
    #[must_use]
    pub fn new(program: impl Into<OsString>) -> Self {
        Self { words: vec![program.into()], inherited: Vec::new(), group: None, question: None }
    }

    /// One more argument.
    pub fn arg(&mut self, word: impl Into<OsString>) -> &mut Self {
        self.words.push(word.into());
        self
    }

    /// More arguments.
    pub fn args<Word: Into<OsString>>(
        &mut self,
        words: impl IntoIterator<Item = Word>,
    ) -> &mut Self {
        self.words.extend(words.into_iter().map(Into::into));
        self
    }

    /// Lets it inherit `fds` under the numbers that they have here (all others
    /// close when it starts). Our copies close when it has started.
    pub fn inherit(&mut self, fds: Vec<OwnedFd>) {
        self.inherited.extend(fds);
    }

    /// Starts it in a cgroup (v1), whose file `tasks` this is, open for writing. A
    /// thread that writes itself there is moved at once; who moves another one,
    /// or a process, waits until no CPU forks or ends one, milliseconds. A group
    /// that refuses it is no error: it starts where this process is.
    pub fn join(&mut self, group: File) {
        self.group = Some(group);
    }

    /// Lets the kernel ask us about every ioctl with this `request` (its low 32
    /// bits) that it makes. Needs CAP_SYS_ADMIN. After the start,
    /// [`crate::IoctlListener::accept`] the other end of `channel`.
    pub fn ask_about_ioctl(&mut self, request: u32, channel: UnixStream) {
        self.question = Some((request, channel));
    }

    /// Starts it with nothing to read; what it prints goes into the file
    /// `output`.
    ///
    /// # Errors
    /// The file cannot be made, or the program not be started.
    pub fn start(self, output: &Path) -> io::Result<Running> {
        let mut options = OpenOptions::new();
        let output = options.write(true).create(true).truncate(true).mode(0o600).open(output)?;
        let nothing = File::open("/dev/null")?;
        let strings = |strings: Vec<OsString>| {
            let made = strings.into_iter().map(|text| CString::new(text.into_vec()));
            made.collect::<Result<Vec<_>, _>>().map_err(io::Error::from)
        };
        let (words, environment) = (strings(self.words)?, strings(environment())?);
        let mut plan = Plan {
            words: pointers(&words),
            environment: pointers(&environment),
            nothing: nothing.as_raw_fd(),
            output: output.as_raw_fd(),
            inherited: self.inherited.iter().map(AsRawFd::as_raw_fd).collect(),
            group: self.group.as_ref().map(AsRawFd::as_raw_fd),
            question: self.question,
            error: 0,
        };
        plan.carry_out()
    }
}

/// Ours, as the program's: `NAME=value`.
fn environment() -> Vec<OsString> {
    let line = |(mut name, value): (OsString, OsString)| {
        name.push("=");
        name.push(value);
        name
    };
    std::env::vars_os().map(line).collect()
}

/// As `execve` wants them; they hold while `strings` do.
fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
}

/// All that the child needs, made before it is there.
struct Plan {
    words: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
    nothing: RawFd,
    output: RawFd,
    inherited: Vec<RawFd>,
    group: Option<RawFd>,
    question: Option<(u32, UnixStream)>,
    /// Why it could not execute the program: written by the child.
    error: i32,
}

impl Plan {
    fn carry_out(&mut self) -> io::Result<Running> {
        let mut stack = vec![0_u8; STACK_BYTES];
        let unaligned = (stack.as_ptr() as usize + STACK_BYTES) % STACK_ALIGNMENT;
        // SAFETY: inside of `stack` or its end.
        let top = unsafe { stack.as_mut_ptr().add(STACK_BYTES - unaligned) };
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let mut pidfd: RawFd = -1;
        // SAFETY: plain data, all zeroes is valid; sigfillset then fills it.
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        // SAFETY: live sets. A handler of ours must not run in the child, on its
        // stack and in our memory: it lets signals in only when none has one.
        // `child` gets a live plan and a live stack that nobody else uses, and
        // they outlive its use of both: this thread goes on when it has
        // executed the program or ended. The last argument is where the kernel
        // writes the descriptor.
        let pid = unsafe {
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            let plan = std::ptr::from_mut(self).cast();
            libc::clone(child, top.cast(), flags, plan, &raw mut pidfd)
        };
        let refused = io::Error::last_os_error();
        // SAFETY: the set that was there before.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
        };
        if pid < 0 {
            return Err(refused);
        }
        let pidfd = Pidfd::adopt(crate::uffd::own(pidfd));
        let mut running = Running { pid: pid.cast_unsigned(), pidfd, ended: None };
        if self.error != 0 {
            running.wait(None)?;
            return Err(io::Error::from_raw_os_error(self.error));
        }
        Ok(running)
    }

    /// In the child: everything up to the program. Returns only with an error,
    /// and allocates nothing (`last_os_error` holds just the number).
    fn become_it(&self) -> io::Result<()> {
        let check = |code: libc::c_int| {
            if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        // SAFETY: plain system calls on integers and live values. The
        // dispositions of signals and the mask are the child's own.
        unsafe {
            for signal in 1..=SIGNALS {
                // Some are not to be changed; they have no handler either.
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
            check(libc::dup2(self.nothing, libc::STDIN_FILENO))?;
            check(libc::dup2(self.output, libc::STDOUT_FILENO))?;
            check(libc::dup2(self.output, libc::STDERR_FILENO))?;
            for &fd in &self.inherited {
                check(libc::fcntl(fd, libc::F_SETFD, 0))?;
            }
            if let Some(group) = self.group {
                libc::write(group, c"0".as_ptr().cast(), 1);
            }
            libc::umask(0o077);
            check(libc::setsid())?;
        }
        // The last thing: from here on it is asked about.
        if let Some((request, channel)) = &self.question {
            install_and_send(*request, channel)?;
        }
        // SAFETY: both arrays end with null and point to live strings.
        unsafe { libc::execve(self.words[0], self.words.as_ptr(), self.environment.as_ptr()) };
        Err(io::Error::last_os_error())
    }
}

extern "C" fn child(plan: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `carry_out` passed its plan, and waits until we are done with it.
    let plan = unsafe { &mut *plan.cast::<Plan>() };
    if let Err(error) = plan.become_it() {
        plan.error = error.raw_os_error().unwrap_or(libc::EINVAL);
    }
    NOT_STARTED
}

/// A program that we started: a child of this process, to be waited for.
#[derive(Debug)]
pub struct Running {
    pid: u32,
    pidfd: Pidfd,
    /// It was collected: the number may be another's.
    ended: Option<ExitStatus>,
}

impl Running {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Becomes readable when it ends.
    #[must_use]
    pub fn pidfd(&self) -> &Pidfd {
        &self.pidfd
    }

    fn collect(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let mut status = 0;
            // SAFETY: a child that was not collected yet, and a live int.
            match unsafe { libc::waitpid(self.pid.cast_signed(), &raw mut status, libc::WNOHANG) } {
                0 => {}
                1.. => self.ended = Some(ExitStatus::from_raw(status)),
                _ => return Err(io::Error::last_os_error()),
            }
        }
        Ok(self.ended)
    }

    /// Waits for its end, without a limit or up to it. `None`: it runs longer.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self, limit: Option<Duration>) -> io::Result<Option<ExitStatus>> {
        let end = limit.map(|limit| Instant::now() + limit);
        loop {
            if let Some(status) = self.collect()? {
                return Ok(Some(status));
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            poll_readable([self.pidfd.as_fd()], left)?;
        }
    }

    /// Ends it now.
    pub fn kill(&mut self) {
        // An error says that it has ended already.
        let _ = self.pidfd.signal(libc::SIGKILL);
        let _ = self.wait(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Output(std::path::PathBuf);

    impl Output {
        fn new(name: &str) -> Self {
            let name = format!("strata-launch-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn text(&self) -> String {
            std::fs::read_to_string(&self.0).expect("what it printed")
        }
    }

    impl Drop for Output {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn shell(script: &str) -> Launch {
        let mut launch = Launch::new("/bin/sh");
        launch.args(["-c", script]);
        launch
    }

    #[test]
    fn a_program_starts_in_a_clean_place_with_what_it_inherits() {
        let output = Output::new("clean");
        let (reader, writer) = io::pipe().expect("a pipe");
        let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
        let number = writer.as_raw_fd();
        // What grep inherits of the shell, which blocks all while it waits for it; and it
        // redirects to no descriptor of two digits.
        let mut launch = shell(&format!(
            "umask; cut -d' ' -f6 /proc/$$/stat; grep -E '^Sig(Blk|Ign)' /proc/self/status; \
             ls /proc/$$/fd | tr '\\n' ' '; echo $HOME; cat; \
             echo told >/proc/$$/fd/{number}"
        ));
        launch.inherit(vec![writer]);
        let mut running = launch.start(&output.0).expect("it starts");
        let ended = running.wait(None).expect("a wait").expect("its end");
        assert!(ended.success());
        let text = output.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "0077");
        assert_eq!(lines[1], running.id().to_string(), "leader of its session");
        assert_eq!(lines[2], "SigBlk:\t0000000000000000");
        let ignored =
            lines[3].split_once('\t').and_then(|(_, set)| u64::from_str_radix(set, 16).ok());
        let pipe = 1 << (libc::SIGPIPE - 1);
        assert_eq!(ignored.expect("a set") & pipe, 0, "as Rust programs ignore it");
        let fds: Vec<&str> = lines[4].split(' ').collect();
        assert!(fds.contains(&number.to_string().as_str()));
        assert!(!fds.contains(&reader.as_raw_fd().to_string().as_str()));
        assert!(text.ends_with(&format!("{}\n", std::env::var("HOME").unwrap_or_default())));
        let mut told = String::new();
        io::Read::read_to_string(&mut File::from(reader), &mut told).expect("what it told");
        assert_eq!(told, "told\n");
    }

    #[test]
    fn it_asks_to_be_moved_to_its_group_before_it_runs() {
        let (output, group) = (Output::new("grouped"), Output::new("tasks"));
        let mut launch = shell("cat \"$0\"");
        launch.arg(group.0.as_os_str()).join(File::create(&group.0).expect("a file"));
        let mut running = launch.start(&output.0).expect("it starts");
        assert!(running.wait(None).expect("a wait").expect("its end").success());
        assert_eq!(output.text(), "0", "as its thread calls itself");
    }

    #[test]
    fn what_cannot_be_started_says_why_and_is_collected() {
        let output = Output::new("missing");
        let error = Launch::new("/nonexistent/program").start(&output.0).expect_err("none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let error = shell("a\0b").start(&output.0).expect_err("no C string");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let missing = Path::new("/nonexistent/output");
        assert!(shell("true").start(missing).is_err());
    }

    #[test]
    fn it_is_waited_for_within_a_limit_and_killed() {
        let output = Output::new("killed");
        let mut running = shell("exec sleep 100").start(&output.0).expect("it starts");
        assert_eq!(running.wait(Some(Duration::ZERO)).expect("a wait"), None);
        running.kill();
        let ended = running.wait(Some(Duration::ZERO)).expect("a wait").expect("its end");
        assert_eq!(ended.signal(), Some(libc::SIGKILL));
        let mut running = shell("exit 7").start(&output.0).expect("it starts");
        let ended = running.wait(None).expect("a wait").expect("its end");
        assert_eq!(ended.code(), Some(7));
    }

    #[test]
    fn many_threads_start_programs_at_once() {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let output = Output::new(&format!("many-{thread}"));
                    for round in 0..25 {
                        let mut running =
                            shell(&format!("echo {round}")).start(&output.0).expect("it starts");
                        assert!(running.wait(None).expect("a wait").expect("its end").success());
                        assert_eq!(output.text(), format!("{round}\n"));
                    }
                });
            }
        });
    }
}
