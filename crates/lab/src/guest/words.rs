//! What host and guest say to each other: a line of JSON each. Types only.

use serde::{Deserialize, Serialize};

/// What a guest is told; each gets one [`Reply`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum Order {
    /// Start Redis and give it that many records; with words for `strata run`, under
    /// the guest's own Strata.
    Redis { name: String, records: u64, under: Option<Vec<String>> },
    /// Drive it: [`Served`].
    Drive(Drive),
    /// Drive several at the same time: a [`Served`] each.
    DriveAll { loads: Vec<Drive> },
    /// Read all records and compare them.
    Verify { name: String },
    /// Start MariaDB on the disk's databases, with a buffer pool of that size.
    Mariadb { pool_mebibytes: u64 },
    /// Have sysbench read from it: [`Transactions`].
    Sysbench(Sysbench),
    /// Read all rows of a database and compare them with their checksums.
    Rows { database: String },
    /// Start Strata in the guest, its file tier on the NVDIMM, with these lines in its
    /// configuration.
    Strata { lines: String },
    /// A command for the shell; what it printed.
    Run { line: String },
    /// A shell on the console, until it ends.
    Shell { text: String },
    /// Switch the guest off.
    End,
}

/// A load on Redis.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Drive {
    pub name: String,
    /// As on the lab's command line.
    pub pattern: String,
    /// Share of GETs.
    pub reads: f64,
    /// Requests a second; 0: as fast as it goes.
    pub per_second: u64,
    pub seconds: u64,
    pub seed: u64,
}

/// A load on MariaDB: sysbench's `oltp_read_only`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Sysbench {
    pub database: String,
    /// `--rand-type`.
    pub distribution: String,
    pub seconds: u64,
    pub seed: u64,
}

/// What a guest says.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reply {
    /// It has booted.
    Up,
    Done(serde_json::Value),
    Failed(String),
}

/// Of Redis under a load.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Served {
    /// Requests that were due.
    pub due: u64,
    pub answered: u64,
    pub per_second: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Part of the answered that came later than [`LATE_MS`] after they were due.
    pub late: u64,
}

/// Of MariaDB under a load.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Transactions {
    pub count: u64,
    pub per_second: f64,
    pub p95_ms: f64,
}

/// An answer that took longer is as good as none to whoever waits for it.
pub(crate) const LATE_MS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_half_says_the_other_understands() {
        for order in [
            Order::Redis { name: "r".into(), records: 10, under: None },
            Order::Drive(Drive {
                name: "r".into(),
                pattern: "gaussian".into(),
                reads: 0.5,
                per_second: 100,
                seconds: 2,
                seed: 3,
            }),
            Order::End,
        ] {
            let line = serde_json::to_string(&order).expect("it can be said");
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(serde_json::from_str::<Order>(&line).expect("understood"), order);
        }
        let reply = Reply::Done(serde_json::json!({ "answered": 3 }));
        let line = serde_json::to_string(&reply).expect("it can be said");
        assert_eq!(serde_json::from_str::<Reply>(&line).expect("understood"), reply);
    }
}
