//! Looks at a program before it is run: is it there, and can `libstrata.so` get
//! into it? The dynamic loader leaves a preload out without a word (statically
//! linked, setuid) or ends the program (another architecture), so it is told
//! here, in time.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use crate::failure::{Failure, Result};

/// Scripts whose interpreters are scripts: the kernel follows so many.
const MAX_SCRIPT_DEPTH: usize = 4;
/// What the kernel reads of a file to see what it is.
const HEAD_BYTES: usize = 256;
/// Program headers of an ELF file that are looked at; real ones have a dozen.
const MAX_PROGRAM_HEADERS: u64 = 512;

/// A program that can be executed.
#[derive(Debug)]
pub(crate) struct Program {
    /// Its file.
    pub(crate) path: PathBuf,
    /// Why the preload cannot enter, if it cannot.
    pub(crate) obstacle: Option<String>,
}

/// Who is running it: a setuid program is one only for others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    /// Real user id.
    pub(crate) uid: u32,
    /// Real group id.
    pub(crate) gid: u32,
}

impl Caller {
    /// This process.
    pub(crate) fn this() -> Self {
        Self { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw() }
    }
}

/// Finds the program that a shell would run for `command` and examines it.
pub(crate) fn examine(command: &OsStr, path: &OsStr, caller: Caller) -> Result<Program> {
    let what = || format!("cannot run {}", command.display());
    let file = find(command, path).map_err(|(why, todo)| Failure::new(what(), why).todo(todo))?;
    let obstacle = obstacle(&file, caller, MAX_SCRIPT_DEPTH).map_err(|refusal| match refusal {
        Refusal::Io(error) => Failure::new(what(), error).todo("see to the file"),
        Refusal::NotAProgram => Failure::new(what(), "it is neither an ELF program nor a script")
            .todo("start it with its interpreter, or give it a first line like #!/bin/sh"),
        Refusal::Interpreter(path, why) => {
            Failure::new(what(), format!("its interpreter {} {why}", path.display()))
                .todo("correct its first line, or install the interpreter")
        }
    })?;
    Ok(Program { path: file, obstacle })
}

/// Why a file cannot be executed, and what to do.
type Unusable = (String, &'static str);

fn find(command: &OsStr, path: &OsStr) -> std::result::Result<PathBuf, Unusable> {
    if command.is_empty() {
        return Err(("its name is empty".into(), "name a program"));
    }
    if command.as_bytes().contains(&b'/') {
        return executable(Path::new(command)).map(|()| command.into());
    }
    let mut first_refusal = None;
    for place in std::env::split_paths(path) {
        // An empty entry means the current directory.
        let place = if place.as_os_str().is_empty() { ".".into() } else { place };
        let candidate = place.join(command);
        match executable(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(_) if !candidate.exists() || candidate.is_dir() => {}
            Err(refusal) => drop(first_refusal.get_or_insert(refusal)),
        }
    }
    Err(first_refusal
        .unwrap_or_else(|| ("command not found".into(), "check its name and PATH, or give a path")))
}

fn executable(path: &Path) -> std::result::Result<(), Unusable> {
    let metadata = path.metadata().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ("no such file".to_owned(), "check the path"),
        _ => (error.to_string(), "check the path"),
    })?;
    if metadata.is_dir() {
        return Err(("it is a directory".into(), "name a program in it"));
    }
    // Root may "execute" by access(2) what has any execute bit, so ask both.
    if !metadata.is_file() || metadata.mode() & 0o111 == 0 || access(path, Access::EXEC_OK).is_err()
    {
        let shown = path.display();
        return Err((format!("{shown} is not executable"), "see to its mode: chmod +x"));
    }
    Ok(())
}

enum Refusal {
    Io(io::Error),
    NotAProgram,
    Interpreter(PathBuf, String),
}

/// Follows scripts to the ELF program that the kernel will load.
fn obstacle(
    path: &Path,
    caller: Caller,
    depth_left: usize,
) -> std::result::Result<Option<String>, Refusal> {
    let file = match File::open(path) {
        Ok(file) => file,
        // Executable, not readable: nothing can be told, so nothing is said.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => return Err(Refusal::Io(error)),
    };
    let head = read_up_to(&file, 0, HEAD_BYTES).map_err(Refusal::Io)?;
    if let Some(line) = head.strip_prefix(b"#!") {
        let interpreter = interpreter(line).ok_or(Refusal::NotAProgram)?;
        if depth_left == 0 {
            let why = "is one script too many".to_owned();
            return Err(Refusal::Interpreter(interpreter, why));
        }
        if let Err((why, _)) = executable(&interpreter) {
            return Err(Refusal::Interpreter(interpreter, format!("cannot be run: {why}")));
        }
        // The mode of a script gives no privilege; its interpreter's would.
        return obstacle(&interpreter, caller, depth_left - 1).map_err(|refusal| match refusal {
            Refusal::NotAProgram => {
                Refusal::Interpreter(interpreter, "is neither a program nor a script".into())
            }
            other => other,
        });
    }
    if !head.starts_with(b"\x7fELF") {
        return Err(Refusal::NotAProgram);
    }
    let elf = elf_obstacle(&file, &head).map_err(Refusal::Io)?;
    Ok(elf.or_else(|| privilege_obstacle(path, &file, caller)))
}

