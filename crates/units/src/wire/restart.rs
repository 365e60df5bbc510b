//! The page by which a copy of a process learns that it is one: a restored process, whose
//! agent was parked when it was dumped.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use core::{error, fmt, mem::offset_of};

use super::is_spoken;

/// [`Restart::state`]: the agent is parked.
pub const RESTART_PARKED: u32 = 1;
/// [`Restart::state`]: this is a restored process; its agent is to begin anew.
pub const RESTART_RESTORED: u32 = 2;
/// Bytes of a socket's path with its terminating zero (`sun_path`).
pub const SOCKET_PATH_BYTES: usize = 108;

/// Where to call and as whom, and what a copy of the process learns it by: one
/// page of the agent's own private memory, at [`Hello::restart`](super::Hello::restart).
///
/// Whoever restores a process that was dumped while its agent was parked
/// patches this page ([`patch_restart`]) before any of its threads runs. The
/// process itself writes `token` and `socket` once, before it has an agent, and
/// only reads them from then on: its threads may fork, and the child call,
/// before the agent has seen that it is a copy. Forked children inherit both, and
/// what the agent has learnt of the way back.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Restart {
    /// [`MAGIC`](super::MAGIC).
    pub magic: AtomicU64,
    /// 0: nothing special. [`RESTART_PARKED`]: written by the agent before
    /// [`Command::Park`](super::Command::Park) is done, and taken back after.
    /// [`RESTART_RESTORED`]: written by the restorer, and taken back by the agent.
    pub state: AtomicU32,
    /// The user that answered at `socket`, as the agent's user namespace numbers
    /// it: nobody else is believed at the other socket, whose name anybody may
    /// take.
    pub daemon_uid: AtomicU32,
    /// The tenant's token, 0: none.
    pub token: AtomicU64,
    /// Path of the daemon's agent socket, ended by a zero.
    pub socket: [AtomicU8; SOCKET_PATH_BYTES],
    /// Padding.
    pub reserved: AtomicU32,
    /// [`Welcome::back`](super::Welcome::back), as it was last told.
    pub back: AtomicU64,
}

const _: () = assert!(size_of::<Restart>() == crate::PAGE_SIZE);

/// Why a page is no [`Restart`] page that can be patched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestartError {
    /// It is not a page, or of another layout.
    Unknown,
    /// The agent was not parked when the process was dumped.
    NotParked,
    /// The path does not fit, or has a zero byte.
    Path,
}

impl fmt::Display for RestartError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Unknown => "its agent is of another version of libstrata.so",
            Self::NotParked => "its agent was not parked when it was dumped",
            Self::Path => "the agent socket's path is longer than 107 bytes or has a zero byte",
        })
    }
}

impl error::Error for RestartError {}

/// Makes the [`Restart`] page of a dumped process that of a restored one, which
/// is to call at `socket` (none: at the same as before) as `token` (0: the same
/// as before). On an error the page is as it was.
pub fn patch_restart(
    page: &mut [u8],
    token: u64,
    socket: Option<&[u8]>,
) -> Result<(), RestartError> {
    let page: &mut [u8; crate::PAGE_SIZE] = page.try_into().map_err(|_| RestartError::Unknown)?;
    let (head, rest) = page.split_at_mut(offset_of!(Restart, socket));
    let magic = head.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    if !magic.is_some_and(is_spoken) {
        return Err(RestartError::Unknown);
    }
    let (before_token, token_bytes) = head.split_at_mut(offset_of!(Restart, token));
    let state = before_token
        .get_mut(offset_of!(Restart, state)..)
        .and_then(|bytes| bytes.first_chunk_mut())
        .ok_or(RestartError::Unknown)?;
    if *state != RESTART_PARKED.to_le_bytes() {
        return Err(RestartError::NotParked);
    }
    if let Some(path) = socket {
        let fits = !path.is_empty() && path.len() < SOCKET_PATH_BYTES && !path.contains(&0);
        let room = rest.get_mut(..SOCKET_PATH_BYTES).filter(|_| fits).ok_or(RestartError::Path)?;
        room.fill(0);
        for (to, from) in room.iter_mut().zip(path) {
            *to = *from;
        }
    }
    if token != 0 {
        token_bytes.copy_from_slice(&token.to_le_bytes());
    }
    *state = RESTART_RESTORED.to_le_bytes();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{MAGIC, MAGIC_BEFORE};

    /// A page as a parked agent leaves it, with token 7 and an old path.
    fn parked() -> Vec<u8> {
        let mut page = vec![0; crate::PAGE_SIZE];
        page[..8].copy_from_slice(&MAGIC.to_le_bytes());
        page[8] = RESTART_PARKED as u8;
        page[16] = 7;
        page[24..36].copy_from_slice(b"/a/long/path");
        page
    }

    #[test]
    fn a_restart_page_is_patched_where_it_is_read() {
        let mut page = parked();
        patch_restart(&mut page, 0x0102, Some(b"/new")).expect("parked");
        let mut expected = vec![0; crate::PAGE_SIZE];
        expected[..8].copy_from_slice(&MAGIC.to_le_bytes());
        expected[8] = RESTART_RESTORED as u8;
        expected[16..18].copy_from_slice(&[2, 1]);
        expected[24..28].copy_from_slice(b"/new");
        assert!(page == expected);

        let mut page = parked();
        patch_restart(&mut page, 0, None).expect("parked");
        let mut expected = parked();
        expected[8] = RESTART_RESTORED as u8;
        assert!(page == expected, "what is not given stays");
    }

    #[test]
    fn so_is_one_of_the_version_before() {
        let mut page = parked();
        page[..8].copy_from_slice(&MAGIC_BEFORE.to_le_bytes());
        patch_restart(&mut page, 0, None).expect("parked");
        assert_eq!(page[..8], MAGIC_BEFORE.to_le_bytes());
    }

    #[test]
    fn only_a_parked_agents_page_is_patched() {
        let refused = |change: &dyn Fn(&mut Vec<u8>), path: &[u8]| {
            let mut page = parked();
            change(&mut page);
            let before = page.clone();
            let error = patch_restart(&mut page, 1, Some(path)).expect_err("wrong");
            assert!(page == before, "changed on {error}");
            error
        };
        assert_eq!(refused(&|page| page[0] ^= 0x10, b"/new"), RestartError::Unknown);
        assert_eq!(refused(&|page| page.truncate(100), b"/new"), RestartError::Unknown);
        assert_eq!(refused(&|page| page[8] = 0, b"/new"), RestartError::NotParked);
        assert_eq!(refused(&|page| page[9] = 1, b"/new"), RestartError::NotParked);
        assert_eq!(refused(&|_| {}, &[b'x'; SOCKET_PATH_BYTES]), RestartError::Path);
        assert_eq!(refused(&|_| {}, b""), RestartError::Path);
        assert_eq!(refused(&|_| {}, b"/a\0b"), RestartError::Path);
        assert!(patch_restart(&mut parked(), 1, Some(&[b'x'; SOCKET_PATH_BYTES - 1])).is_ok());
    }
}
