"""docs/limits.md, page by page: what the kernel cannot do with evicted memory.
(The futex limits are registered in programs.py, the raw-clone one in death.py.)"""

import os
import re
import struct

from machine import read
from strata import Failure, Skip
from suite import CASES, ROOT, case

BYTES = 48 << 20
PAGE = 4096


@case("limit-proc-mem")
def limit_proc_mem(run):
    run.run("limits", "proc-mem")


@case("limit-own-userfaultfd")
def limit_own_userfaultfd(run):
    run.run("limits", "own-userfaultfd")


@case("limit-clear-tid")
def limit_clear_tid(run):
    run.run("limits", "clear-tid")


def dumped_pages(path, start):
    """(pages of the region that are all zero, pages that hold records)."""
    empty = full = 0
    with open(path, "rb") as core:
        header = core.read(64)
        offset, = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        for number in range(count):
            core.seek(offset + number * size)
            kind, _, position, address, _, length, _, _ = struct.unpack("<IIQQQQQQ", core.read(56))
            low, high = max(address, start), min(address + length, start + BYTES)
            if kind != 1 or low >= high:
                continue
            core.seek(position + low - address)
            for _ in range((high - low) // PAGE):
                page = core.read(PAGE)
                if not page.strip(b"\0"):
                    empty += 1
                elif b"Ada Lovelace" in page:
                    full += 1
                else:
                    raise Failure("the core dump holds a page of neither kind")
    return empty, full


@case("limit-core-dump")
def limit_core_dump(run):
    """Evicted pages are holes in a core dump."""
    pattern = read("/proc/sys/kernel/core_pattern").strip()
    if "/" in pattern or "|" in pattern or "%" in pattern:
        raise Skip(f"core dumps go elsewhere here ({pattern})")
    program = run.start("limits", "core-dump")
    start = int(program.gate().split()[1], 16)
    program.assert_pressed()
    program.answer()
    if program.wait() != -6:
        raise Failure("the program did not abort")
    found = [name for name in os.listdir(run.directory) if name.startswith(pattern)]
    if not found:
        raise Skip("no core was dumped")
    empty, full = dumped_pages(os.path.join(run.directory, found[0]), start)
    run.note(f"{full} pages dumped, {empty} holes")
    if empty + full != BYTES // PAGE:
        raise Failure(f"{empty + full} pages of {BYTES // PAGE} are in the dump")
    if (empty == 0) != run.native:
        raise Failure(f"{empty} holes in the dump; if the limit is gone change docs/limits.md")


@case("limits-document")
def limits_document(run):
    """Every case that docs/limits.md names exists, and it names every limit."""
    rows = [line for line in read(os.path.join(ROOT, "docs", "limits.md")).splitlines()
            if line.startswith("| ") and "---" not in line]
    named = {name for row in rows
             for name in re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", row.split("|")[-2])}
    if unknown := named - set(CASES):
        raise Failure(f"docs/limits.md names cases that do not exist: {sorted(unknown)}")
    if missing := {name for name in CASES if name.startswith("limit-")} - named:
        raise Failure(f"docs/limits.md does not name {sorted(missing)}")
    run.note(f"{len(named)} cases named")