/// The first word of a `#!` line.
fn interpreter(line: &[u8]) -> Option<PathBuf> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t' | 0));
    let word = words.find(|word| !word.is_empty())?;
    Some(OsStr::from_bytes(word).into())
}

/// Up to `count` bytes from `offset` on; fewer at the end of the file.
fn read_up_to(file: &File, offset: u64, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    let mut filled = 0;
    while filled < count {
        match file.read_at(&mut bytes[filled..], offset.saturating_add(filled as u64)) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// Class (32 or 64 bit), byte order and machine of an ELF file.
fn kind(head: &[u8]) -> Option<(u8, u8, [u8; 2])> {
    Some((*head.get(4)?, *head.get(5)?, [*head.get(18)?, *head.get(19)?]))
}

fn elf_obstacle(file: &File, head: &[u8]) -> io::Result<Option<String>> {
    // The library was built for the machine that strata was built for.
    let own = read_up_to(&File::open("/proc/self/exe")?, 0, HEAD_BYTES)?;
    let (own, theirs) = (kind(&own), kind(head));
    if own != theirs {
        let bits = |kind: Option<(u8, _, _)>| kind.map(|(class, _, _)| class);
        return Ok(Some(if bits(own) != bits(theirs) && bits(theirs) == Some(1) {
            "it is a 32-bit program".into()
        } else {
            "it is built for another architecture".into()
        }));
    }
    Ok(match loader(file, head)? {
        None => Some("it is statically linked".into()),
        Some(loader) if loader.windows(7).any(|window| window == b"ld-musl") => {
            Some("it is linked with musl, and libstrata.so with glibc".into())
        }
        Some(_) => None,
    })
}

/// The dynamic loader that a 64-bit ELF file names (`PT_INTERP`).
fn loader(file: &File, head: &[u8]) -> io::Result<Option<Vec<u8>>> {
    const PT_INTERP: u32 = 3;
    let corrupt = || io::Error::new(io::ErrorKind::InvalidData, "its ELF header is corrupt");
    let table = u64_at(head, 32).ok_or_else(corrupt)?;
    let entry_bytes = u64::from(u16_at(head, 54).ok_or_else(corrupt)?);
    let count = u64::from(u16_at(head, 56).ok_or_else(corrupt)?);
    for index in 0..count.min(MAX_PROGRAM_HEADERS) {
        let offset = table.checked_add(index * entry_bytes).ok_or_else(corrupt)?;
        let header = read_up_to(file, offset, 56)?;
        if u32_at(&header, 0).ok_or_else(corrupt)? == PT_INTERP {
            let place = u64_at(&header, 8).ok_or_else(corrupt)?;
            return read_up_to(file, place, HEAD_BYTES).map(|path| {
                Some(path.split(|byte| *byte == 0).next().unwrap_or_default().to_vec())
            });
        }
    }
    Ok(None)
}

// Of this machine's byte order, as was seen before.

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A program that gains privileges by being executed runs in the loader's secure
/// mode, which ignores `LD_PRELOAD`. One that is setuid to the caller gains none.
fn privilege_obstacle(path: &Path, file: &File, caller: Caller) -> Option<String> {
    let metadata = file.metadata().ok()?;
    let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
    if mode & 0o4000 != 0 && uid != caller.uid {
        return Some(format!("it is setuid (to uid {uid})"));
    }
    // Without the group's execute bit this one meant mandatory locking.
    if mode & 0o2010 == 0o2010 && gid != caller.gid {
        return Some(format!("it is setgid (to gid {gid})"));
    }
    // Root gains nothing from file capabilities.
    let size = rustix::fs::getxattr(path, "security.capability", &mut [0u8; 0][..]);
    if caller.uid != 0 && size.is_ok_and(|size| size > 0) {
        return Some("it has file capabilities".into());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Directory;
    use std::fs::{read, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    const PATH: &str = "/usr/bin:/bin";

    fn caller() -> Caller {
        Caller::this()
    }

    fn examine_path(path: &Path, caller: Caller) -> Result<Program> {
        examine(path.as_os_str(), OsStr::new(PATH), caller)
    }

    fn put(directory: &Directory, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
        let path = directory.path().join(name);
        write(&path, bytes).expect("file");
        set_permissions(&path, PermissionsExt::from_mode(mode)).expect("mode");
        path
    }

    /// This test's own binary: a dynamically linked ELF file.
    fn own() -> Vec<u8> {
        read("/proc/self/exe").expect("own binary")
    }

    /// `own()` with every PT_INTERP renamed: a statically linked program, as far
    /// as the kernel can tell.
    fn without_loader() -> Vec<u8> {
        let mut elf = own();
        let table = u64_at(&elf, 32).expect("ELF") as usize;
        let (size, count) = (u16_at(&elf, 54).expect("ELF"), u16_at(&elf, 56).expect("ELF"));
        for index in 0..count {
            let at = table + usize::from(index) * usize::from(size);
            if u32_at(&elf, at) == Some(3) {
                // PT_NULL
                elf[at..at + 4].fill(0);
            }
        }
        elf
    }

    #[test]
    fn ordinary_programs_have_no_obstacle() {
        let found = examine(OsStr::new("sh"), OsStr::new(PATH), caller()).expect("a shell");
        assert!(found.path.is_absolute() && found.obstacle.is_none(), "{found:?}");
        let directory = Directory::new("plain");
        let path = put(&directory, "own", &own(), 0o755);
        assert_eq!(examine_path(&path, caller()).expect("runs").obstacle, None);
    }

    #[test]
    fn what_cannot_be_run_is_refused_with_the_reason() {
        let directory = Directory::new("refused");
        let plain = put(&directory, "plain", b"#!/bin/sh\n", 0o644);
        let text = put(&directory, "text", b"hello\n", 0o755);
        let empty = put(&directory, "empty", b"", 0o755);
        let missing = put(&directory, "missing", b"#!/no/such/interpreter -x\n", 0o755);
        let nothing = put(&directory, "nothing", b"#! \n", 0o755);
        let torn = put(&directory, "torn", &own()[..40], 0o755);
        for (path, why) in [
            (Path::new(""), "its name is empty"),
            (Path::new("no-such-command"), "command not found"),
            (Path::new("/no/such/file"), "no such file"),
            (directory.path(), "it is a directory"),
            (&plain, "is not executable"),
            (&text, "neither an ELF program nor a script"),
            (&empty, "neither an ELF program nor a script"),
            (&nothing, "neither an ELF program nor a script"),
            (&missing, "its interpreter /no/such/interpreter cannot be run: no such file"),
            (&torn, "its ELF header is corrupt"),
        ] {
            let line = examine_path(path, caller()).expect_err(why).to_string();
            assert!(line.contains(why) && line.contains("; "), "{line}");
        }
    }

    #[test]
    fn obstacles_are_seen_through_scripts_too() {
        let directory = Directory::new("obstacles");
        let mut narrow = own();
        narrow[4] = 1;
        let mut foreign = own();
        foreign[18] ^= 0xff;
        let musl: Vec<u8> = {
            let mut elf = own();
            let at = elf.windows(8).position(|w| w == b"ld-linux").expect("PT_INTERP");
            elf[at..at + 8].copy_from_slice(b"ld-musl-");
            elf
        };
        for (name, bytes, why) in [
            ("static", without_loader(), "it is statically linked"),
            ("narrow", narrow, "it is a 32-bit program"),
            ("foreign", foreign, "it is built for another architecture"),
            ("musl", musl, "it is linked with musl"),
        ] {
            let path = put(&directory, name, &bytes, 0o755);
            let script = format!("#! {} -x\n", path.display());
            let script = put(&directory, &format!("{name}.sh"), script.as_bytes(), 0o755);
            for file in [path, script] {
                let obstacle = examine_path(&file, caller()).expect("runs").obstacle;
                assert!(obstacle.as_ref().is_some_and(|o| o.contains(why)), "{obstacle:?}");
            }
        }
    }

    #[test]
    fn scripts_are_followed_as_far_as_the_kernel_does() {
        let directory = Directory::new("depth");
        let mut interpreter = PathBuf::from("/bin/sh");
        for depth in 1..=MAX_SCRIPT_DEPTH + 1 {
            let text = format!("#!{}\n", interpreter.display());
            interpreter = put(&directory, &depth.to_string(), text.as_bytes(), 0o755);
            let examined = examine_path(&interpreter, caller());
            assert_eq!(examined.is_ok(), depth <= MAX_SCRIPT_DEPTH, "{depth}: {examined:?}");
        }
        let own_interpreter = directory.path().join("circle");
        let text = format!("#!{}\n", own_interpreter.display());
        put(&directory, "circle", text.as_bytes(), 0o755);
        let line = examine_path(&own_interpreter, caller()).expect_err("a circle").to_string();
        assert!(line.contains("one script too many"), "{line}");
    }

    #[test]
    fn programs_that_gain_privileges_are_closed_to_others() {
        let directory = Directory::new("privilege");
        let (me, other) = (caller(), Caller { uid: caller().uid + 1, gid: caller().gid + 1 });
        for (mode, mine, theirs) in [
            (0o4755, None, Some("it is setuid")),
            (0o2755, None, Some("it is setgid")),
            (0o2744, None, None),
            (0o755, None, None),
        ] {
            let path = put(&directory, "program", &own(), mode);
            for (caller, expected) in [(me, mine), (other, theirs)] {
                let obstacle = examine_path(&path, caller).expect("runs").obstacle;
                let matches = match (&obstacle, expected) {
                    (Some(obstacle), Some(text)) => obstacle.contains(text),
                    (None, None) => true,
                    _ => false,
                };
                assert!(matches, "{mode:o} {caller:?}: {obstacle:?}");
            }
        }
    }
}
