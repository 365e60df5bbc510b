"""A job of CPython that a snapshot is taken of while it works: NumPy arrays (plain
byte arrays where NumPy is not), dictionaries, a generator and a thread.

    arrays.py BOARD MODE SIZE_MIB

The board is that of moment.c; behind it, the stride that the order WRITE sets (at
48), and of the last CHECK how far the matrices went in all (56), at which round
that stride began (64) and which round it was (72). What is wrong is said on
stderr, status 1."""

import mmap
import os
import random
import sys
import threading
import zlib

try:
    import numpy
except ImportError:
    numpy = None

SIDE = 512  # of a matrix of 64-bit integers: 2 MiB
CHECK, FORK, END, WRITE = 1, 2, 4, 6


def matrix(seed):
    """2 MiB that follow from a number, and are no mere repetition."""
    if numpy is None:
        piece = b"".join(zlib.crc32(b"%d/%d" % (seed, i)).to_bytes(4, "big") for i in range(4096))
        return bytearray(piece * (SIDE * SIDE * 8 // len(piece)))
    row = numpy.arange(SIDE, dtype=numpy.int64) * (seed * 2 + 1)
    return numpy.add.outer(row * SIDE, row)


def same(one, other):
    return one == other if numpy is None else bool((one == other).all())


def squares():
    n = 0
    while True:
        yield n, n * n
        n += 1


class Job:
    def __init__(self, count):
        self.count = count
        self.seeds = list(range(count))
        self.matrices = [matrix(seed) for seed in self.seeds]
        self.text = {f"key {n}": [n, str(n) * 20, {"n": n}] for n in range(20_000)}
        self.numbers, self.rounds, self.helped = squares(), 0, 0
        self.stride, self.began, self.advanced = 1, 0, 0
        self.wanted, self.given = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self.help, daemon=True).start()

    def help(self):
        while True:
            self.wanted.acquire()
            self.helped += 1
            self.given.release()

    def round(self):
        place = random.Random(self.rounds).randrange(self.count)
        if not same(self.matrices[place], matrix(self.seeds[place])):
            raise ValueError(f"matrix {place} is not that of {self.seeds[place]}")
        self.seeds[place] += self.count * self.stride
        self.advanced += self.stride
        self.matrices[place] = matrix(self.seeds[place])
        self.text[f"key {self.rounds % 20_000}"][2]["n"] += 1
        self.wanted.release()
        self.given.acquire()
        number, square = next(self.numbers)
        if (number, square, self.helped) != (self.rounds, self.rounds ** 2, self.rounds + 1):
            raise ValueError(f"round {self.rounds}: {number}, {square}, helped {self.helped}")
        self.rounds += 1

    def check(self):
        if sum(self.seeds) != self.count * (self.count - 1) // 2 + self.count * self.advanced:
            raise ValueError(f"the matrices did not go {self.advanced} strides")
        for place, seed in enumerate(self.seeds):
            if not same(self.matrices[place], matrix(seed)):
                raise ValueError(f"matrix {place} is not that of {seed}")
        for n in range(20_000):
            value = self.text[f"key {n}"]
            times = self.rounds // 20_000 + (n < self.rounds % 20_000)
            if value != [n, str(n) * 20, {"n": n + times}]:
                raise ValueError(f"entry {n} is {value}")


def main():
    with open(sys.argv[1], "r+b") as file:
        board = memoryview(mmap.mmap(file.fileno(), 4096))
    # Whole words, which `struct` would write byte by byte.
    words, longs = board.cast("I"), board.cast("Q")
    job = Job(int(sys.argv[3]) // 2)
    epoch = last = 0
    words[8] = 1
    while True:
        if words[0] != epoch:
            epoch = words[0]
            longs[2] = job.rounds
            words[1] += 1
        job.round()
        longs[1] = job.rounds
        order = words[6]
        if order & 255 == 0 or order == last:
            continue
        last = order
        job.check()
        if order & 255 == FORK:
            child = os.fork()
            if child == 0:
                job.check()
                os._exit(0)
            if os.waitpid(child, 0)[1] != 0:
                raise ValueError("the child found something wrong")
        if order & 255 == WRITE:
            job.stride, job.began = words[12], job.rounds
        if order & 255 == CHECK:
            longs[7], longs[8], longs[9] = job.advanced, job.began, job.rounds
        words[7] = order
        if order & 255 == END:
            return


main()
