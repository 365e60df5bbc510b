//! `strata pool`: caches that guests' disks are read through.

use clap::{Subcommand, ValueEnum};
use strata_api::{PoolAdmission, PoolStats, Reply, Request};
use strata_units::ByteSize;

use crate::args::{named_tenant, tenant_name};
use crate::client;
use crate::failure::{Failure, Result, printable};
use crate::{place, show};

/// What to do with pools.
#[derive(Subcommand, Debug)]
pub(crate) enum PoolCommand {
    /// Make a pool
    ///
    /// Guests whose disks are read through one pool share what is in it, and can tell by
    /// the time that a read takes what others have read: make one for guests that trust
    /// each other.
    Create {
        /// Its name
        #[arg(value_parser = tenant_name)]
        name: String,
        /// The most memory that it may cost; without one, a sixteenth of the machine's
        #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
        limit: Option<ByteSize>,
        /// Which pages that guests miss it takes
        #[arg(long, value_enum, default_value_t = Admit::Room)]
        admit: Admit,
    },
    /// List the pools
    Ls {
        /// Print a JSON array of objects
        #[arg(long)]
        json: bool,
    },
    /// Show what is in pools, and how often it was asked for
    Stats {
        /// The pool; without one, all
        #[arg(value_parser = named_tenant)]
        name: Option<String>,
        /// Print a JSON array of objects
        #[arg(long)]
        json: bool,
    },
    /// Have a pool hand its memory back; it goes on, empty
    Empty {
        /// The pool
        #[arg(value_parser = named_tenant)]
        name: String,
    },
    /// Remove a pool; disks that are read through it go on without
    Rm {
        /// The pool
        #[arg(value_parser = named_tenant)]
        name: String,
    },
}

/// [`PoolAdmission`], as it is typed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Admit {
    /// All as long as there is room; then those that were missed before
    Room,
    /// All
    First,
    /// Those that were missed before, by whichever guest
    Second,
}

/// Does it; what is to be printed.
pub(crate) fn pool(command: PoolCommand) -> Result<String> {
    match command {
        PoolCommand::Create { name, limit, admit } => {
            let admission = match admit {
                Admit::Room => PoolAdmission::Room,
                Admit::First => PoolAdmission::First,
                Admit::Second => PoolAdmission::Second,
            };
            let what = format!("cannot make the pool {name}");
            let limit_bytes = limit.map(|limit| limit.0);
            let request = Request::PoolCreate { name, limit_bytes, admission };
            let Some(socket) = place::control_sockets().into_iter().find(|path| path.exists())
            else {
                return Err(Failure::new(what, "no stratad is running")
                    .todo("start it (sudo systemctl start stratad), or correct STRATA_SOCKET"));
            };
            match client::ask(&socket, &request) {
                Ok(reply) => done(&what, reply),
                Err(none) => Err(none.failure(&what, &socket)),
            }
        }
        PoolCommand::Ls { json } => {
            let pools = all()?;
            if json { show::json(&pools) } else { Ok(listing(&pools)) }
        }
        PoolCommand::Stats { name, json } => {
            let mut pools = all()?;
            if let Some(name) = name {
                pools.retain(|pool| means(&name, pool));
                if pools.is_empty() {
                    return Err(Failure::new(format!("there is no pool {name}"), "")
                        .todo("strata pool ls lists them"));
                }
            }
            if json {
                return show::json(&pools);
            }
            Ok(pools.iter().map(figures).collect::<Vec<_>>().join("\n"))
        }
        PoolCommand::Empty { name } => {
            let what = format!("cannot empty the pool {name}");
            command_of(&what, &name, Request::PoolEmpty { name: name.clone() })
        }
        PoolCommand::Rm { name } => {
            let what = format!("cannot remove the pool {name}");
            command_of(&what, &name, Request::PoolRemove { name: name.clone() })
        }
    }
}

fn done(what: &str, reply: Reply) -> Result<String> {
    match reply {
        Reply::Done { note } => Ok(printable(&note)),
        Reply::Error { message, hint } => Err(client::refused(what, &message, &hint)),
        _ => Err(client::misunderstood(what)),
    }
}

/// Whether `name`, as the user types it, means this pool; the daemon decides.
fn means(name: &str, pool: &PoolStats) -> bool {
    match name.split_once(':') {
        None => pool.name == name && pool.uid == place::uid(),
        Some((user, own)) => {
            pool.name == own && user.parse().map_or(true, |uid: u32| uid == pool.uid)
        }
    }
}

/// Asks the daemon that has the pool.
fn command_of(what: &str, name: &str, request: Request) -> Result<String> {
    for (socket, reply) in client::ask_each(what, &Request::Pools)? {
        if let Reply::Pools { pools } = reply
            && pools.iter().any(|pool| means(name, pool))
        {
            let reply = client::ask(&socket, &request);
            return done(what, reply.map_err(|none| none.failure(what, &socket))?);
        }
    }
    Err(Failure::new(what, "there is none of that name").todo("strata pool ls lists them"))
}

fn all() -> Result<Vec<PoolStats>> {
    const WHAT: &str = "cannot list pools";
    let mut all = Vec::new();
    for (_, reply) in client::ask_each(WHAT, &Request::Pools)? {
        let Reply::Pools { pools } = reply else { return Err(client::misunderstood(WHAT)) };
        all.extend(pools);
    }
    Ok(all)
}

