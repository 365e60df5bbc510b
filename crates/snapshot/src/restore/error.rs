//! Why a restore failed.

use std::io;
use std::time::Duration;

use crate::log::Complaint;

/// Why nothing was restored. Whatever was started has been ended.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// CRIU said no.
    #[error("it could not be restored: {0}")]
    Failed(Complaint),
    /// Numbers of processes or threads of the dump are in use.
    #[error("these process numbers of it are in use: {}; a clone (strata clone) has numbers of its own", .0.iter().map(|(number, name)| format!("{number} ({name})")).collect::<Vec<_>>().join(", "))]
    Taken(Vec<(u32, String)>),
    /// Processes of the dump have higher numbers than there are here.
    #[error(
        "process number {number} of it is beyond what this machine gives: kernel.pid_max is {limit}; raise it (sysctl kernel.pid_max=4194304)"
    )]
    TooHigh {
        /// The highest.
        number: u32,
        /// The first number that is not given.
        limit: u32,
    },
    /// It took too long.
    #[error("CRIU did not {what} within {limit:?}; what it had started was ended")]
    TooLong {
        /// What it was to do.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// It sent what CRIU does not send.
    #[error("CRIU sent something else than a process with its userfaultfd: {0}")]
    Protocol(String),
    /// The system refused something that is needed for it.
    #[error("{what}: {cause}")]
    System {
        /// What was being done.
        what: String,
        /// The cause.
        cause: io::Error,
    },
}

impl RestoreError {
    /// Whether somebody else has a number of the dump's: who has it may end.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        match self {
            Self::Taken(_) => true,
            Self::Failed(complaint) => complaint.is_of_taken_number(),
            _ => false,
        }
    }
}

pub(super) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> RestoreError {
    let what = what.into();
    move |cause| RestoreError::System { what, cause }
}
