#!/bin/bash
# Strata installed as docs/usage.md says and run by systemd from its unit, in
# namespaces of their own: overlays take what is installed, systemd is the first
# process of its pid namespace, nothing is left behind.
#
#   service.sh PLACE BUILD CRIU    PLACE: a directory of our own; BUILD: where the programs
#                                  are. What was seen is in PLACE/seen.
#
# It calls itself in the namespaces (inside), and once more as a unit beside
# stratad's (look).
set -euo pipefail
self=$(readlink -f "$0")
repository=$(dirname "$self")/../..

outside() {
    place=$1
    hierarchy=/sys/fs/cgroup
    if mountpoint -q "$hierarchy/unified"; then
        hierarchy=$hierarchy/unified
    fi
    group=$hierarchy/strata-service-$$
    mkdir "$group"
    trap tidy EXIT
    status=0
    # In a subshell, which becomes the first process of the namespaces.
    (
        echo "$BASHPID" >"$group/cgroup.procs"
        exec unshare --mount --pid --fork --cgroup --uts --ipc --kill-child \
            "$self" inside "$@" </dev/null
    ) || status=$?
    exit "$status"
}

# Groups outlive who was in them: ours, and those that stratad made for its tenants.
tidy() {
    find "$group" -depth -type d -exec rmdir {} + || true
    if [ -s "$place/number" ]; then
        while read -r number; do
            find /sys/fs/cgroup -depth -type d -path "*/strata-$number*" -exec rmdir {} + || true
        done <"$place/number"
    fi
}

# recipe AFTER BEFORE: the commands that docs/usage.md has first after a line.
recipe() {
    sed -n "/^$1/,/^$2/p" "$repository/docs/usage.md" | sed '1,/^```sh/d; /^'"$2"'/d'
}

inside() {
    place=$1 build=$2 criu=$3
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /run
    mkdir /run/overlay
    for directory in etc usr var; do
        mkdir -p "/run/overlay/$directory/upper" "/run/overlay/$directory/work"
        mount -t overlay overlay "/$directory" -o \
            "lowerdir=/$directory,upperdir=/run/overlay/$directory/upper,workdir=/run/overlay/$directory/work"
    done
    # The group that we are in is the root of what systemd sees. Where the memory
    # controller is in v1, stratad finds it elsewhere.
    umount -R -l /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mkdir /run/memory
    mount -t cgroup -o memory cgroup /run/memory 2>/dev/null || true
    # As a person installs it, command by command, from a tree that was built.
    mkdir -p /run/tree/target
    ln -s "$build" /run/tree/target/release
    ln -s "$repository/include" "$repository/packaging" /run/tree
    (cd /run/tree && sh -e -c "$(recipe '## The system daemon' systemctl)")
    # The example of a rule is for Debian's Redis, which its own unit confines.
    rule=$(sed -n '/^#: \[\[manage]]/,/^$/s/^#: //p' /etc/strata/stratad.toml)
    cat >>/etc/strata/stratad.toml <<EOF
criu = "$criu"
uffd_users = ["redis"]
${rule/1GiB/32MiB}
EOF
    # Nothing of this machine's starts: targets of these names, stratad, and the look.
    units=/run/units
    mkdir -p "$units/multi-user.target.wants"
    for target in sysinit basic shutdown multi-user; do
        printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" >"$units/$target.target"
    done
    cat >"$units/look.service" <<EOF
[Unit]
After=stratad.service
SuccessAction=exit-force
FailureAction=exit-force
FailureActionExitStatus=1
[Service]
Type=oneshot
StandardOutput=file:$place/seen
StandardError=inherit
TimeoutStartSec=120
ExecStart=$self look $place
EOF
    ln -s /etc/systemd/system/stratad.service /etc/systemd/system/stratad.socket \
        /usr/lib/systemd/system/redis-server.service "$units"
    # A manager that waits half a minute for a sign of life would be half a minute of this.
    mkdir "$units/stratad.service.d"
    printf '[Service]\nWatchdogSec=2\n' >"$units/stratad.service.d/watchdog.conf"
    sh -e -c "$(recipe '`\[\[manage]]`' 'systemctl')"
    mv /etc/systemd/system/redis-server.service.d "$units"
    install -d -o redis -g redis /var/lib/redis /var/log/redis
    ln -s "$units/stratad.service" "$units/look.service" "$units/multi-user.target.wants"
    container=strata-test SYSTEMD_UNIT_PATH=$units exec /usr/lib/systemd/systemd --system \
        --unit=multi-user.target --log-target=console
}

# is WHAT WANTED COMMAND...: the command says what is wanted.
is() {
    local what=$1 wanted=$2 said
    shift 2
    said=$("$@") || { echo "$what: status $?: $said"; exit 1; }
    [ "$said" = "$wanted" ] || { echo "$what: $said instead of $wanted"; exit 1; }
    echo "$what: $said"
}

