#!/usr/bin/env bash
# The tests several times over, every second time with one core kept busy by another
# process: none may fail, and none be flaky.
#
#   scripts/steady.sh [TIMES [FLAG ...]]   5 times; flags of scripts/test.sh
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
times=${1:-5}
shift || true
busy='' unsteady=0
trap '[ -z "$busy" ] || kill "$busy"' EXIT
log=$(mktemp)
for ((time = 1; time <= times; time++)); do
    beside=''
    if ((time % 2 == 0)); then
        taskset -c 0 sh -c 'while :; do :; done' &
        busy=$! beside=', one core busy'
    fi
    scripts/test.sh --fast "$@" >"$log" 2>&1
    status=$?
    if [ -n "$busy" ]; then
        kill "$busy"
        wait "$busy" 2>/dev/null
        busy=''
    fi
    echo "$time of $times$beside: $(tail -n 1 "$log"); $(grep -E '^(flaky: |no flaky case)' "$log" | tail -n 1)"
    grep -E '^(again|FAIL|flaky) ' "$log"
    if [ "$status" != 0 ] || ! grep -q '^no flaky case$' "$log"; then
        unsteady=$((unsteady + 1))
    fi
done
rm -f "$log"
exit $((unsteady > 0))
