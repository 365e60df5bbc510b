//! The database of the bench: MariaDB with a buffer pool that holds all of its
//! data, driven by sysbench's own scripts, read-only and then read-write.
//!
//! The rows are our own (realistic text), in sysbench's schema. Every row
//! carries the CRC of its text, which triggers keep when sysbench changes it, so
//! that the whole table can be checked in one query. What it is not: a bench of
//! the disk. Data files are read once, and the log is written lazily.

use super::{
    Bench,
    figures::{Done, Figures},
    installed, run,
};
use crate::{
    janitor::{Janitor, Registered},
    meter::Meter,
    process,
    progress::Progress,
    redis::server::Wrapping,
    stage::{Setup, Surroundings},
    subject::{Subject, last_line, scratch},
    sysbench,
};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Starting, loading, checking: anything that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Client connections; each asks for one thing at a time.
const CLIENTS: &str = "4";
/// Where Debian's sysbench keeps its scripts.
const SCRIPTS: &str = "/usr/share/sysbench";

/// A workload of sysbench.
#[derive(Clone, Copy)]
pub(super) struct Phase {
    pub title: &'static str,
    script: &'static str,
}

/// In the order in which a trial runs them.
pub(super) const PHASES: [Phase; 2] = [
    Phase { title: "read only", script: "oltp_read_only" },
    Phase { title: "read and write", script: "oltp_read_write" },
];

/// The prepared data directory, and what is needed to use it.
pub(super) struct Database {
    server: PathBuf,
    client: PathBuf,
    sysbench: PathBuf,
    data: PathBuf,
    files: Registered,
    rows: u64,
    pool: &'static str,
    data_bytes: u64,
    /// What the sums over all rows are before anything is written.
    sums: String,
}

/// Reads every row and index entry: warms the pool, and says what is in it.
const SUMS: &str = "SELECT COUNT(*), SUM(k), BIT_XOR(CRC32(CONCAT(id, c, pad))) FROM sbtest1; \
                    SELECT SUM(k) FROM sbtest1 FORCE INDEX (k_1)";
/// Rows whose text is not what was written with it.
const DAMAGED: &str = "SELECT COUNT(*) FROM sbtest1 WHERE LEFT(pad, 10) <> LPAD(CRC32(c), 10, '0')";

/// A row's text depends on its number alone.
fn load_statements(rows: u64) -> String {
    let pick = |salt: char, words: &[&str]| {
        let list = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(",");
        format!("ELT(1 + CRC32(CONCAT(seq, '{salt}')) % {}, {list})", words.len())
    };
    let name = pick('n', &["Amelia", "Benjamin", "Elena", "Farid", "Giulia", "Katarzyna", "Noor"]);
    let city = pick('c', &["Rotterdam", "Valencia", "Gothenburg", "Lyon", "Krakow", "Porto"]);
    let state = pick('s', &["pending", "paid", "packed", "shipped", "delivered", "returned"]);
    let goods = pick('g', &["copper kettle", "walnut desk", "linen curtain", "desk lamp"]);
    let note = pick('o', &["leave it with a neighbour", "before noon", "handle with care"]);
    format!(
        "CREATE TABLE sbtest1 (id INT NOT NULL PRIMARY KEY, k INT NOT NULL DEFAULT 0, \
           c CHAR(120) NOT NULL DEFAULT '', pad CHAR(60) NOT NULL DEFAULT '') \
           ENGINE=InnoDB CHARACTER SET latin1;
         INSERT INTO sbtest1 SELECT seq, 1 + CRC32(CONCAT(seq, 'k')) % {rows}, c, \
           CONCAT(LPAD(CRC32(c), 10, '0'), '-', {note}) FROM (SELECT seq, \
             CONCAT('{{\"order\":', seq, ',\"customer\":\"', {name}, '\",\"city\":\"', {city}, \
               '\",\"status\":\"', {state}, '\",\"item\":\"', {goods}, '\",\"total\":', \
               CRC32(CONCAT(seq, 't')) % 100000, '}}') AS c FROM seq_1_to_{rows}) AS made;
         CREATE INDEX k_1 ON sbtest1 (k);
         CREATE TRIGGER inserted BEFORE INSERT ON sbtest1 FOR EACH ROW \
           SET NEW.pad = CONCAT(LPAD(CRC32(NEW.c), 10, '0'), SUBSTR(NEW.pad, 11));
         CREATE TRIGGER updated BEFORE UPDATE ON sbtest1 FOR EACH ROW \
           SET NEW.pad = CONCAT(LPAD(CRC32(NEW.c), 10, '0'), SUBSTR(NEW.pad, 11));"
    )
}

