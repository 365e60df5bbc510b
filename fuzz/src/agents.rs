//! What an agent says when it is not ours: the order of its messages, and its block of
//! memory, as a worker reads them.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use strata_pager::untrusted::read_control_block;
use strata_sys::{ControlBlock, SharedMemory};
use strata_units::PAGE_SIZE;
use strata_units::handshake::{Amiss, Handshake, Heard};
use strata_units::wire::{BATCH_PAGES, TRANSFER_PAGES};

/// Messages in any order: each behind a byte with how many descriptors came with it, and
/// whether the daemon then asks for a userfaultfd, and a byte with its length.
pub fn handshake(mut data: &[u8]) {
    let mut handshake = Handshake::default();
    let (mut is_over, mut has_hello, mut may_send) = (false, false, false);
    while let Some((&[how, len], rest)) = data.split_first_chunk() {
        let (message, rest) = rest.split_at(rest.len().min(len.into()));
        data = rest;
        let descriptors = usize::from(how & 3);
        match handshake.hear(message, descriptors) {
            Ok(Heard::Nothing) => {
                assert!(!is_over && !has_hello && message.is_empty());
                is_over = true;
            }
            Ok(Heard::Hello(hello, _)) => {
                assert!(!is_over && !has_hello);
                has_hello = true;
                let most = 1 << 47;
                let pages = [hello.transfer, hello.probe, hello.restart];
                assert!(pages.iter().all(|page| page % PAGE_SIZE as u64 == 0 && *page < most));
                assert!(hello.transfer <= most - (TRANSFER_PAGES * PAGE_SIZE) as u64);
                assert!(hello.own_start <= hello.own_end && hello.own_end <= most);
            }
            Ok(Heard::Userfaultfd) => {
                assert!(has_hello && may_send && !is_over && descriptors > 0);
                is_over = true;
            }
            Err(why) => {
                assert!(!is_over || why == Amiss::TooMuch, "nothing more is heard");
                is_over = true;
            }
        }
        if how & 4 != 0 {
            handshake.asked_for_userfaultfd();
            may_send |= has_hello && !is_over;
        }
    }
}

/// A control block: pieces of eight bytes behind the numbers of the words that they are
/// written to. Whatever its program writes, a page that it says to be a thread's or a
/// mutex's stays in place.
pub fn block(data: &[u8]) {
    let block = ControlBlock::create(strata_units::wire::MAGIC).expect("a memory file");
    let descriptor = block.as_fd().try_clone_to_owned().expect("a descriptor");
    let memory = SharedMemory::from_fd(descriptor).expect("the same file");
    for piece in data.chunks_exact(10) {
        let (at, bytes) = piece.split_at(2);
        let at = u64::from(u16::from_le_bytes(at.try_into().expect("two bytes"))) * 8;
        memory.write(at % memory.len_bytes(), bytes);
    }
    let control = block.control();
    let said = read_control_block(control);
    let page = |address: u64| address & !(PAGE_SIZE as u64 - 1);
    let threads = control.threads.iter().map(|slot| slot.control_block.load(Ordering::Relaxed));
    let pinned = control.pinned.iter().map(|pinned| pinned.load(Ordering::Relaxed));
    let mut kept = threads.chain(pinned).filter(|&address| address != 0);
    assert!(kept.all(|address| said.keeps_in_place(page(address))));
    assert!(said.moved <= BATCH_PAGES && said.stacks.len() <= control.threads.len());
}
