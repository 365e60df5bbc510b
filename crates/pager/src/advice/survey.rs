//! What of a tenant is not managed, and why: processes that no agent is in, and memory
//! of the others by the reason for which it is left alone. Nothing is decided by it but
//! what they cost.
//!
//! Reads the kernel's tables of whole processes, so it has a thread of its own
//! (`stratad`'s surveyor), takes a small part of one processor, and whoever asks waits
//! for it with a limit.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use strata_sys::{MappingUse, is_zombie, stat_field};
use strata_units::wire::ENV_TOKEN;
use strata_units::{ByteSize, PAGE_SIZE};

use crate::map::lock;
use crate::regions::eligibility::{Why, eligibility};
use crate::regions::registration::stacks_of;
use crate::tenant::Tenant;
use crate::tenant::surveyed::{State, Survey, Unattended, Unmanaged};
use crate::tenant::usage::{proportional_shared, proportional_unattended};

/// A survey that is younger serves whoever asks.
const FRESH: Duration = Duration::from_secs(2);
/// Whoever asks waits so long for surveys, of one tenant or of many.
pub const SURVEY_PATIENCE: Duration = Duration::from_millis(300);
/// Memory is surveyed as long as somebody has asked within this time.
const ASKED_WITHIN: Duration = Duration::from_secs(10);
/// A survey may take one part in so many of the time.
const SURVEY_PART: u32 = 50;
/// Processes without an agent that are named.
const MOST_NAMED: usize = 32;
/// Processes of a tenant that are looked at.
const MOST_PROCESSES: usize = 4096;
/// A younger process may still be starting: its agent may be about to come.
const YOUNG: Duration = Duration::from_secs(1);
/// A clone's first process.
const OWN_HELPER: &str = "strata-clone";
/// How often a tenant is looked through whose processes do not run, and had none beside
/// them that no agent is in: only who may move processes between cgroups can give it one.
const STILL_EVERY: Duration = Duration::from_secs(128);
/// Longest environment that is looked at.
const MOST_ENVIRONMENT_BYTES: u64 = 256 << 10;

/// Whether somebody has asked, and since when a survey is under way.
static QUESTIONS: Mutex<(bool, Option<Instant>)> = Mutex::new((false, None));
static ASKED: Condvar = Condvar::new();

/// Waits until somebody asks, for so long at most.
pub fn wait_for_questions(at_most: Duration) {
    let questions = QUESTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = ASKED.wait_timeout_while(questions, at_most, |(asked, _)| !*asked);
    waited.unwrap_or_else(PoisonError::into_inner).0.0 = false;
}

impl Tenant {
    /// Has it surveyed with the others: whoever wants to know of many tenants asks for all
    /// of them first, and does not wait for each of them in turn.
    pub fn ask_for_survey(&self) {
        lock(&self.survey.state).asked = Some(Instant::now());
    }

