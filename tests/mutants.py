#!/usr/bin/env python3
"""Breaks one line after the other, each in a way that could lose a byte, and sees whether
the tests notice: `make mutants`. A change to the tests must not make them notice less.

It works in a copy of the last commit, below target/mutants, with what is built there.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLACE = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "mutants")
TREE, TARGET = os.path.join(PLACE, "tree"), os.path.join(PLACE, "target")

PAGER = ("memory-dont-need", "memory-unmap", "memory-remap", "race-", "fork-same",
         "fork-wide", "fork-after-churn", "kill-reclaims", "exit-reclaims", "worker-killed")
STORE = ("file-tier", "memory-lazy-free")
# What is broken, in which file, how, and the cases that could notice.
MUTANTS = (
    ("a page that is discarded while it leaves comes back", "crates/pager/src/fault/events.rs",
     "gate.slots[usize::from(slot)] = 0;", "let _ = slot;", PAGER),
    ("a page that is moved while it leaves goes to its old place",
     "crates/pager/src/fault/events.rs",
     "gate.slots[usize::from(slot)] = address - from + to;",
     "gate.slots[usize::from(slot)] = address;", PAGER),
    ("what a discarded page had stored is never freed", "crates/pager/src/tenant/transitions.rs",
     "Entry::Stored(handle) | Entry::Arriving(handle) => self.store.release(handle),",
     "Entry::Stored(_) | Entry::Arriving(_) => {}", PAGER),
    ("a child does not look for pages that left during its fork",
     "crates/pager/src/fault/events.rs",
     "space.has_strays.store(true, Ordering::Release);",
     "space.has_strays.store(false, Ordering::Release);", PAGER),
    ("a batch goes on after the address space has changed", "crates/pager/src/fault/events.rs",
     "agent.control.control().epoch.fetch_add(1, Ordering::SeqCst);",
     "agent.control.control().epoch.fetch_add(0, Ordering::SeqCst);", PAGER),
    ("pages of one hash are taken for the same", "crates/store/src/store.rs",
     "                && stored == *page\n", "", STORE),
    ("bytes that do not have their checksum are handed out", "crates/store/src/store.rs",
     "(whole && digest.hash() == hash)", "(whole || digest.hash() == hash)", STORE),
    ("a page that others refer to is promoted for one of them", "crates/store/src/store.rs",
     "let alone = word.references() == 1", "let alone = word.references() >= 1", STORE),
    ("the agent moves what it was told is out of date", "crates/preload/src/batch.rs",
     "let (moved, error) = if current {", "let (moved, error) = if current || true {", PAGER),
    ("the agent leaves a page in the transfer range", "crates/preload/src/batch.rs",
     "let bytes = count.min(TRANSFER_PAGES - first) * PAGE_SIZE;",
     "let bytes = count.min(TRANSFER_PAGES - first).saturating_sub(1) * PAGE_SIZE;", PAGER),
)


# What hangs has noticed. The tests of a crate take half a minute at most.
HANGS_AFTER_S = 180


def run(*command, **how):
    """Runs it in the copy; None if it hangs. All that it started is ended with it."""
    process = subprocess.Popen(command, cwd=TREE, env={**os.environ, "CARGO_TARGET_DIR": TARGET},
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(**how)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, output


def unit_tests(path):
    """(whether the tests of the file's crate fail, what they say)."""
    crate = "strata-" + path.split("/")[1]
    test = ("cargo", "test", "--profile", "checked", "--locked", "--package", crate, "--lib")
    status, said = run(*test, "--no-run")
    if status != 0:
        raise SystemExit(f"it does not build: {said[-2000:]}")
    status, said = run(*test, timeout=HANGS_AFTER_S)
    if status is None:
        return True, f"the unit tests of {crate} hang"
    failed = re.findall(r"^test (\S+) \.\.\. FAILED$", said, re.MULTILINE)
    return status != 0, f"{crate}: " + (", ".join(failed[:3]) or f"ends with status {status}")


def programs(cases):
    """(whether one of the cases fails, which)."""
    only = [word for name in cases for word in ("--only", name)]
    # What hangs is waited for no longer than on a quick machine.
    status, said = run("scripts/test.sh", "--fast", "--first", "--patience", "1", *only)
    failed = [line for line in said.splitlines() if line.startswith(("FAIL", "error"))]
    return status != 0, "; ".join(failed)[:300] or said[-300:]


def notices(path, cases):
    """The unit tests of a crate are asked first: they take a twentieth of the time."""
    fails, said = unit_tests(path)
    return (fails, said) if fails else programs(cases)


def main():
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(w in m[0] for w in sys.argv[1:])]
    shutil.rmtree(TREE, ignore_errors=True)
    os.makedirs(PLACE, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, TREE], check=True)
    # Kernels for guests and CRIU are not asked for: no case here needs them.
    asked = [unit_tests(path) for path in sorted({path for _, path, _, _, _ in chosen})]
    asked.append(programs(sorted({case for _, _, _, _, cases in chosen for case in cases})))
    for fails, said in asked:
        if fails:
            print(f"the tests fail as they are: {said}", file=sys.stderr)
            return 2
    missed = []
    for what, path, old, new, cases in chosen:
        place = os.path.join(TREE, path)
        with open(place) as file:
            text = file.read()
        if text.count(old) != 1:
            print(f"{path} has {text.count(old)} times: {old}", file=sys.stderr)
            return 2
        began = time.monotonic()
        with open(place, "w") as file:
            file.write(text.replace(old, new))
        fails, said = notices(path, cases)
        with open(place, "w") as file:
            file.write(text)
        print(f"{'noticed' if fails else 'MISSED'}: {what}  ({time.monotonic() - began:.0f} s"
              f"{', ' + said if fails else ''})", flush=True)
        if not fails:
            missed.append(what)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
