"""The Python module python/strata, without NumPy: what it does to memory of every
kind, and what it says when it cannot. Every byte is checked."""

import array
import gc
import mmap
import os
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "python"))

import strata  # noqa: E402

MIB = 1 << 20
OUT = (strata.STAGED, strata.COMPRESSED, strata.FILE)


def fails(error, number, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except error as failed:
        assert number is None or failed.errno == number, failed
        return
    raise AssertionError(f"{call} did not fail")


def out(memory):
    return sum(tier in OUT for tier in strata.where(memory))


def until(condition, what):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def alone():
    assert not strata.available()
    memory = bytearray(MIB)
    for call in ((strata.advise, memory, strata.COLD), (strata.where, memory),
                 (strata.allocate, MIB, strata.DRAM)):
        fails(strata.NotManaged, 38, *call)
    plain = strata.allocate(MIB, strata.FILE, or_plain=True)
    assert plain.tier is None and len(plain) == MIB and not any(plain.view)
    plain.view[5] = 1


def managed():
    assert strata.available()
    pattern = bytes(range(256)) * 16
    for memory in (bytearray(pattern * (16 * MIB // 4096)),
                   array.array("Q", pattern * (8 * MIB // 4096)),
                   mmap.mmap(-1, 4 * MIB, mmap.MAP_PRIVATE)):
        if isinstance(memory, mmap.mmap):
            memory[:] = pattern * (4 * MIB // 4096)
        pages = len(strata.where(memory))
        strata.advise(memory, strata.COLD)
        until(lambda: out(memory) >= pages - 2, "cold memory leaves")
        assert bytes(memory) == pattern * (memoryview(memory).nbytes // 4096)
        strata.advise(memory, strata.HOT)
        strata.advise(memory, strata.PIN)
        until(lambda: out(memory) == 0, "pinned memory comes")
        strata.advise(memory, strata.NORMAL)
    placed = strata.allocate(8 * MIB, strata.COMPRESSED)
    placed.view[:] = pattern * (8 * MIB // 4096)
    until(lambda: out(placed.view) > 2000, "placed memory leaves")
    assert bytes(placed.view) == pattern * (8 * MIB // 4096)
    # It lives as long as anybody refers to it.
    part = placed.view[4096:8192]
    del placed
    gc.collect()
    assert bytes(part) == pattern
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(part) == pattern else 1)
    assert os.waitpid(child, 0)[1] == 0
    before = mapped()
    del part
    gc.collect()
    assert mapped() < before - 7 * MIB, (before, mapped())
    fails(strata.StrataError, 19, strata.allocate, MIB, strata.NODE)
    fails(strata.StrataError, 12, strata.allocate, 1 << 40, strata.DRAM)
    fails(strata.StrataError, 22, strata.advise, bytearray(1), 99)
    fails(ValueError, None, strata.advise, b"read-only", strata.COLD)
    fails(ValueError, None, strata.advise, memoryview(bytearray(64))[::2], strata.COLD)
    fails(ValueError, None, strata.allocate, 0, strata.DRAM)
    assert strata.where(bytearray(0)) == b""


def working(journal):
    """Says things of its memory for ever, and checks it."""
    pattern = bytes(range(256)) * 16
    placed = strata.allocate(16 * MIB, strata.COMPRESSED)
    pinned = bytearray(pattern * (8 * MIB // 4096))
    placed.view[:] = pattern * (16 * MIB // 4096)
    strata.advise(pinned, strata.PIN)
    for number in range(1 << 30):
        for memory in (placed.view, pinned):
            assert bytes(memory) == pattern * (len(memory) // 4096)
        for advice in (strata.HOT, strata.COLD, strata.FREE_SOON):
            try:
                strata.advise(placed.view, advice)
                strata.where(pinned)
            except strata.StrataError as error:
                # A copy of it: the connection was the original's.
                assert error.errno in (104, 107, 125), error
        with open(journal, "a") as file:
            print(number, file=file)
        time.sleep(0.02)


def mapped():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


if __name__ == "__main__":
    {"alone": alone, "managed": managed, "working": working}[sys.argv[1]](*sys.argv[2:])
    print("all right")
