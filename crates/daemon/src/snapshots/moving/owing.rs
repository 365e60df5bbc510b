//! A tenant runs here before all of its memory is here: what is said of that on the way, and
//! until it is whole.

use strata_api::MoveWord;
use strata_pager::Tenant;
use strata_snapshot::archive::Reader;
use strata_sys::{Priority, log};
use strata_units::{ADDRESSES_END, PAGE_SIZE};

use super::super::Snapshots;
use super::super::disk::Known;
use super::Wire;
use super::into::Coming;
use super::lend::lent_name;
use super::memories::ranges_in;
use super::owed::{Came, Head, Owed};
use crate::tenants::chain;

impl Snapshots {
    /// Takes in which pages come later: they are there from here on, and whoever needs one
    /// waits for it.
    pub(super) fn lent_in(
        &self,
        reader: &Reader,
        coming: &mut Coming<'_>,
        known: &Known,
        holder: &Tenant,
    ) -> Result<(), String> {
        let wrong = || "what arrived contradicts itself".to_owned();
        let page = PAGE_SIZE as u64;
        let (first, end) = known.guest.as_ref().map_or((page, ADDRESSES_END), |part| part.memory);
        let is_its = |&(start, end_of): &(u64, u64)| {
            start.is_multiple_of(page)
                && end_of.is_multiple_of(page)
                && first <= start
                && end_of <= end
        };
        let (mut addresses, mut parts) = (Vec::new(), Vec::new());
        for process in &known.processes {
            let ranges = ranges_in(reader, &lent_name(process.pid))?;
            let sum =
                |sum: u64, &(start, end): &(u64, u64)| sum.saturating_add((end - start) / page);
            let all = ranges.iter().fold(addresses.len() as u64, sum);
            if !ranges.iter().all(is_its) || all > u64::from(u32::MAX) {
                return Err(wrong());
            }
            let before = addresses.len();
            let each = |&(start, end): &(u64, u64)| (start..end).step_by(PAGE_SIZE);
            addresses.extend(ranges.iter().flat_map(each));
            if addresses.len() > before {
                parts.push((before, process.pid));
            }
        }
        let Some(&(_, pid)) = parts.first() else { return Ok(()) };
        let head = Head {
            id: coming.id.clone(),
            name: coming.name.clone(),
            from: coming.lender.clone().unwrap_or_default(),
            pid,
            others: parts[1..].iter().map(|&(first, pid)| (first as u32, pid)).collect(),
            pages: addresses.len() as u32,
        };
        let file = self.disk.nameless(&coming.id)?;
        let failed = |error: std::io::Error| format!("snapshot_dir: {}", chain(&error));
        let pages = Owed::create(file.try_clone().map_err(failed)?, head, addresses.clone());
        let pages = pages.map_err(failed)?.known();
        let file = holder.open_snapshot_file(file, Box::new(pages)).map_err(failed)?;
        let ends = parts.iter().skip(1).map(|&(first, _)| first).chain([addresses.len()]);
        for (&(first, pid), end) in parts.iter().zip(ends) {
            // One that cannot be updated is no more.
            let memory = coming.memories.remove(&pid).ok_or_else(wrong)?;
            let into = (memory, &file, first as u32);
            holder.adopt_over(into, &[], &addresses[first..end]).map_err(failed)?;
            coming.memories.insert(pid, memory);
        }
        Ok(())
    }

    /// It runs, or may: from here on whoever needs a page that has not come waits.
    pub(super) fn lets_run(&self, coming: &Coming<'_>) {
        if let Some((owed, _)) = &coming.owed {
            owed.runs(true);
        }
    }

    /// It runs, which is said when all of its memory is here: then nobody else's is needed any
    /// more. An error: it runs all the same, and waits for the rest.
    pub(super) fn say_whole(&self, coming: &Coming<'_>, wire: &mut Wire) -> Result<(), String> {
        if let Some((owed, way)) = &coming.owed {
            let name = &coming.name;
            say_owing(coming, wire);
            self.guests.step("owing");
            match owed.wait_whole(*way) {
                Came::Cut => {
                    let why = super::owes(name).unwrap_or_else(|| super::CUT.to_owned());
                    log(Priority::Warning, format_args!("{why}"));
                    return Err(why);
                }
                Came::Whole(0) => log(Priority::Notice, format_args!("{name}: all of it is here")),
                Came::Whole(lost) => log(
                    Priority::Error,
                    format_args!("{name}: {lost} pages of it are lost, and all others are here"),
                ),
                // It has ended.
                Came::Over => {}
            }
            self.guests.step("whole");
        }
        self.say_running(&coming.id, wire);
        Ok(())
    }
}

/// It runs, and what it is owed is said. If nobody hears that, he asks.
pub(super) fn say_owing(coming: &Coming<'_>, wire: &mut Wire) {
    if let Some((owed, _)) = &coming.owed {
        let _ = wire.say(&MoveWord::Owing { pages: owed.left() });
    }
}
