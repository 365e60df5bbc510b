//! What the command line of a QEMU says that somebody else started: libvirt, or whoever.
//! It is the program's own word, and whatever cannot be read is not known.

use std::ffi::OsString;

use strata_units::ByteSize;

use crate::line::MIB;
use crate::line::words::{Line, items};
use crate::options::size;

/// What is known of a guest by its command line.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Described {
    /// Its name.
    pub name: Option<String>,
    /// The memory that it is promised.
    pub memory: Option<ByteSize>,
    /// Its machine, as QEMU names it.
    pub machine: Option<String>,
    /// `kvm` or `tcg`, where that alone is said.
    pub accelerator: Option<String>,
}

/// Reads a command line, the program's name first.
#[must_use]
pub fn described(words: &[String]) -> Described {
    let words: Vec<OsString> = words.iter().skip(1).map(OsString::from).collect();
    let Ok(items) = items(&words) else { return Described::default() };
    let line = Line { items };
    let last = |option: &str, key: &str| line.last(option, key).ok().flatten();
    Described {
        name: last("name", "guest"),
        memory: last("m", "size").and_then(|text| size(&text, MIB)).map(ByteSize),
        machine: last("machine", "type"),
        accelerator: line
            .accelerator()
            .ok()
            .flatten()
            .filter(|said| matches!(said.as_str(), "kvm" | "tcg")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libvirt_starts_is_read() {
        let line = "/usr/bin/qemu-system-x86_64 -name guest=web,,1,debug-threads=on -S \
                    -object {\"qom-type\":\"secret\",\"id\":\"masterKey0\",\"format\":\"raw\"} \
                    -machine pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram \
                    -accel tcg -m size=327680k,slots=16,maxmem=1G -overcommit mem-lock=off \
                    -sandbox on,obsolete=deny -msg timestamp=on";
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let expected = Described {
            name: Some("web,1".into()),
            memory: Some(ByteSize(320 << 20)),
            machine: Some("pc-q35-7.2".into()),
            accelerator: Some("tcg".into()),
        };
        assert_eq!(described(&words), expected);
    }

    #[test]
    fn what_cannot_be_read_is_not_known() {
        let read = |words: &[&str]| {
            described(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(read(&["qemu", "-m", "320"]).memory, Some(ByteSize(320 << 20)));
        assert_eq!(read(&["qemu", "-name", "a", "-name", "b"]).name.as_deref(), Some("b"));
        for words in
            [&[][..], &["qemu"], &["qemu", "-name"], &["qemu", "-m", "much"], &["-name", "x"]]
        {
            assert_eq!(read(words), Described::default(), "{words:?}");
        }
        assert_eq!(read(&["qemu", "-name", "{\"guest\":"]).name, None);
    }
}
