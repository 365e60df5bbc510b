#!/usr/bin/env python3
"""Breaks one line after the other, each in a way that could lose a byte, and sees whether
the tests notice: `make mutants`. A change to the tests must not make them notice less.

It works in a copy of the last commit, below target/mutants, with what is built there.
"""

import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLACE = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "mutants")
TREE, TARGET = os.path.join(PLACE, "tree"), os.path.join(PLACE, "target")

PAGER = ("unit-pager", "memory-dont-need", "memory-unmap", "memory-remap", "race-", "fork-same",
         "fork-wide", "fork-after-churn", "kill-reclaims", "exit-reclaims", "worker-killed")
STORE = ("unit-store", "file-tier", "memory-lazy-free")
AGENT = ("unit-preload", *PAGER[1:])
# What is broken, in which file, how, and the cases that could notice.
MUTANTS = (
    ("a page that is discarded while it leaves comes back", "crates/pager/src/events.rs",
     "gate.slots[usize::from(slot)] = 0;", "let _ = slot;", PAGER),
    ("a page that is moved while it leaves goes to its old place", "crates/pager/src/events.rs",
     "gate.slots[usize::from(slot)] = address - from + to;",
     "gate.slots[usize::from(slot)] = address;", PAGER),
    ("what a discarded page had stored is never freed", "crates/pager/src/charge.rs",
     "Entry::Stored(handle) | Entry::Arriving(handle) => self.store.release(handle),",
     "Entry::Stored(_) | Entry::Arriving(_) => {}", PAGER),
    ("a child does not look for pages that left during its fork", "crates/pager/src/events.rs",
     "space.has_strays.store(true, Ordering::Release);",
     "space.has_strays.store(false, Ordering::Release);", PAGER),
    ("a batch goes on after the address space has changed", "crates/pager/src/events.rs",
     "agent.control.control().epoch.fetch_add(1, Ordering::SeqCst);",
     "agent.control.control().epoch.fetch_add(0, Ordering::SeqCst);", PAGER),
    ("pages of one hash are taken for the same", "crates/store/src/store.rs",
     "                && stored == *page\n", "", STORE),
    ("bytes that do not have their checksum are handed out", "crates/store/src/store.rs",
     "(whole && digest.hash() == hash)", "(whole || digest.hash() == hash)", STORE),
    ("a page that others refer to is promoted for one of them", "crates/store/src/store.rs",
     "let alone = word.references() == 1", "let alone = word.references() >= 1", STORE),
    ("the agent moves what it was told is out of date", "crates/preload/src/batch.rs",
     "let (moved, error) = if current {", "let (moved, error) = if current || true {", AGENT),
    ("the agent leaves a page in the transfer range", "crates/preload/src/batch.rs",
     "let bytes = count.min(TRANSFER_PAGES - first) * PAGE_SIZE;",
     "let bytes = count.min(TRANSFER_PAGES - first).saturating_sub(1) * PAGE_SIZE;", AGENT),
)


def run(*command, **how):
    return subprocess.run(command, cwd=TREE, env={**os.environ, "CARGO_TARGET_DIR": TARGET},
                          stdin=subprocess.DEVNULL, text=True, check=False, **how)


def notices(cases):
    """(whether the tests fail, what they say)."""
    only = [word for name in cases for word in ("--only", name)]
    # What hangs is waited for no longer than on a quick machine.
    done = run("scripts/test.sh", "--fast", "--patience", "1", *only, stdout=subprocess.PIPE,
               stderr=subprocess.STDOUT)
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAIL", "error"))]
    return done.returncode != 0, "; ".join(said)[:300] or done.stdout[-300:]


def main():
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(w in m[0] for w in sys.argv[1:])]
    shutil.rmtree(TREE, ignore_errors=True)
    os.makedirs(PLACE, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, TREE], check=True)
    # Kernels for guests and CRIU are not asked for: no case here needs them.
    fails, said = notices({case for _, _, _, _, cases in chosen for case in cases})
    if fails:
        print(f"the tests fail as they are: {said}", file=sys.stderr)
        return 2
    missed = []
    for what, path, old, new, cases in chosen:
        path = os.path.join(TREE, path)
        with open(path) as file:
            text = file.read()
        if text.count(old) != 1:
            print(f"{path} has {text.count(old)} times: {old}", file=sys.stderr)
            return 2
        began = time.monotonic()
        with open(path, "w") as file:
            file.write(text.replace(old, new))
        fails, said = notices(cases)
        with open(path, "w") as file:
            file.write(text)
        print(f"{'noticed' if fails else 'MISSED'}: {what}  ({time.monotonic() - began:.0f} s"
              f"{', ' + said if fails else ''})", flush=True)
        if not fails:
            missed.append(what)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
