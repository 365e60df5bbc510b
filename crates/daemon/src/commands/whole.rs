//! What is asked of the daemon as a whole: its configuration read again, the next version, and
//! the list of tenants.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use strata_api::{MAX_LINE_BYTES, MAX_LISTED, MAX_LISTED_COMMAND_BYTES, Reply, Stats};
use strata_pager::{SURVEY_PATIENCE, Tenant};
use strata_sys::peer::Peer;
use strata_sys::{SIGHUP, kill_process};

use super::{Commands, LOOK_EVERY, error};
use crate::reload::Reread;
use crate::statistics;
use crate::tenants::Key;
use crate::upgrade;

/// Of one page of a list: a part of what a line may have.
const LISTED_BYTES: usize = MAX_LINE_BYTES * 3 / 4;
/// A configuration that was read again holds within this, unless the worker is busy.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(2);

impl Commands {
    /// Has the supervisor read the configuration again, if it will be able to.
    pub(super) fn reload(&self, peer: Peer) -> Reply {
        if peer.uid != 0 && !self.private {
            return error("only root has the configuration read again", "run as root");
        }
        match Reread::of(self.config_file.as_deref(), self.private, &self.current.get()) {
            // A package was upgraded: the new stratad reads it. Not where it says that the
            // new one is to find elsewhere what this one has.
            Ok(reread) if upgrade::is_another() && reread.kept.is_empty() => self.upgrade(peer),
            Ok(reread) => {
                let before = self.registry.config_read().load(Ordering::Acquire);
                kill_process(self.supervisor_pid, SIGHUP);
                let until = Instant::now() + FOLLOWED_WITHIN;
                while Instant::now() < until {
                    // Less, where the worker has not followed the one before yet.
                    if self.registry.config_followed().load(Ordering::Acquire) > before {
                        return Reply::Done { note: reread.note() };
                    }
                    std::thread::sleep(LOOK_EVERY);
                }
                let note = format!("{}, and is about to hold", reread.note());
                Reply::Done { note }
            }
            Err(problems) => {
                let hint = "nothing was changed; strata config check shows it all";
                error(format!("{problems:#}").replace('\n', "; "), hint)
            }
        }
    }

    /// Has the supervisor become the stratad that is installed now, if that can be.
    pub(super) fn upgrade(&self, peer: Peer) -> Reply {
        if peer.uid != 0 && !self.private {
            return error("only root has stratad upgraded", "run as root");
        }
        match upgrade::check(self.config_file.as_deref(), self.private) {
            Ok(version) => {
                self.registry.upgrades().store(upgrade::THIS, Ordering::Release);
                // As for another configuration: the worker makes room.
                kill_process(std::process::id(), SIGHUP);
                Reply::Done { note: format!("stratad {version} takes over") }
            }
            Err(why) => error(format!("{why:#}").replace('\n', "; "), "stratad goes on as it was"),
        }
    }

    /// A page of the caller's tenants, of root everybody's.
    pub(super) fn list(&self, peer: Peer, after: Option<&(String, u32)>) -> Reply {
        let own = (peer.uid != 0).then_some(peer.uid);
        if after.is_none() {
            // Of all pages at once: the next ones wait the less.
            let all = self.tenants.list().into_iter();
            let own = |tenant: &Arc<Tenant>| own.is_none_or(|uid| tenant.record().uid == uid);
            all.filter(own).for_each(|tenant| tenant.ask_for_survey());
        }
        let by = Instant::now() + SURVEY_PATIENCE;
        let after = after.map(|(name, uid)| Key::new(*uid, name));
        let (page, mut more) = self.tenants.page(own, after.as_ref(), MAX_LISTED);
        let mut tenants = Vec::new();
        let mut bytes = 0;
        for tenant in &page {
            let mut stats = statistics::by_then(tenant, by);
            // By all of the command line.
            self.guests.add(&mut stats);
            self.pools.add(&mut stats);
            self.snapshots.add(&mut stats);
            cut(&mut stats.command);
            bytes += serde_json::to_vec(&stats).map_or(0, |line| line.len());
            if bytes > LISTED_BYTES && !tenants.is_empty() {
                more = true;
                break;
            }
            tenants.push(stats);
        }
        let last = tenants.last().map(|stats: &Stats| (stats.name.clone(), stats.uid));
        Reply::List { next: last.filter(|_| more), tenants }
    }
}

/// Cuts a command line to what is listed of it.
fn cut(command: &mut Vec<String>) {
    let mut left = MAX_LISTED_COMMAND_BYTES;
    for index in 0..command.len() {
        let word = &mut command[index];
        if word.len() >= left {
            let end = (0..=left).rev().find(|&end| word.is_char_boundary(end)).unwrap_or(0);
            word.truncate(end);
            word.push('…');
            command.truncate(index + 1);
            return;
        }
        left = left.saturating_sub(word.len() + 1);
    }
}