credentials() {
    grep -E '^(CapBnd|NoNewPrivs|Seccomp):' "/proc/$1/status" | tr -s '\t\n' ' '
}

# of NAME KEY: what is known of a tenant.
of() {
    strata stats "$1" --json | python3 -c "import json, sys; print(json.load(sys.stdin)['$2'])"
}

# Its state, when it is no newcomer any more.
state() {
    for _ in $(seq 100); do
        [ "$(of "$1" state)" = native ] || break
        sleep 0.1
    done
    of "$1" state
}

# show PROPERTY: of stratad's unit.
show() {
    systemctl show stratad --property "$1" --value
}

# is_another PID: systemd has started one in the place of this.
is_another() {
    for _ in $(seq 200); do
        now=$(show MainPID)
        [ "$now" != "$1" ] && [ "$now" != 0 ] && [ "$(show SubState)" = running ] && break
        sleep 0.1
    done
    echo "$now" >>"$number"
    goes_on "$now"
}

# goes_on PID: the tenants are managed by that one, every key there.
goes_on() {
    for _ in $(seq 100); do
        [ "$(show StatusText)" = "Manages the programs of 2 tenants." ] && break
        sleep 0.1
    done
    is "$1, its line" "Manages the programs of 2 tenants." show StatusText
    is "$1, ready" active systemctl is-active stratad
    is "$1, managed" managed state r
    is "$1, place" before "${ask[@]}" get place
    is "$1, keys" "200001" "${ask[@]}" dbsize
    is "$1, last key" 400 "${ask[@]}" strlen key:199999
    is "$1, clone" before redis-cli -p 7778 get place
}

POPULATE='for i = 0, 99999 do redis.call("set", "key:"..i, string.rep("x", 400)) end return 1'

look() {
    number=$1/number
    # It is ready: this unit comes after it.
    is "its line" "Manages no program." show StatusText
    show MainPID >>"$number"
    mkdir /run/redis
    strata run --name r --dram 64MiB -- redis-server --port 7777 --save "" --appendonly no --enable-debug-command yes \
        --dir /run/redis >/run/redis/log 2>&1 &
    ask=(redis-cli -p 7777)
    for _ in $(seq 100); do
        "${ask[@]}" ping >/dev/null 2>&1 && break
        sleep 0.1
    done
    is manual found bash -c '[ -s /usr/share/man/man1/strata.1 ] && echo found'
    is populated OK "${ask[@]}" debug populate 200000 key 400
    is before OK "${ask[@]}" set place before
    pid=$(pgrep -x redis-server)
    had=$(credentials "$pid")
    is snapshot r@1 strata snapshot r --label first
    is after OK "${ask[@]}" set place after
    kill -9 "$pid"
    is restored r strata restore r@first
    is "restored, place" before "${ask[@]}" get place
    is "restored, number" "$pid" pgrep -x redis-server
    is "restored, credentials" "$had" credentials "$pid"
    is "after again" OK "${ask[@]}" set place after
    is "rolled back" r strata rollback r r@first
    is "rolled back, place" before "${ask[@]}" get place
    is "cloned" "c 127.0.0.1:7778->7777" strata clone r@first --name c --net new --forward 7778:7777
    is "cloned, place" before redis-cli -p 7778 get place
    # One that systemd starts, as its own user, confined.
    is "a rule's, started" "" systemctl start redis-server
    is "a rule's, populated" 1 redis-cli eval "$POPULATE" 0
    is "a rule's, managed" managed state redis
    is "a rule's, beyond its budget" yes bash -c "[ $(of redis evictions_total) -gt 0 ] && echo yes"
    is "a rule's, last key" 400 redis-cli strlen key:99999
    is "a rule's, restarted" "" systemctl restart redis-server
    is "a rule's, managed again" managed state redis
    is "a rule's, first key" 400 redis-cli strlen key:0
    is "a rule's, stopped" "" systemctl stop redis-server
    # The next stratad has its tenants, however this one ended.
    is reload "" systemctl reload stratad
    goes_on "$(show MainPID)"
    main=$(show MainPID)
    is restart "" systemctl restart stratad
    show MainPID >>"$number"
    is "restarted, another process" yes bash -c "[ $main != $(show MainPID) ] && echo yes"
    goes_on "$(show MainPID)"
    kill -9 "$(show MainPID)"
    is_another "$(show MainPID)"
    kill -STOP "$(pgrep -P "$(show MainPID)" -x stratad)"
    is_another "$(show MainPID)"
    is "restarted by itself" 2 show NRestarts
    # Its tenants outlive it.
    systemctl stop stratad.socket stratad
    is "without stratad" inactive bash -c 'systemctl is-active stratad || true'
    is "without stratad, place" before "${ask[@]}" get place
    is "without stratad, last key" 400 "${ask[@]}" strlen key:199999
    is "without stratad, processes" 2 pgrep -c -x redis-server
    echo done
}

case $1 in
inside | look) "$@" ;;
*) outside "$@" ;;
esac
