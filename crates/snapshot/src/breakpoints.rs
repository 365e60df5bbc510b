//! Lets CRIU set breakpoints without waiting.
//!
//! CRIU stops each thread that it lets go at a breakpoint, for the kernel an
//! event of a task. The first such event of a machine makes it wait for all CPUs (an
//! RCU grace period, milliseconds) while the processes stand still. While there is
//! one of ours it need not; to make ours takes as long, while CRIU starts.

use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

use strata_sys::idle_task_event;

/// While this is there, breakpoints are at once; soon after it begins.
#[derive(Debug)]
pub(crate) struct Breakpoints {
    _until: Sender<()>,
}

impl Breakpoints {
    pub(crate) fn ahead() -> Self {
        let (until, dropped) = channel();
        let hold = move || {
            let _event = idle_task_event();
            let _ = dropped.recv();
        };
        // Without it, or its event, CRIU waits.
        let _ = Builder::new().name("breakpoints".into()).stack_size(64 << 10).spawn(hold);
        Self { _until: until }
    }
}