    /// The last survey, a fresh one if that can be had by then.
    #[must_use]
    pub fn surveyed(&self, by: Instant) -> Survey {
        let mut state = lock(&self.survey.state);
        let now = Instant::now();
        state.asked = Some(now);
        let is_fresh = |state: &State| state.taken.is_some_and(|when| now < when + FRESH);
        let rests = state.next.is_some_and(|next| now < next);
        if !is_fresh(&state) && !rests {
            let mut questions = QUESTIONS.lock().unwrap_or_else(PoisonError::into_inner);
            questions.0 = true;
            let hangs = questions.1.is_some_and(|since| now > since + SURVEY_PATIENCE);
            drop(questions);
            ASKED.notify_one();
            if !hangs {
                let patience = by.saturating_duration_since(now);
                let waited =
                    self.survey.done.wait_timeout_while(state, patience, |state| !is_fresh(state));
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.survey.clone()
    }

    /// Surveys the tenant: its processes, and its memory if somebody wants to know.
    pub fn survey(&self) {
        if self.is_released() {
            // Its programs are anybody's, and so are their children.
            self.unattended_bytes.store(0, Ordering::Relaxed);
            self.hold_note("unattended", None);
            let mut state = lock(&self.survey.state);
            state.survey = Survey::default();
            state.taken = Some(Instant::now());
            self.survey.done.notify_all();
            return;
        }
        let began = Instant::now();
        let wants_memory = {
            let mut state = lock(&self.survey.state);
            let asked = state.asked.is_some_and(|when| began < when + ASKED_WITHIN);
            let recent = state.looked.is_some_and(|when| began < when + STILL_EVERY);
            let stands_still = state.stands_still(self);
            if !asked && recent && stands_still {
                return;
            }
            state.looked = Some(began);
            asked && state.next.is_none_or(|next| began >= next)
        };
        lock(&QUESTIONS).1 = Some(began);
        let mut survey = self.survey_processes();
        let unattended_bytes = survey.unmanaged.unattended_bytes;
        if self.unattended_bytes.swap(unattended_bytes, Ordering::Relaxed) != unattended_bytes {
            // It may rest, and nobody else tells it.
            self.wake_keeper();
        }
        self.note_unattended(&survey);
        if wants_memory {
            for space in self.space_list() {
                let Some(agent) = space.agent() else { continue };
                let Ok(uses) = agent.process.mapping_uses() else { continue };
                let Ok(maps) = agent.process.maps() else { continue };
                let stacks = stacks_of(agent.control.control());
                let eligibility = eligibility(&maps, agent.ranges, &stacks);
                for MappingUse { mapping, anonymous_bytes } in uses {
                    let gate = lock(&space.gate);
                    let registered = gate.is_registered(mapping.range);
                    drop(gate);
                    // One that is new since then is counted in the next survey.
                    let at =
                        eligibility.partition_point(|(m, _)| m.range.end <= mapping.range.start);
                    if !registered && let Some(&(_, eligible)) = eligibility.get(at) {
                        count(&mut survey.unmanaged, eligible, anonymous_bytes);
                    }
                }
            }
        }
        lock(&QUESTIONS).1 = None;
        let mut state = lock(&self.survey.state);
        if !wants_memory {
            let unattended_bytes = survey.unmanaged.unattended_bytes;
            survey.unmanaged = Unmanaged { unattended_bytes, ..state.survey.unmanaged };
            state.survey = survey;
            return;
        }
        state.survey = survey;
        state.taken = Some(Instant::now());
        state.next = Some(Instant::now() + began.elapsed() * SURVEY_PART);
        self.survey.done.notify_all();
    }

    /// The processes that no agent is in.
    fn survey_processes(&self) -> Survey {
        let mut attended: BTreeSet<u32> = self.pids().into_iter().collect();
        attended.insert(std::process::id());
        let mut survey = Survey::default();
        let has_cgroup = self.record.cgroup.is_some();
        let mut shared_bytes = 0;
        for pid in self.all_processes(&attended) {
            if !has_cgroup {
                shared_bytes += proportional_shared(pid);
            }
            if attended.contains(&pid) || is_zombie(pid) || is_young(pid) || is_own_helper(pid) {
                continue;
            }
            let Some(bytes) = proportional_unattended(pid) else { continue };
            survey.unmanaged.unattended_bytes += bytes;
            survey.unattended_processes += 1;
            if survey.unattended.len() < MOST_NAMED {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let name = name.trim_end().to_owned();
                survey.unattended.push(Unattended {
                    pid,
                    name,
                    bytes,
                    why: why(pid, self.record.uid),
                });
            }
        }
        if !has_cgroup {
            lock(&self.shared).bytes = shared_bytes;
        }
        survey
    }

    /// All processes that are the tenant's, as its cgroup has it or, without one, those
    /// that descend from processes with an agent.
    fn all_processes(&self, attended: &BTreeSet<u32>) -> BTreeSet<u32> {
        let own = std::process::id();
        if let Some(directory) = &self.record.cgroup {
            let text = fs::read_to_string(Path::new(directory).join("cgroup.procs"));
            let numbers = text.unwrap_or_default();
            return numbers
                .lines()
                .filter_map(|line| line.parse().ok())
                .take(MOST_PROCESSES)
                .collect();
        }
        let mut found = BTreeSet::new();
        let mut left: Vec<u32> = attended.iter().copied().filter(|&pid| pid != own).collect();
        while let Some(pid) = left.pop() {
            if found.len() < MOST_PROCESSES && found.insert(pid) {
                left.extend(children_of(pid));
            }
        }
        found
    }

    fn note_unattended(&self, survey: &Survey) {
        let text = survey.unattended.first().map(|one| {
            let Unattended { pid, name, why, .. } = one;
            let more = match survey.unattended_processes {
                1 => String::new(),
                count => format!(" (and {} more: strata stats --json names them)", count - 1),
            };
            let bytes = ByteSize(survey.unmanaged.unattended_bytes);
            format!("{bytes} are in processes that are not managed: {name} ({pid}): {why}{more}")
        });
        // The log names each once; the note holds as long as there is one.
        let mut state = lock(&self.survey.state);
        state.said.retain(|pid| survey.unattended.iter().any(|one| one.pid == *pid));
        let new: Vec<&Unattended> =
            survey.unattended.iter().filter(|one| state.said.insert(one.pid)).collect();
        drop(state);
        for Unattended { pid, name, why, .. } in new.into_iter().take(1) {
            self.log(&format!("process {pid} ({name}) is not managed: {why}"));
        }
        self.hold_note("unattended", text);
    }
}

/// Whether it is the process of Strata's that a clone has above it.
fn is_own_helper(pid: u32) -> bool {
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    program.file_name().is_some_and(|name| name == OWN_HELPER)
}

/// Whether a process began a moment ago.
fn is_young(pid: u32) -> bool {
    // Of its directory the kernel tells when somebody looked first; its own start is in
    // hundredths of a second since the machine's.
    let began =
        stat_field(&format!("/proc/{pid}/stat"), 22).and_then(|text| text.parse::<u64>().ok());
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let now = uptime.split_ascii_whitespace().next().and_then(|text| text.parse::<f64>().ok());
    match (began, now) {
        (Some(began), Some(now)) => now - (began as f64 / 100.0) < YOUNG.as_secs_f64(),
        _ => true,
    }
}

fn children_of(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    texts
        .flat_map(|text| {
            let numbers = text.split_ascii_whitespace().filter_map(|word| word.parse().ok());
            numbers.collect::<Vec<u32>>()
        })
        .collect()
}

/// Adds memory that is not registered to the cause for which it is not.
fn count(unmanaged: &mut Unmanaged, eligible: Result<(), Why>, bytes: u64) {
    let cause = match eligible {
        Ok(()) => &mut unmanaged.untouched_bytes,
        Err(Why::Shared | Why::Agent) => return,
        Err(Why::Executable) => &mut unmanaged.executable_bytes,
        Err(Why::File | Why::DevZero) => &mut unmanaged.files_bytes,
        Err(Why::Kernel | Why::Stack) => &mut unmanaged.stacks_bytes,
        Err(Why::Small) => &mut unmanaged.small_bytes,
    };
    *cause += bytes;
}

/// Why no agent is in a process, as far as can be seen from outside.
fn why(pid: u32, tenant_uid: u32) -> &'static str {
    if let Ok(file) = File::open(format!("/proc/{pid}/exe"))
        && let Some(why) = program_keeps_out(&file)
    {
        return why;
    }
    let mut environment = Vec::new();
    let is_read = File::open(format!("/proc/{pid}/environ"))
        .and_then(|file| file.take(MOST_ENVIRONMENT_BYTES).read_to_end(&mut environment))
        .is_ok();
    let has = |name: &str| {
        environment.split(|byte| *byte == 0).any(|entry| {
            entry.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'='))
        })
    };
    if is_read && !(has("LD_PRELOAD") && has(ENV_TOKEN)) {
        return "it was started without Strata's environment (sudo, env -i)";
    }
    let owner = fs::metadata(format!("/proc/{pid}")).map(|directory| directory.uid());
    match owner {
        Ok(uid) if uid != 0 && uid != tenant_uid => {
            "its user may not use userfaultfd (see uffd_users)"
        }
        _ => "no agent came; its standard error may say why",
    }
}

