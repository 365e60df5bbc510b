//! The configuration as it is now, for all of a worker's parts: whoever needs it asks each
//! time, so that one that is read again holds at once.

use std::sync::{Arc, PoisonError, RwLock};

use crate::config::Config;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Current(RwLock<Arc<Config>>);

impl Current {
    pub(crate) fn new(config: Config) -> Arc<Self> {
        Arc::new(Self(RwLock::new(Arc::new(config))))
    }

    pub(crate) fn get(&self) -> Arc<Config> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set(&self, config: Config) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }
}
