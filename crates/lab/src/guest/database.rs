//! In the guest: MariaDB on the databases of the disk (`scripts/guest-disk.sh`), read by
//! sysbench. Every row carries the CRC of its text. Nothing is written, so that this holds.

use super::{
    servers,
    words::{Sysbench, Transactions},
};
use crate::sysbench;
use anyhow::{Context, Result, bail};
use std::{
    fs::{self, File},
    process::{Child, Command, Stdio},
};

const SOCKET: &str = "--socket=/run/mariadb.sock";
const LOG: &str = "/run/mariadb.log";
/// The disk's databases, and where it says how many rows each has.
const DATABASES: [&str; 2] = ["small", "large"];
const ROWS: &str = "/etc/strata-rows";
/// Rows that are what was written.
const INTACT: &str = "SELECT COUNT(*) FROM sbtest1 WHERE LEFT(pad, 10) = LPAD(CRC32(c), 10, '0')";

pub(super) struct Mariadb {
    child: Child,
}

impl Mariadb {
    pub(super) fn start(pool_mebibytes: u64) -> Result<Self> {
        let output = File::create(LOG).context("make MariaDB's log")?;
        let mut child = Command::new("mariadbd")
            .args(["--no-defaults", "--user=root", "--datadir=/var/lib/mysql", SOCKET])
            .args(["--pid-file=/run/mariadb.pid", "--skip-networking", "--skip-log-bin"])
            .args(["--innodb-log-file-size=64M", "--innodb-flush-log-at-trx-commit=0"])
            .args(["--innodb-buffer-pool-dump-at-shutdown=0", "--innodb-flush-method=O_DIRECT"])
            .args(["--innodb-buffer-pool-load-at-startup=0"])
            .arg(format!("--innodb-buffer-pool-size={pool_mebibytes}M"))
            .env("PATH", servers::PATH)
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("share MariaDB's log")?)
            .stderr(output)
            .spawn()
            .context("start mariadbd")?;
        servers::wait(&mut child, LOG, || query("small", "SELECT 1").is_ok())
            .context("mariadbd")?;
        Ok(Self { child })
    }

    /// Two clients that each ask for one thing at a time.
    pub(super) fn sysbench(&self, load: &Sysbench) -> Result<Transactions> {
        let said = servers::tool(
            "sysbench",
            &[
                "oltp_read_only",
                "--mysql-socket=/run/mariadb.sock",
                "--mysql-user=root",
                &format!("--mysql-db={}", load.database),
                "--tables=1",
                &format!("--table-size={}", rows(&load.database)?),
                &format!("--rand-type={}", load.distribution),
                &format!("--rand-seed={}", load.seed),
                "--percentile=95",
                "--threads=2",
                &format!("--time={}", load.seconds),
                "run",
            ],
        )?;
        let read = sysbench::read(&said).context("read what sysbench printed")?;
        Ok(Transactions {
            count: read.transactions,
            per_second: read.transactions as f64 / read.seconds,
            p95_ms: read.percentile_ms,
        })
    }

    /// Every row, compared with its checksum.
    pub(super) fn verify(&self, database: &str) -> Result<()> {
        let (rows, intact) = (rows(database)?, query(database, INTACT)?);
        if intact.trim() != rows.to_string() {
            bail!("wrong values: {} of {rows} rows are what was written", intact.trim());
        }
        Ok(())
    }
}

impl Drop for Mariadb {
    fn drop(&mut self) {
        // The guest is switched off next, and what was written to its disk is forgotten.
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

fn query(database: &str, text: &str) -> Result<String> {
    servers::tool("mariadb", &["--no-defaults", SOCKET, "-uroot", "-N", "-B", "-e", text, database])
}

fn rows(database: &str) -> Result<u64> {
    let text = fs::read_to_string(ROWS).with_context(|| format!("read {ROWS}"))?;
    let place = DATABASES.iter().position(|&known| known == database);
    place
        .and_then(|place| text.lines().nth(place)?.parse().ok())
        .with_context(|| format!("the disk has no database {database}"))
}
