"""Snapshots of MariaDB under sysbench. Its files are not part of a snapshot: they
are copied while it is locked and has nothing to write, and put back with it."""

import os
import select
import shutil
import subprocess

from moment import Snapshots, need_criu
from strata import Failure, Skip
from suite import case

ROWS = 20_000
SCRIPT = "/usr/share/sysbench/oltp_read_write.lua"


class Database(Snapshots):
    def __init__(self, run, *options):
        need_criu()
        server = run.tool("mariadbd", "mysqld")
        install = run.tool("mariadb-install-db", "mysql_install_db")
        self.client = run.tool("mariadb", "mysql")
        self.sysbench = run.tool("sysbench")
        if not os.path.exists(SCRIPT):
            raise Skip(f"sysbench has no {SCRIPT}")
        self.data = os.path.join(run.directory, "data")
        made = subprocess.run(
            [install, "--no-defaults", f"--datadir={self.data}", f"--tmpdir={run.directory}",
             "--skip-test-db", "--user=root",
             "--auth-root-authentication-method=normal", "--skip-name-resolve"],
            capture_output=True, text=True, check=False)
        if made.returncode:
            raise Failure("preparing the database: " + made.stderr.strip()[-200:])
        program = run.start(
            server, "--no-defaults", f"--datadir={self.data}", "--socket=db.sock", "--user=root",
            "--skip-networking", f"--tmpdir={run.directory}", "--innodb-buffer-pool-size=96M",
            # It reserves 8 TiB else.
            "--loose-innodb-buffer-pool-size-max=96M", "--innodb-log-file-size=16M",
            "--innodb-flush-log-at-trx-commit=0", "--sync-binlog=0", "--skip-log-bin",
            "--innodb-buffer-pool-dump-at-shutdown=0", "--pid-file=db.pid", *options,
            budget="64MiB")
        super().__init__(run, program)
        self.answers()

    def command_line(self):
        return [self.client, "--no-defaults", "--socket=data/db.sock", "-uroot", "-N", "-B"]

    def query(self, text):
        done = subprocess.run([*self.command_line(), "-e", text], cwd=self.run.directory,
                              capture_output=True, text=True, check=False,
                              timeout=max(self.run.seconds_left(), 1))
        if done.returncode:
            raise Failure(f"{text[:60]}: {done.stderr.strip()[-200:]}")
        return done.stdout.strip()

    def answers(self):
        def it_does():
            try:
                return self.query("SELECT 1") == "1"
            except Failure:
                return False
        self.daemon.wait_until(it_does, "MariaDB answers", 30)

    def bench(self, *arguments):
        """A sysbench that runs by itself."""
        with open(os.path.join(self.run.log_directory, "sysbench.log"), "ab") as log:
            return subprocess.Popen(
                [self.sysbench, SCRIPT, "--db-driver=mysql", "--mysql-user=root",
                 "--mysql-db=sbtest", f"--mysql-socket={self.data}/db.sock", "--tables=2",
                 f"--table-size={ROWS}", "--threads=2", *arguments],
                cwd=self.run.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def load(self):
        self.query("CREATE DATABASE sbtest")
        if self.bench("prepare").wait(max(self.run.seconds_left(), 1)):
            raise Failure("sysbench prepare failed")

    def assert_sound(self, where):
        for table in ("sbtest1", "sbtest2"):
            checked = self.query(f"CHECK TABLE sbtest.{table} EXTENDED")
            if not checked.endswith("OK"):
                raise Failure(f"{where}: {checked}")
            if (rows := self.query(f"SELECT COUNT(*) FROM sbtest.{table}")) != str(ROWS):
                raise Failure(f"{where}: {rows} rows of {ROWS} in {table}")

    def sums(self):
        return self.query("SELECT SUM(k), BIT_XOR(CRC32(CONCAT(id, k, c, pad))) FROM sbtest.sbtest1;"
                          "SELECT SUM(k), BIT_XOR(CRC32(CONCAT(id, k, c, pad))) FROM sbtest.sbtest2")

    def works_for_a_while(self, where):
        if self.bench("--time=1", "run").wait(max(self.run.seconds_left(), 1)):
            raise Failure(f"{where}: sysbench failed")


@case("snapshot-mariadb", native=False, own_daemon=True, seconds=180, takes=15)
def snapshot_mariadb(run):
    database = Database(run, "--innodb-use-native-aio=0")
    database.load()
    load = database.bench("--time=600", "run")
    locked = subprocess.Popen([*database.command_line(), "--unbuffered"], cwd=run.directory,
                              text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    copy = os.path.join(run.directory, "copy")
    try:
        database.daemon.wait_until(
            lambda: int(database.query("SHOW GLOBAL STATUS LIKE 'Com_commit'").split()[1]) > 100,
            "sysbench works")
        # The recipe: nobody writes, nothing is left to write, then both.
        locked.stdin.write("SET GLOBAL innodb_max_dirty_pages_pct_lwm = 0;"
                           "SET GLOBAL innodb_max_dirty_pages_pct = 0;"
                           "FLUSH TABLES WITH READ LOCK; SELECT 'locked';\n")
        locked.stdin.flush()
        ready, _, _ = select.select([locked.stdout], [], [], 30)
        if not ready or locked.stdout.readline().strip() != "locked":
            raise Failure("the tables could not be locked")
        clean = "SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_pages_dirty'"
        database.daemon.wait_until(lambda: database.query(clean).split()[1] == "0",
                                   "every page is written", 30)
        sums = database.sums()
        snapshot = database.take()
        shutil.copytree(database.data, copy, ignore=lambda _, names: {"db.sock"} & set(names))
        locked.stdin.close()
        locked.wait(30)
        database.daemon.wait_until(lambda: database.sums() != sums, "sysbench goes on")
    finally:
        for process in (load, locked):
            process.kill()
            process.wait()
    database.assert_sound("after the snapshot")
    stats = database.daemon.stats(database.name)
    if not stats["evictions_total"] or not stats["faults_total"]:
        raise Failure("nothing was evicted: the case tests nothing")
    for number in range(2):
        where = f"restored for the {('first', 'second')[number]} time"
        database.kill()
        shutil.rmtree(database.data)
        shutil.copytree(copy, database.data)
        database.restore(snapshot)
        database.answers()
        if database.sums() != sums:
            raise Failure(f"{where}: the tables are not what they were")
        database.assert_sound(where)
        database.works_for_a_while(where)
        database.assert_sound(where + " and written to")
    if lost := database.daemon.stats(database.name)["lost_pages_total"]:
        raise Failure(f"{lost} pages lost")
    run.note(f"frozen {database.list()[snapshot]['freeze_us'] / 1000:.0f} ms")
    database.kill()


@case("snapshot-mariadb-default", native=False, own_daemon=True, seconds=120)
def snapshot_mariadb_default(run):
    """As it is by default: refused by name if it has an io_uring ring, and works
    on; taken if it has none."""
    database = Database(run)
    pid = database.pids()[0]
    held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    has_ring = any("io_uring" in target for target in held)
    done = database.daemon.strata("snapshot", database.name, check=False)
    if has_ring:
        lines = done.stderr.splitlines()
        if done.returncode != 1 or len(lines) != 1 or "io_uring" not in lines[0]:
            raise Failure(f"not refused for its io_uring ring: status {done.returncode}, {lines}")
        if database.list():
            raise Failure("a refused snapshot is listed")
    elif done.returncode:
        raise Failure(f"no ring, and yet: {done.stderr.strip()}")
    if database.pids() != [pid]:
        raise Failure("it is not there any more")
    database.load()
    database.assert_sound("afterwards")
    run.note("refused for its io_uring ring" if has_ring else "has no io_uring ring: taken")
    database.kill()
