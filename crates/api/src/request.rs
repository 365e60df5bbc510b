//! What `strata` asks of `stratad`.

use serde::{Deserialize, Serialize};

use crate::{
    CurvePoint, DramClaim, GuestSpec, Identity, Net, PlaceWish, PoolAdmission, PortForward,
    SnapshotRef, Tcp, advice, label_problem, snapshot,
};

/// What the command line asks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Is anyone there, and who?
    Ping,
    /// Make a tenant and put the calling process into it. The process then
    /// executes the program with the environment of the reply.
    Run {
        /// The tenant's name; must be free. None: the daemon makes one of
        /// `command`.
        name: Option<String>,
        /// Its DRAM budget; none: the configuration's default.
        dram_bytes: Option<u64>,
        /// The program, for display.
        command: Vec<String>,
    },
    /// The tenant is about to become a guest, a virtual machine. Answered by
    /// [`Reply::Guest`](crate::Reply::Guest).
    Guest {
        /// The tenant: just made, by the same user.
        name: String,
        /// What it is going to be.
        guest: Box<GuestSpec>,
    },
    /// A guest is to come from a snapshot. Answered by
    /// [`Reply::GuestAgain`](crate::Reply::GuestAgain): the caller starts its QEMU, which
    /// waits, and asks [`Request::GuestFill`]. The caller is put into the tenant as by
    /// [`Request::Run`].
    GuestAgain {
        /// Which.
        snapshot: SnapshotRef,
        /// The tenant: a new one; or the one that the snapshot was taken of, if that has
        /// ended. None: the daemon makes a name.
        name: Option<String>,
        /// The tenant of that name lives, and goes back to the snapshot: the new QEMU takes
        /// the place of the one that runs, which goes on until then.
        #[serde(default)]
        rollback: bool,
    },
    /// Give a guest that waits the memory and the devices of a snapshot, and let it run.
    /// Answered by [`Reply::Revived`](crate::Reply::Revived).
    GuestFill {
        /// The tenant, of [`Reply::GuestAgain`](crate::Reply::GuestAgain).
        name: String,
        /// Which.
        snapshot: SnapshotRef,
        /// Its QEMU.
        pid: u32,
        /// As it was in [`Request::GuestAgain`].
        #[serde(default)]
        rollback: bool,
        /// It was asked for before, of a worker that is gone: what that one has begun is
        /// ended, and nothing begun.
        #[serde(default)]
        again: bool,
        /// It is not to run: whoever asked ends it, and knows that it can come.
        #[serde(default)]
        rehearse: bool,
    },
    /// Have the agent in a guest do what makes the guest another machine. Answered by
    /// [`Reply::GuestOrdered`](crate::Reply::GuestOrdered), or an error that says why it is
    /// not done.
    GuestOrder {
        /// The tenant.
        name: String,
        /// What it is to be known by; none: its network is another one from now on.
        #[serde(default)]
        identity: Option<Identity>,
    },
    /// Let a guest run on that stands still, as after its disk had no room.
    GuestResume {
        /// The tenant.
        name: String,
    },
    /// Read the configuration again.
    Reload,
    /// Become the stratad that is installed now.
    Upgrade,
    /// Tenants of the caller, of root all, a page of them.
    List {
        /// [`Reply::List`](crate::Reply::List)'s `next` of the page before; none: the first
        /// page.
        #[serde(default)]
        after: Option<(String, u32)>,
    },
    /// One tenant.
    Stats {
        /// Its name.
        name: String,
    },
    /// Change a budget.
    Set {
        /// The tenant.
        name: String,
        /// The new budget.
        dram_bytes: u64,
    },
    /// What a tenant claims of the DRAM that the host shares out. From then on its budget
    /// moves.
    Claim {
        /// The tenant.
        name: String,
        /// What.
        claim: DramClaim,
    },
    /// How the host's DRAM is shared out just now. Answered by
    /// [`Reply::HostShares`](crate::Reply::HostShares).
    Shares,
    /// How much DRAM does it need? It is watched from now on, for ten minutes
    /// after the last question.
    Advise {
        /// The tenant.
        name: String,
        /// It is not to be watched any more; answered by [`Reply::Done`](crate::Reply::Done).
        #[serde(default)]
        stop: bool,
    },
    /// Make a pool: a cache that guests' disks are read through. Answered by
    /// [`Reply::Done`](crate::Reply::Done).
    PoolCreate {
        /// Its name; must be free among the caller's pools.
        name: String,
        /// The most that it may cost; none: a sixteenth of the machine's memory.
        limit_bytes: Option<u64>,
        /// Which pages it takes.
        #[serde(default)]
        admission: PoolAdmission,
    },
    /// The caller's pools, of root all. Answered by [`Reply::Pools`](crate::Reply::Pools).
    Pools,
    /// Have a pool hand all its memory back; it goes on, empty.
    PoolEmpty {
        /// Which.
        name: String,
    },
    /// Remove a pool: disks that are read through it go on without.
    PoolRemove {
        /// Which.
        name: String,
    },
    /// Share a total out so that the sum of the losses is least. Changes nothing.
    ShareOut {
        /// The total.
        total_bytes: u64,
        /// One curve a tenant, whosever it is.
        curves: Vec<Vec<CurvePoint>>,
    },
    /// Give all pages back and stop managing.
    Release {
        /// The tenant.
        name: String,
    },
    /// End the tenant's processes (SIGTERM, then SIGKILL after a grace time).
    Stop {
        /// The tenant.
        name: String,
    },
    /// Take a snapshot. Answered when it can be restored, or, with `persist`,
    /// when it is on disk.
    Snapshot {
        /// The tenant.
        name: String,
        /// A second name for it; must be free among the tenant's snapshots.
        label: Option<String>,
        /// Keep it on disk, so that it survives a reboot.
        persist: bool,
    },
    /// Take a snapshot of the tenant that the calling process belongs to, which
    /// is what the library inside a program asks. Answered by
    /// [`Reply::Snapshot`](crate::Reply::Snapshot) when it can be restored. In what is
    /// restored, the connection is at its end.
    SnapshotSelf {
        /// As for [`Request::Snapshot`].
        label: Option<String>,
    },
    /// Set something for ranges of the calling process's memory, for all or none:
    /// what the library inside a program asks (`include/strata.h`). Answered by
    /// [`Reply::Place`](crate::Reply::Place).
    Place {
        /// What.
        wish: PlaceWish,
        /// First bytes and ends, whole pages: 1 to
        /// [`MAX_PLACE_RANGES`](crate::MAX_PLACE_RANGES).
        ranges: Vec<(u64, u64)>,
    },
    /// Where pages of the calling process live. Answered by
    /// [`Reply::Where`](crate::Reply::Where).
    Where {
        /// First byte of the first.
        start: u64,
        /// How many: 1 to [`MAX_PLACE_PAGES`](crate::MAX_PLACE_PAGES).
        pages: u32,
    },
    /// The snapshots of the caller.
    Snapshots {
        /// Only those taken of the tenant of this name, which need not be there
        /// any more; none: all.
        name: Option<String>,
        /// Without what they cost: for that every page of each is looked at.
        #[serde(default)]
        brief: bool,
    },
    /// Put a living tenant back to a snapshot: its processes end, those of the
    /// snapshot take their place, under the same name and with its budget.
    Rollback {
        /// The tenant.
        name: String,
        /// Usually one of its own; or the one that it was cloned from.
        snapshot: SnapshotRef,
    },
    /// What became of a process of a tenant, for whoever waits for it: answered when no
    /// rollback of the tenant is under way.
    Became {
        /// The tenant.
        name: String,
        /// The process; it has ended.
        pid: u32,
    },
    /// Bring a tenant back that has ended.
    Restore {
        /// Which.
        snapshot: SnapshotRef,
        /// The new tenant's name, which must be free; none: the old one.
        name: Option<String>,
    },
    /// Start further tenants from a snapshot, beside the original.
    Clone {
        /// Which.
        snapshot: SnapshotRef,
        /// How many: 1 to [`MAX_CLONES`](crate::MAX_CLONES). All come to life or none.
        count: u32,
        /// The clone's name; of several, what their names begin with: `NAME-1`,
        /// `NAME-2`, … None: the daemon makes one of the snapshot's tenant.
        name: Option<String>,
        /// Where their network is.
        net: Net,
        /// Ports that lead to them; only with [`Net::New`].
        forwards: Vec<PortForward>,
        /// What becomes of established connections.
        tcp: Tcp,
        /// Directories (absolute paths) of which each clone sees a copy of its
        /// own at the same place.
        copy_dirs: Vec<String>,
    },
    /// Remove a snapshot, and free what nothing else refers to.
    SnapshotRemove {
        /// Which.
        snapshot: SnapshotRef,
    },
    /// Write a snapshot to disk, so that it survives a reboot.
    SnapshotPersist {
        /// Which.
        snapshot: SnapshotRef,
    },
    /// Write a snapshot into one file, for another machine.
    SnapshotExport {
        /// Which.
        snapshot: SnapshotRef,
        /// The file, an absolute path; it must not be there yet. Made for its
        /// owner only.
        path: String,
    },
    /// Write one process of a snapshot into a core file, for debuggers.
    SnapshotCore {
        /// Which.
        snapshot: SnapshotRef,
        /// The process's number when the snapshot was taken.
        pid: u32,
        /// The file, an absolute path; it must not be there yet. Made for its
        /// owner only.
        path: String,
    },
    /// Take in a snapshot that another machine wrote.
    SnapshotImport {
        /// The file, an absolute path.
        path: String,
        /// The tenant name that it gets; none: the one that it had.
        name: Option<String>,
        /// Also where this machine's processor lacks instructions that the other
        /// one had: its programs do not use them, says the user.
        #[serde(default)]
        any_cpu: bool,
        /// Whatever it asks for, and whoever wrote it.
        #[serde(default)]
        trust: bool,
        /// Only say what it asks for.
        #[serde(default)]
        dry_run: bool,
    },
    /// Move a tenant to another daemon, or settle a move that was cut. From here on the
    /// connection carries frames: see [`MoveWord`](crate::MoveWord) and
    /// [`MoveNear`](crate::MoveNear).
    Move {
        /// The tenant.
        name: String,
        /// Where it goes, for messages.
        host: String,
        /// Only settle what an earlier move has left.
        #[serde(default)]
        settle: bool,
        /// A guest's disks go along.
        #[serde(default)]
        copy_disks: bool,
        /// It runs there before all of its memory has come.
        #[serde(default)]
        at_once: bool,
    },
    /// Carry what is said about a disk that goes along. As for [`Request::Move`].
    MoveDisk {
        /// Of the move.
        id: String,
        /// Which disk.
        number: u32,
    },
    /// Take a tenant in that another daemon moves here. As for [`Request::Move`].
    Receive,
}