impl Database {
    /// Fills a data directory, natively and once: every trial gets a copy.
    pub(super) fn prepare(bench: &Bench) -> Result<Self> {
        let server = installed(&["mariadbd", "mysqld"], "mariadb-server-core")?;
        let client = installed(&["mariadb", "mysql"], "mariadb-client-core")?;
        let sysbench = installed(&["sysbench"], "sysbench")?;
        for phase in PHASES {
            let script = Path::new(SCRIPTS).join(phase.script).with_extension("lua");
            if !script.is_file() {
                bail!("{} is missing: apt-get install --reinstall sysbench", script.display());
            }
        }
        let (data, files) = scratch(&bench.janitor, "database")?;
        let (rows, pool, data_bytes) =
            if bench.quick { (150_000, "64M", 64 << 20) } else { (1_700_000, "512M", 640 << 20) };
        let mut database = Self {
            server,
            client,
            sysbench,
            data,
            files,
            rows,
            pool,
            data_bytes,
            sums: String::new(),
        };
        let what = format!("mariadb: {rows} rows");
        let progress = Progress::start(&what);
        let made = database.fill(&bench.janitor);
        progress.finish(&what);
        made.context("prepare MariaDB's data")?;
        Ok(database)
    }

    fn fill(&mut self, janitor: &Janitor) -> Result<()> {
        let mut running = self.start(janitor, &self.data, &Wrapping::default())?;
        let nothing = &mut || Ok(());
        running.query("CREATE DATABASE sbtest", nothing)?;
        running.database = Some("sbtest");
        running.query(&load_statements(self.rows), nothing)?;
        if running.query(DAMAGED, nothing)? != "0" {
            bail!("the rows do not carry their checksums");
        }
        self.sums = running.query(SUMS, nothing)?;
        running.query("SHUTDOWN", nothing)?;
        let status = running.subject.wait(PATIENCE, || Ok(()))?;
        if !status.success() {
            bail!("mariadbd ended badly ({status}): {}", last_line(&running.log));
        }
        Ok(())
    }

    /// Removes the data; dropping does, too, but says nothing of failures.
    pub(super) fn remove(self) -> Result<()> {
        self.files.undo()
    }

    fn start(&self, janitor: &Janitor, data: &Path, wrapping: &Wrapping) -> Result<Running> {
        let log = data.join("server.log");
        let socket = data.join("db.sock");
        let mut line: Vec<OsString> = vec![self.server.clone().into(), "--no-defaults".into()];
        line.extend(
            [("--datadir=", data), ("--socket=", &socket), ("--pid-file=", &data.join("pid"))]
                .map(|(option, path)| format!("{option}{}", path.display()).into()),
        );
        line.extend(
            [
                "--skip-networking",
                // No system tables are needed then; nobody else gets at the socket.
                "--skip-grant-tables",
                "--skip-log-bin",
                "--innodb-log-file-size=64M",
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-buffer-pool-dump-at-shutdown=0",
                "--innodb-buffer-pool-load-at-startup=0",
                "--innodb-flush-method=O_DIRECT",
            ]
            .map(OsString::from),
        );
        line.push(format!("--innodb-buffer-pool-size={}", self.pool).into());
        if rustix::process::geteuid().is_root() {
            line.push("--user=root".into());
        }
        let mut command = wrapping.command(&line);
        let output = File::create(&log).context("make the server's log")?;
        command.stdin(Stdio::null()).stdout(output.try_clone().context("share the log")?);
        command.stderr(output);
        let subject = Subject::spawn(janitor, &mut command)?;
        let client = self.client.clone();
        let janitor = janitor.clone();
        let mut running = Running { subject, client, janitor, socket, log, database: None };
        running.wait_until_ready()?;
        Ok(running)
    }

