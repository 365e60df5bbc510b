//! The constructor, and starting an agent: what runs on the program's threads
//! before `main`, and again in a forked child (`fork`).

use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use strata_units::wire::{
    CONTROL_BYTES, DEFAULT_AGENT_SOCKET, ENV_GUEST, ENV_PROTOCOL, ENV_REQUIRED, ENV_SOCKET,
    ENV_TOKEN, HelloKind, MAGIC, MAGIC_BEFORE, UNMANAGED_STATUS,
};

use crate::agent;
use crate::block::{
    self, Block, OUTCOME_ABANDONED, OUTCOME_FAILED, OUTCOME_PENDING, OUTCOME_READY, Settings,
    TRANSFER_BYTES,
};
use crate::fork;
use crate::guards;
use crate::guest;
use crate::handshake::{Failure, HANDSHAKE_TIME};
use crate::identity;
use crate::kernel::{self, Deadline};
use crate::next;
use crate::records;
use crate::thread;

/// How long the constructor waits: a little longer than the agent tries, so
/// that it is the agent that gives up.
const START_TIME: Duration = HANDSHAKE_TIME.saturating_add(Duration::from_secs(1));

/// Not yet known whether this program is to be managed.
const MODE_EARLY: u32 = 0;
/// It is not: wrappers call straight through.
const MODE_OFF: u32 = 1;
/// It is, or its agent is trying.
const MODE_ON: u32 = 2;

static MODE: AtomicU32 = AtomicU32::new(MODE_EARLY);

/// Whether threads and mutexes are to be recorded, and where. Before the
/// constructor has decided, they are.
pub(crate) fn recording() -> Option<&'static Block> {
    if MODE.load(Ordering::Relaxed) == MODE_OFF {
        return None;
    }
    let block = block::obtain();
    if block.is_none() {
        // A thread that is not recorded must not meet a mover.
        MODE.store(MODE_OFF, Ordering::SeqCst);
    }
    block
}

/// Whether nothing of this process is managed, and nothing will be.
pub(crate) fn is_off() -> bool {
    MODE.load(Ordering::Relaxed) == MODE_OFF
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

unsafe extern "C" {
    /// The process's environment, a null-terminated array of C strings.
    static environ: *const *const c_char;
}

/// What the dynamic linker calls before `main`. (Not every one passes arguments.)
extern "C" fn constructor() {
    // SAFETY: the C library has set it before it calls constructors; nothing else
    // runs that could write it, or what it points to.
    let wishes = unsafe { Wishes::read(environ) };
    // SAFETY: as above.
    if !guest::prepare(unsafe { variable(environ, ENV_GUEST) }) {
        say(
            "strata: STRATA_GUEST_DIR is no path that could be the guest's memory; that memory stays shared and unmanaged\n",
        );
    }
    let managed = match wishes {
        Some(wishes) => match stranger(&wishes) {
            Some(why) => go_without(why, wishes.is_required),
            None => {
                identity::prepare();
                guards::prepare();
                start_program(&wishes)
            }
        },
        None => false,
    };
    if !managed {
        MODE.store(MODE_OFF, Ordering::SeqCst);
    }
}

/// Says why this program is not managed, and whether it runs all the same: one that was
/// promised a budget does not, unless whoever started it said so. False.
fn go_without(why: &str, is_required: bool) -> bool {
    const MOST_BYTES: usize = 512;
    let end = match is_required {
        false => "; running unmanaged\n",
        true => {
            "; it does not run unmanaged (strata run --allow-unmanaged, or required = false in a rule, lets it)\n"
        }
    };
    // One write, so that lines of several processes stay whole.
    let mut line = [0; MOST_BYTES];
    let mut used = 0;
    for part in ["strata: ", why, end] {
        let room = line.len() - used;
        let part = &part.as_bytes()[..part.len().min(room)];
        line[used..used + part.len()].copy_from_slice(part);
        used += part.len();
    }
    say(core::str::from_utf8(&line[..used]).unwrap_or(why));
    if is_required {
        kernel::end_process(UNMANAGED_STATUS);
    }
    false
}

/// Why this program cannot be managed, whatever the daemon says.
fn stranger(wishes: &Wishes) -> Option<&'static str> {
    if wishes.is_under_valgrind {
        Some(
            "Valgrind runs no thread that it does not know (without Valgrind the program is managed)",
        )
    } else if next::any(c"gnu_get_libc_version").is_null() {
        Some("this program's C library is not glibc, which libstrata.so is made for")
    } else {
        None
    }
}

