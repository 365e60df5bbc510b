//! Redis as a subject: its protocol, the load on it, and its process.
pub(crate) mod command;
pub(crate) mod expect;
#[cfg(test)]
mod fake;
pub(crate) mod load;
pub(crate) mod outcome;
pub(crate) mod resp;
pub(crate) mod server;
pub(crate) mod tally;
