//! How a page comes in: the messages of a userfaultfd and what each does to the page
//! map, the handler that fills pages, and what it brings ahead.

pub(crate) mod clustering;
pub(crate) mod events;
pub(crate) mod handler;
pub(crate) mod inherit;
pub(crate) mod reads;
pub(crate) mod streams;
pub(crate) mod unattended;

#[cfg(test)]
mod fork_tests;
#[cfg(test)]
mod read_tests;
#[cfg(test)]
mod ring_tests;
#[cfg(test)]
pub(crate) mod serve_tests;