    /// One trial: its phases, values checked before, between and after.
    pub(super) fn trial(&self, bench: &Bench, setup: Setup, what: &str) -> Result<Vec<Figures>> {
        crate::interrupt::check()?;
        let progress = Progress::start(what);
        let found = run::again(setup, |setup| {
            let janitor = &bench.janitor;
            let binaries = &bench.plan.binaries;
            let around = Surroundings::start(janitor, setup, "mariadb", self.data_bytes, binaries)?;
            let found = self.drive(bench, &around, &progress);
            let oom_killed = around.was_oom_killed();
            around.stop()?;
            Ok((found, oom_killed))
        });
        match &found {
            Ok((found, _)) => {
                let rates: Vec<String> =
                    found.iter().map(|one| format!("{:.0}", one.operations_per_second)).collect();
                progress.finish(&format!("{what}: {} transactions/s", rates.join(" and ")));
            }
            Err(_) => progress.finish(&format!("{what}: failed")),
        }
        let (mut found, oom_kills) = found.with_context(|| what.to_owned())?;
        for one in &mut found {
            one.oom_kills = oom_kills;
        }
        Ok(found)
    }

    fn drive(
        &self,
        bench: &Bench,
        around: &Surroundings,
        progress: &Progress,
    ) -> Result<Vec<Figures>> {
        let (data, files) = scratch(&bench.janitor, "mariadb")?;
        progress.part("copying the data");
        copy(&self.data, &data)?;
        progress.part("filling the pool");
        let mut running = self.start(&bench.janitor, &data, around.wrapping())?;
        running.database = Some("sbtest");
        let pid = running.subject.pid();
        if let Some(core) = bench.plan.server_core {
            process::pin_process(pid, core)?;
        }
        let mut meter = Meter::new(around, pid);
        let sums = |running: &Running, meter: &mut Meter| {
            let sums = running.query(SUMS, &mut || meter.tick())?;
            if sums != self.sums {
                bail!("wrong values: the table's sums are {sums}, not {}", self.sums);
            }
            Ok(())
        };
        sums(&running, &mut meter)?;
        let mut found = Vec::new();
        let [warmup, seconds] = bench.times();
        for (number, phase) in PHASES.iter().enumerate() {
            progress.part(&format!("{}: warming up", phase.title));
            // Each on rows of its own; the same in all setups.
            let seed = 10 * number as u32 + 1;
            self.sysbench(bench, phase, &data, warmup, seed, &mut || meter.tick())?;
            progress.part(&format!("{}: measuring", phase.title));
            meter.begin()?;
            let done =
                self.sysbench(bench, phase, &data, seconds, seed + 1, &mut || meter.tick())?;
            let window = meter.end()?;
            let name = format!("mariadb {}", phase.title);
            found.push(Figures::new(&name, around.setup, &meter, &window, done));
            progress.part("checking every row");
            if number == 0 {
                sums(&running, &mut meter)?;
            }
        }
        running.check(self.rows, &mut || meter.tick())?;
        drop(running);
        files.undo()?;
        Ok(found)
    }

    /// Runs the client for a time; what it did, and its CPU time.
    fn sysbench(
        &self,
        bench: &Bench,
        phase: &Phase,
        data: &Path,
        seconds: &str,
        seed: u32,
        tick: &mut dyn FnMut() -> Result<()>,
    ) -> Result<(Done, u64)> {
        let output = data.join("sysbench.out");
        let mut command = Command::new(&self.sysbench);
        command
            .arg(phase.script)
            .arg(format!("--mysql-socket={}", data.join("db.sock").display()))
            .args(["--mysql-user=root", "--mysql-db=sbtest", "--tables=1", "--auto_inc=off"])
            .args([format!("--table-size={}", self.rows), format!("--rand-seed={seed}")])
            // Four of five accesses to a fifth of the rows, and so on inside it.
            .args(["--rand-type=pareto", "--percentile=99"])
            .args([format!("--threads={CLIENTS}"), format!("--time={seconds}")])
            .arg("run")
            .stdin(Stdio::null())
            .stdout(File::create(&output).context("make sysbench's output")?)
            .stderr(File::options().append(true).open(&output).context("open its output")?);
        let cores = process::allowed_cores();
        // The child inherits the core; this process gives it back at once.
        if let Some(core) = bench.plan.client_core {
            process::pin_self(core)?;
        }
        let started = Subject::spawn(&bench.janitor, &mut command);
        if bench.plan.client_core.is_some() {
            process::unpin_self(&cores)?;
        }
        let mut client = started?;
        let pid = client.pid();
        let mut cpu_ns = 0;
        let status = client.wait(PATIENCE, || {
            cpu_ns = process::times(pid).map_or(cpu_ns, |times| times.cpu_ns);
            tick()
        })?;
        let text = fs::read_to_string(&output).context("read sysbench's output")?;
        if !status.success() {
            let fatal = text.lines().find(|line| line.contains("FATAL"));
            let reason = fatal.map_or_else(|| last_line(&output), str::to_owned);
            bail!("sysbench failed ({status}): {reason}");
        }
        let read = sysbench::read(&text).context("read what sysbench printed")?;
        let done = Done {
            operations: read.transactions,
            seconds: read.seconds,
            p50_us: None,
            p99_us: read.percentile_ms * 1000.0,
        };
        Ok((done, cpu_ns))
    }
}

