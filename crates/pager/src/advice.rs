//! What a tenant needs and what of it is not managed: a sample of a tenant far from
//! its budget, and a survey of its processes.

pub(crate) mod sample;
pub(crate) mod survey;
