//! How a tenant gets its address spaces, and how the tenants of a worker that died go on
//! with the next one.

mod attach;
pub(crate) mod recover;
