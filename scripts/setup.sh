#!/usr/bin/env bash
# Sees to it that what a make target needs is there: checks cargo, installs the
# Debian packages that are missing (and says so), does nothing when none is.
#
#   scripts/setup.sh build|demo|test|bench|guest|disk|compile|criu
#
# criu fetches a CRIU that works, if there is none, and prints where it is
# (scripts/criu.sh); into the user's cache, not installed.
#
# guest also fetches kernels of the distribution for the guests of the tests,
# into target/tests/guest; they are unpacked, not installed.
#
# disk does what guest does, and builds the disk of the guests that are measured
# and shown (scripts/guest-disk.sh), there too; compile, that of the guests that
# compile (make bench ROW=compile).
#
# Packages that bring a service get installed without starting it; a service
# that was there before is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

stop() {
    echo "setup: $*" >&2
    exit 1
}

check_cargo() {
    local wanted found
    wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml)
    command -v cargo >/dev/null ||
        stop "cargo is missing; install Rust $wanted or newer (https://rustup.rs)"
    found=$(cargo --version | awk '{print $2}')
    printf '%s\n%s\n' "$wanted" "$found" | sort -C -V ||
        stop "cargo is $found, older than the $wanted needed; run: rustup update"
}

# Packages to install, in the order in which they were found missing.
missing=()

# need PACKAGE COMMAND...: any one of the commands will do, wherever it is from.
need() {
    local package=$1 command
    shift
    for command in "$@"; do
        if PATH="$PATH:/usr/sbin:/sbin:/usr/local/go/bin" command -v "$command" >/dev/null; then
            return
        fi
    done
    missing+=("$package")
}

# need_file PACKAGE GLOB: a file that no command stands for.
need_file() {
    compgen -G "$2" >/dev/null || missing+=("$1")
}

need_build() {
    need gcc cc # the linker that rustc calls
    need_file libc6-dev '/usr/include/stdio.h'
}

need_demo() {
    need redis-server redis-server
    need util-linux mkswap
    need mount swapon
}

need_bench() {
    need golang-go go
}

need_test() {
    need redis-tools redis-cli
    need python3 python3
    need stress-ng stress-ng
    need mariadb-server-core mariadbd
    need mariadb-server-core mariadb-install-db
    need mariadb-client-core mariadb
    need sysbench sysbench
    need default-jdk-headless javac
    need golang-go go
    need gdb gdb
    need musl-tools musl-gcc
    need valgrind valgrind
    need g++ c++
    need_file python3-numpy /usr/lib/python3/dist-packages/numpy
    # Clients of other people's for what guests' disks are served by.
    need qemu-utils qemu-img
    need libnbd-bin nbdcopy
    need python3-libnbd nbdsh
    need_file libjemalloc2 '/usr/lib/*/libjemalloc.so.2'
    need_file systemd /usr/lib/systemd/systemd
}

# The programs that the bench measures beside Redis.
need_programs() {
    need mariadb-server-core mariadbd
    need mariadb-client-core mariadb
    need sysbench sysbench
    need default-jdk-headless javac
    need python3 python3
}

need_guest() {
    need qemu-system-x86 qemu-system-x86_64
    need dpkg dpkg-deb
    need ndctl ndctl
    need e2fsprogs mkfs.ext4
    need redis-server redis-server
    need libvirt-daemon libvirtd
    need libvirt-daemon virtlogd
    need libvirt-clients virsh
    need_file libvirt-daemon-driver-qemu '/usr/lib/*/libvirt/connection-driver/libvirt_driver_qemu.so'
    # Its configuration, and the user whose processes its guests are.
    need_file libvirt-daemon-system /etc/libvirt/qemu.conf
    need xz-utils xz
    need zstd zstd
}

# What builds a disk with a Debian on it.
need_disk() {
    need mmdebstrap mmdebstrap
}

# What CRIU wants of a kernel and Debian's has in modules.
modules=({nfnetlink,nf_tables,libcrc32c,crc32c_generic}.ko tun.ko veth.ko
    {unix,inet,tcp,udp,raw,af_packet,netlink}_diag.ko)
# And for a file system on persistent memory.
modules+=({libnvdimm,nfit,nd_btt,nd_pmem,crc16,mbcache,jbd2,ext4}.ko)
# And for a guest's balloon, its disk, its network card, and the port of an agent in it.
modules+=(virtio{,_ring,_pci_legacy_dev,_pci_modern_dev,_pci,_mmio,_balloon,_blk,_console,_net}.ko
    {failover,net_failover}.ko)

# unpack_kernel VMLINUZ: the kernel out of what unpacks itself, beside it as vmlinux-VERSION;
# emulated, that takes a second of each boot. The magic of what it is packed with says where it
# begins; what follows it is no part of it, which the unpackers complain of.
unpack_kernel() {
    local how at unpacked=${1/vmlinuz-/vmlinux-}
    [ "$unpacked" -nt "$1" ] && return
    for how in 'xz \xfd7zXZ\x00' 'zstd \x28\xb5\x2f\xfd'; do
        at=$(LC_ALL=C grep -aobP -m 1 "${how#* }" "$1" | head -n 1 | cut -d : -f 1) || true
        [ -n "$at" ] || continue
        tail -c +$((at + 1)) "$1" | "${how%% *}" -dc >"$unpacked.new" 2>/dev/null || true
        if [ "$(head -c 4 "$unpacked.new" | tail -c 3)" = ELF ]; then
            mv "$unpacked.new" "$unpacked"
            return
        fi
    done
    rm -f "$unpacked.new"
    echo "setup: $1 is packed in an unknown way; guests boot slower with it"
}

