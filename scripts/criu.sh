#!/usr/bin/env bash
# Sees to it that there is a CRIU that the tests can use (4.2 or newer), and
# prints its path: the one in PATH, or the one of a newer suite of Debian,
# unpacked with its libraries in the user's cache and started through their
# loader. The system's own libraries stay as they are. Nothing of it enters the
# repository. Does nothing when it is there.
#
#   scripts/criu.sh [--path]     --path: only say where it is; fetch nothing
set -euo pipefail

wanted=4.2
cache=${XDG_CACHE_HOME:-$HOME/.cache}/strata-lab
place=$cache/criu
# The suites that may have it, the steadiest first.
suites="stable testing unstable"

stop() {
    echo "criu: $*" >&2
    exit 1
}

# is_new_enough PROGRAM: it runs, and says that it is $wanted or newer.
is_new_enough() {
    local version
    version=$("$1" --version 2>/dev/null | awk '/^Version:/ { print $2 }') || return 1
    [ -n "$version" ] && printf '%s\n%s\n' "$wanted" "$version" | sort -C -V
}

for found in $(PATH=$PATH:/usr/sbin:/usr/local/sbin command -v criu) "$place/criu"; do
    if [ -x "$found" ] && is_new_enough "$found"; then
        echo "$found"
        exit
    fi
done
[ "${1:-}" != --path ] || exit 1

for tool in apt-get apt-cache dpkg dpkg-deb; do
    command -v "$tool" >/dev/null || stop "$tool is missing; install criu $wanted or newer by hand"
done
# The mirror and the key that the system's own packages come with.
mirror=$(apt-get indextargets --format '$(SITE) $(LABEL)' 'Created-By: Packages' 2>/dev/null |
    awk '$2 == "Debian" { print $1; exit }')
if [ -z "$mirror" ]; then # never updated: what its sources say
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null |
        awk '/^URIs:|^deb / { for (i = 2; i <= NF; i++) if ($i ~ /debian\/?$/) { print $i; exit } }')
fi
[ -n "$mirror" ] || stop "apt knows no mirror; run apt-get update, or install criu $wanted or newer by hand"
keyring=$(compgen -G '/usr/share/keyrings/debian-archive-keyring.*' | head -n 1) ||
    stop "the keys of Debian's archive are missing (package debian-archive-keyring)"

mkdir -p "$cache"
work=$(mktemp -d "$cache/criu.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/packages/archives/partial" "$work/root"
# An apt of its own: nothing is installed here yet, so it fetches everything
# that CRIU needs; signatures and checksums are apt's.
: >"$work/status"
apt=(-q -o Dir::Etc::sourcelist="$work/suite.sources" -o Dir::Etc::sourceparts=-
    -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status"
    -o Dir::Cache="$work/packages" -o APT::Sandbox::User=root -o Debug::NoLocking=1
    -o APT::Install-Recommends=false -o Acquire::Languages=none)
for target in DEP-11 DEP-11-icons-small DEP-11-icons CNF Contents-deb; do
    apt+=(-o "Acquire::IndexTargets::deb::$target::DefaultEnabled=false")
done
for suite in $suites; do
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' \
        "$mirror" "$suite" "$keyring" >"$work/suite.sources"
    apt-get "${apt[@]}" update >"$work/log" 2>&1 || continue
    version=$(apt-cache "${apt[@]}" show criu 2>/dev/null | awk '/^Version:/ { print $2; exit }')
    [ -n "$version" ] && dpkg --compare-versions "$version" ge "$wanted" || continue
    echo "criu: fetching $version with its libraries (about 9 MB)" >&2
    apt-get "${apt[@]}" install -y --download-only criu >"$work/log" 2>&1 ||
        stop "could not be fetched: $(tail -n 3 "$work/log")"
    for package in "$work"/packages/archives/*.deb; do
        dpkg-deb -x "$package" "$work/root"
    done
    loader=$(cd "$work/root" && find . -name 'ld-linux*.so.*' -path '*/lib/*' | head -n 1)
    [ -n "$loader" ] || stop "the packages hold no dynamic loader"
    cat >"$work/root/criu" <<END
#!/bin/sh
# CRIU beside its own libraries.
here=$place
exec "\$here/${loader#./}" --library-path "\$here/$(dirname "${loader#./}")" --argv0 criu "\$here/usr/sbin/criu" "\$@"
END
    chmod 755 "$work/root/criu"
    rm -rf "$place"
    mv "$work/root" "$place"
    is_new_enough "$place/criu" || stop "fetched $version, but it does not run here: $("$place/criu" --version 2>&1 | head -n 2)"
    echo "$place/criu"
    exit
done
stop "no suite of ${suites// /, } has criu $wanted or newer within reach: $(tail -n 2 "$work/log")"
