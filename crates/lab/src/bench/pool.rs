//! Disks that guests have in memory: 4 KiB at random from a swap disk, and from an image
//! whose pages are all in a pool, beside `qemu-nbd` on the same bytes in a tmpfs. One
//! client of ours asks all of them, one request at a time, and looks at every page.

use super::{
    Bench,
    report::{PartResults, Series, Side},
};
use crate::{
    histogram::Histogram,
    interrupt,
    janitor::Undo,
    process,
    progress::Progress,
    random::{Random, mix},
    strata::Strata,
    subject::stop_child,
};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PAGE: usize = 4096;
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Of the image that is read through it: all pages fit.
const POOL_LIMIT: &str = "512MiB";

/// Half of it compresses to nothing; no other page is equal.
fn content(page: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    let mut random = Random::new(page);
    for (index, word) in bytes[..PAGE / 2].chunks_exact_mut(8).enumerate() {
        let word: &mut [u8] = word;
        let value = if index == 0 { mix(page) } else { random.next() };
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// One client, in the old way of the protocol: simple replies, one request at a time.
struct Client(UnixStream);

impl Client {
    fn connect(socket: &Path) -> Result<Self> {
        let mut stream = UnixStream::connect(socket).context("connect to a disk's server")?;
        stream.set_read_timeout(Some(START_TIMEOUT)).context("bound a disk's patience")?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).context("read a server's greeting")?;
        // Fixed newstyle, no zeroes; then the export without a name.
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
        stream.write_all(&hello).context("ask for a disk")?;
        stream.read_exact(&mut [0; 10]).context("read what a disk is")?;
        Ok(Self(stream))
    }

    fn ask(&mut self, kind: u16, offset: u64, out: &[u8]) -> Result<()> {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(u32::from(kind).to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend((PAGE as u32).to_be_bytes());
        request.extend(out);
        self.0.write_all(&request).context("ask a disk")?;
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).context("read a disk's reply")?;
        if reply[..8] != *b"\x67\x44\x66\x98\0\0\0\0" || reply[8..] != offset.to_be_bytes() {
            bail!("a disk answered {reply:?}");
        }
        Ok(())
    }

    fn read(&mut self, page: u64, out: &mut [u8; PAGE]) -> Result<()> {
        self.ask(0, page * PAGE as u64, &[])?;
        self.0.read_exact(out).context("read a page")
    }

    fn write(&mut self, page: u64) -> Result<()> {
        self.ask(1, page * PAGE as u64, &content(page))
    }
}

/// One disk's server.
struct Server {
    name: &'static str,
    child: Child,
    /// `strata-export` ends with this.
    hold: Option<ChildStdin>,
    /// All that work for a request.
    pids: Vec<u32>,
    client: Client,
}

impl Server {
    fn export(
        name: &'static str,
        bench: &Bench,
        directory: &Path,
        words: &[&str],
        daemon: &[u32],
    ) -> Result<Self> {
        let mut child = Command::new(bench.plan.binaries.join("strata-export"))
            .args(words)
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start strata-export")?;
        let mut hold = child.stdin.take().context("strata-export has no input")?;
        let mut says = BufReader::new(child.stdout.take().context("strata-export has no output")?);
        let mut hear = |wanted: &str| -> Result<()> {
            loop {
                let mut line = String::new();
                says.read_line(&mut line).context("hear strata-export")?;
                match line.trim_end() {
                    said if said.starts_with(wanted) => return Ok(()),
                    said if said.starts_with("note ") => {}
                    said => bail!("strata-export says {said:?}"),
                }
            }
        };
        hear("ready ")?;
        let socket = directory.join(format!("{name}.sock").replace(' ', "-"));
        writeln!(hold, "{}", socket.display()).context("tell strata-export its socket")?;
        hear("serving")?;
        let client = Client::connect(&socket)?;
        let pids = [&process::family(child.id())[..], daemon].concat();
        Ok(Self { name, child, hold: Some(hold), pids, client })
    }

    fn qemu_nbd(directory: &Path, image: &Path) -> Result<Self> {
        let socket = directory.join("qemu-nbd.sock");
        let mut child = Command::new("qemu-nbd")
            .args(["--format=raw", "--persistent", "--cache=writeback", "--socket"])
            .arg(&socket)
            .arg(image)
            .current_dir(directory)
            .stdin(Stdio::null())
            .spawn()
            .context("start qemu-nbd (Debian: qemu-utils)")?;
        let until = Instant::now() + START_TIMEOUT;
        while UnixStream::connect(&socket).is_err() {
            if let Some(status) = child.try_wait().context("look at qemu-nbd")? {
                bail!("qemu-nbd ended at once ({status})");
            }
            if Instant::now() > until {
                bail!("qemu-nbd does not listen");
            }
            thread::sleep(Duration::from_millis(20));
        }
        let (client, pids) = (Client::connect(&socket)?, vec![child.id()]);
        Ok(Self { name: "qemu-nbd", child, hold: None, pids, client })
    }

    fn cpu_ns(&self) -> u64 {
        self.pids.iter().filter_map(|&pid| process::times(pid)).map(|times| times.cpu_ns).sum()
    }

    /// Asks for pages at random; latencies, and the server's processor time for each.
    fn asked(&mut self, pages: u64, seconds: f64, seed: u64, writes: bool) -> Result<Seen> {
        let (mut random, mut times) = (Random::new(seed), Histogram::default());
        let (mut out, mut count) = ([0; PAGE], 0u64);
        let cpu_ns = self.cpu_ns();
        let began = Instant::now();
        while began.elapsed().as_secs_f64() < seconds {
            let page = random.below(pages);
            let asked = Instant::now();
            if writes {
                self.client.write(page)?;
            } else {
                self.client.read(page, &mut out)?;
            }
            times.record(asked.elapsed().as_nanos() as u64, 1);
            count += 1;
            if !writes && out != content(page) {
                bail!("{} gave other bytes for page {page}", self.name);
            }
        }
        let cpu_us = (self.cpu_ns() - cpu_ns) as f64 / 1e3 / count.max(1) as f64;
        Ok(Seen { p50_us: times.quantile_us(0.5), p99_us: times.quantile_us(0.99), cpu_us })
    }

    fn end(mut self) -> Result<()> {
        match self.hold.take() {
            Some(hold) => {
                drop(hold);
                self.child.wait().map(drop).context("end strata-export")
            }
            None => stop_child(&mut self.child),
        }
    }
}

struct Seen {
    p50_us: f64,
    p99_us: f64,
    cpu_us: f64,
}

type Figure = (&'static str, fn(&Seen) -> f64);
const FIGURES: [Figure; 3] = [
    ("round trip, p50", |seen| seen.p50_us),
    ("round trip, p99", |seen| seen.p99_us),
    ("server's processor time", |seen| seen.cpu_us),
];

/// All of the part.
pub(super) fn pool(bench: &Bench, results: &mut PartResults) -> Result<()> {
    let pages: u64 = if bench.quick { 4096 } else { 32_768 };
    let seconds = if bench.quick { 0.2 } else { 1.2 };
    let directory = PathBuf::from(format!("/dev/shm/strata-lab-{}-pool", std::process::id()));
    let _files = bench.janitor.register(Undo::RemoveFiles { path: directory.clone() })?;
    fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
    let _processes = bench.janitor.register(Undo::KillIn { directory: directory.clone() })?;
    let images = ["through.img", "qemu.img"].map(|name| directory.join(name));
    for image in &images {
        let mut file = fs::File::create(image).context("make an image")?;
        for page in 0..pages {
            file.write_all(&content(page)).context("fill an image")?;
        }
    }
    let mut strata = Strata::start(&bench.janitor, &bench.plan.binaries)?;
    strata.keep(&bench.janitor)?;
    strata.ask(&["pool", "create", "bench", "--limit", POOL_LIMIT, "--admit", "first"])?;
    let socket = strata.pool_socket();
    let socket = socket.to_str().context("a path of our own making")?;
    let size = (pages * PAGE as u64).to_string();
    let image = images[0].to_str().context("a path of our own making")?;
    let swap = ["--swap", &size, "--guest", "bench", "--pool-socket", socket];
    let through = ["--image", image, "--pool", "bench", "--pool-socket", socket];
    let mut servers = [
        Server::export("swap disk", bench, &directory, &swap, &[])?,
        Server::export("through a pool", bench, &directory, &through, &strata.pids())?,
        Server::qemu_nbd(&directory, &images[1])?,
    ];
    let progress = Progress::start("pool");
    let mut page = [0; PAGE];
    for index in 0..pages {
        interrupt::check()?;
        servers[0].client.write(index)?;
        servers[1].client.read(index, &mut page)?;
    }
    let mut samples: Vec<Vec<[Side; 3]>> = vec![Vec::new(); 2];
    for side in &mut samples {
        *side = servers.iter().map(|server| [(); 3].map(|()| Side::new(server.name))).collect();
    }
    for repetition in bench.repetitions() {
        for turn in 0..servers.len() {
            let one = (repetition + turn) % servers.len();
            for (kind, writes) in [false, true].into_iter().enumerate() {
                // What is written leaves the pool, and would be missed the next time.
                if writes && one == 1 {
                    continue;
                }
                interrupt::check()?;
                let seed = (repetition * 2 + kind) as u64;
                let seen = servers[one].asked(pages, seconds, seed, writes)?;
                for (side, (_, figure)) in samples[kind][one].iter_mut().zip(FIGURES) {
                    side.samples.push(figure(&seen));
                }
                results.raw.push(serde_json::json!({
                    "server": servers[one].name, "writes": writes, "p50_us": seen.p50_us,
                    "p99_us": seen.p99_us, "cpu_us": seen.cpu_us,
                }));
            }
        }
    }
    progress.finish("pool");
    for (kind, what) in ["read", "write"].into_iter().enumerate() {
        for one in 0..2 {
            for (index, (name, _)) in FIGURES.iter().enumerate() {
                let [left, right] = [one, 2].map(|one| samples[kind][one][index].clone());
                if !left.samples.is_empty() {
                    results.series.push(Series {
                        name: format!("4 KiB {what} at random: {name}"),
                        unit: "µs".to_owned(),
                        left,
                        right: Some(right),
                    });
                }
            }
        }
    }
    servers.into_iter().try_for_each(Server::end)?;
    strata.stop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_page_is_another_and_half_of_each_is_zero() {
        assert_ne!(content(1), content(2));
        assert!(content(7)[PAGE / 2..].iter().all(|&byte| byte == 0));
        assert_eq!(content(9)[..8], mix(9).to_le_bytes());
    }
}
