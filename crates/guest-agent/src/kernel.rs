//! What the guest's kernel says of memory in `/proc`. The files stay open, and are read into
//! one buffer.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use strata_units::reading::Reading;

/// `/proc/vmstat` has some 5 KiB.
const MAX_FILE_BYTES: usize = 32 << 10;

/// Its files.
pub(crate) struct Kernel {
    meminfo: File,
    vmstat: Option<File>,
    /// Kernels that were told so have none.
    pressure: Option<File>,
    uptime: File,
    buffer: Vec<u8>,
}

impl Kernel {
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self {
            meminfo: File::open("/proc/meminfo")?,
            vmstat: File::open("/proc/vmstat").ok(),
            pressure: File::open("/proc/pressure/memory").ok(),
            uptime: File::open("/proc/uptime")?,
            buffer: vec![0; MAX_FILE_BYTES],
        })
    }

    pub(crate) fn look(&mut self) -> io::Result<Reading> {
        let mut reading = Reading::default();
        let Self { meminfo, vmstat, pressure, uptime, buffer } = self;
        reading.at_ms = uptime_ms(text(uptime, buffer)?).ok_or(io::ErrorKind::InvalidData)?;
        if let Some(pressure) = pressure
            && let Ok(text) = text(pressure, buffer)
        {
            take_pressure(&mut reading, text);
        }
        if let Some(vmstat) = vmstat
            && let Ok(text) = text(vmstat, buffer)
        {
            take_vmstat(&mut reading, text);
        }
        if !take_meminfo(&mut reading, text(meminfo, buffer)?) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(reading)
    }
}

/// What a file says, as far as the buffer goes.
fn text<'a>(file: &File, buffer: &'a mut [u8]) -> io::Result<&'a str> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read_at(&mut buffer[length..], length as u64)? {
            0 => break,
            count => length += count,
        }
    }
    std::str::from_utf8(&buffer[..length]).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// `SECONDS.HUNDREDTHS …`
fn uptime_ms(text: &str) -> Option<u64> {
    let (seconds, hundredths) = text.split(' ').next()?.split_once('.')?;
    let hundredths: u64 = hundredths.trim().parse().ok()?;
    Some(seconds.parse::<u64>().ok()? * 1000 + hundredths * 10)
}

/// `Name:   NUMBER kB`, in bytes. False: what every kernel since 3.14 has is not there.
fn take_meminfo(reading: &mut Reading, text: &str) -> bool {
    let (mut total, mut free, mut available) = (None, None, None);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(number)) = (words.next(), words.next()) else { continue };
        let Ok(kib) = number.parse::<u64>() else { continue };
        let bytes = kib.saturating_mul(1024);
        match name {
            "MemTotal:" => total = Some(bytes),
            "MemFree:" => free = Some(bytes),
            "MemAvailable:" => available = Some(bytes),
            "Dirty:" | "Writeback:" => reading.dirty_bytes += bytes,
            "Committed_AS:" => reading.committed_bytes = Some(bytes),
            _ => {}
        }
    }
    let (Some(total), Some(free), Some(available)) = (total, free, available) else {
        return false;
    };
    (reading.total_bytes, reading.free_bytes, reading.available_bytes) = (total, free, available);
    true
}

/// `some avg10=… avg60=… avg300=… total=MICROSECONDS`, and the same for `full`.
fn take_pressure(reading: &mut Reading, text: &str) {
    for line in text.lines() {
        let total = line.rsplit_once("total=").and_then(|(_, total)| total.trim().parse().ok());
        if line.starts_with("some ") {
            reading.some_us = total;
        } else if line.starts_with("full ") {
            reading.full_us = total;
        }
    }
}

/// `name NUMBER`.
fn take_vmstat(reading: &mut Reading, text: &str) {
    for line in text.lines() {
        let Some((name, number)) = line.split_once(' ') else { continue };
        let Ok(number) = number.trim().parse::<u64>() else { continue };
        match name {
            // One of these, or, before Linux 5.9, the first alone.
            "workingset_refault" | "workingset_refault_anon" | "workingset_refault_file" => {
                reading.refaulted_pages = Some(reading.refaulted_pages.unwrap_or(0) + number);
            }
            "pswpin" => reading.swapped_in_pages = Some(number),
            "pswpout" => reading.swapped_out_pages = Some(number),
            "pgmajfault" => reading.major_faults = Some(number),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read() {
        let mut reading = Reading::default();
        let meminfo = "MemTotal:        1000 kB\nMemFree:          200 kB\nMemAvailable:     300 kB\n\
                       Dirty:             4 kB\nWriteback:         1 kB\nCommitted_AS:  5000 kB\n\
                       HugePages_Total:   0\nMemFreeX: 9 kB\n";
        assert!(take_meminfo(&mut reading, meminfo));
        take_pressure(
            &mut reading,
            "some avg10=0.00 avg60=1.50 avg300=0.00 total=1234\n\
             full avg10=0.00 avg60=0.00 avg300=0.00 total=56\n",
        );
        take_vmstat(
            &mut reading,
            "nr_free_pages 5\nworkingset_refault_anon 3\nworkingset_refault_file 4\n\
             pswpin 1\npswpout 2\npgmajfault 9\nodd\n",
        );
        let expected = Reading {
            total_bytes: 1000 << 10,
            free_bytes: 200 << 10,
            available_bytes: 300 << 10,
            dirty_bytes: 5 << 10,
            committed_bytes: Some(5000 << 10),
            some_us: Some(1234),
            full_us: Some(56),
            refaulted_pages: Some(7),
            swapped_in_pages: Some(1),
            swapped_out_pages: Some(2),
            major_faults: Some(9),
            ..Reading::default()
        };
        assert_eq!(reading, expected);
        assert!(!take_meminfo(&mut reading, "MemTotal: 5 kB\nMemFree: 1 kB\n"));
        assert_eq!(uptime_ms("61.07 120.00\n"), Some(61_070));
        assert_eq!((uptime_ms(""), uptime_ms("x.y z")), (None, None));
    }

    #[test]
    fn this_machines_kernel_is_read() {
        let mut kernel = Kernel::open().expect("there is a /proc");
        let first = kernel.look().expect("it is read");
        assert!(first.total_bytes > first.available_bytes && first.available_bytes > 0);
        assert!(first.committed_bytes.is_some_and(|bytes| bytes > 0) && first.at_ms > 0);
        let line = first.to_string();
        assert_eq!(Reading::parse(line.as_bytes()), Some(first));
        assert!(kernel.look().expect("and again").at_ms >= first.at_ms);
    }
}
