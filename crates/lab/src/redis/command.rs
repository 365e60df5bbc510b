//! `strata-lab redis …`: fill, drive and verify a server that is already
//! running, for use from scripts and by hand.

use super::{
    expect::Expect,
    load::{Client, Moment, Workload},
    resp::Endpoint,
};
use crate::{keys::Pattern, progress::Progress, random::mix, records::Records};
use anyhow::{Result, bail};
use std::{path::PathBuf, time::Duration};

/// Parts of the load generator.
#[derive(clap::Subcommand)]
pub(crate) enum RedisCommand {
    /// Set every key to its record
    Load(Target),
    /// Drive the server for a time, checking every value
    Run {
        #[command(flatten)]
        target: Target,
        /// Which keys
        #[arg(long, value_enum, default_value_t = Pattern::Uniform)]
        pattern: Pattern,
        /// Share of GETs; the rest are SETs (1: read only, 0.5: 1:1, 0: write only)
        #[arg(long, default_value_t = 1.0)]
        reads: f64,
        /// Seconds that are measured
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
        /// Seconds before
        #[arg(long, default_value_t = 2.0)]
        warmup_seconds: f64,
    },
    /// Get every key and compare it byte for byte with what `load` has set
    Verify(Target),
}

/// Where, and which records.
#[derive(clap::Args)]
pub(crate) struct Target {
    /// Unix socket of the server
    #[arg(long, conflicts_with = "tcp", required_unless_present = "tcp")]
    unix: Option<PathBuf>,
    /// Its address instead, as HOST:PORT
    #[arg(long)]
    tcp: Option<String>,
    /// Number of records
    #[arg(long, default_value_t = 800_000)]
    records: u64,
    /// Seed of records and keys
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, default_value_t = 8)]
    connections: usize,
    /// Requests under way per connection (1: unpipelined)
    #[arg(long, default_value_t = 16)]
    pipeline: usize,
    /// Core for the client
    #[arg(long)]
    core: Option<usize>,
}

impl Target {
    fn prepare(&self) -> Result<(Client, Expect)> {
        if self.records == 0 || self.connections == 0 || self.pipeline == 0 {
            bail!("--records, --connections and --pipeline must be at least 1");
        }
        let endpoint = match (&self.unix, &self.tcp) {
            (Some(path), _) => Endpoint::Unix(path.clone()),
            (None, Some(address)) => Endpoint::Tcp(address.clone()),
            (None, None) => bail!("give --unix or --tcp"),
        };
        let expect = Expect::new(Records::new(mix(self.seed)), self.records);
        let client = Client {
            endpoint,
            connections: self.connections,
            pipeline: self.pipeline,
            core: self.core,
        };
        Ok((client, expect))
    }
}

/// Runs one part; prints its result as JSON.
pub(crate) fn run(command: &RedisCommand) -> Result<()> {
    let bar = |what: &str| {
        let progress = Progress::start(what);
        move |moment| {
            if let Moment::Tick { done, operations } = moment {
                progress.set(done, format!("{operations} operations"));
            }
        }
    };
    let json = match command {
        RedisCommand::Load(target) => {
            let (client, expect) = target.prepare()?;
            serde_json::to_string_pretty(&client.load(&expect, &mut bar("loading"))?)
        }
        RedisCommand::Verify(target) => {
            let (client, expect) = target.prepare()?;
            serde_json::to_string_pretty(&client.verify(&expect, &mut bar("verifying"))?)
        }
        RedisCommand::Run { target, pattern, reads, seconds, warmup_seconds } => {
            if !(0.0..=1.0).contains(reads) || *seconds <= 0.0 || *warmup_seconds < 0.0 {
                bail!("--reads lies between 0 and 1, times are not negative");
            }
            let (client, expect) = target.prepare()?;
            let workload = Workload {
                pattern: *pattern,
                reads: *reads,
                warmup: Duration::from_secs_f64(*warmup_seconds),
                warmup_pipeline: 1,
                duration: Duration::from_secs_f64(*seconds),
                seed: target.seed,
            };
            serde_json::to_string_pretty(&client.run(&workload, &expect, &mut bar("running"))?)
        }
    };
    println!("{}", json?);
    Ok(())
}
