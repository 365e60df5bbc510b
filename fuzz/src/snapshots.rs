//! Snapshot files, down to CRIU's images and what those ask for.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use strata_snapshot::archive::{Page, Reader};
use strata_snapshot::claims::{Claim, Images, Owner, What, check, read};
use strata_snapshot::coredump::Process;
use strata_sys::Directory;

/// Memory that a case may have for its images.
const MOST_BYTES: u64 = 16 << 20;

/// A snapshot file. Built for a fuzzer it has no checksums that would have to be met.
pub fn archive(data: &[u8]) {
    let Some(mut file) = memory_file() else { return };
    file.write_all(data).expect("written to memory");
    let Ok(reader) = Reader::from_file(file, Path::new("fuzzed")) else { return };
    let mut most = 0;
    for process in reader.processes() {
        most += process.pages;
    }
    // A few bytes can say that there are thousands of pages of one value: no more of
    // them is read than the file could hold.
    if most < 4096 {
        let mut page: Page = [0; strata_units::PAGE_SIZE];
        for process in reader.processes() {
            let mut pages = reader.pages(process.pid);
            while pages.next_into(&mut page).is_some() {}
        }
    }
    let _ = reader.verify(&mut |_, _| ());
    if let Ok(images) = strata_snapshot::claims::load_archive(&reader) {
        let size: u64 = images.values().map(|image| image.len() as u64).sum();
        assert!(size <= 64 << 20);
        if size <= MOST_BYTES {
            look_at(&images);
        }
    }
}

/// A nameless file.
fn memory_file() -> Option<File> {
    let memory = rustix::fs::memfd_create("fuzzed", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
    Some(File::from(memory))
}

/// CRIU's images: pieces behind a byte that says of which kind, one for the process
/// number, and two for the length.
pub fn claims(data: &[u8]) {
    const NAMES: [&str; 24] = [
        "inventory",
        "pstree",
        "core-",
        "ids-",
        "fs-",
        "mm-",
        "pagemap-",
        "pagemap-shmem-",
        "pages-",
        "fdinfo-",
        "files",
        "memfd",
        "pipes-data",
        "fifo-data",
        "sk-queues",
        "seccomp",
        "filelocks",
        "remap-fpath",
        "timens-",
        "tcp-stream-",
        "ghost-file-",
        "tty-info",
        "tty-data",
        "stats-dump",
    ];
    let mut rest = data;
    let mut images = Images::new();
    while let Some((head, behind)) = rest.split_at_checked(4) {
        let name = NAMES[usize::from(head[0]) % NAMES.len()];
        let number = if name.ends_with('-') { (head[1] % 4).to_string() } else { String::new() };
        let len = usize::from(u16::from_le_bytes([head[2], head[3]])).min(behind.len());
        let (image, behind) = behind.split_at(len);
        images.insert(format!("{name}{number}.img"), image.to_vec());
        rest = behind;
    }
    look_at(&images);
    look_at_process(&images);
}

/// A core file of what they say can be begun, or is refused.
fn look_at_process(images: &Images) {
    let Ok(directory) = Directory::open(Path::new("/")) else { return };
    let _ = Process::of(images, directory, 1, &(0..0));
}

/// Everything that is asked for can be said, and nobody has a right to what is not
/// known.
fn look_at(images: &Images) {
    let owner = Owner { user: 1000, ..Owner::default() };
    let claims = read(images);
    let beyond = check(&claims, &owner, &|_, _| Ok(()));
    for claim in &claims {
        let text = claim.to_string();
        assert!(!text.contains(|c: char| c.is_control()), "{text:?}");
        let is_refused = beyond.iter().any(|beyond| beyond.claim == *claim);
        match claim {
            Claim { what: What::User(user), .. } => assert_eq!(is_refused, *user != 1000),
            Claim { what: What::Unknown(_) | What::Capabilities(..), .. } => assert!(is_refused),
            _ => {}
        }
    }
}
