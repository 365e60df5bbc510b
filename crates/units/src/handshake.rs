//! The daemon's side of a handshake, as far as it needs nobody: which message may come
//! when, and whether its numbers make sense. All of it is a stranger's bytes.

use core::{error, fmt};

use crate::wire::{AsBytes, Hello, HelloKind, TRANSFER_PAGES, Userfaultfd, is_spoken};
use crate::{ADDRESSES_END, PAGE_SIZE};

/// What is wrong with what an agent sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amiss {
    /// It is not as long as a hello.
    CutShort,
    /// Its kind is not known.
    UnknownKind,
    /// Its numbers are another version's, or nobody's.
    Garbage,
    /// The userfaultfd that it was asked for is not there.
    NoUserfaultfd,
    /// Nothing more was to come.
    TooMuch,
}

impl fmt::Display for Amiss {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::CutShort => "its hello is cut short",
            Self::UnknownKind => "says hello in an unknown way",
            Self::Garbage => "its hello is of another version, or garbage",
            Self::NoUserfaultfd => "it sent no userfaultfd",
            Self::TooMuch => "it says more than it was asked for",
        })
    }
}

impl error::Error for Amiss {}

/// A message that may come when it came.
#[derive(Clone, Copy, Debug)]
pub enum Heard {
    /// The agent has gone without a word.
    Nothing,
    /// Its numbers make sense.
    Hello(Hello, HelloKind),
    /// The userfaultfd that was asked for is the last descriptor that came with it.
    Userfaultfd,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    Hello,
    Answer,
    Userfaultfd,
    Nothing,
}

/// Where a handshake is.
#[derive(Debug)]
pub struct Handshake {
    next: Next,
    /// The version in which the agent has begun.
    magic: u64,
}

impl Default for Handshake {
    fn default() -> Self {
        Self { next: Next::Hello, magic: 0 }
    }
}

impl Handshake {
    /// Reads the agent's next message, with which so many descriptors came. After an error
    /// nothing more is heard.
    ///
    /// # Errors
    /// It is not what may come now.
    pub fn hear(&mut self, bytes: &[u8], descriptors: usize) -> Result<Heard, Amiss> {
        let (heard, next) = match core::mem::replace(&mut self.next, Next::Nothing) {
            Next::Hello if bytes.is_empty() => (Heard::Nothing, Next::Nothing),
            Next::Hello => {
                let hello = Hello::heard(bytes).ok_or(Amiss::CutShort)?;
                self.magic = hello.magic;
                (Heard::Hello(hello, checked(&hello)?), Next::Answer)
            }
            Next::Userfaultfd => {
                let whole = Userfaultfd::from_bytes(bytes).is_some_and(|m| m.magic == self.magic);
                if descriptors == 0 || !whole {
                    return Err(Amiss::NoUserfaultfd);
                }
                (Heard::Userfaultfd, Next::Nothing)
            }
            Next::Answer | Next::Nothing => return Err(Amiss::TooMuch),
        };
        self.next = next;
        Ok(heard)
    }

    /// The daemon has asked for a userfaultfd ([`crate::wire::Verdict::Create`]). It does
    /// so once, in answer to a hello.
    pub fn asked_for_userfaultfd(&mut self) {
        if self.next == Next::Answer {
            self.next = Next::Userfaultfd;
        }
    }
}

