//! The notes of a core file: what the kernel writes of a process that it dumps
//! (`elfcore.h`, `fs/binfmt_elf.c`), for 64-bit x86.

use super::process::{Mapping, Process, REGISTERS, Thread};
use crate::message::Message;

const PRSTATUS: u32 = 1;
const FPREGSET: u32 = 2;
const PRPSINFO: u32 = 3;
const AUXV: u32 = 6;
const X86_XSTATE: u32 = 0x202;
const SIGINFO: u32 = 0x5349_4749;
const FILES: u32 = 0x4649_4c45;

/// `elf_prstatus`, and where its parts are.
const STATUS_BYTES: usize = 336;
const STATUS_BLOCKED: usize = 24;
const STATUS_PID: usize = 32;
const STATUS_REGISTERS: usize = 112;
const STATUS_HAS_FLOATING: usize = STATUS_REGISTERS + 8 * REGISTERS as usize;
/// `elf_prpsinfo`.
const INFO_BYTES: usize = 136;
const INFO_NICE: usize = 3;
const INFO_USER: usize = 16;
const INFO_PID: usize = 24;
const INFO_NAME: usize = 40;
const INFO_ARGUMENTS: usize = 56;
const SIGINFO_BYTES: usize = 128;

/// Of a command line, with a NUL at its end.
pub(super) const ARGUMENT_BYTES: usize = 80;
const NAME_BYTES: usize = 16;
/// Of the list of files, as the kernel has it.
const MOST_FILE_BYTES: usize = 4 << 20;

/// The part of an extended state that FXSAVE writes, the header after it, and the
/// state with AVX.
const LEGACY_BYTES: usize = 512;
const ALL_BYTES: usize = 832;
const AVX: usize = 576;
/// Where the kernel leaves word of what the processor has; what of it is not in its
/// first state.
const FEATURES: usize = 464;
const IN_USE: usize = 512;
/// x87, SSE, AVX.
const KNOWN_FEATURES: u64 = 7;

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The values of a field as words, no more than `most`, from `at` on.
fn put_words(out: &mut [u8], at: usize, message: &Message, field: u64, most: usize) {
    for (index, word) in message.numbers(field).into_iter().take(most).enumerate() {
        put(out, at + 4 * index, &word.to_le_bytes());
    }
}

fn note(out: &mut Vec<u8>, owner: &[u8], kind: u32, content: &[u8]) {
    let lengths = [owner.len() + 1, content.len()];
    lengths.iter().for_each(|length| out.extend((*length as u32).to_le_bytes()));
    out.extend(kind.to_le_bytes());
    for bytes in [&[owner, b"\0"].concat(), content] {
        out.extend(bytes);
        out.resize(out.len().next_multiple_of(4), 0);
    }
}

fn status(process: &Process, thread: &Thread) -> Vec<u8> {
    let mut out = vec![0; STATUS_BYTES];
    put(&mut out, STATUS_BLOCKED, &thread.blocked.to_le_bytes());
    let numbers = [thread.tid, process.parent, process.group, process.session];
    for (index, number) in numbers.into_iter().enumerate() {
        put(&mut out, STATUS_PID + 4 * index, &number.to_le_bytes());
    }
    for (index, register) in thread.registers.iter().enumerate() {
        put(&mut out, STATUS_REGISTERS + 8 * index, &register.to_le_bytes());
    }
    out[STATUS_HAS_FLOATING] = 1;
    out
}

fn info(process: &Process, arguments: &[u8]) -> Vec<u8> {
    let mut out = vec![0; INFO_BYTES];
    // Whatever it did, it stands still in this file.
    put(&mut out, 1, b"R");
    out[INFO_NICE] = process.nice;
    let mut numbers = [process.user, process.user_group].map(u32::to_le_bytes).concat();
    put(&mut out, INFO_USER, &numbers);
    numbers = [process.pid, process.parent, process.group, process.session]
        .map(u32::to_le_bytes)
        .concat();
    put(&mut out, INFO_PID, &numbers);
    let name = &process.name[..process.name.len().min(NAME_BYTES - 1)];
    put(&mut out, INFO_NAME, name);
    let words: Vec<u8> = arguments
        .iter()
        .take(ARGUMENT_BYTES - 1)
        .map(|&byte| if byte == 0 { b' ' } else { byte })
        .collect();
    put(&mut out, INFO_ARGUMENTS, words.trim_ascii_end());
    out
}

/// Registers beyond the general ones, as XSAVE lays them out (`user_x86_fpregs_entry`).
fn extended(floating: &Message) -> Vec<u8> {
    let mut out = vec![0; ALL_BYTES];
    let number = |field| floating.number(field).unwrap_or(0);
    for (index, field) in [1, 2, 3, 4].into_iter().enumerate() {
        put(&mut out, 2 * index, &(number(field) as u16).to_le_bytes());
    }
    put(&mut out, 8, &number(5).to_le_bytes());
    put(&mut out, 16, &number(6).to_le_bytes());
    put(&mut out, 24, &(number(7) as u32).to_le_bytes());
    put(&mut out, 28, &(number(8) as u32).to_le_bytes());
    put_words(&mut out, 32, floating, 9, 32);
    put_words(&mut out, 160, floating, 10, 64);
    let more = floating.message(13);
    // Without more there is what FXSAVE knows, all of it in use.
    let in_use = more.as_ref().and_then(|more| more.number(1)).unwrap_or(3);
    put(&mut out, FEATURES, &KNOWN_FEATURES.to_le_bytes());
    put(&mut out, IN_USE, &(in_use & KNOWN_FEATURES).to_le_bytes());
    if let Some(more) = more {
        put_words(&mut out, AVX, &more, 2, 64);
    }
    out
}

/// The files that are mapped: how many, the unit of places in them, of each the range
/// and its place, then the names.
fn files(process: &Process) -> Vec<u8> {
    const UNIT: u64 = strata_units::PAGE_SIZE as u64;
    let (mut table, mut names, mut count) = (Vec::new(), Vec::new(), 0u64);
    for Mapping { range, file, .. } in &process.mappings {
        let Some((id, offset)) = file else { continue };
        let Some(name) = process.paths.get(id) else { continue };
        if table.len() + names.len() + name.len() > MOST_FILE_BYTES {
            break;
        }
        for number in [range.start, range.end, offset / UNIT] {
            table.extend(number.to_le_bytes());
        }
        names.extend(name);
        names.push(0);
        count += 1;
    }
    [&count.to_le_bytes()[..], &UNIT.to_le_bytes(), &table, &names].concat()
}

/// All of a process; `arguments`: the beginning of its command line, as it is in its
/// memory.
pub(super) fn notes(process: &Process, arguments: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for (index, thread) in process.threads.iter().enumerate() {
        note(&mut out, b"CORE", PRSTATUS, &status(process, thread));
        if index == 0 {
            note(&mut out, b"CORE", PRPSINFO, &info(process, arguments));
            // No signal: it was not ended.
            note(&mut out, b"CORE", SIGINFO, &[0; SIGINFO_BYTES]);
            let auxiliary: Vec<u8> =
                process.auxiliary.iter().flat_map(|word| word.to_le_bytes()).collect();
            note(&mut out, b"CORE", AUXV, &auxiliary);
            note(&mut out, b"CORE", FILES, &files(process));
        }
        let extended = extended(&thread.floating);
        let mut legacy = extended[..LEGACY_BYTES].to_vec();
        legacy[FEATURES..].fill(0);
        note(&mut out, b"CORE", FPREGSET, &legacy);
        note(&mut out, b"LINUX", X86_XSTATE, &extended);
    }
    out
}
