"""A virtual machine that stands still: its memory holds what was loaded into it, and
is read back through QEMU's monitor. No guest that runs tells so surely that each byte
is as it was, and none is as quick to start."""

import filecmp
import glob
import hashlib
import os
import socket
import time

from strata import Failure

MIB = 1 << 20
CONTENT_MIB = 48
LOADED_AT = 4 * MIB
PROMPT = b"(qemu) "


def files(qemu):
    """What it needs to start elsewhere, beside the libraries that it is linked with."""
    return [qemu, *glob.glob("/usr/lib/*/qemu/accel-tcg-x86_64.so")]


class Machine:
    """Under Strata, with `content_mib` of its memory written."""

    def __init__(self, run, content_mib=CONTENT_MIB):
        self.run, self.size = run, content_mib * MIB
        self.content = os.path.join(run.directory, "content")
        with open(self.content, "wb") as file:
            for page in range(self.size // 4096):
                file.write(hashlib.shake_128(b"%d" % page).digest(256) * 16)
        self.monitor_path = os.path.join(run.directory, "monitor")
        self.program = run.start(
            run.tool("qemu-system-x86_64"), "-machine", "none", "-S", "-nodefaults",
            "-display", "none", "-m", f"{content_mib + 16}M",
            "-device", f"loader,file={self.content},addr={LOADED_AT:#x},force-raw=on",
            # Less than half of what it takes: QEMU keeps what it loads a second time, for resets.
            "-monitor", "unix:monitor,server,nowait", budget=f"{content_mib * 5 // 6}MiB")
        self.monitor = self.connect()
        self.until_prompt()

    def connect(self):
        while True:
            monitor = socket.socket(socket.AF_UNIX)
            try:
                monitor.connect(self.monitor_path)
                monitor.settimeout(max(self.run.seconds_left(), 1))
                return monitor
            except OSError:
                monitor.close()
            if self.program.process.poll() is not None:
                raise Failure(self.program.end_reason())
            if self.run.seconds_left() < 0:
                raise Failure("hung: QEMU's monitor does not answer")
            time.sleep(0.05)

    def until_prompt(self):
        said = b""
        while not said.endswith(PROMPT):
            piece = self.monitor.recv(4096)
            if not piece:
                raise Failure("QEMU hung up: " + self.program.end_reason())
            said += piece

    def check(self):
        """All that was loaded is in the machine's memory."""
        saved, size = os.path.join(self.run.directory, "saved"), self.size
        self.monitor.sendall(f'pmemsave {LOADED_AT:#x} {size:#x} "saved"\n'.encode())
        self.until_prompt()
        if os.path.getsize(saved) != size or not filecmp.cmp(saved, self.content, shallow=False):
            raise Failure("the machine's memory is not what was loaded into it")
        os.unlink(saved)

    def end(self):
        self.program.assert_pressed()
        self.monitor.sendall(b"quit\n")
        self.program.end_well()
        self.monitor.close()
