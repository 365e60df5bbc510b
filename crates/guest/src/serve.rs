//! The pool's end of a link: one connection, request by request. Who may connect is the
//! caller's business; what is sent here is untrusted.

use std::io::{self, Read, Write};

use strata_units::PAGE_SIZE;

use crate::pool::{FileId, Pool};
use crate::talk::{self, Ask};

/// Who greets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Caller {
    /// A disk, which names the pool that it is read through.
    Disk,
    /// A swap disk, which names its guest.
    Swap,
}

/// Reads a greeting, and answers it by what `find` says of the name in it; that is
/// returned. Who is refused is told why.
///
/// # Errors
/// The connection's; or it is no greeting.
pub fn greet<T>(
    stream: &mut (impl Read + Write),
    find: impl FnOnce(Caller, &str) -> Result<T, String>,
) -> io::Result<Result<T, String>> {
    let mut magic = talk::MAGIC;
    stream.read_exact(&mut magic)?;
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "this is no greeting");
    let caller = match magic {
        talk::MAGIC => Caller::Disk,
        talk::SWAP_MAGIC => Caller::Swap,
        _ => return Err(nonsense()),
    };
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length == 0 || length > talk::MAX_NAME_BYTES {
        return Err(nonsense());
    }
    let mut name = vec![0; length];
    stream.read_exact(&mut name)?;
    let name = String::from_utf8(name).map_err(|_| nonsense())?;
    let found = find(caller, &name);
    let mut text = found.as_ref().err().cloned().unwrap_or_default();
    let end = (0..=talk::MAX_TEXT_BYTES).rev().find(|&end| text.is_char_boundary(end));
    text.truncate(end.unwrap_or_default());
    let mut answer = u32::from(found.is_err()).to_le_bytes().to_vec();
    answer.extend((text.len() as u32).to_le_bytes());
    answer.extend(text.as_bytes());
    stream.write_all(&answer)?;
    Ok(found)
}

/// The caller's end: hears what came of a greeting.
///
/// # Errors
/// The connection's; or it was refused, and why.
pub(crate) fn hear_answer(stream: &mut impl Read) -> io::Result<()> {
    let mut number = || {
        let mut bytes = [0; 4];
        stream.read_exact(&mut bytes).map(|()| u32::from_le_bytes(bytes))
    };
    let (refused, length) = (number()?, number()?);
    let mut text = vec![0; (length as usize).min(talk::MAX_TEXT_BYTES)];
    stream.read_exact(&mut text)?;
    match refused {
        0 => Ok(()),
        _ => Err(io::Error::other(String::from_utf8_lossy(&text).into_owned())),
    }
}

/// The file that a connection has open.
struct OpenFile<'a> {
    pool: &'a Pool,
    id: FileId,
    private: bool,
    number: u32,
}

impl Drop for OpenFile<'_> {
    fn drop(&mut self) {
        self.pool.close(&self.id, self.private);
    }
}

/// Answers requests until the client goes, or the pool is removed.
///
/// # Errors
/// The connection's; or the client sent what is no request.
pub fn serve(stream: &mut (impl Read + Write), pool: &Pool) -> io::Result<()> {
    let mut open: Option<OpenFile<'_>> = None;
    let mut answer = Vec::new();
    let mut payload = Vec::new();
    loop {
        let mut header = [0; talk::HEADER_BYTES];
        match stream.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let nonsense = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let ask = Ask::decode(&header).ok_or_else(|| nonsense("this is no request"))?;
        if pool.has_ended() {
            return Ok(());
        }
        payload.resize(ask.payload_bytes(), 0);
        stream.read_exact(&mut payload)?;
        let own = open.as_ref().map(|open| open.number);
        if let Ask::Get { file, .. } | Ask::Put { file, .. } | Ask::Forget { file, .. } = ask
            && Some(file) != own
        {
            return Err(nonsense("a file that this connection has not open"));
        }
        answer.clear();
        match ask {
            Ask::Open { private } => {
                let id = payload.as_slice().try_into().map_err(|_| nonsense("no identity"))?;
                // The next one is known before this one goes: they may be the same.
                let number = pool.open(&id);
                open = number.map(|number| OpenFile { pool, id, private, number });
                answer.extend(number.unwrap_or(talk::NO_FILE).to_le_bytes());
            }
            Ask::Get { file, index, count } => {
                answer.resize(count as usize, talk::MISSED);
                let mut page = [0; PAGE_SIZE];
                for at in 0..count as usize {
                    let index = index + at as u64;
                    if pool.get(file, index, &mut page) {
                        answer[at] = talk::HIT;
                        answer.extend(page);
                    } else if pool.wants(file, index) {
                        answer[at] = talk::WANTED;
                    }
                }
            }
            Ask::Put { file, index, .. } => {
                let mut taken = 0u32;
                for (index, page) in (index..).zip(payload.as_chunks::<PAGE_SIZE>().0) {
                    taken += u32::from(pool.put(file, index, page));
                }
                answer.extend(taken.to_le_bytes());
            }
            Ask::Forget { file, index, count } => {
                pool.forget(file, index, count);
                answer.extend(0u32.to_le_bytes());
            }
        }
        stream.write_all(&answer)?;
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