# Kernels to boot guests with: the distribution's own, and a newer one if it
# offers that beside it; vmlinuz-VERSION, and modules-VERSION beside it, where
# "recipe" says what was asked for: another list is another fetch.
fetch_kernels() {
    local place meta package version kernel
    place=$(realpath -m "${CARGO_TARGET_DIR:-target}")/tests/guest
    mkdir -p "$place"
    apt-cache show linux-image-amd64 >/dev/null 2>&1 || as_root apt-get update -q ||
        stop "apt-get update failed; is the network there?"
    for meta in linux-image-amd64 linux-image-6.12-amd64; do
        package=$(apt-cache depends "$meta" 2>/dev/null | awk '/Depends: linux-image/ { print $2 }')
        [ -n "$package" ] || continue
        version=${package#linux-image-}
        [ -e "$place/vmlinuz-$version" ] &&
            [ "${modules[*]}" = "$(cat "$place/modules-$version/recipe" 2>/dev/null)" ] && continue
        echo "setup: fetching $package for guests (up to 110 MB)"
        (
            fetched=$(mktemp -d)
            trap 'rm -rf "$fetched"' EXIT
            chmod 755 "$fetched"
            cd "$fetched"
            apt-get download -q -o APT::Sandbox::User=root "$package" || stop "apt-get could not download $package"
            patterns=("${modules[@]/#/./lib/modules/*/}")
            # Not every kernel has every module; tar says which are not there.
            dpkg-deb --fsys-tarfile ./*.deb |
                tar -x --wildcards './boot/vmlinuz-*' "${patterns[@]/%/*}" || true
            mv boot/vmlinuz-* "$place"
            rm -rf "$place/modules-$version"
            mkdir "$place/modules-$version"
            find lib/modules -name '*.ko*' -exec mv -t "$place/modules-$version" {} +
            # Last: what is cut off before is fetched again.
            echo "${modules[*]}" >"$place/modules-$version/recipe"
        )
    done
    compgen -G "$place/vmlinuz-*" >/dev/null || stop "no kernel package was found; is this Debian?"
    for kernel in "$place"/vmlinuz-*; do
        unpack_kernel "$kernel"
    done
}

# Debian asks this file whether a package may start its services.
policy=/usr/sbin/policy-rc.d
policy_made=
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

remove_policy() {
    [ -z "$policy_made" ] || as_root rm -f "$policy"
}

install_missing() {
    local packages unit
    packages=$(printf '%s\n' "${missing[@]}" | awk '!seen[$0]++' | tr '\n' ' ')
    command -v apt-get >/dev/null ||
        stop "missing: ${packages% } (Debian names); this system has no apt-get, install them by hand"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || stop "missing: ${packages% }; run as root: apt-get install $packages"
        echo "setup: installing with sudo: ${packages% }"
    else
        echo "setup: installing: ${packages% }"
    fi
    if [ ! -e "$policy" ]; then
        policy_made=1
        trap remove_policy EXIT
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
        as_root chmod 755 "$policy"
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q ||
        stop "apt-get update failed; is the network there?"
    # shellcheck disable=SC2086 # one word each
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends $packages ||
        stop "apt-get could not install: ${packages% }"
    # Servers are wanted as programs, not at every boot. They were not
    # installed before, so nobody's service is switched off here.
    case " $packages" in *" redis-server "*)
        not_at_boot redis-server.service redis.service ;;
    esac
    case " $packages" in *" libvirt-daemon-system "*)
        not_at_boot libvirtd.service libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket \
            libvirt-guests.service virtlogd.socket virtlogd-admin.socket virtlockd.socket \
            virtlockd-admin.socket ;;
    esac
}

not_at_boot() {
    local unit
    command -v systemctl >/dev/null || return 0
    for unit in "$@"; do
        as_root systemctl disable -q "$unit" 2>/dev/null || true
    done
}

guest_disk() {
    fetch_kernels
    as_root env CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}" scripts/guest-disk.sh "$1"
}

case ${1:-} in
build) need_build ;;
demo) need_build && need_demo ;;
bench) need_build && need_demo && need_bench && need_programs ;;
test) need_build && need_demo && need_test ;;
guest) need_build && need_guest ;;
disk | compile) need_build && need_guest && need_disk ;;
criu) exec scripts/criu.sh ;;
*) stop "give one of: build, demo, test, bench, guest, disk, compile, criu" ;;
esac
check_cargo
if [ ${#missing[@]} -gt 0 ]; then
    install_missing
fi
case ${1:-} in
guest) fetch_kernels ;;
disk) guest_disk servers ;;
compile) guest_disk compile ;;
esac
