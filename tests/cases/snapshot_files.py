"""Snapshots in files: persisted, they outlive their daemon; exported, they come
to life elsewhere; damaged in any place, they are refused and leave nothing."""

import os
import shutil
import stat
import struct

from moment import Moment, need_criu
from snapshot_crash import fill, refused, small_disk
from snapshot_programs import Rounds
from snapshot_rights import assert_private
from strata import Failure, configured
from suite import case
from users import as_nobody, publish


class Machine:
    """One `stratad --config` after another with the same directory of snapshots;
    two of them are two machines."""

    def __init__(self, run, name, directory=None):
        self.run, self.home = run, os.path.join(run.directory, name)
        self.directory = directory or os.path.join(self.home, "kept")
        self.log = os.path.join(run.log_directory, f"stratad-{name}.log")
        os.mkdir(self.home)

    def daemon(self, mask=0o022):
        return configured(self.run.daemon, f'snapshot_dir = "{self.directory}"\n', self.home,
                          self.log, mask=mask)

    def assert_nothing_left(self, but=()):
        """No trace of a snapshot, whole or not, besides these."""
        left = [os.path.join(place, name)[len(self.directory) + 1:]
                for place, _, names in os.walk(self.directory) for name in names]
        left = [name for name in left
                if name.split("/")[0] not in (*but, "lineage.json", "ballast")]
        if left:
            raise Failure(f"left in the directory of snapshots: {left[:3]}")
        if parts := [name for name in os.listdir(self.run.directory) if name.endswith(".part")]:
            raise Failure(f"half files are left: {parts}")


def states(program):
    return {id: one["state"] for id, one in program.list().items()}


def assert_states(program, expected, when):
    if (found := states(program)) != expected:
        raise Failure(f"{when}: {found} instead of {expected}")


@case("snapshot-persist", native=False, own_daemon=True)
def persist(run):
    """Persisted at once, later, or not at all: the next daemon with the directory
    has the first two, with the numbers going on; they bring the program back."""
    machine = Machine(run, "here")
    # What a careless starter leaves to the daemon.
    with machine.daemon(mask=0):
        program = Moment(run, "plain", 16, "8MiB")
        program.pressed()
        first = program.take("--label", "kept", "--persist")
        later = program.take()
        plain = program.take()
        if run.daemon.strata("snapshot", "persist", later).stdout.strip() != later:
            raise Failure("persist does not print what it persisted")
        run.daemon.strata("snapshot", "persist", later)  # once more is no error
        kept = {first: "persisted", later: "persisted"}
        assert_states(program, {**kept, plain: "usable"}, "persisted")
        listed = program.list()
        for one in kept:
            size = os.stat(os.path.join(machine.directory, one, "memory")).st_size
            if listed[one]["file_bytes"] != size or not 1 << 20 < size < 32 << 20:
                raise Failure(f"{one}: {listed[one]['file_bytes']} bytes said, {size} there")
        program.roll(first)
        assert_private(machine.directory)
        program.report()
        program.kill()
    # What CRIU wrote beside the file may not have been on the device when the
    # machine went down.
    for name in os.listdir(os.path.join(machine.directory, first, "images")):
        os.truncate(os.path.join(machine.directory, first, "images", name), 0)
    with machine.daemon():
        assert_states(program, kept, "after the daemon")
        if program.list()[first]["label"] != "kept":
            raise Failure("its label is lost")
        run.daemon.strata("snapshot", "export", first, os.path.join(run.directory, "again"))
        program.brought_back(first, lambda: program.restore(first))
        program.pressed()
        program.roll(later)
        if (new := program.take()) != f"{program.name}@4":
            raise Failure(f"the next one is {new}")
        if program.list()[new]["parent"] != later:
            raise Failure(f"{new} comes from {program.list()[new]['parent']}, not {later}")
        program.roll(new)
        program.assert_clean()
        program.kill()
        program.remove(f"{program.name}@kept")
        program.remove(later)
    with machine.daemon():
        assert_states(program, {}, "all were removed")
        machine.assert_nothing_left()
    os.unlink(os.path.join(run.directory, "again"))


