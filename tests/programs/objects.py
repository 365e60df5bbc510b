"""CPython under pressure: a large dict, lists and bytes, checked against what
they were computed from; then the same in forked workers. Prints "ok" and waits
for a line on stdin."""

import gc
import hashlib
import multiprocessing
import sys


def record(number, version=0):
    digest = hashlib.md5(f"{number}/{version}".encode()).hexdigest()[:8]
    return {"id": number, "name": f"name {digest}", "tags": ["alpha", "beta", digest],
            "text": f"record {number} version {version} of a table that changes " * 4}


def blob(number):
    return (f"{number}:{hashlib.md5(str(number).encode()).hexdigest()} ".encode() * 300)[:8192]


COUNT = 60_000
table = {}
blobs = []


def check(span):
    start, end = span
    for number in range(start, end):
        if table[number] != record(number, int(number % 3 == 0)):
            return f"record {number} is wrong"
        if number < len(blobs) and blobs[number] != blob(number):
            return f"blob {number} is wrong"
    return None


def check_all(spans):
    for error in filter(None, map(check, spans)):
        sys.exit(error)


def main():
    for number in range(COUNT):
        table[number] = record(number)
    blobs.extend(blob(number) for number in range(6000))
    for number in range(0, COUNT, 3):
        table[number] = record(number, 1)
    gc.collect()
    spans = [(start, start + COUNT // 8) for start in range(0, COUNT, COUNT // 8)]
    # Not a Pool: that one replaces a worker that died and waits for ever.
    workers = [multiprocessing.get_context("fork").Process(target=check_all, args=(half,))
               for half in (spans[::2], spans[1::2])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [f"a forked worker ended with {w.exitcode}" for w in workers if w.exitcode]
    found += [error for error in map(check, spans) if error]
    if found:
        sys.exit(found[0])
    print("ok", flush=True)
    sys.stdin.readline()


main()
