"""Random requests over several connections at once to an NBD server, beside a model of
what has to come of them; a client of libnbd's. Prints the digest of the model in the end.

    nbd_model.py SOCKET SEED ROUNDS
"""

import hashlib
import random
import sys

import nbd

CONNECTIONS = 3
MOST_BYTES = 300_000


def connect(path):
    client = nbd.NBD()
    client.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    client.connect_unix(path)
    return client


def a_range(choose, size):
    """Pages, or bytes that begin and end anywhere."""
    if choose.random() < 0.5:
        offset = choose.randrange(size // 4096) * 4096
        return offset, min(4096 * choose.randint(1, 16), size - offset)
    offset = choose.randrange(size)
    return offset, min(choose.randint(1, choose.choice((1, 511, 5000, MOST_BYTES))), size - offset)


def main(path, seed, rounds):
    choose = random.Random(seed)
    clients = [connect(path) for _ in range(CONNECTIONS)]
    if not clients[0].can_multi_conn():
        raise SystemExit("it does not say that several connections may be used")
    size = clients[0].get_size()
    # Slowly: pieces of at most 32 MiB.
    model = bytearray()
    while len(model) < size:
        model += clients[0].pread(min(1 << 20, size - len(model)), len(model))
    holes = 0
    for number in range(rounds):
        client = choose.choice(clients)
        offset, count = a_range(choose, size)
        what = choose.random()
        flags = nbd.CMD_FLAG_FUA if choose.random() < 0.05 else 0
        if what < 0.55:
            found = client.pread(count, offset)
            if found != model[offset:offset + count]:
                raise SystemExit(f"WRONG in round {number}: {count} bytes at {offset}")
        elif what < 0.85:
            data = choose.randbytes(64) * (count // 64 + 1)
            client.pwrite(data[:count], offset, flags)
            model[offset:offset + count] = data[:count]
        elif what < 0.92:
            flags |= nbd.CMD_FLAG_NO_HOLE if choose.random() < 0.5 else 0
            client.zero(count, offset, flags)
            model[offset:offset + count] = bytes(count)
        elif what < 0.96:
            client.trim(count, offset, flags)
            # What is trimmed may be anything, but stays that.
            model[offset:offset + count] = client.pread(count, offset)
        elif what < 0.98:
            client.flush()
        else:
            def extents(context, at, entries, error):
                nonlocal holes
                for length, kind in zip(entries[::2], entries[1::2]):
                    end = min(at + length, offset + count)
                    if kind & nbd.STATE_ZERO and any(model[at:end]):
                        raise SystemExit(f"WRONG: {at} to {end} is said to be zero")
                    holes += kind & nbd.STATE_HOLE
                    at += length
            client.block_status(count, offset, extents)
        if number == rounds // 3:
            # The runner may do what it likes meanwhile.
            print("middle", flush=True)
    clients[0].flush()
    for client in clients:
        client.shutdown()
    print(f"holes {holes}")
    print(hashlib.sha256(model).hexdigest())


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
