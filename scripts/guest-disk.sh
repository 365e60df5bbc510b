#!/usr/bin/env bash
# Builds a disk of the guests that `make bench` measures and `make guest-demo`
# shows: a Debian of this machine's release. One ext4 without a boot loader in
# target/tests/guest: QEMU gets a kernel, and the guests' first process is
# strata-lab (crates/lab/src/guest). Does nothing when it is there. Root, as it
# fills a root of its own (mmdebstrap) and runs programs there.
#
#   servers   disk.img: MariaDB, sysbench, Redis and ndctl, and two databases in
#             sysbench's schema, each row with the CRC of its text. About two
#             minutes and 1.5 GB
#   compile   compile.img: a compiler, and in /src a project in C (Debian's
#             source of bzip2) with the checksums of its files and of what they
#             become. About a minute and 0.5 GB
#
#   scripts/setup.sh disk|compile     installs what this needs, and runs it
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-servers}
place=$(realpath -m "${CARGO_TARGET_DIR:-target}")/tests/guest
# Rows of the databases; the large one is the larger part of a guest of 1 GiB.
small=80000
large=1600000
# What a disk is made of: with another recipe it is built anew.
case $kind in
servers)
    disk=$place/disk.img size=3G
    packages=mariadb-server-core,mariadb-client-core,sysbench,redis-server,redis-tools,ndctl,e2fsprogs,mount,procps
    recipe="2 $packages small=$small large=$large"
    ;;
compile)
    disk=$place/compile.img size=1G
    packages=gcc,libc6-dev,make,mount,procps
    source=bzip2
    recipe="2 $packages $source"
    ;;
*)
    echo "guest-disk: give servers or compile" >&2
    exit 2
    ;;
esac

stop() {
    echo "guest-disk: $*" >&2
    exit 1
}

say() {
    echo "guest-disk: $* ($SECONDS s)" >&2
}

[ -e "$disk" ] && [ "$recipe" = "$(cat "$disk.recipe" 2>/dev/null)" ] && exit
[ "$(id -u)" = 0 ] || stop "building a disk for guests needs root"
for tool in mmdebstrap mkfs.ext4 chroot; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null ||
        stop "$tool is missing; run scripts/setup.sh disk"
done
PATH="$PATH:/usr/sbin:/sbin"
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
[ -n "$release" ] || stop "/etc/os-release names no release; is this Debian?"

mkdir -p "$place"
work=$(mktemp -d "$place/disk.XXXXXX")
server=
clean() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap clean EXIT
chmod 755 "$work"
root=$work/root

say "unpacking Debian $release with $packages"
# Nothing is measured of documentation; no service is started, nothing is kept of apt.
mmdebstrap --quiet --mode=root --variant=essential --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$release" "$root" >"$work/log" 2>&1 || stop "mmdebstrap: $(tail -1 "$work/log")"

# A row's text depends on its number alone; it compresses as text does.
fill() {
    cat <<END
CREATE DATABASE $1; USE $1;
CREATE TABLE sbtest1 (id INT NOT NULL PRIMARY KEY, k INT NOT NULL DEFAULT 0,
  c CHAR(120) NOT NULL DEFAULT '', pad CHAR(60) NOT NULL DEFAULT '') ENGINE=InnoDB CHARACTER SET latin1;
INSERT INTO sbtest1 SELECT seq, 1 + CRC32(CONCAT(seq, 'k')) % $2, c, CONCAT(LPAD(CRC32(c), 10, '0'), '-', CRC32(seq), '-left with a neighbour')
  FROM (SELECT seq, CONCAT('{"order":', seq, ',"customer":', CRC32(CONCAT(seq, 'n')), ',"city":"',
    ELT(1 + CRC32(CONCAT(seq, 'c')) % 6, 'Rotterdam', 'Valencia', 'Gothenburg', 'Lyon', 'Krakow', 'Porto'), '","status":"',
    ELT(1 + CRC32(CONCAT(seq, 's')) % 4, 'pending', 'paid', 'shipped', 'returned'), '","total":', CRC32(CONCAT(seq, 't')) % 100000, '}') AS c
    FROM seq_1_to_$2) AS made;
CREATE INDEX k_1 ON sbtest1 (k);
SELECT COUNT(*) FROM sbtest1 WHERE LEFT(pad, 10) = LPAD(CRC32(c), 10, '0');
END
}

