//! The thread that goes round the tenants and looks what of them is not managed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use strata_pager::wait_for_questions;

use crate::tenants::Tenants;

/// How often it goes when nobody asks.
const EVERY: Duration = Duration::from_secs(1);

/// Starts it.
pub(crate) fn start(tenants: &Arc<Tenants>) -> io::Result<()> {
    let tenants = Arc::clone(tenants);
    std::thread::Builder::new().name("surveyor".into()).spawn(move || {
        loop {
            wait_for_questions(EVERY);
            for tenant in tenants.list() {
                tenant.survey();
            }
        }
    })?;
    Ok(())
}
