//! That a userfaultfd and what is held of a process are of one address space.
//!
//! The kernel does not say whose memory a userfaultfd fills. So the page tables that were
//! opened of the process are asked: what is done by the userfaultfd to one page must be
//! seen in them. First a number that nobody can guess is put into the page and read back;
//! then the page is write-protected and released in an order that nobody can guess.
//!
//! Whoever wanted to show the same in another address space would need a userfaultfd of
//! that one. A program that never made one cannot be taken for this, whatever somebody
//! feeds it: neither a set-user-id program that the process has executed meanwhile, nor
//! whoever has its number by now.

use std::time::Duration;

use strata_units::{PAGE_SIZE, PageBuffer};

use crate::handle::Process;
use crate::uffd::{Fill, Range, Registration, Userfaultfd};

/// Protections and releases: as many bits.
const STEPS: u32 = 64;
/// While the program changes its memory the kernel puts everything off; tried again so
/// often.
const TRIES: u32 = 100;
const TRY_AGAIN: Duration = Duration::from_millis(1);
const NONCE_BYTES: usize = 32;

/// Why it is not shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disproof {
    /// The page is not there to be registered.
    NoPage,
    /// What the userfaultfd does is not seen in the process's memory.
    Different,
    /// The page is somebody's memory already whom `others` names, by index.
    Known(usize),
    /// No random numbers.
    NoChance,
}

impl std::fmt::Display for Disproof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoPage => "it names no page by which its userfaultfd can be told",
            Self::Different => "its userfaultfd is not that of its memory",
            Self::Known(_) => "its memory has an agent already",
            Self::NoChance => "there are no random numbers",
        })
    }
}

/// Fills `bytes` with what nobody can guess. False: there is nothing.
fn random(bytes: &mut [u8]) -> bool {
    // SAFETY: a live buffer of that length. Up to 256 bytes come whole.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    usize::try_from(got) == Ok(bytes.len())
}

/// Does `act` again while the address space is changing.
fn settled(mut act: impl FnMut() -> Fill) -> Fill {
    for _ in 1..TRIES {
        match act() {
            Fill::Changing => std::thread::sleep(TRY_AGAIN),
            done => return done,
        }
    }
    act()
}

impl Process {
    /// Shows that `uffd`, and all descriptors of this process, are of one address space: by
    /// the page at `probe`, private memory that the process has mapped for that and does not
    /// touch. And that it is not that of one of `others`.
    ///
    /// # Errors
    /// It is not shown.
    pub fn prove(&self, uffd: &Userfaultfd, probe: u64, others: &[&Self]) -> Result<(), Disproof> {
        let page = Range { start: probe, end: probe.saturating_add(PAGE_SIZE as u64) };
        if uffd.register_protectable(page) != Registration::Done {
            return Err(Disproof::NoPage);
        }
        let proved = self.prove_registered(uffd, page, others);
        uffd.unregister(page);
        if proved.is_ok() {
            self.is_proved();
        }
        proved
    }

    /// The same by the page at `there`, where `uffd` waits for missing pages and the process
    /// has one. It is registered for protection from then on; whoever writes to it meanwhile
    /// waits.
    ///
    /// # Errors
    /// It is not shown.
    pub fn prove_by(&self, uffd: &Userfaultfd, there: u64) -> Result<(), Disproof> {
        let page = Range { start: there, end: there.saturating_add(PAGE_SIZE as u64) };
        if uffd.register_protectable(page) != Registration::Done {
            return Err(Disproof::NoPage);
        }
        let proved = self.prove_by_steps(uffd, page, &[]);
        settled(|| uffd.unprotect(page));
        proved
    }

    fn prove_registered(
        &self,
        uffd: &Userfaultfd,
        page: Range,
        others: &[&Self],
    ) -> Result<(), Disproof> {
        let mut nonce = [0; NONCE_BYTES];
        if !random(&mut nonce) {
            return Err(Disproof::NoChance);
        }
        let mut content = PageBuffer::zeroed();
        content.0[..NONCE_BYTES].copy_from_slice(&nonce);
        match settled(|| uffd.copy(page.start, &content)) {
            Fill::Done { .. } => {
                let mut seen = [0; NONCE_BYTES];
                if self.read(page.start, &mut seen) < NONCE_BYTES || seen != nonce {
                    return Err(Disproof::Different);
                }
            }
            // Of a handshake that was broken off.
            Fill::Present => {}
            _ => return Err(Disproof::NoPage),
        }
        self.prove_by_steps(uffd, page, others)
    }

    fn prove_by_steps(
        &self,
        uffd: &Userfaultfd,
        page: Range,
        others: &[&Self],
    ) -> Result<(), Disproof> {
        let mut steps = [0; STEPS as usize / 8];
        if !random(&mut steps) {
            return Err(Disproof::NoChance);
        }
        let mut others: Vec<Option<&Self>> = others.iter().copied().map(Some).collect();
        for step in 0..STEPS {
            let protected = steps[step as usize / 8] >> (step % 8) & 1 == 1;
            let act = || if protected { uffd.protect(page) } else { uffd.unprotect(page) };
            if !matches!(settled(act), Fill::Done { .. })
                || !self.is_protected_as(page.start, protected)
            {
                return Err(Disproof::Different);
            }
            for other in &mut others {
                other.take_if(|other| !other.is_protected_as(page.start, protected));
            }
        }
        match others.iter().position(Option::is_some) {
            Some(known) => Err(Disproof::Known(known)),
            None => Ok(()),
        }
    }
}