/// The kind of a hello whose numbers make sense.
fn checked(hello: &Hello) -> Result<HelloKind, Amiss> {
    let aligned = |address: u64| address.is_multiple_of(PAGE_SIZE as u64);
    let transfer_end = hello.transfer.saturating_add((TRANSFER_PAGES * PAGE_SIZE) as u64);
    let kind = match hello.kind {
        1 => HelloKind::Start,
        2 => HelloKind::Forked,
        3 => HelloKind::Resumed,
        4 => HelloKind::Restored,
        _ => return Err(Amiss::UnknownKind),
    };
    let sane = is_spoken(hello.magic)
        && aligned(hello.transfer)
        && aligned(hello.probe)
        && hello.transfer != 0
        && transfer_end <= ADDRESSES_END
        && hello.probe < ADDRESSES_END
        && hello.own_start <= hello.own_end
        && hello.own_end <= ADDRESSES_END
        && aligned(hello.restart)
        && (hello.restart == 0 || (hello.own_start..hello.own_end).contains(&hello.restart));
    if sane { Ok(kind) } else { Err(Amiss::Garbage) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{HelloBefore, MAGIC, MAGIC_BEFORE};

    const HELLO: Hello = Hello {
        magic: MAGIC,
        kind: 1,
        pid: 7,
        token: 0,
        transfer: 1 << 30,
        probe: 1 << 20,
        own_start: 1 << 40,
        own_end: (1 << 40) + 8192,
        restart: (1 << 40) + 4096,
        library: 1,
    };

    #[test]
    fn a_hello_with_numbers_that_make_no_sense_is_refused() {
        assert_eq!(checked(&HELLO), Ok(HelloKind::Start));
        let amiss = [
            Hello { magic: MAGIC + 1, ..HELLO },
            Hello { transfer: 0, ..HELLO },
            Hello { transfer: 4097, ..HELLO },
            Hello { transfer: ADDRESSES_END - 4096, ..HELLO },
            Hello { transfer: u64::MAX - 4095, ..HELLO },
            Hello { probe: 1, ..HELLO },
            Hello { probe: ADDRESSES_END, ..HELLO },
            Hello { own_start: HELLO.own_end + 1, ..HELLO },
            Hello { own_end: ADDRESSES_END + 1, ..HELLO },
            Hello { restart: HELLO.own_end, ..HELLO },
            Hello { restart: HELLO.restart + 8, ..HELLO },
        ];
        for hello in amiss {
            assert_eq!(checked(&hello), Err(Amiss::Garbage), "{hello:?}");
        }
        for kind in [0, 5, u32::MAX] {
            assert_eq!(checked(&Hello { kind, ..HELLO }), Err(Amiss::UnknownKind));
        }
    }

    #[test]
    fn messages_come_in_their_order_and_no_more() {
        let (hello, uffd) = (HELLO.to_bytes(), Userfaultfd { magic: MAGIC }.to_bytes());
        let mut handshake = Handshake::default();
        handshake.asked_for_userfaultfd();
        assert_eq!(handshake.hear(&uffd, 1).err(), Some(Amiss::CutShort), "no hello yet");
        let mut handshake = Handshake::default();
        assert!(matches!(handshake.hear(&hello, 0), Ok(Heard::Hello(..))));
        assert_eq!(handshake.hear(&uffd, 1).err(), Some(Amiss::TooMuch), "nobody asked");
        for (message, descriptors, fits) in
            [(&uffd, 1, true), (&uffd, 0, false), (&hello, 1, false)]
        {
            let mut handshake = Handshake::default();
            assert!(handshake.hear(&hello, 0).is_ok());
            handshake.asked_for_userfaultfd();
            assert_eq!(handshake.hear(message, descriptors).is_ok(), fits);
            handshake.asked_for_userfaultfd();
            assert_eq!(handshake.hear(&uffd, 1).err(), Some(Amiss::TooMuch));
        }
        // In the version in which it has begun.
        let before = HelloBefore::from(Hello { magic: MAGIC_BEFORE, ..HELLO }).to_bytes();
        for (magic, fits) in [(MAGIC, false), (MAGIC_BEFORE, true)] {
            let mut handshake = Handshake::default();
            assert!(matches!(handshake.hear(&before, 0), Ok(Heard::Hello(..))));
            handshake.asked_for_userfaultfd();
            let uffd = Userfaultfd { magic }.to_bytes();
            assert_eq!(handshake.hear(&uffd, 1).is_ok(), fits);
        }
        assert!(matches!(Handshake::default().hear(&[], 0), Ok(Heard::Nothing)));
        assert_eq!(Handshake::default().hear(&hello[1..], 0).err(), Some(Amiss::CutShort));
    }
}
