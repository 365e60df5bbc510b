"""A disk image that is served through a pool (strata-export), as `strata vm run` starts
it, without a guest."""

import os
import subprocess

import machine
from strata import Failure


class Export:
    """`pool`: its name; none: without one."""

    def __init__(self, run, image, name, pool=None, read_only=False):
        self.run = run
        self.socket_path = os.path.join(run.directory, f"{name}.sock")
        self.log_path = os.path.join(run.directory, f"{name}.log")
        command = [os.path.join(run.binaries.directory, "strata-export"), "--image", image]
        if read_only:
            command.append("--read-only")
        if pool:
            command += ["--pool", pool, "--pool-socket",
                        os.path.join(run.daemon.directory, "pool.sock")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        self.said = self.hear()
        if not self.said.startswith("ready "):
            self.process.stdin.close()
            self.process.wait()
            return
        self.process.stdin.write(self.socket_path + "\n")
        self.process.stdin.flush()
        if self.hear() != "serving":
            raise Failure("strata-export does not serve")

    def hear(self):
        """Its next line that is no note."""
        while True:
            line = self.process.stdout.readline().strip()
            if not line.startswith("note "):
                return line

    @property
    def uri(self):
        return f"nbd+unix:///?socket={self.socket_path}"

    def complaints(self):
        return machine.read(self.log_path).splitlines()

    def end(self):
        """Lets go of what it lives by."""
        self.process.stdin.close()
        self.process.stdout.close()
        if self.process.wait(max(self.run.seconds_left(), 1)) != 0:
            raise Failure(f"strata-export ended with status {self.process.returncode}")
