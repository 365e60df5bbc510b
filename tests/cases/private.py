"""What a private daemon takes along from whoever starts it: nothing."""

import os
import select
import signal
import subprocess
import tempfile

from strata import Failure
from suite import case

SECONDS = 15


@case("private-daemon-descriptors", native=False)
def private_daemon_descriptors(run):
    """It outlives its caller, so a pipe's end that it kept would keep the other
    end's reader waiting."""
    directory = tempfile.mkdtemp(prefix="strata-test-")
    reader, writer = os.pipe()
    daemon = subprocess.Popen(
        [run.binaries.stratad, "--private", directory], pass_fds=[writer],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        os.close(writer)
        control = os.path.join(directory, "control.sock")
        run.daemon.wait_until(lambda: os.path.exists(control), "the daemon listens")
        # Readable means: nobody holds the other end any more.
        if not select.select([reader], [], [], 0)[0]:
            raise Failure("stratad --private holds a descriptor of its caller's")
        if daemon.poll() is not None:
            raise Failure(f"stratad ended with status {daemon.returncode}")
    finally:
        os.close(reader)
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        os.rmdir(directory)
