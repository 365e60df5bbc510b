//! What a snapshot file costs to write, check and read, with the pages of a file:
//!
//! ```text
//! cargo run --release -p strata-snapshot --example archive_speed -- FILE [DIRECTORY]
//! ```
//!
//! FILE is any bytes, taken as the 4 KiB pages of one process: a memory image, say.
//! The snapshot file is made in DIRECTORY (default: where temporary files are) and
//! removed. FILE is read page by page while the snapshot is written, in the
//! same thread. No test: it asserts that every page comes back, and no time.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use strata_snapshot::archive::{Page, Reader, Scratch, Writer};

const PID: u32 = 1;
const BASE: u64 = 0x7000_0000_0000;
const RANDOM_READS: u64 = 20_000;

fn main() -> Result<(), Box<dyn Error>> {
    let source = std::env::args_os().nth(1).ok_or("say which file: archive_speed -- FILE")?;
    let directory = std::env::args_os().nth(2).map_or_else(std::env::temp_dir, PathBuf::from);
    let path = directory.join(format!("strata-archive-speed-{}", std::process::id()));
    let outcome = measure(&PathBuf::from(source), &path);
    let _ = std::fs::remove_file(&path);
    outcome
}

fn open(source: &Path) -> Result<BufReader<File>, Box<dyn Error>> {
    Ok(BufReader::with_capacity(1 << 20, File::open(source)?))
}

fn measure(source: &Path, path: &Path) -> Result<(), Box<dyn Error>> {
    let pages = std::fs::metadata(source)?.len() / 4096;
    let megabytes = pages as f64 * 4096.0 / 1e6;
    let report = |what: &str, began: Instant| {
        let seconds = began.elapsed().as_secs_f64();
        println!("{what:10} {seconds:7.2} s {:8.0} MB/s", megabytes / seconds);
    };
    let mut page: Page = [0; 4096];
    let mut input = open(source)?;
    let began = Instant::now();
    let mut writer = Writer::create(path)?;
    writer.process(PID, None)?;
    for number in 0..pages {
        input.read_exact(&mut page)?;
        writer.page(BASE + number * 4096, &page)?;
    }
    let written = writer.finish()?;
    report("write", began);
    let began = Instant::now();
    let reader = Reader::open(path)?;
    println!("open       {:7.2} ms", began.elapsed().as_secs_f64() * 1e3);
    let began = Instant::now();
    reader.verify(&mut |_, _| ())?;
    report("verify", began);

    let mut input = open(source)?;
    let mut out: Page = [0; 4096];
    let began = Instant::now();
    let mut all = reader.pages(PID);
    while let Some((address, read)) = all.next_into(&mut out) {
        read?;
        input.read_exact(&mut page)?;
        assert!(out == page, "{address:#x}");
    }
    report("read", began);

    let mut scratch = Scratch::default();
    let mut state = 1u64;
    let began = Instant::now();
    for _ in 0..RANDOM_READS {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let address = BASE + (state >> 33) % pages * 4096;
        assert!(reader.page(PID, address, &mut scratch, &mut out)?);
    }
    println!(
        "random     {:7.1} µs a page",
        began.elapsed().as_secs_f64() * 1e6 / RANDOM_READS as f64
    );
    println!(
        "{written:?}: {:.3} of {megabytes:.0} MB",
        written.file_bytes as f64 / 1e6 / megabytes
    );
    let status = std::fs::read_to_string("/proc/self/status")?;
    println!("{}", status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default());
    Ok(())
}
