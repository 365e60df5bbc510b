//! Private places (mounts, network, process numbers) for programs that are
//! started in them. How the daemon starts programs is in `launch`.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::process::Pidfd;

/// Starts the program in a session of its own, where signals of our terminal do
/// not reach it, and lets it make files for its user alone.
pub fn own_session(command: &mut Command) {
    // SAFETY: both are async-signal-safe and take at most an integer.
    unsafe {
        command.pre_exec(|| {
            libc::umask(0o077);
            if libc::setsid() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        });
    }
}

/// Does the same to this process. One that leads a group already stays where it is.
pub fn own_session_now() {
    // SAFETY: both take at most an integer.
    unsafe {
        libc::umask(0o077);
        libc::setsid();
    }
}

/// What a process gets for itself alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Own {
    /// A mount namespace, none of whose mounts are seen outside.
    pub mounts: bool,
    /// A network namespace, with nothing but a loopback interface that is off.
    pub network: bool,
    /// A pid namespace, for children started from now on.
    pub pids: bool,
}

/// Gives this process what `own` says. Call it while there is one thread.
pub fn unshare(own: Own) -> io::Result<()> {
    let flag = |wanted: bool, flag: libc::c_int| if wanted { flag } else { 0 };
    let flags = flag(own.mounts, libc::CLONE_NEWNS)
        | flag(own.network, libc::CLONE_NEWNET)
        | flag(own.pids, libc::CLONE_NEWPID);
    // SAFETY: flags only.
    if unsafe { libc::unshare(flags) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if own.mounts {
        // SAFETY: live C strings; null source, type and data are allowed for a
        // change of propagation.
        let code = unsafe {
            libc::mount(
                std::ptr::null(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            )
        };
        if code != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Prepares a child that becomes the first process of a pid namespace: it sees
/// a `/proc` of its own, and is killed (its namespace with it) when its parent
/// dies. The caller has unshared mounts and pids.
pub fn prepare_child(command: &mut Command) {
    // SAFETY: runs in the child between fork and exec; prctl and mount are
    // plain system calls with live C strings, nothing is allocated.
    unsafe {
        command.pre_exec(|| {
            let proc = c"proc".as_ptr();
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0
                || libc::mount(
                    proc,
                    c"/proc".as_ptr(),
                    proc,
                    libc::MS_NOSUID | libc::MS_NOEXEC | libc::MS_NODEV,
                    std::ptr::null(),
                ) != 0
            {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// Shows `from` where `onto` is, for this process's mount namespace (and only
/// there, if the namespace is private).
pub fn bind_mount(from: &Path, onto: &Path) -> io::Result<()> {
    let path = |path: &Path| {
        CString::new(path.as_os_str().as_bytes())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a path holds a NUL"))
    };
    let (from, onto) = (path(from)?, path(onto)?);
    // SAFETY: both paths are live C strings; null type and data are allowed
    // for bind mounts.
    let code = unsafe {
        libc::mount(
            from.as_ptr(),
            onto.as_ptr(),
            std::ptr::null(),
            libc::MS_BIND | libc::MS_REC,
            std::ptr::null(),
        )
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Switches the loopback interface of this network namespace on.
pub fn raise_loopback() -> io::Result<()> {
    // SAFETY: integers only, returns a new descriptor.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let socket = crate::uffd::own(fd);
    // SAFETY: ifreq is plain data, all zeroes is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: `request` is a live ifreq with a name that ends in zero.
    let code = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Moves this process into the mount and network namespaces of another, and
/// children that it starts from then on into its pid namespace. Call it while
/// there is one thread.
pub fn enter_namespaces_of(pid: u32) -> io::Result<()> {
    let pidfd = Pidfd::open(pid)?;
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWPID;
    // SAFETY: a descriptor that is open for the call, and flags.
    let code = unsafe { libc::setns(pidfd.as_fd().as_raw_fd(), flags) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Moves the calling thread into the network namespace of a process, for
/// sockets made by it from then on.
pub fn enter_network_of(pid: u32) -> io::Result<()> {
    let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net"))?;
    // SAFETY: a descriptor that is open for the call, and a flag.
    let code = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// One child that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// Its process id.
    pub pid: u32,
    /// As a shell would say it: exit code, or 128 and the signal.
    pub code: i32,
}

/// Waits for any child of this process to end; `None` when there is none left.
pub fn wait_any_child() -> io::Result<Option<Ended>> {
    loop {
        let mut status = 0;
        // SAFETY: `status` is a live int.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        if pid > 0 {
            let code = if libc::WIFEXITED(status) {
                libc::WEXITSTATUS(status)
            } else {
                128 + libc::WTERMSIG(status)
            };
            return Ok(Some(Ended { pid: pid as u32, code }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ECHILD) => return Ok(None),
            Some(libc::EINTR) => {}
            _ => return Err(error),
        }
    }
}
