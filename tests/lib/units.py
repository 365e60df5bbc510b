"""The unit tests of the workspace as cases of the suite: one test binary each, so
that they share the slots with the programs and a failure is looked at the same way."""

import json
import os
import re
import subprocess
import sys

from strata import Failure

SUMMARY = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)
FAILED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$", re.MULTILINE)
REAPER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reaper.py")
# Ends what hangs.
LIMIT_S = 900


class Binary:
    """One test binary, as cargo names it in its messages."""

    def __init__(self, message):
        self.path = message["executable"]
        self.directory = os.path.dirname(message["manifest_path"])
        package = os.path.basename(self.directory)
        target = message["target"]
        kind = target["kind"][0]
        own = kind in ("lib", "cdylib", "rlib")
        self.name = f"unit-{package}" if own else f"unit-{package}-{target['name']}"
        self.failed = []  # of the first run: what the second runs alone
        self.passed = self.ignored = 0

    def run(self, case):
        """Runs all its tests, or those that failed before one at a time; raises
        Failure with their names."""
        again = self.failed
        command = [sys.executable, "-B", REAPER, self.path, *(["--exact", "--test-threads=1", *again] if again else [])]
        log_path = os.path.join(case.log_directory, "output")
        environment = {**os.environ, "CARGO_MANIFEST_DIR": self.directory}
        with open(log_path, "wb") as log:
            try:
                status = subprocess.run(command, cwd=self.directory, env=environment, stdout=log,
                                        stderr=log, stdin=subprocess.DEVNULL, timeout=LIMIT_S,
                                        check=False).returncode
            except subprocess.TimeoutExpired:
                raise Failure(f"not ended after {LIMIT_S} s; see {log_path}") from None
        with open(log_path, errors="replace") as log:
            said = log.read()
        self.failed = FAILED.findall(said)
        summary = SUMMARY.search(said)
        if summary:
            passed, failed, self.ignored = map(int, summary.groups())
            self.passed = max(self.passed, passed) if not again else self.passed + passed
            if (failed, status) == (0, 0):
                # A name that no test has would pass by running nothing.
                if again and passed != len(again):
                    raise Failure(f"{passed} of {len(again)} tests ran again: {' '.join(again)}")
                case.tests = self.passed
                case.note(f"{self.passed} tests" + (f", {self.ignored} ignored" if self.ignored
                                                    else ""))
                return
        what = " ".join(self.failed) or f"status {status}"
        raise Failure(f"{what}; see {log_path}")


def read(path):
    """The test binaries of `cargo test --no-run --message-format=json`, whose
    output is in `path`."""
    found = []
    with open(path) as lines:
        for line in lines:
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("reason") == "compiler-artifact" and message.get("executable") and \
                    message["profile"]["test"]:
                found.append(Binary(message))
    return found