/// Why the library cannot be in a program, by its file.
fn program_keeps_out(file: &File) -> Option<&'static str> {
    const INTERPRETER: u32 = 3;
    let mut head = [0; PAGE_SIZE];
    let count = file.read_at(&mut head, 0).ok()?;
    let head = &head[..count];
    if !head.starts_with(b"\x7fELF") {
        return None;
    }
    if head.get(4) != Some(&2) {
        return Some("it is built for 32 bits");
    }
    let number = |at: usize, bytes: usize| {
        let field = head.get(at..at + bytes)?;
        Some(field.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    let table = number(32, 8)? as usize;
    let (size, entries) = (number(54, 2)? as usize, number(56, 2)? as usize);
    for entry in 0..entries {
        let at = table.checked_add(entry.checked_mul(size)?)?;
        if number(at, 4)? == u64::from(INTERPRETER) {
            let (start, length) = (number(at + 8, 8)? as usize, number(at + 32, 8)? as usize);
            let name = head.get(start..start.checked_add(length)?)?;
            let is_musl = name.windows(7).any(|part| part == b"ld-musl");
            return is_musl.then_some("it is linked with musl");
        }
    }
    Some("it is statically linked")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(class: u8, interpreter: Option<&[u8]>) -> Vec<u8> {
        let mut file = vec![0; 256];
        file[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', class]);
        (file[32], file[54], file[56]) = (64, 56, 1);
        if let Some(name) = interpreter {
            (file[64], file[72], file[96]) = (3, 200, name.len() as u8);
            file[200..200 + name.len()].copy_from_slice(name);
        }
        file
    }

    #[test]
    fn what_a_program_is_linked_with_is_in_its_file() {
        let path = std::env::temp_dir().join(format!("strata-elf-{}", std::process::id()));
        let said = |bytes: &[u8]| {
            fs::write(&path, bytes).expect("a file");
            program_keeps_out(&File::open(&path).expect("there"))
        };
        assert_eq!(said(&elf(2, None)), Some("it is statically linked"));
        assert_eq!(said(&elf(1, None)), Some("it is built for 32 bits"));
        assert_eq!(
            said(&elf(2, Some(b"/lib/ld-musl-x86_64.so.1\0"))),
            Some("it is linked with musl")
        );
        assert_eq!(said(&elf(2, Some(b"/lib64/ld-linux-x86-64.so.2\0"))), None);
        // Cut short, or no program at all.
        assert_eq!(said(&elf(2, Some(b"/lib"))[..60]), None);
        assert_eq!(said(b"#!/bin/sh\n"), None);
        fs::remove_file(&path).expect("removed");
        let own = File::open("/proc/self/exe").expect("this program");
        assert_eq!(program_keeps_out(&own), None);
    }

    #[test]
    fn a_process_is_young_at_first() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        assert!(is_young(child.id()));
        assert!(!is_young(1));
        assert!(children_of(std::process::id()).contains(&child.id()));
        child.kill().expect("killed");
        child.wait().expect("collected");
    }
}
