#!/usr/bin/env bash
# All tests: format, then unit tests and programs under pressure together, some at a time
# (tests/lib/runner.py), and the lints beside them: programs wait more than they compute. A
# failure does not keep what comes after it from running. The last line counts them:
# N passed, N failed, N skipped.
#
#   scripts/test.sh [--fast] [FLAG ...]   --fast: no format, no lints; then flags of
#                                         tests/run.sh, as --only PATTERN
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

# Unit tests and programs are built once, in one optimised profile with assertions.
profile=checked
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export STRATA_BIN_DIR=$target/$profile
log=$target/test.log units=$target/units.json
mkdir -p "$target"

passed=0 failed=0 skipped=0
# One step that counts as one test.
step() {
    local name=$1 began=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@"; then
        passed=$((passed + 1))
        echo "ok $name  ($((SECONDS - began)) s)"
    else
        failed=$((failed + 1))
        echo "FAIL $name"
        return 1
    fi
}

build() {
    cargo build --profile "$profile" --workspace --lib --bins --examples --locked &&
        cargo test --profile "$profile" --workspace --locked --no-run \
            --lib --bins --tests --message-format=json >"$units"
}

# The tests of snapshots ask here for CRIU; without it they say that they skip.
STRATA_CRIU=${STRATA_CRIU:-$(scripts/criu.sh --path || true)}
export STRATA_CRIU

# What needs nothing of the machine's; its own process, with its own count.
lints() {
    step "lints" nice -n 19 \
        cargo clippy --profile "$profile" --workspace --all-targets --locked -- -D warnings
    step "examples in documentation" nice -n 19 \
        cargo test --profile "$profile" --package strata-client --locked --quiet --doc
    echo "$passed $failed" >"$target/lints.count"
}

beside=
if [ "${1:-}" = --fast ]; then
    shift
else
    step "format" cargo fmt --all --check
    beside=lints
fi
if step "build" build; then
    if [ -n "$beside" ]; then
        rm -f "$target/lints.count"
        # A group of its own: cargo and what it has started go with it, when this is interrupted.
        set -m
        (passed=0 failed=0 && lints) >"$target/lints.log" 2>&1 </dev/null &
        beside=$!
        set +m
        trap 'kill -- "-$beside" 2>/dev/null' EXIT
    fi
    printf '\n== unit tests, and programs under pressure\n'
    tests/run.sh --units "$units" --patience 5 "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    read -r p f s < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$/\1 \2 \3/p' "$log")
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0})) skipped=$((skipped + ${s:-0}))
    # One that failed without counting a failure is one itself.
    [ "$status" = 0 ] || [ "${f:-0}" != 0 ] || failed=$((failed + 1))
    grep -E '^(flaky: |no flaky case)' "$log"
    if [ -n "$beside" ]; then
        wait "$beside"
        trap - EXIT
        cat "$target/lints.log"
        read -r p f <"$target/lints.count" || f=1
        passed=$((passed + ${p:-0})) failed=$((failed + f))
    fi
elif [ -n "$beside" ]; then
    lints
fi

printf '\n%s s\n' "$SECONDS"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
