//! A tenant that was given up here: what is said of it, what the next worker does with it, and
//! how it is settled what became of it.

use std::sync::Arc;

use strata_api::{MOVE_AT_ONCE_VERSION, MOVE_VERSION, MoveWord, Stats};
use strata_pager::Tenant;
use strata_sys::{Priority, log};

use super::super::Snapshots;
use super::super::gone::ends;
use super::super::lineage::life_of;
use super::lending::Lending;
use super::record::{Moves, Out};
use super::{ANSWERED_WITHIN, Wire, owed, still};
use crate::guests::Guests;
use crate::tenants::Tenants;

impl Out {
    /// Whether it is this tenant that was given up, and it has not ended.
    pub(super) fn is_of(&self, tenant: &Tenant) -> bool {
        // What is lent is so even if it has ended.
        (tenant.attachment().1 || self.is_lent()) && life_of(tenant) == self.life
    }

    /// Whether pages of it are needed here.
    pub(super) fn is_lent(&self) -> bool {
        self.is_given && self.lent.is_some()
    }

    /// To whoever wants something else done with the tenant.
    pub(in super::super) fn refusal(&self, name: &str) -> String {
        if let Some(lent) = self.lent.as_ref().filter(|_| self.is_given) {
            return format!(
                "{name} was given to {0}, which may not have all of its memory yet: {1} of it were lent from here (strata move --settle {name} {0} gives them and ends it here)",
                self.host,
                lent.bytes()
            );
        }
        format!(
            "{name} stands still here: it was given to {}, which has not said yet whether it runs there (strata move --settle {name} {} asks)",
            self.host, self.host
        )
    }
}

impl Snapshots {
    /// Looks after what an earlier worker was about to give up, and did not.
    pub(in super::super) fn see_to_moves(
        moves: &Moves,
        uid: u32,
        tenants: &Arc<Tenants>,
        guests: &Arc<Guests>,
    ) {
        for (name, out) in moves.all_out() {
            let tenant = tenants.get(uid, &name).filter(|tenant| out.is_of(tenant));
            let outcome = match &tenant {
                _ if out.is_lent() => {
                    log(Priority::Warning, format_args!("{}", out.refusal(&name)));
                    continue;
                }
                Some(_) if out.is_given => {
                    log(Priority::Warning, format_args!("{}", out.refusal(&name)));
                    continue;
                }
                Some(tenant) => still::take_back(tenant, guests),
                None if out.is_given && !out.asides.is_empty() => {
                    log(
                        Priority::Warning,
                        format_args!(
                            "{name} was given to {0} and has ended here, and it is not known whether it runs there (strata move --settle {name} {0} asks){1}",
                            out.host,
                            out.note()
                        ),
                    );
                    continue;
                }
                None => Ok(()),
            };
            if let Err(why) = outcome.and_then(|()| moves.forget_out(&name)) {
                log(Priority::Error, format_args!("{name}: {why}"));
            }
        }
    }

    /// What is known of the tenant of this name, if it was given up, or is about to be.
    pub(in super::super) fn given(&self, name: &str) -> Option<Out> {
        let out = self.moves.out(name)?;
        self.own_tenant(name).is_some_and(|tenant| out.is_of(&tenant)).then_some(out)
    }

    /// Whether the tenant was given up, and it is not known what became of it.
    pub(crate) fn is_given(&self, name: &str) -> bool {
        self.given(name).is_some_and(|out| out.is_given)
    }

    /// Whether pages of the tenant of this name are lent to a host on which it may run.
    pub(crate) fn lends(&self, name: &str) -> bool {
        self.given(name).is_some_and(|out| out.is_lent())
    }

    /// The same, of this tenant, as a sentence.
    pub(crate) fn is_lent(&self, tenant: &Tenant) -> Option<String> {
        let name = &tenant.record().name;
        let out = self.moves.out(name).filter(|out| out.is_lent() && out.is_of(tenant))?;
        Some(out.refusal(name))
    }

    /// What whoever looks at a tenant should know of its move.
    pub(crate) fn add(&self, stats: &mut Stats) {
        let out = self.given(&stats.name).filter(|out| out.is_given && stats.uid == self.uid);
        stats.notes.extend(out.map(|out| out.refusal(&stats.name)));
        if stats.uid == self.uid {
            stats.notes.extend(owed::refusal(&stats.name));
        }
    }

    /// Asks what became of a tenant that was given up, and does what follows.
    pub(crate) fn settle_move(
        &self,
        uid: u32,
        name: &str,
        wire: &mut Wire,
    ) -> Result<String, String> {
        self.check_user(uid)?;
        let _turn = self.turn_for_move(name)?;
        let Some(out) = self.moves.out(name).filter(|out| out.is_given) else {
            return Err("it was not given up here: it runs here, or has ended".to_owned());
        };
        let tenant = self.own_tenant(name).filter(|tenant| out.is_of(tenant));
        let mut lending = tenant.as_ref().zip(out.lent.as_ref()).map(|(tenant, lent)| {
            // From now on whoever asks for its pages gets them.
            Lending::again(tenant, &out, lent, &self.moves)
        });
        let tenant = tenant.filter(|tenant| !ends(tenant));
        let version = if out.is_lent() { MOVE_AT_ONCE_VERSION } else { MOVE_VERSION };
        let id = out.id.clone();
        wire.say(&MoveWord::Ask { version, id, name: name.to_owned() })?;
        let answer = match &mut lending {
            Some(lending) => lending.settled(wire)?,
            None => wire.hear(ANSWERED_WITHIN)?,
        };
        match answer {
            MoveWord::Pages { .. } | MoveWord::Owing { .. } if out.is_lent() => Err(format!(
                "what was lent of {name} is gone here, and {} waits for it: stop it there",
                out.host
            )),
            MoveWord::Running => {
                if let Some(tenant) = &tenant {
                    self.end_here(tenant)?;
                }
                if let Some(lending) = &lending {
                    lending.forget();
                }
                self.moves.forget_out(name)?;
                let _ = wire.say(&MoveWord::Settled);
                log(Priority::Notice, format_args!("{name}: moved to {}", out.host));
                Ok(format!("{name} runs at {}{}", out.host, out.note()))
            }
            MoveWord::Never { why } => {
                let note = out.put_back();
                if let Some(tenant) = &tenant {
                    still::take_back(tenant, &self.guests)?;
                }
                if let Some(lending) = &lending {
                    lending.forget();
                }
                self.moves.forget_out(name)?;
                if let Some(tenant) = tenant.as_ref().filter(|one| self.guests.spec(one).is_some())
                {
                    self.guests.resume(tenant);
                }
                let _ = wire.say(&MoveWord::Settled);
                Err(match tenant {
                    Some(_) => format!("{why}{note}; it runs on here"),
                    None => format!("{why}{note}; and it has ended here"),
                })
            }
            _ => Err("the other side says what was not asked for".to_owned()),
        }
    }
}