impl Request {
    /// What is wrong with a request about snapshots as it stands, whatever there
    /// is to take them of; None when nothing is. The command line says it before
    /// it asks, the daemon before it does anything. (Tenant names and budgets
    /// are not looked at; what names a snapshot is checked by its type.)
    #[must_use]
    pub fn snapshot_problem(&self) -> Option<String> {
        match self {
            Self::Snapshot { label: Some(label), .. }
            | Self::SnapshotSelf { label: Some(label) } => label_problem(label).map(str::to_owned),
            Self::Clone { count, name, net, forwards, tcp, copy_dirs, .. } => {
                snapshot::count_problem(*count, name.as_deref())
                    .or_else(|| snapshot::forwards_problem(*count, *net, forwards))
                    .or_else(|| snapshot::tcp_problem(*count, *net, *tcp))
                    .or_else(|| snapshot::copy_dirs_problem(copy_dirs))
            }
            Self::SnapshotExport { path, .. }
            | Self::SnapshotCore { path, .. }
            | Self::SnapshotImport { path, .. } => snapshot::path_problem(path),
            _ => None,
        }
    }

    /// Whether it is about the calling process itself: one that has ended by then
    /// must not speak for whoever has its number.
    #[must_use]
    pub fn is_about_the_caller(&self) -> bool {
        matches!(
            self,
            Self::Run { .. }
                | Self::GuestAgain { .. }
                | Self::SnapshotSelf { .. }
                | Self::Place { .. }
                | Self::Where { .. }
        )
    }

