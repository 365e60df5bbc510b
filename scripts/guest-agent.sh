#!/usr/bin/env bash
# Builds strata-guest-agent for the inside of a guest: one file that needs no library there.
# With the musl target if that is installed (rustup target add), else with glibc's archives.
set -euo pipefail
cd "$(dirname "$0")/.."

host=$(rustc -vV | sed -n 's/^host: //p')
musl=${host/-gnu/-musl}
target=$host
[ -d "$(rustc --print sysroot)/lib/rustlib/$musl" ] && target=$musl
build=$(realpath -m "${CARGO_TARGET_DIR:-target}")/guest-agent
# With --target these are for the program alone.
export RUSTFLAGS="-C target-feature=+crt-static -C strip=symbols"
CARGO_TARGET_DIR=$build cargo build --release --locked --target "$target" --package strata-guest-agent
cp "$build/$target/release/strata-guest-agent" "$build/strata-guest-agent"
if ldd "$build/strata-guest-agent" 2>&1 | grep -q '=>'; then
    echo "guest-agent: $build/strata-guest-agent needs libraries" >&2
    exit 1
fi
echo "$build/strata-guest-agent ($target)"
