//! A restore that is only to show that it can be done: what it touches of its memory
//! before its first instruction is empty.

use std::io;
use std::os::fd::AsFd;
use std::thread::Builder;
use std::time::Duration;

use strata_sys::{Event, Range, SharedMemory, Userfaultfd, poll_readable};
use strata_units::PAGE_SIZE;

use crate::restore::Arrival;

/// Faults that are read at a time, and how often it is looked whether the process is
/// there still.
const MESSAGES: usize = 64;
const LOOK_EVERY: Duration = Duration::from_millis(100);

impl Arrival {
    /// Answers whatever it touches with empty pages, for a rehearsal. Nobody may ever
    /// let it run.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn fill_with_nothing(self) -> io::Result<()> {
        let ring = SharedMemory::create("rehearsed", Userfaultfd::ring_bytes(MESSAGES) as u64)?;
        let fill = move || {
            let memory = Userfaultfd::adopt(self.userfaultfd);
            // Hung up with its last process.
            while let Ok([polled]) = poll_readable([memory.as_fd()], Some(LOOK_EVERY)) {
                if polled.hangup || !memory.is_alive() {
                    return;
                }
                let Ok(count) = memory.read_messages(&ring, 0, MESSAGES) else { return };
                for index in 0..count {
                    // All other events are answered by having been read.
                    if let Some(Event::Fault { address, .. }) =
                        Userfaultfd::message(&ring, 0, index)
                    {
                        let end = address + PAGE_SIZE as u64;
                        memory.zero(Range { start: address, end });
                    }
                }
            }
        };
        Builder::new().name("rehearse".into()).stack_size(64 << 10).spawn(fill)?;
        Ok(())
    }
}
