"""Bench: objects, strings and dictionaries of a script with one thread. Prints the
seconds that it took."""

import sys
import time

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 10


class Item:
    def __init__(self, number):
        self.number = number
        self.name = "item %d" % number


begin = time.monotonic()
total = 0
for turn in range(ROUNDS):
    items = [Item(number) for number in range(20000)]
    by_name = {item.name: item for item in items}
    total += sum(by_name["item %d" % number].number for number in range(0, 20000, 3))
print("%.6f" % (time.monotonic() - begin))
sys.exit(total == 0)
