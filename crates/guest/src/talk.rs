//! What goes between a disk and its pool, and a swap disk and its daemon: the greetings. The
//! requests are in `strata_units::pool`.

pub use strata_units::pool::*;

/// A greeting. None: no pool has such a name.
#[must_use]
pub fn greeting(name: &str) -> Option<Vec<u8>> {
    greeting_of(MAGIC, name)
}

/// A greeting of a guest's swap disk. None: no guest has such a name.
#[must_use]
pub fn swap_greeting(guest: &str) -> Option<Vec<u8>> {
    greeting_of(SWAP_MAGIC, guest)
}

fn greeting_of(magic: [u8; 8], name: &str) -> Option<Vec<u8>> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return None;
    }
    let mut bytes = magic.to_vec();
    bytes.extend((name.len() as u32).to_le_bytes());
    bytes.extend(name.as_bytes());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_names_something() {
        assert_eq!(greeting("a").map(|bytes| bytes.len()), Some(13));
        assert!(greeting("").is_none() && greeting(&"x".repeat(65)).is_none());
    }
}