    /// What is wrong with a request to share out, whoever asks; None when nothing
    /// is.
    #[must_use]
    pub fn curve_problem(&self) -> Option<&'static str> {
        let Self::ShareOut { curves, .. } = self else { return None };
        curves.iter().find_map(|curve| advice::curve_problem(curve))
    }

    /// Whether the connection carries frames from here on, and no reply line.
    #[must_use]
    pub fn is_conversation(&self) -> bool {
        matches!(self, Self::Move { .. } | Self::MoveDisk { .. } | Self::Receive)
    }

    /// Whether [`Progress`](crate::Progress) lines may come before the reply.
    #[must_use]
    pub fn shows_progress(&self) -> bool {
        match self {
            Self::Snapshot { .. }
            | Self::SnapshotSelf { .. }
            | Self::Rollback { .. }
            | Self::Restore { .. }
            | Self::Clone { .. }
            | Self::GuestAgain { .. }
            | Self::GuestFill { .. }
            | Self::GuestOrder { .. }
            | Self::SnapshotRemove { .. }
            | Self::SnapshotPersist { .. }
            | Self::SnapshotExport { .. }
            | Self::SnapshotCore { .. }
            | Self::SnapshotImport { .. } => true,
            Self::Ping
            | Self::Move { .. }
            | Self::MoveDisk { .. }
            | Self::Receive
            | Self::GuestResume { .. }
            | Self::Reload
            | Self::Upgrade
            | Self::Run { .. }
            | Self::Guest { .. }
            | Self::List { .. }
            | Self::Stats { .. }
            | Self::Set { .. }
            | Self::Claim { .. }
            | Self::Shares
            | Self::Place { .. }
            | Self::Where { .. }
            | Self::Advise { .. }
            | Self::ShareOut { .. }
            | Self::Release { .. }
            | Self::Stop { .. }
            | Self::Became { .. }
            | Self::PoolCreate { .. }
            | Self::Pools
            | Self::PoolEmpty { .. }
            | Self::PoolRemove { .. }
            | Self::Snapshots { .. } => false,
        }
    }
}
