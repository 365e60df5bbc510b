//! What may be typed of snapshots and clones.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use strata_api::{MAX_CLONES, Net, PortForward, Request, SnapshotRef, Tcp, Which};

use super::{forward, label, named_tenant, tenant_name};

/// How to take a snapshot, or what to do with those that there are.
#[derive(Args, Debug)]
pub(crate) struct SnapshotArguments {
    /// The tenant
    #[arg(value_parser = named_tenant, required = true)]
    pub(crate) name: Option<String>,
    /// A second name for the snapshot, unique among the tenant's: NAME@LABEL
    #[arg(long, value_name = "LABEL", value_parser = label, allow_hyphen_values = true)]
    pub(crate) label: Option<String>,
    /// Write it to disk, so that it survives a reboot
    #[arg(long)]
    pub(crate) persist: bool,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Option<SnapshotCommand>,
}

/// What to do with snapshots that there are.
#[derive(Subcommand, Debug)]
pub(crate) enum SnapshotCommand {
    /// Remove snapshots, in any order
    ///
    /// Frees what no tenant and no other snapshot needs.
    Rm {
        /// The snapshots: NAME@N or NAME@LABEL
        #[arg(value_name = "SNAP", required = true)]
        snapshots: Vec<SnapshotRef>,
    },
    /// Write a snapshot to disk, so that it survives a reboot
    Persist {
        /// The snapshot: NAME@N or NAME@LABEL
        #[arg(value_name = "SNAP")]
        snapshot: SnapshotRef,
    },
    /// Write a snapshot into one file, for another machine
    ///
    /// The file holds all of the tenant's memory, secrets included; only its
    /// owner may read it.
    Export {
        /// The snapshot: NAME@N or NAME@LABEL
        #[arg(value_name = "SNAP")]
        snapshot: SnapshotRef,
        /// The file; it must not be there yet
        file: PathBuf,
    },
    /// Write one process of a snapshot into a core file, for gdb
    ///
    /// The file holds all that the process had written to its memory, secrets
    /// included; only its owner may read it. gdb PROGRAM FILE opens it.
    Core {
        /// The snapshot: NAME@N or NAME@LABEL
        #[arg(value_name = "SNAP")]
        snapshot: SnapshotRef,
        /// The process's number when the snapshot was taken
        pid: u32,
        /// The file; it must not be there yet
        file: PathBuf,
    },
    /// Take in a snapshot that was exported
    ///
    /// Prints its identity here. The programs and files that the tenant had open
    /// must be at the same places when it is restored.
    Import {
        /// The file
        file: PathBuf,
        /// The tenant name that it gets; without one, the one that it had
        #[arg(long, value_parser = tenant_name)]
        name: Option<String>,
        /// Also if this machine's processor lacks instructions that the other one had
        ///
        /// A program that uses one of them dies by SIGILL.
        #[arg(long)]
        any_cpu: bool,
        /// Whoever wrote the file, and whatever it asks for
        ///
        /// What belongs to another user is taken in only if it asks for nothing
        /// that this user may not have. It runs with what it asks for.
        #[arg(long)]
        trust: bool,
        /// Only print what it asks for: users, capabilities, files, sockets
        #[arg(long)]
        dry_run: bool,
    },
}

/// How to make clones.
#[derive(Args, Debug)]
pub(crate) struct CloneArguments {
    /// The snapshot: NAME@N or NAME@LABEL
    #[arg(value_name = "SNAP")]
    pub(crate) snapshot: SnapshotRef,
    /// How many
    #[arg(long, value_name = "K", default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CLONES)))]
    pub(crate) count: u32,
    /// The clone's name; of several NAME-1, NAME-2, …; without one, made of the
    /// snapshot's
    #[arg(long, value_parser = tenant_name)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) network: NetworkArguments,
    /// What becomes of TCP connections inside of the clone; in a new network
    /// they go on in any case, those to others never do
    #[arg(long, value_enum, default_value = "close")]
    pub(crate) tcp: TcpArgument,
    /// A directory of which each clone gets a copy of its own at the same place
    #[arg(long, value_name = "DIR")]
    pub(crate) copy_dir: Vec<PathBuf>,
}

impl CloneArguments {
    /// Of what every clone has.
    pub(crate) fn plain(
        snapshot: SnapshotRef,
        count: u32,
        name: Option<String>,
        network: NetworkArguments,
    ) -> Self {
        Self { snapshot, count, name, network, tcp: TcpArgument::Close, copy_dir: Vec::new() }
    }

    /// What to ask, with copies of these directories.
    pub(crate) fn request(&self, snapshot: SnapshotRef, copy_dirs: Vec<String>) -> Request {
        Request::Clone {
            snapshot,
            count: self.count,
            name: self.name.clone(),
            net: match self.network.net {
                Some(NetArgument::New) => Net::New,
                _ => Net::Shared,
            },
            forwards: self.network.forward.clone(),
            tcp: self.tcp.into(),
            copy_dirs,
        }
    }
}

/// Which snapshot a tenant goes back to.
#[derive(Clone, Debug)]
pub(crate) enum RollbackTarget {
    /// One of its own.
    Own(Which),
    /// Any.
    Named(SnapshotRef),
}

/// Which network clones have.
#[derive(Args, Clone, Default, Debug)]
pub(crate) struct NetworkArguments {
    /// The clones' network: shared, new, or bridge=NAME
    ///
    /// shared: the original's; a port that is still in use makes the clone fail (programs have
    /// this one without --net; guests cannot have it, and have one of the original's kind).
    /// new: one of its own for each clone, reached by --forward. bridge=NAME: a guest is on
    /// that bridge of this machine's, once it has an address of its own.
    #[arg(long, value_name = "WHERE", value_parser = net)]
    pub(crate) net: Option<NetArgument>,
    /// A port of 127.0.0.1 that leads to one of the clone's; the second clone
    /// has the next port, and so on; 0 chooses a free one; needs --net new
    #[arg(long, value_name = "HOST:GUEST", value_parser = forward)]
    pub(crate) forward: Vec<PortForward>,
}

/// Where a clone's network is, as it is typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NetArgument {
    /// The original's.
    Shared,
    /// One of its own for each clone.
    New,
    /// A bridge of this machine's.
    Bridge(String),
}

/// Longest name of a network device.
const MAX_DEVICE_BYTES: usize = 15;

fn net(text: &str) -> Result<NetArgument, String> {
    let is_device = |name: &str| {
        let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
        (1..=MAX_DEVICE_BYTES).contains(&name.len())
            && name.bytes().all(is_plain)
            && !name.starts_with('-')
    };
    match (text, text.strip_prefix("bridge=")) {
        ("shared", _) => Ok(NetArgument::Shared),
        ("new", _) => Ok(NetArgument::New),
        (_, Some(name)) if is_device(name) => Ok(NetArgument::Bridge(name.to_owned())),
        (_, Some(_)) => Err("a bridge's name has 1 to 15 plain characters".to_owned()),
        _ => Err("it is shared, new, or bridge=NAME".to_owned()),
    }
}

/// [`Tcp`], as it is typed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TcpArgument {
    /// The clone finds them closed
    Close,
    /// They go on; one clone, and the original must have ended
    Keep,
}

impl From<TcpArgument> for Tcp {
    fn from(argument: TcpArgument) -> Self {
        match argument {
            TcpArgument::Close => Self::Close,
            TcpArgument::Keep => Self::Keep,
        }
    }
}
