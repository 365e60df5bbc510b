"""Pages that the kernel has merged with equal ones (KSM): left where they are, paid for
once, and evicted again when they have been written."""

import statistics
import time

import ksm
from strata import Failure, Skip
from suite import case
from under import Guest

MIB = 1 << 20
PAGE = 4096
SIZE_MIB, BUDGET_MIB, SMALL_MIB, WRITTEN_MIB = 64, 45, 20, 40
PAGES = SIZE_MIB * MIB // PAGE
# Of what would be merged without Strata: all pages of one with all of the other.
LEAST_SHARING = PAGES * 9 // 10
MOST_ROUNDS = 200


def rounds(programs, until, what, word="more", run=None):
    """All of them look at all of their memory until it is so."""
    for number in range(MOST_ROUNDS):
        for program in programs:
            program.gate("round")
        enough = until(number)
        for program in programs:
            program.answer(word)
        if enough:
            return
        word = "more"
        if run.seconds_left() < 0:
            break
    raise Failure(f"not so: {what}; {ksm.sharing()} pages are merged")


def figures(programs, key):
    return [program.stats()[key] for program in programs]


def refused(run, programs):
    """Hardly any eviction was refused."""
    count, all_of_them = sum(figures(programs, "evictions_refused_total")), \
        sum(figures(programs, "evictions_total"))
    run.note(f"evictions {all_of_them} refused {count}")
    if all_of_them < PAGES // 4:
        raise Failure(f"{all_of_them} evictions: it tested nothing")
    if count > all_of_them // 100:
        raise Failure(f"{count} of {all_of_them} evictions were refused")


@case("merged", native=False, own_daemon=True, alone=True, seconds=120, takes=20)
def merged(run):
    """Two equal programs at 70 % of their memory each are merged as without Strata, and
    pay for one copy together. With less than that they are said to be over their budgets,
    for that cause, and stay merged. What they write then is evicted as any page is."""
    why = ksm.missing()
    if why:
        raise Skip(why)
    with ksm.switched_on():
        programs = [run.start("merged", budget=f"{BUDGET_MIB}MiB") for _ in range(2)]

        def are_merged(_):
            return ksm.sharing() >= LEAST_SHARING
        rounds(programs, are_merged, f"{LEAST_SHARING} of {PAGES} pages are merged", run=run)
        refused(run, programs)

        def cost_once(_):
            return all(m >= SIZE_MIB * MIB * 9 // 10 and s >= m * 4 // 10 for m, s in
                       zip(figures(programs, "merged_bytes"),
                           figures(programs, "merged_saved_bytes")))
        rounds(programs, cost_once, "each is known to pay for half of what is merged", run=run)
        if any(r > (SIZE_MIB * 6 // 10) * MIB for r in figures(programs, "resident_bytes")):
            raise Failure(f"resident: {figures(programs, 'resident_bytes')}")

        for program in programs:
            run.daemon.strata("set", program.name, "--dram", f"{SMALL_MIB}MiB")

        def is_said(_):
            return all(any("KSM" in note for note in program.stats()["notes"])
                       for program in programs)
        rounds(programs, is_said, "the notes say why the budget cannot be met", run=run)
        rounds(programs, lambda number: number >= 5, "five rounds", run=run)
        run.note(f"merged {ksm.sharing()} of {PAGES} with {SMALL_MIB} MiB")
        if not are_merged(0):
            raise Failure(f"{ksm.sharing()} pages are merged with a budget that cannot be met")

        before = figures(programs, "evictions_total")
        for program in programs:
            run.daemon.strata("set", program.name, "--dram", f"{WRITTEN_MIB}MiB")

        def have_left(number):
            after = figures(programs, "evictions_total")
            return number >= 5 and all(a - b >= PAGES // 16 for a, b in zip(after, before))
        rounds(programs, have_left, "what was written is evicted", word="write", run=run)
        refused(run, programs)
        for program in programs:
            program.gate("round")
            program.answer("end")
        for program in programs:
            program.finish()


GUEST_MIB, GUEST_FILLED_MIB, GUEST_BUDGET_MIB = 128, 48, 90
# Samples of what is merged, and seconds from one to the next.
SAMPLES, SAMPLE_EVERY = 40, 0.25


def usually(guests):
    """What is merged while all of them run, in the middle of many looks."""
    found = []
    for _ in range(SAMPLES):
        for guest in guests:
            guest.rounds(1)
        found.append(ksm.sharing())
        time.sleep(SAMPLE_EVERY)
    return statistics.median(found)


@case("merged-guests", native=False, own_daemon=True, alone=True, soak=True, seconds=240)
def merged_guests(run):
    """Two equal guests: as much is merged when each has 70 % of its memory as DRAM as when
    they have all that they want, and hardly an eviction is refused."""
    why = ksm.missing()
    if why:
        raise Skip(why)
    with ksm.switched_on():
        guests = []
        try:
            for name in ("one", "two"):
                guests.append(Guest(run, name, ["--memory", f"{GUEST_MIB}MiB", "--dram", "1GiB"],
                                    ["-machine", "q35"]))
            for guest in guests:
                guest.hear(r"^up\n")
                guest.tell(f"fill {GUEST_FILLED_MIB}")
            for guest in guests:
                guest.hear(r"^filled\n")
            usually(guests)
            without = usually(guests)
            for guest in guests:
                run.daemon.strata("set", guest.name, "--dram", f"{GUEST_BUDGET_MIB}MiB")
            usually(guests)
            under = usually(guests)
            run.note(f"merged {under} pages, {without} without pressure")
            stats = [guest.stats() for guest in guests]
            evictions = sum(one["evictions_total"] for one in stats)
            refusals = sum(one["evictions_refused_total"] for one in stats)
            run.note(f"evictions {evictions} refused {refusals}")
            if evictions == 0 or without == 0:
                raise Failure("nothing was evicted or merged: it tested nothing")
            if under < 0.9 * without or refusals > evictions // 100:
                raise Failure("evicting undoes what is merged")
            for guest in guests:
                guest.end()
        finally:
            for guest in guests:
                guest.kill()
