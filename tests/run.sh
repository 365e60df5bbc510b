#!/bin/sh
# Runs the conformance suite: real programs under real pressure.
#
#   tests/run.sh [--native] [--only PATTERN] [--soak] [--list]
#
# Needs cc and python3; under Strata also root and a built target/release.
# The work is done by tests/lib/suite.py.
exec python3 -B "$(dirname "$0")/lib/suite.py" "$@"