@case("snapshot-placement", native=False, own_daemon=True, seconds=120)
def placement(run):
    """What was pinned at the snapshot is pinned in whatever comes back of it, from
    memory or from a file."""
    machine = Machine(run, "here")

    def goes_on_pinned(program, name):
        program.goes_on(3)
        if (found := run.daemon.stats(name)["pinned_bytes"]) != 12 << 20:
            raise Failure(f"{name}: {found} bytes are pinned")
    with machine.daemon():
        program = Rounds(run, "place", "restored")
        goes_on_pinned(program, program.name)
        snapshot = program.take("--persist")
        program.rollback(snapshot)
        goes_on_pinned(program, program.name)
        program.kill()
        program.command("clone", snapshot, "--name", "twin")
        goes_on_pinned(program, "twin")
        program.name = "twin"
        program.kill()
    with machine.daemon():
        program.restore(snapshot, "again")
        goes_on_pinned(program, "again")
        program.kill()


@case("snapshot-loaded-once", native=False, own_daemon=True)
def loaded_once(run):
    """Clones asked for at the same time of a snapshot that is on disk alone: its
    memory is read once, and nothing of it is left when they and it are gone."""
    machine = Machine(run, "here")
    with machine.daemon():
        program = Moment(run, "plain", 16, "8MiB")
        program.pressed()
        kept = program.take("--persist")
        program.kill()
    with machine.daemon():
        names = ["one", "two", "three"]
        commands = [run.daemon.start_strata("clone", kept, "--name", name) for name in names]
        for command in commands:
            _, said = command.communicate(timeout=run.seconds_left())
            if command.returncode != 0:
                raise Failure(f"{' '.join(command.args[1:])}: {said.strip()}")
        for name in names:
            run.daemon.strata("stop", name)
        run.daemon.strata("snapshot", "rm", kept)
        run.daemon.wait_until(lambda: not run.daemon.tenants(), "strata ps lists nobody any more")
        machine.assert_nothing_left()


@case("snapshot-export", native=False, own_daemon=True)
def export(run):
    """To another machine and back to life there, under another name, twice; what
    is there already is never replaced."""
    here, there = Machine(run, "here"), Machine(run, "there")
    file = os.path.join(run.directory, "moment.strata")
    with here.daemon(mask=0):
        program = Moment(run, "threads", 16, "10MiB")
        program.pressed()
        snapshot = program.take("--label", "good")
        run.daemon.strata("snapshot", "export", snapshot, file)
        if mode := stat.S_IMODE(os.stat(file).st_mode) & 0o177:
            raise Failure(f"an exported file has mode {mode:o} and more")
        whole = open(file, "rb").read()
        elsewhere = os.path.join(run.directory, "no", "such")
        for target in (file, run.directory, elsewhere, "/proc/1/none"):
            refused(run.daemon.strata("snapshot", "export", snapshot, target, check=False),
                    target)
        link = os.path.join(run.directory, "link")
        os.symlink("nowhere", link)
        refused(run.daemon.strata("snapshot", "export", snapshot, link, check=False), link)
        if open(file, "rb").read() != whole or os.path.lexists(
                os.path.join(run.directory, "nowhere")):
            raise Failure("a refused export wrote")
        program.goes_on()
        program.check()
        program.report()
        program.kill()
    with there.daemon(mask=0):
        own = program.name
        imported = run.daemon.strata("snapshot", "import", file).stdout.strip()
        again = run.daemon.strata("snapshot", "import", file).stdout.strip()
        renamed = run.daemon.strata("snapshot", "import", file, "--name", "guest").stdout.strip()
        if (imported, again, renamed) != (f"{own}@1", f"{own}@2", "guest@1"):
            raise Failure(f"they are called {imported}, {again}, {renamed}")
        labels = {id: one["label"] for name in (own, "guest")
                  for id, one in program.list(name).items()}
        if labels != {imported: "good", again: None, renamed: "good"}:
            raise Failure(f"their labels are {labels}")
        assert_private(there.directory)
        program.moments[renamed] = program.moments[snapshot]
        program.brought_back(renamed, lambda: program.restore("guest@good", "guest"))
        program.pressed()
        program.check()
        program.roll(renamed)
        # Its own snapshots go on from there.
        if (new := program.take("--persist")) != "guest@2":
            raise Failure(f"the next one is {new}")
        program.roll(new)
        program.assert_clean()
        program.kill()
        for bad in (os.path.join(run.directory, "no"), run.directory, "/dev/null",
                    program.board_path):
            refused(run.daemon.strata("snapshot", "import", bad, check=False), bad)