/// A started server.
struct Running {
    subject: Subject,
    client: PathBuf,
    janitor: Janitor,
    socket: PathBuf,
    log: PathBuf,
    database: Option<&'static str>,
}

impl Running {
    fn wait_until_ready(&mut self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.query("SELECT 1", &mut || Ok(())).is_err() {
            crate::interrupt::check()?;
            if let Some(status) = self.subject.child().try_wait().context("look at mariadbd")? {
                bail!("mariadbd ended at once ({status}): {}", last_line(&self.log));
            }
            if Instant::now() >= until {
                bail!("mariadbd does not answer: {}", last_line(&self.log));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// What the statements print, rows separated by lines.
    fn query(&self, text: &str, tick: &mut dyn FnMut() -> Result<()>) -> Result<String> {
        let output = self.socket.with_extension("out");
        let mut command = Command::new(&self.client);
        command
            .arg("--no-defaults")
            .arg(format!("--socket={}", self.socket.display()))
            .args(["-uroot", "-N", "-B", "-e", text])
            .args(self.database)
            .stdin(Stdio::null())
            .stdout(File::create(&output).context("make a query's output")?)
            .stderr(File::options().append(true).open(&output).context("open its output")?);
        let mut client = Subject::spawn(&self.janitor, &mut command)?;
        let status = client.wait(PATIENCE, tick)?;
        let said = fs::read_to_string(&output).context("read a query's output")?;
        if !status.success() {
            bail!("{text:.60}: {}", said.trim());
        }
        Ok(said.trim().to_owned())
    }

    /// All rows are there and are what was written; the indexes agree.
    fn check(&self, rows: u64, tick: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let damaged = self.query(DAMAGED, tick)?;
        if damaged != "0" {
            bail!("wrong values: {damaged} rows are not what was written");
        }
        // Each transaction that deletes a row puts one of the same number back.
        let count = self.query("SELECT COUNT(*) FROM sbtest1", tick)?;
        if count != rows.to_string() {
            bail!("wrong values: {count} rows of {rows} are there");
        }
        let checked = self.query("CHECK TABLE sbtest1 EXTENDED", tick)?;
        if !checked.ends_with("OK") {
            bail!("wrong values: CHECK TABLE says {checked}");
        }
        Ok(())
    }
}

/// Copies a data directory: files and one level of directories below it.
fn copy(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("list {}", from.display()))? {
        let entry = entry.context("list the data")?;
        let (kind, target) =
            (entry.file_type().context("look at the data")?, to.join(entry.file_name()));
        if kind.is_dir() {
            fs::create_dir_all(&target).with_context(|| format!("make {}", target.display()))?;
            copy(&entry.path(), &target)?;
        } else if kind.is_file() {
            // To the disk now, or it happens in the measured time.
            fs::copy(entry.path(), &target)
                .and_then(|_| File::open(&target)?.sync_all())
                .with_context(|| format!("copy {}", entry.path().display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_copied_with_what_is_in_it() {
        let root = std::env::temp_dir().join(format!("strata-lab-copy-{}", std::process::id()));
        let (from, to) = (root.join("from"), root.join("to"));
        fs::create_dir_all(from.join("below")).expect("made");
        fs::create_dir_all(&to).expect("made");
        fs::write(from.join("below/file"), "text").expect("written");
        copy(&from, &to).expect("copied");
        assert_eq!(fs::read_to_string(to.join("below/file")).expect("there"), "text");
        fs::remove_dir_all(&root).expect("removed");
    }
}
