//! The configuration is read again while the daemon runs (SIGHUP, `strata reload`). The
//! supervisor reads it and hands it to the next worker, for which the present one makes
//! room: what a worker may be replaced by at any instant needs no second way.

use std::path::Path;

use anyhow::bail;

use crate::config::{Config, Machine};

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
