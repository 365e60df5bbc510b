#!/usr/bin/env bash
# Stands for a CRIU that fails. It is the real one (the file `real` beside it says
# where that is) but for what the file `plan` beside it orders, a line each:
#
#   COMMAND NUMBER STEP HOW      COMMAND: dump or restore; NUMBER: which one of these
#
# STEP is one at which CRIU runs scripts (pre-dump, post-dump, pre-restore,
# post-restore, pre-resume, post-resume), or `start`, before CRIU, or `end`, after
# it has done everything. HOW: `fail` (the script, or CRIU, says so) or `kill` (CRIU
# is gone, or the first process that it restores). What was done is written to the file `done`.
here=$(dirname "$(readlink -f "$0")")

if [ -n "$CRTOOLS_SCRIPT_ACTION" ]; then
    while read -r command number step how pid; do
        [ "$step" = "$CRTOOLS_SCRIPT_ACTION" ] || continue
        echo "$command $number $step $how" >>"$here/done"
        [ "$how" = fail ] && exit 1
        # The first process of a namespace cannot be killed from within: then what it
        # restores is.
        [ "$pid" = 1 ] && pid=$CRTOOLS_INIT_PID
        kill -9 "$pid"
    done <"$here/now"
    exit 0
fi

real=$(cat "$here/real")
case $1 in
dump | restore) ;;
*) exec "$real" "$@" ;;
esac
count=$(($(cat "$here/$1.count" 2>/dev/null || echo 0) + 1))
echo "$count" >"$here/$1.count"
: >"$here/now"
at_end=
while read -r command number step how; do
    [ "$command $number" = "$1 $count" ] || continue
    case $step in
    start)
        echo "$command $number $step $how" >>"$here/done"
        [ "$how" = kill ] && kill -9 $$
        echo "a CRIU that fails as it was told to" >&2
        exit 1
        ;;
    end) at_end="$command $number $step $how" ;;
    *) echo "$command $number $step $how $$" >>"$here/now" ;;
    esac
done <"$here/plan"
command=$1
shift
if [ -n "$at_end" ]; then
    "$real" "$command" --action-script "$here/criu" "$@"
    echo "$at_end" >>"$here/done"
    exit 1
fi
if [ -s "$here/now" ]; then
    exec "$real" "$command" --action-script "$here/criu" "$@"
fi
exec "$real" "$command" "$@"
