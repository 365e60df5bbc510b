#!/usr/bin/env bash
# All tests, one after the other; a failure does not keep the later ones from
# running. The last line counts them: N passed, N failed, N skipped.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

title() {
    printf '\n== %s\n' "$1"
}

# One step that counts as one test.
step() {
    local name=$1
    shift
    title "$name"
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $name"
    fi
}

# Adds up "N passed ... N failed ... N skipped|ignored" lines of the log. A
# command that failed without counting a failure is one itself.
count() {
    local status=$1 pattern=$2 p f s
    read -r p f s < <(grep -E "$pattern" "$log" | awk '
        { for (i = 2; i <= NF; i++) {
            if ($i ~ /^passed/) p += $(i - 1)
            if ($i ~ /^failed/) f += $(i - 1)
            if ($i ~ /^(skipped|ignored)/) s += $(i - 1) } }
        END { print p + 0, f + 0, s + 0 }')
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ "$status" != 0 ] && [ "$f" = 0 ]; then
        failed=$((failed + 1))
    fi
}

# The tests of snapshots ask here for CRIU; without it they say that they skip.
STRATA_CRIU=${STRATA_CRIU:-$(scripts/criu.sh --path || true)}
export STRATA_CRIU

step "format" cargo fmt --all --check
step "lints" cargo clippy --workspace --all-targets --locked -- -D warnings

title "unit and property tests"
cargo test --workspace --locked --no-fail-fast 2>&1 | tee "$log"
count "${PIPESTATUS[0]}" '^test result:'

step "build" cargo build --release --workspace --locked

if [ -x tests/run.sh ]; then
    title "programs under pressure"
    tests/run.sh --patience 5 2>&1 | tee "$log"
    count "${PIPESTATUS[0]}" '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$'
fi

echo
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