/// What the environment says.
struct Wishes<'environment> {
    socket: &'environment CStr,
    token: u64,
    /// The version of the protocol.
    magic: u64,
    /// Valgrind preloads libraries of its own.
    is_under_valgrind: bool,
    /// This process must not run unmanaged.
    is_required: bool,
}

/// What the names of those begin with.
const VALGRIND_LIBRARY: &[u8] = b"/vgpreload_";

impl Wishes<'_> {
    /// None: this program is not to be managed.
    ///
    /// # Safety
    /// `environment` must be null or a null-terminated array of C strings that
    /// stay unchanged while the result is in use.
    unsafe fn read(environment: *const *const c_char) -> Option<Self> {
        let mut socket = None;
        let mut token = 0;
        let mut is_under_valgrind = false;
        let mut is_required = false;
        let mut magic = MAGIC;
        let mut entry = environment;
        // SAFETY: the array is null-terminated, says the caller.
        while !entry.is_null() && unsafe { !(*entry).is_null() } {
            // SAFETY: an entry before the terminating one is a C string.
            let variable = unsafe { CStr::from_ptr(*entry) };
            if let Some(value) = value_of(variable, ENV_SOCKET).filter(|value| !value.is_empty()) {
                socket = Some(value);
            } else if let Some(value) = value_of(variable, ENV_TOKEN) {
                token = parse_token(value.to_bytes());
            } else if let Some(value) = value_of(variable, ENV_PROTOCOL) {
                if value == c"5" {
                    magic = MAGIC_BEFORE;
                }
            } else if let Some(value) = value_of(variable, ENV_REQUIRED) {
                is_required = is_meant(value.to_bytes(), kernel::process_id(), kernel::parent_id());
            } else if let Some(value) = value_of(variable, "LD_PRELOAD") {
                let mut parts = value.to_bytes().windows(VALGRIND_LIBRARY.len());
                is_under_valgrind = parts.any(|part| part == VALGRIND_LIBRARY);
            }
            // SAFETY: not yet the end.
            entry = unsafe { entry.add(1) };
        }
        let socket = match socket {
            Some(socket) => socket,
            None if kernel::exists(DEFAULT_SOCKET) => DEFAULT_SOCKET,
            None => return None,
        };
        Some(Self { socket, token, magic, is_under_valgrind, is_required })
    }
}

/// The value of a variable.
///
/// # Safety
/// As for [`Wishes::read`].
unsafe fn variable(environment: *const *const c_char, name: &str) -> Option<&'static CStr> {
    let mut entry = environment;
    // SAFETY: the array is null-terminated, says the caller.
    while !entry.is_null() && unsafe { !(*entry).is_null() } {
        // SAFETY: an entry before the terminating one is a C string.
        if let Some(value) = value_of(unsafe { CStr::from_ptr(*entry) }, name) {
            return Some(value);
        }
        // SAFETY: not yet the end.
        entry = unsafe { entry.add(1) };
    }
    None
}

/// [`DEFAULT_AGENT_SOCKET`] as the kernel wants it.
const DEFAULT_SOCKET: &CStr = {
    const BYTES: [u8; DEFAULT_AGENT_SOCKET.len() + 1] = {
        let mut bytes = [0; DEFAULT_AGENT_SOCKET.len() + 1];
        let mut i = 0;
        while i < DEFAULT_AGENT_SOCKET.len() {
            bytes[i] = DEFAULT_AGENT_SOCKET.as_bytes()[i];
            i += 1;
        }
        bytes
    };
    match CStr::from_bytes_with_nul(&BYTES) {
        Ok(path) => path,
        Err(_) => panic!("the default socket's path has no zero byte"),
    }
};

fn value_of<'variable>(variable: &'variable CStr, name: &str) -> Option<&'variable CStr> {
    let rest = variable.to_bytes_with_nul().strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
    CStr::from_bytes_with_nul(rest).ok()
}

/// Whether the value of [`ENV_REQUIRED`] means the process `own`, whose parent is
/// `parent`: what it starts inherits the variable and is not meant.
fn is_meant(value: &[u8], own: u32, parent: u32) -> bool {
    let (digits, meant) = match value.strip_prefix(b"+") {
        Some(digits) => (digits, parent),
        None => (value, own),
    };
    let add = |number: u32, &digit: &u8| {
        let digit = char::from(digit).to_digit(10)?;
        number.checked_mul(10)?.checked_add(digit)
    };
    !digits.is_empty() && digits.iter().try_fold(0, add) == Some(meant)
}