def blocks(data):
    """Offset and length of a block of each kind: pages, extents, file, directory;
    of the table and the footer (docs/snapshot-format.md)."""
    table, count = struct.unpack_from("<QQ", data, len(data) - 56)
    found, offset = {}, 32
    for index in range(count):
        length, kind = struct.unpack_from("<IB", data, table + 8 * index)
        found.setdefault(kind, (offset, length))
        offset += length
    if offset != table or set(found) != {1, 2, 3, 4}:
        raise Failure(f"the file is not as it is described: {found}, {offset}, {table}")
    return {"pages": found[1], "extents": found[2], "image": found[3], "directory": found[4],
            "table": (table, 8 * count), "footer": (len(data) - 56, 56)}


@case("snapshot-file-damaged", native=False, own_daemon=True)
def damaged(run):
    """A bit flipped in each part of the file, the file cut off, of another version
    or another kind: import says what and where, and nothing of it is offered. So
    does the restore of a persisted one."""
    machine = Machine(run, "here")
    file, bad = (os.path.join(run.directory, name) for name in ("whole", "bad"))
    with machine.daemon():
        program = Moment(run, "quiet", 16, "256MiB")
        snapshot = program.take("--persist")
        other = program.take("--persist")
        run.daemon.strata("snapshot", "export", snapshot, file)
        program.report()
        program.kill()
        data = open(file, "rb").read()
        place = blocks(data)
        head = 40 + 8 * 16  # of a block of pages; of others it is 40 bytes
        wrong = {
            "magic": (flipped(data, 3), ("no snapshot file",)),
            "another version": (data[:8] + b"\2" + data[9:], ("version 2", "reads version 1")),
            "header": (flipped(data, 20), ("damaged", "header", "byte 0")),
            "page sums": (flipped(data, place["pages"][0] + 44), ("damaged", "page at 0x")),
            "a page": (flipped(data, place["pages"][0] + head + 200), ("damaged", "page at 0x")),
            "extents": (flipped(data, place["extents"][0] + 45), ("damaged", "byte")),
            "an image": (flipped(data, sum(place["image"]) - 2), ("damaged", ".img", "byte")),
            "directory": (flipped(data, place["directory"][0] + 50), ("damaged", "directory")),
            "table": (flipped(data, place["table"][0] + 1), ("damaged", "table")),
            "footer": (flipped(data, place["footer"][0] + 17), ("incomplete",)),
            "cut in the pages": (data[:len(data) // 2], ("incomplete",)),
            "cut at the end": (data[:-1], ("incomplete",)),
            "more behind it": (data + b"\0", ("incomplete",)),
            "empty": (b"", ("no snapshot file",)),
            "a header alone": (data[:32], ("incomplete",)),
        }
        tenants = run.daemon.tenants()
        for what, (content, words) in wrong.items():
            with open(bad, "wb") as target:
                target.write(content)
            done = run.daemon.strata("snapshot", "import", bad, "--name", "taken-in", check=False)
            try:
                refused(done, bad, *words)
            except Failure as failure:
                raise Failure(f"{what}: {failure}") from None
            if program.list("taken-in") or run.daemon.tenants() != tenants:
                raise Failure(f"{what}: something of it is offered")
            machine.assert_nothing_left((snapshot, other))
        # It was the damage: the whole one is taken.
        run.daemon.strata("snapshot", "import", file, "--name", "taken-in")
    kept = os.path.join(machine.directory, snapshot, "memory")
    for what in ("a page", "an image", "cut in the pages", "another version"):
        with open(kept, "wb") as target:
            target.write(wrong[what][0])
        with machine.daemon():
            for _ in range(2):
                done = program.restore(snapshot, check=False)
                try:
                    refused(done, *wrong[what][1])
                except Failure as failure:
                    raise Failure(f"persisted, {what}: {failure}") from None
                if program.pids():
                    raise Failure(f"persisted, {what}: it has processes")
            # The one beside it is whole.
            program.brought_back(other, lambda: program.restore(other))
            program.report()
            program.kill()
    with open(kept, "wb") as target:
        target.write(data)
    with machine.daemon():
        program.brought_back(snapshot, lambda: program.restore(snapshot))
        program.kill()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1:]


@case("snapshot-file-no-space", native=False, own_daemon=True)
def no_space(run):
    """No space to persist, export or import: refused with that reason, no half
    file anywhere, and what was whole brings the program back, later as well."""
    with small_disk(run, "24m") as full:
        kept = os.path.join(full, "kept")
        machine = Machine(run, "here", kept)
        with machine.daemon():
            program = Moment(run, "plain", 16, "8MiB")
            program.pressed()
            first = program.take("--persist")
            second = program.take()
            file = os.path.join(run.directory, "exported")
            run.daemon.strata("snapshot", "export", second, file)
            ballast = os.path.join(full, "ballast")
            size = os.stat(file).st_size
            for spare in (1 << 20, size // 2, size - (64 << 10)):
                fill(ballast, spare // 4096 * 4096)
                for what in (("persist", second), ("export", second, os.path.join(full, "file")),
                             ("import", file, "--name", "taken-in")):
                    if what[0] == "import":
                        # It takes up little: the memory is not written again.
                        fill(ballast, 16 << 10)
                    done = run.daemon.strata("snapshot", *what, check=False)
                    refused(done, "No space left")
                    assert_states(program, {first: "persisted", second: "usable"},
                                  f"no space to {what[0]}")
                    if program.list("taken-in"):
                        raise Failure("half an import is offered")
                    machine.assert_nothing_left((first, second))
                    if set(os.listdir(full)) != {"kept", "ballast"} or \
                            set(os.listdir(os.path.join(kept, second))) != \
                            {"images", "snapshot.json"}:
                        raise Failure(f"no space to {what[0]} left {os.listdir(full)}, "
                                      f"{os.listdir(os.path.join(kept, second))}")
                # Taken, but not written: it is said, and it is there.
                fill(ballast, 1 << 20)
                done = run.daemon.strata("snapshot", program.name, "--persist", check=False)
                refused(done, "No space left", f"{program.name}@")
                (third,) = set(program.list()) - {first, second}
                assert_states(program, {first: "persisted", second: "usable", third: "usable"},
                              "no space for a new one")
                program.remove(third)
            os.unlink(ballast)
            program.goes_on()
            program.check()
            program.roll(first)
            run.daemon.strata("snapshot", "persist", second)
            program.report()
            program.kill()
        with machine.daemon():
            assert_states(program, {first: "persisted", second: "persisted"}, "afterwards")
            program.brought_back(second, lambda: program.restore(second))
            program.roll(first)
            program.kill()


@case("snapshot-file-rights", native=False, own_daemon=True)
def rights(run):
    """Another user does not see what was persisted, under no daemon, and brings
    no file in."""
    need_criu()
    place, published = publish(run)
    machine = Machine(run, "here")
    file = os.path.join(place, "exported")
    nobody = lambda *command: as_nobody(  # noqa: E731
        run, published.strata, *command, STRATA_SOCKET=run.daemon.socket_path)
    try:
        os.chmod(run.directory, 0o755)
        for round_ in range(2):
            with machine.daemon():
                if round_ == 0:
                    program = Moment(run, "quiet", 16, "256MiB")
                    snapshot = program.take("--persist")
                    run.daemon.strata("snapshot", "export", snapshot, file)
                    program.kill()
                assert_private(machine.directory)
                for command in (("restore", snapshot), ("clone", snapshot),
                                ("snapshot", "rm", snapshot), ("snapshot", "persist", snapshot),
                                ("snapshot", "export", snapshot, "/tmp/strata-test-never")):
                    status, lines = nobody(*command)
                    if status != 1 or len(lines) != 1 or "no snapshot" not in lines[0]:
                        raise Failure(f"another user: {command}: {status}, {lines}")
                os.chmod(file, 0o600)
                status, lines = nobody("snapshot", "import", file)
                if status != 1 or "Permission denied" not in "".join(lines):
                    raise Failure(f"another user's import: {status}, {lines}")
                os.chmod(file, 0o644)
                status, lines = nobody("snapshot", "import", file)
                if status != 1 or len(lines) != 1 or "alone" not in lines[0]:
                    raise Failure(f"another user's import: {status}, {lines}")
                assert_states(program, {snapshot: "persisted"}, "another user tried")
    finally:
        shutil.rmtree(place)
