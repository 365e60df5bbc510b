"""Runs a command and collects the processes that its own leave behind, as the first
process of a system does: the runner keeps orphans below itself and collects none, and
the tests of snapshots wait until processes are gone.

    reaper.py COMMAND [ARGUMENT ...]"""

import ctypes
import os
import sys

PR_SET_CHILD_SUBREAPER = 36


def main():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
