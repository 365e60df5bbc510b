"""A NumPy array that lives compressed, beside one that must stay in DRAM.

    PYTHONPATH=python strata run --dram 64MiB -- python3 examples/placement/array.py

Runs the same without Strata: then all of it is in DRAM, and it says so."""

import time

import numpy

import strata

ROWS = 4096


def stored(array):
    """Pages of it that are out of DRAM's ordinary use."""
    tiers = strata.where(array)
    return sum(tiers.count(bytes([tier])) for tier in
               (strata.COMPRESSED, strata.STAGED, strata.FILE)), len(tiers)


def main():
    # Years of measurements that are seldom looked at, and what is known of each row.
    history = strata.empty((ROWS, 1024), "f4", tier=strata.COMPRESSED, or_plain=True)
    history[:] = numpy.arange(ROWS, dtype="f4")[:, None] + numpy.arange(1024, dtype="f4") % 7
    sums = history.sum(axis=1, dtype="f8")
    try:
        strata.advise(sums, strata.PIN)
    except strata.NotManaged:
        print("no Strata here: everything is in DRAM")
    else:
        end = time.monotonic() + 20
        while stored(history)[0] < stored(history)[1] * 9 // 10 and time.monotonic() < end:
            time.sleep(0.05)
        print("{} of {} pages of the history are out of DRAM".format(*stored(history)))
    # Looked at, it is there.
    row = ROWS // 3
    assert history[row].sum(dtype="f8") == sums[row]
    if strata.available():
        strata.advise(history[:ROWS // 8], strata.HOT)
    assert (history.sum(axis=1, dtype="f8") == sums).all()
    print("all rows are right")


if __name__ == "__main__":
    main()