/// 16 hex digits; anything else is no token.
fn parse_token(text: &[u8]) -> u64 {
    if text.len() != 16 {
        return 0;
    }
    text.iter()
        .try_fold(0, |token: u64, &digit| {
            Some(token << 4 | u64::from(char::from(digit).to_digit(16)?))
        })
        .unwrap_or(0)
}

/// Starts the program's first agent and waits for it; false: it runs unmanaged.
fn start_program(wishes: &Wishes) -> bool {
    let without = |failure: Failure| {
        let said = block::existing()
            .is_some_and(|block| block.shared().required.load(Ordering::SeqCst) != 0);
        go_without(reason(failure), wishes.is_required || said)
    };
    let Some(block) = recording() else { return without(Failure::NoMemory) };
    if !block.introduce(wishes.socket, wishes.token, wishes.magic) {
        let why = "STRATA_AGENT_SOCKET is too long for a socket's path";
        return go_without(why, wishes.is_required);
    }
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let transfer = kernel::map_anonymous(0, TRANSFER_BYTES, access);
    let places = kernel::map_anonymous(0, 2 * CONTROL_BYTES, libc::PROT_NONE);
    let (Some(transfer), Some(places)) = (transfer, places) else {
        return without(Failure::NoMemory);
    };
    // SAFETY: this is the constructor, and there is no agent yet.
    unsafe {
        // A huge page would make one slot's arrival cost 2 MiB. It fails only
        // on kernels without huge pages.
        kernel::advise(transfer, TRANSFER_BYTES, libc::MADV_NOHUGEPAGE);
        block.set(Settings { transfer, places });
    }
    MODE.store(MODE_ON, Ordering::SeqCst);
    block.shared().required.store(u32::from(wishes.is_required), Ordering::SeqCst);
    records::record_thread(block, 0);
    if !fork::register() {
        return without(Failure::NoMemory);
    }
    if !start_agent(block, HelloKind::Start) {
        return without(Failure::NoMemory);
    }
    let outcome = wait(block, START_TIME);
    if outcome == OUTCOME_READY {
        return true;
    }
    if outcome == OUTCOME_PENDING {
        // Stuck in the kernel or never scheduled: it ends by itself when it
        // finds that nobody waits.
        return without(Failure::Silent);
    }
    // It has said its last word. That it is gone matters to a program that counts
    // its threads.
    thread::wait_free(block, 0, START_TIME);
    // SAFETY: nobody else knows the transfer range, and the agent no longer uses
    // it. (A thread may still be writing a record to a control block, which stays
    // mapped.)
    unsafe { kernel::unmap(transfer, TRANSFER_BYTES) };
    match failure_of(outcome) {
        Some(Failure::Unreachable) if wishes.token == 0 => false,
        // The daemon does not want it managed: it was released, say.
        Some(Failure::Unmanaged) | None => false,
        Some(failure) => without(failure),
    }
}

/// Starts a process's first agent; false: the kernel makes no thread.
pub(crate) fn start_agent(block: &'static Block, kind: HelloKind) -> bool {
    block.hello_kind.store(kind as u32, Ordering::SeqCst);
    // Whatever the parent's agent was doing, this one has not begun.
    block.restart.state.store(0, Ordering::SeqCst);
    block.lives.store(0, Ordering::SeqCst);
    block.shared().pid.store(kernel::process_id(), Ordering::SeqCst);
    // SAFETY: this process has had no agent yet, so that nobody sits there: what
    // says so was zero from the beginning, or has been wiped.
    unsafe { thread::start(block, 0, agent::begin) }
}

/// Waits for the agent's handshake. When the time is up, says
/// [`OUTCOME_PENDING`]; a first agent is then told to end.
pub(crate) fn wait(block: &Block, time: Duration) -> u32 {
    let outcome = &block.shared().outcome;
    let deadline = Deadline::after(time);
    loop {
        let said = outcome.load(Ordering::SeqCst);
        if said != OUTCOME_PENDING {
            return said;
        }
        let Some(left) = deadline.left() else { break };
        kernel::futex_wait(outcome, OUTCOME_PENDING, left);
    }
    if block.hello_kind.load(Ordering::SeqCst) == HelloKind::Forked as u32 {
        return OUTCOME_PENDING;
    }
    match outcome.compare_exchange(
        OUTCOME_PENDING,
        OUTCOME_ABANDONED,
        Ordering::SeqCst,
        Ordering::SeqCst,
    ) {
        Ok(pending) => pending,
        Err(said) => said,
    }
}