fn bytes(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

fn hit_rate(pool: &PoolStats) -> String {
    match pool.gets_total {
        0 => "-".to_owned(),
        gets => format!("{:.1} %", 100.0 * pool.hits_total as f64 / gets as f64),
    }
}

fn listing(pools: &[PoolStats]) -> String {
    let head = ["NAME", "USER", "KIND", "LIMIT", "COST", "HOLDS", "GETS", "HITS"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for pool in pools {
        rows.push(vec![
            printable(&pool.name),
            pool.uid.to_string(),
            if pool.guest.is_some() { "swap" } else { "cache" }.to_owned(),
            bytes(pool.limit_bytes),
            bytes(pool.cost_bytes),
            bytes(pool.page_bytes),
            pool.gets_total.to_string(),
            hit_rate(pool),
        ]);
    }
    show::columns(&rows, 3)
}

/// What a guest has swapped out.
fn swap_figures(pool: &PoolStats, guest: &str) -> String {
    let mut rows = vec![
        ["pool".to_owned(), printable(&pool.name)],
        ["user".to_owned(), pool.uid.to_string()],
        ["kind".to_owned(), format!("the swap disk of the guest {}", printable(guest))],
        ["size".to_owned(), bytes(pool.limit_bytes)],
        ["costs".to_owned(), bytes(pool.cost_bytes)],
        ["holds".to_owned(), bytes(pool.page_bytes)],
        ["of that, there twice".to_owned(), bytes(pool.deduplicated_bytes)],
        ["of that, one value".to_owned(), bytes(pool.fill_bytes)],
    ];
    let pages = [
        ("pages read", pool.gets_total),
        ("pages written", pool.puts_total),
        ("pages refused for want of room", pool.refused_total),
        ("pages given up", pool.forgotten_total),
        ("pages corrupt", pool.corrupt_total),
    ];
    rows.extend(pages.map(|(name, count)| [name.to_owned(), count.to_string()]));
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    show::columns(&rows, 1)
}

fn figures(pool: &PoolStats) -> String {
    if let Some(guest) = &pool.guest {
        return swap_figures(pool, guest);
    }
    let admission = match pool.admission {
        PoolAdmission::Room => "all as long as there is room, then what was missed before",
        PoolAdmission::First => "all",
        PoolAdmission::Second => "what was missed before",
    };
    let state =
        if pool.closed { "takes nothing: the machine has little memory left" } else { "open" };
    let mut rows = vec![
        ["pool".to_owned(), printable(&pool.name)],
        ["user".to_owned(), pool.uid.to_string()],
        ["state".to_owned(), state.to_owned()],
        ["takes".to_owned(), admission.to_owned()],
        ["limit".to_owned(), bytes(pool.limit_bytes)],
        ["costs".to_owned(), bytes(pool.cost_bytes)],
        ["holds".to_owned(), bytes(pool.page_bytes)],
        ["of that, there twice".to_owned(), bytes(pool.deduplicated_bytes)],
        ["of that, one value".to_owned(), bytes(pool.fill_bytes)],
        ["files".to_owned(), pool.files.to_string()],
        ["connections".to_owned(), pool.connections.to_string()],
        ["hit rate".to_owned(), hit_rate(pool)],
    ];
    let pages = [
        ("pages asked for", pool.gets_total),
        ("pages found", pool.hits_total),
        ("pages taken", pool.puts_total),
        ("pages refused for want of room", pool.refused_total),
        ("pages missed and not wanted", pool.passed_over_total),
        ("pages forgotten, being written", pool.forgotten_total),
        ("pages evicted", pool.evicted_total),
        ("pages corrupt", pool.corrupt_total),
        ("times emptied", pool.handed_back_total),
    ];
    rows.extend(pages.map(|(name, count)| [name.to_owned(), count.to_string()]));
    rows.push(["handed back".to_owned(), bytes(pool.handed_back_bytes_total)]);
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    show::columns(&rows, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_shown_in_a_line_and_in_full() {
        let pool = PoolStats {
            name: "base".into(),
            uid: place::uid(),
            limit_bytes: 64 << 20,
            page_bytes: 8 << 20,
            gets_total: 8,
            hits_total: 6,
            ..PoolStats::default()
        };
        let line = listing(std::slice::from_ref(&pool));
        assert!(line.contains("base") && line.contains("75.0 %"), "{line}");
        let text = figures(&pool);
        assert!(text.contains("hit rate") && text.contains("64.0 MiB"), "{text}");
        let swap = PoolStats { guest: Some("web".into()), refused_total: 77, ..pool.clone() };
        assert!(listing(std::slice::from_ref(&swap)).contains("  swap "));
        let text = figures(&swap);
        assert!(text.contains("of the guest web") && text.contains("room  77"), "{text}");
        assert!(means("base", &pool) && means(&format!("{}:base", place::uid()), &pool));
        assert!(!means("other", &pool) && !means(&format!("{}:base", place::uid() + 1), &pool));
        assert_eq!(hit_rate(&PoolStats::default()), "-");
    }
}