add_servers() {
    say "making the databases: $small and $large rows"
    data=/var/lib/mysql
    chroot "$root" mkdir -p "$data"
    chroot "$root" mariadb-install-db --user=root --datadir="$data" \
        --auth-root-authentication-method=normal --skip-test-db --force >"$work/log" 2>&1 ||
        stop "mariadb-install-db: $(tail -1 "$work/log")"
    chroot "$root" mariadbd --no-defaults --user=root --datadir="$data" --socket=/tmp/db.sock \
        --pid-file=/tmp/db.pid --skip-networking --skip-log-bin --innodb-log-file-size=64M \
        --innodb-flush-log-at-trx-commit=0 --innodb-buffer-pool-size=768M >"$work/log" 2>&1 &
    server=$!
    sql() {
        chroot "$root" mariadb --no-defaults --socket=/tmp/db.sock -u root -N "$@"
    }
    for _ in $(seq 300); do
        sql -e 'SELECT 1' >/dev/null 2>&1 && break
        kill -0 "$server" 2>/dev/null || stop "mariadbd ended: $(tail -1 "$work/log")"
        sleep 0.1
    done
    for database in "small $small" "large $large"; do
        read -r name rows <<<"$database"
        counted=$(fill "$name" "$rows" | sql) || stop "the database could not be filled"
        [ "$counted" = "$rows" ] || stop "$name: $counted of $rows rows carry their checksums"
    done
    sql -e 'SET GLOBAL innodb_fast_shutdown=0; SHUTDOWN'
    wait "$server" || stop "mariadbd ended badly: $(tail -1 "$work/log")"
    server=
    printf '%s\n' "$small" "$large" >"$root/etc/strata-rows"
}

# The project's source as Debian has it; it is built once, for the checksums.
add_project() {
    say "fetching the source of $source"
    mkdir -p "$work/apt/lists" "$root/src"
    # Where the packages come from, their sources come from.
    cat /etc/apt/sources.list.d/*.sources 2>/dev/null | sed -n 's/^Types:.*/Types: deb-src/; p' >"$work/apt/all.sources"
    sed -n 's/^deb /deb-src /p' /etc/apt/sources.list 2>/dev/null >"$work/apt/all.list" || true
    apt_get() {
        apt-get -q -o APT::Sandbox::User=root -o Dir::State::lists="$work/apt/lists" \
            -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/apt" "$@"
    }
    apt_get update >"$work/log" 2>&1 || true # of foreign sources some have none
    (cd "$work/apt" && apt_get source --download-only "$source" >"$work/log" 2>&1) ||
        stop "apt-get source $source: $(tail -1 "$work/log")"
    tar -xzf "$work"/apt/*.orig.tar.gz -C "$root/src" --strip-components=1
    cat >"$root/src/build" <<'END'
#!/bin/sh
# Builds all of it anew with so many compilers at once; what comes of it must be what it was.
set -e
cd /src
sha256sum --quiet --check sources.sum
make --silent clean >/dev/null
make --silent -j "$1" bzip2 bzip2recover CFLAGS="-O0 -w"
[ -z "$2" ] || sha256sum --quiet --check built.sum
END
    chmod +x "$root/src/build"
    say "building it once"
    chroot "$root" sh -c 'cd /src && find . -name "*.[ch]" | sort | xargs sha256sum >sources.sum && ./build 2 &&
        sha256sum bzip2 bzip2recover libbz2.a >built.sum && ./build 1 check && make --silent clean' \
        >"$work/log" 2>&1 || stop "building $source: $(tail -1 "$work/log")"
}

case $kind in
servers) add_servers ;;
compile) add_project ;;
esac
chroot "$root" mkdir -p /strata /pmem

say "making the disk"
truncate -s "$size" "$work/disk.img"
mkfs.ext4 -q -m 0 -L guest -d "$root" "$work/disk.img" || stop "mkfs.ext4 failed"
mv "$work/disk.img" "$disk"
echo "$recipe" >"$disk.recipe"
say "$disk"
