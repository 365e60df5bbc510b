#!/usr/bin/env bash
# Fuzzes what reads strangers' bytes, guided by coverage (libFuzzer), each target for as
# long as is said. What it finds is printed, and kept in target/fuzz/found: mend it, and
# keep the input in fuzz/corpus/TARGET, where every run of the tests tries it again.
#
#   scripts/fuzz.sh [SECONDS [TARGET ...]]       60 s each, all targets
#
# No other toolchain is needed than the repository's: the compiler counts the edges
# that are taken (sancov-module), libfuzzer-sys brings libFuzzer, a C++ compiler builds
# it. There is no address sanitizer: outside of `sys` there is no `unsafe` here, and an
# index out of bounds is a panic.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] ||
    targets=(control agent handshake block archive claims store tier pages registry monitor nbd
        pool reading)

host=$(rustc -vV | sed -n 's/^host: //p')
build=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fuzz
# With --target these are for our programs, not for build scripts.
export RUSTFLAGS="--cfg fuzzing -Cdebug-assertions -Coverflow-checks -Ccodegen-units=1 \
-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_LTO=off CARGO_TARGET_DIR=$build \
    cargo build --release --locked --target "$host" --package strata-fuzz --features libfuzzer --bins

status=0
for target in "${targets[@]}"; do
    seen=$build/seen/$target found=$build/found
    mkdir -p "$seen" "$found"
    printf '\n== %s\n' "$target"
    "$build/$host/release/fuzz-$target" -max_total_time="$seconds" -seed="${FUZZ_SEED:-1}" \
        -timeout=10 -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 \
        -artifact_prefix="$found/$target-" "$seen" "fuzz/corpus/$target" 2>&1 |
        grep -vE '^#|NEW_FUNC|# Uses|^WARNING: Failed to find' || status=1
done
exit $status
