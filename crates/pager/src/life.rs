//! How the tenants of a worker that died go on with the next one, and how a tenant is
//! released.

pub(crate) mod recover;
pub(crate) mod release;
