//! What may be typed of virtual machines.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use strata_api::{MAX_CLONES, SnapshotRef};
use strata_units::ByteSize;

use super::{ClaimArguments, label, tenant_name};

/// What to do with virtual machines.
#[derive(Subcommand, Debug)]
pub(crate) enum VmCommand {
    /// Start a QEMU guest under a DRAM budget
    ///
    /// Completes QEMU's command line, says what it added, and becomes QEMU. The guest's
    /// cold pages sink as any program's do; what the guest frees costs nothing. Guests
    /// whose memory others share or that is pinned are refused.
    Run(VmRunArguments),
    /// Make a guest of libvirt's a tenant
    ///
    /// Shows what has to be changed in the domain, which --apply then changes, and the
    /// rule that the daemon's configuration has to have. It holds from the guest's next
    /// start. Guests whose memory others share or that is pinned are refused.
    Libvirt(VmLibvirtArguments),
    /// Take a snapshot of a guest: its memory, its devices and its disks, of one moment
    ///
    /// As `strata snapshot`. The guest stays on its own images; the snapshot has copies.
    Snapshot {
        /// The guest
        #[arg(value_parser = tenant_name)]
        name: String,
        /// A second name for the snapshot
        #[arg(long, value_parser = label)]
        label: Option<String>,
        /// Write it to disk, so that it survives a reboot
        #[arg(long)]
        persist: bool,
    },
    /// Take a snapshot of a guest at a good moment, which is waited for
    ///
    /// Clones of it begin where the guest has booted and warmed up.
    Template(crate::template::VmTemplateArguments),
    /// Bring a guest back that has ended
    ///
    /// As `strata restore`.
    Restore {
        /// The snapshot: NAME@N or NAME@LABEL
        #[arg(value_name = "SNAP")]
        snapshot: SnapshotRef,
        /// Another name for the guest
        #[arg(long, value_parser = tenant_name)]
        name: Option<String>,
    },
    /// Start further guests from a snapshot, beside the original
    ///
    /// As `strata clone`. Each has a QEMU, a monitor and consoles of its own.
    Clone {
        /// The snapshot: NAME@N or NAME@LABEL
        #[arg(value_name = "SNAP")]
        snapshot: SnapshotRef,
        /// How many
        #[arg(long, value_name = "K", default_value = "1",
            value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CLONES)))]
        count: u32,
        /// The clone's name; of several NAME-1, NAME-2, …
        #[arg(long, value_parser = tenant_name)]
        name: Option<String>,
        #[command(flatten)]
        network: super::snapshot::NetworkArguments,
    },
    /// List the guests
    Ls {
        /// Print a JSON array of objects, as `stats --json` prints one
        #[arg(long)]
        json: bool,
    },
    /// Show one guest's memory: promised, resident, stored, freed
    Stats {
        /// The guest
        #[arg(value_parser = tenant_name)]
        name: String,
        /// Print one JSON object, as `strata stats --json` does
        #[arg(long)]
        json: bool,
    },
    /// Let a guest run on that stands still
    ///
    /// QEMU stops a guest whose disk fails, as when an image's file system is full: `strata vm
    /// ls` shows io-error. When there is room the guest runs on, and writes what it could not.
    Resume {
        /// The guest
        #[arg(value_parser = tenant_name)]
        name: String,
    },
}

/// Which of libvirt's guests, and whether to change it.
#[derive(Args, Debug)]
pub(crate) struct VmLibvirtArguments {
    /// The domain, as libvirt names it
    pub(crate) domain: String,
    /// Change the domain; without this, only show what would be changed
    #[arg(long)]
    pub(crate) apply: bool,
    /// The DRAM budget of each guest in the rule that is proposed
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) dram: Option<ByteSize>,
}

/// How to start a guest.
#[derive(Args, Debug)]
pub(crate) struct VmRunArguments {
    /// The guest's name, and the tenant's; without one, what -name says
    #[arg(long, value_parser = tenant_name)]
    pub(crate) name: Option<String>,
    /// The memory that the guest is promised; without it, what -m says
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) memory: Option<ByteSize>,
    /// Its DRAM budget, QEMU's own memory included; without one, the daemon's default
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) dram: Option<ByteSize>,
    /// What it claims of a host's DRAM.
    #[command(flatten)]
    pub(crate) claim: ClaimArguments,
    #[command(flatten)]
    pub(crate) balloon: crate::self_balloon::SelfBalloonArguments,
    /// A disk that is read through a pool: IMAGE,cache=POOL[,format=…][,overlay=FILE]
    #[arg(long, value_name = "DISK")]
    pub(crate) disk: Vec<String>,
    /// A swap disk of that size, in memory: compressed, and equal pages once
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) swap: Option<ByteSize>,
    /// Print the command line that would be executed, and start nothing
    #[arg(long)]
    pub(crate) print: bool,
    /// QEMU and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "QEMU")]
    pub(crate) command: Vec<OsString>,
}
