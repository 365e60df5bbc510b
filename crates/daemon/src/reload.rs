//! The configuration is read again while the daemon runs (SIGHUP, `strata reload`). The
//! supervisor reads it, for the workers to come, and leaves its sum in the registry; then the
//! worker reads it, too, and goes on with it. One that reads something else, because the file
//! has just changed once more, makes room for a worker that has what the supervisor has.

use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::bail;
use strata_pager::Registry;
use strata_sys::{Priority, log};

use crate::config::{Config, Machine};
use crate::control::ControlServer;
use crate::current::Current;
use crate::logbook;
use crate::metrics::Metrics;
use crate::shares::Shares;
use crate::snapshots::Snapshots;
use crate::snapshots::schedules::Schedules;
use crate::supervisor::Inheritance;

/// A configuration that was read again.
#[derive(Debug)]
pub(crate) struct Reread {
    pub(crate) config: Config,
    /// Keys that have another value now, which holds only after a restart.
    pub(crate) kept: Vec<&'static str>,
}

impl Reread {
    /// Reads `file` again, in the place of `before`.
    ///
    /// # Errors
    /// All that is wrong with it, or that there is none.
    pub(crate) fn of(file: Option<&Path>, private: bool, before: &Config) -> anyhow::Result<Self> {
        if private {
            bail!("a private stratad has no configuration");
        }
        let now = Config::load(file, &Machine::this()?)?;
        Ok(Self::merged(before, now))
    }

    /// `now`, but for what tenants that live stand on.
    fn merged(before: &Config, now: Config) -> Self {
        let mut kept = Vec::new();
        let mut config = now;
        let mut keep = |key, differs: bool| {
            if differs {
                kept.push(key);
            }
        };
        keep("socket_dir", config.socket_dir != before.socket_dir);
        keep("snapshot_dir", config.snapshot_dir != before.snapshot_dir);
        keep("tier_path", config.tier_path != before.tier_path);
        keep("node", config.node != before.node);
        config.socket_dir.clone_from(&before.socket_dir);
        config.snapshot_dir.clone_from(&before.snapshot_dir);
        config.tier_path.clone_from(&before.tier_path);
        config.node = before.node;
        Self { config, kept }
    }

    /// What is said of it.
    pub(crate) fn note(&self) -> String {
        match self.kept.is_empty() {
            true => "the configuration was read again".into(),
            false => format!(
                "the configuration was read again; restart stratad to have what it says of {}",
                self.kept.join(", ")
            ),
        }
    }
}

/// The supervisor has read `config`: this is what its worker is to follow.
pub(crate) fn tell(registry: &Registry, config: &Config) {
    registry.config_sum().store(config.sum(), Ordering::Relaxed);
    registry.config_read().fetch_add(1, Ordering::Release);
}

/// Whether the worker follows what the supervisor has read last.
pub(crate) fn is_followed(registry: &Registry) -> bool {
    let followed = registry.config_followed().load(Ordering::Acquire);
    followed == registry.config_read().load(Ordering::Acquire)
}

/// The next worker has it from its beginning.
pub(crate) fn begins_with_it(registry: &Registry) {
    let read = registry.config_read().load(Ordering::Acquire);
    registry.config_followed().store(read, Ordering::Release);
}

/// What of a worker does more than to ask what the configuration is.
pub(crate) struct Followers<'a> {
    pub(crate) control: &'a ControlServer,
    pub(crate) metrics: &'a Metrics,
    pub(crate) schedules: &'a Schedules,
    pub(crate) shares: &'a std::sync::Arc<Shares>,
    pub(crate) snapshots: &'a Snapshots,
}

impl Followers<'_> {
    /// Has all of them follow it. What cannot is said in the log, and tried again with the
    /// next one.
    pub(crate) fn follow(&self, config: &Config) {
        logbook::set_lines_per_minute(config.quota.log_lines);
        self.control.admit_of_each(config.quota.connections as usize);
        self.snapshots.forget_criu();
        let address = config.metrics.map(|at| format!("no metrics at {at}")).unwrap_or_default();
        for (what, outcome) in [
            (address.as_str(), self.metrics.follow(config.metrics)),
            ("no scheduled snapshots", self.schedules.follow()),
            ("no DRAM is shared out", self.shares.follow()),
        ] {
            if let Err(error) = outcome {
                log(Priority::Warning, format_args!("{what}: {error}"));
            }
        }
    }

    /// Goes on with what the supervisor has read. False: that is not what is there now.
    pub(crate) fn read_again(&self, inheritance: &Inheritance, current: &Current) -> bool {
        let Inheritance { registry, config_file, private, .. } = inheritance;
        let read = registry.config_read().load(Ordering::Acquire);
        let reread = Reread::of(config_file.as_deref(), *private, &current.get());
        let sum = registry.config_sum().load(Ordering::Relaxed);
        let Some(Reread { config, .. }) = reread.ok().filter(|now| now.config.sum() == sum) else {
            return false;
        };
        current.set(config);
        self.follow(&current.get());
        registry.config_followed().store(read, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests {
    use strata_units::ByteSize;

    use super::*;

    #[test]
    fn what_tenants_stand_on_stays() {
        let machine = Machine::this().expect("this machine");
        let before = Config::defaults(&machine);
        let mut now = before.clone();
        now.default_dram = ByteSize(1 << 30);
        now.snapshot_dir = "/elsewhere".into();
        now.tier_path = Some("/tier".into());
        let reread = Reread::merged(&before, now);
        assert_eq!(reread.kept, ["snapshot_dir", "tier_path"]);
        assert!(reread.note().ends_with("of snapshot_dir, tier_path"), "{}", reread.note());
        let expected = Config { default_dram: ByteSize(1 << 30), ..before.clone() };
        assert_eq!(reread.config, expected);
        let same = Reread::merged(&before, before.clone());
        assert!(same.kept.is_empty() && !same.note().contains("restart"));
    }

    #[test]
    fn a_private_daemon_has_none() {
        let machine = Machine::this().expect("this machine");
        let before = Config::defaults(&machine);
        assert!(Reread::of(None, true, &before).is_err());
        let missing = Reread::of(Some(Path::new("/nonexistent")), false, &before);
        assert!(missing.expect_err("there is none").to_string().contains("/nonexistent"));
    }
}
