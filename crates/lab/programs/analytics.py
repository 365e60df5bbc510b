"""CPython to be measured: orders and customers as dicts and lists, grouped and
joined in rounds. A round is three queries on months that are drawn (recent ones
more often) and one on a customer segment; its results are checked against sums
that were kept while loading. Says the lines of src/walk.rs and waits for a line
on its input after each.

    python3 analytics.py ORDERS WARMUP_SECONDS SECONDS
"""

import json
import random
import sys
import time
import zlib

MONTHS = 24
CITIES = ("Rotterdam", "Valencia", "Gothenburg", "Lyon", "Krakow", "Porto", "Leipzig", "Bologna")
GOODS = ("copper kettle", "walnut desk", "linen curtain", "desk lamp", "wool blanket",
         "garden shears", "ceramic bowl", "leather wallet", "travel mug", "cast iron pan")
STATES = ("pending", "paid", "packed", "shipped", "delivered", "returned")
NOTES = ("leave the parcel with a neighbour", "customer asked for delivery before noon",
         "handle with care, the contents break easily", "ring twice")


def gate(line):
    print(json.dumps(line, separators=(",", ":")), flush=True)
    sys.stdin.readline()


def order(number, customers):
    """Order `number`: a function of it alone."""
    draw = zlib.crc32(b"%d" % number)
    return {
        "id": number,
        "customer": draw % customers,
        "cents": 500 + (draw >> 4) % 100_000,
        "state": STATES[draw % 6],
        "items": [GOODS[(draw >> shift) % 10] for shift in (3, 9, 15)],
        "note": f"order {number}: {NOTES[draw & 3]}, tracking {draw:010d}",
    }


def customer(number):
    draw = zlib.crc32(b"c%d" % number)
    return {"id": number, "city": CITIES[draw % 8], "segment": (draw >> 8) % 16,
            "name": f"customer {number} of {CITIES[draw % 8]}", "orders": 0}


class Wrong(Exception):
    """Something read is not what was written."""


class Shop:
    def __init__(self, orders):
        self.customers = {number: customer(number) for number in range(orders // 8)}
        self.segments = [[] for _ in range(16)]
        for one in self.customers.values():
            self.segments[one["segment"]].append(one)
        # What the queries' results must add up to.
        self.month_cents = []
        self.segment_orders = [0] * 16
        self.months = []
        for month in range(MONTHS):
            span = range(orders * month // MONTHS, orders * (month + 1) // MONTHS)
            rows = [order(number, len(self.customers)) for number in span]
            for row in rows:
                buyer = self.customers[row["customer"]]
                buyer["orders"] += 1
                self.segment_orders[buyer["segment"]] += 1
            self.months.append(rows)
            self.month_cents.append(sum(row["cents"] for row in rows))
        self.random = random.Random(7)
        self.chain = 0
        self.rounds = []

    def month(self):
        """Mostly one of the last."""
        return MONTHS - 1 - min(int(self.random.expovariate(0.3)), MONTHS - 1)

    def by_state(self, month):
        groups = {}
        for row in self.months[month]:
            groups[row["state"]] = groups.get(row["state"], 0) + row["cents"]
        if sum(groups.values()) != self.month_cents[month]:
            raise Wrong(f"month {month} by state: {groups}")
        return sorted(groups.items())

    def by_city(self, month):
        """A join: each order's customer says the city."""
        groups = {}
        for row in self.months[month]:
            city = self.customers[row["customer"]]["city"]
            groups[city] = groups.get(city, 0) + row["cents"]
        if sum(groups.values()) != self.month_cents[month]:
            raise Wrong(f"month {month} by city: {groups}")
        return sorted(groups.items())

    def best_sellers(self, month):
        counts, length = {}, 0
        for row in self.months[month]:
            length += len(row["note"])
            for item in row["items"]:
                counts[item] = counts.get(item, 0) + 1
        if sum(counts.values()) != 3 * len(self.months[month]):
            raise Wrong(f"month {month}, items: {counts}")
        return length, sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:3]

    def segment(self, number):
        found = sum(one["orders"] for one in self.segments[number])
        if found != self.segment_orders[number]:
            raise Wrong(f"segment {number} has {found} orders, not {self.segment_orders[number]}")
        return found

    def round(self):
        found = (self.by_state(self.month()), self.by_city(self.month()),
                 self.best_sellers(self.month()), self.segment(self.random.randrange(16)))
        self.chain = zlib.crc32(repr(found).encode(), self.chain)
        self.rounds.append(f"{self.chain:08x}")

    def run(self, seconds):
        """Times of the rounds."""
        times = []
        began = last = time.monotonic()
        while last - began < seconds:
            self.round()
            now = time.monotonic()
            times.append(now - last)
            last = now
        return times

    def verify(self):
        for rows in self.months:
            for row in rows:
                if row != order(row["id"], len(self.customers)):
                    raise Wrong(f"order {row['id']} is {row}")
        for number, one in self.customers.items():
            expected = customer(number)
            expected["orders"] = one["orders"]
            if one != expected:
                raise Wrong(f"customer {number} is {one}")
        return sum(map(len, self.months)) + len(self.customers)


def main():
    shop = Shop(int(sys.argv[1]))
    gate({"gate": "loaded", "bytes": 0})
    shop.run(float(sys.argv[2]))
    gate({"gate": "warm"})
    times = shop.run(float(sys.argv[3]))
    ranked = sorted(times)
    at = lambda share: ranked[min(int(len(ranked) * share), len(ranked) - 1)] * 1e6  # noqa: E731
    gate({"gate": "done", "operations": len(times), "seconds": sum(times), "p50_us": at(0.5),
          "p99_us": at(0.99), "rounds": shop.rounds})
    gate({"gate": "verified", "values": shop.verify()})


try:
    main()
except Wrong as wrong:
    sys.exit(f"wrong value: {wrong}")