/// The failure that an outcome is.
fn failure_of(outcome: u32) -> Option<Failure> {
    let failures = [
        Failure::Unmanaged,
        Failure::Unreachable,
        Failure::Silent,
        Failure::Protocol,
        Failure::NoUserfaultfd,
        Failure::NoMemory,
        Failure::NoDescriptorTable,
        Failure::NotAllowed,
        Failure::Refused,
    ];
    failures.into_iter().find(|&failure| OUTCOME_FAILED + failure as u32 == outcome)
}

/// One line about the outcome of a process that runs on.
pub(crate) fn complain_of(outcome: u32) {
    if let Some(failure) = failure_of(outcome).filter(|&failure| failure != Failure::Unmanaged) {
        go_without(reason(failure), false);
    }
}

fn reason(failure: Failure) -> &'static str {
    match failure {
        Failure::Unmanaged => "the daemon does not manage it",
        Failure::Unreachable => {
            "no daemon can be reached (is stratad running, and may this user reach its socket?)"
        }
        Failure::Silent => "the daemon does not answer",
        Failure::Protocol => "the daemon speaks another protocol (versions differ?)",
        Failure::NoUserfaultfd => "the kernel refuses a userfaultfd (see strata doctor)",
        Failure::NoMemory => "no memory or no thread for the agent",
        Failure::NoDescriptorTable => "the agent may not have its own descriptors (seccomp?)",
        Failure::NotAllowed => {
            "this user may not use userfaultfd through stratad (see uffd_users in its configuration)"
        }
        Failure::Refused => {
            "the daemon does not take it into its tenant (is it another user's, or a quota used up? stratad's log says)"
        }
    }
}

/// Writes one line to standard error, from a thread of the program.
pub(crate) fn say(line: &str) {
    kernel::write(libc::STDERR_FILENO, line);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_sixteen_hex_digits() {
        assert_eq!(parse_token(b"00000000deadBEEF"), 0xdead_beef);
        assert_eq!(parse_token(b"deadbeef"), 0);
        assert_eq!(parse_token(b"000000000000000g"), 0);
        assert_eq!(parse_token(b""), 0);
    }

    #[test]
    fn who_must_not_run_unmanaged_is_named_by_number() {
        assert!(is_meant(b"812", 812, 7) && is_meant(b"+7", 812, 7));
        for value in [&b"7"[..], b"+812", b"", b"+", b"812 ", b"0812x", b"99999999999"] {
            assert!(!is_meant(value, 812, 7), "{value:?}");
        }
    }

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        assert_eq!(value_of(c"STRATA_TOKEN=1", ENV_TOKEN), Some(c"1"));
        assert_eq!(value_of(c"STRATA_TOKENS=1", ENV_TOKEN), None);
        assert_eq!(value_of(c"STRATA_TOKEN", ENV_TOKEN), None);
    }

    #[test]
    fn a_path_that_fills_the_address_is_refused() {
        let longest = std::ffi::CString::new(vec![b'a'; 107]).expect("no zero byte");
        let longer = std::ffi::CString::new(vec![b'a'; 108]).expect("no zero byte");
        let block = block::obtain().expect("memory");
        assert!(!block.introduce(&longer, 1, MAGIC));
        assert!(block.introduce(&longest, 1, MAGIC));
        assert_eq!(block.socket().sun_path[106..], [b'a' as c_char, 0]);
    }

    #[test]
    fn the_environment_is_read_to_its_end() {
        let environment = [
            c"A=b".as_ptr(),
            c"STRATA_TOKEN=0000000000000010".as_ptr(),
            c"STRATA_AGENT_SOCKET=/run/x".as_ptr(),
            core::ptr::null(),
        ];
        // SAFETY: a null-terminated array of C strings.
        let wishes = unsafe { Wishes::read(environment.as_ptr()) }.expect("a socket is named");
        assert_eq!(wishes.socket, c"/run/x");
        assert_eq!((wishes.token, wishes.is_under_valgrind), (16, false));
        let valgrind = c"LD_PRELOAD=/usr/libexec/valgrind/vgpreload_core-amd64-linux.so:/l.so";
        let environment = [environment[2], valgrind.as_ptr(), core::ptr::null()];
        // SAFETY: as above.
        let wishes = unsafe { Wishes::read(environment.as_ptr()) }.expect("a socket is named");
        assert!(wishes.is_under_valgrind);
    }
}
