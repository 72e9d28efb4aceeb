#!/bin/sh
# A round over a slow line, which all nodes and both directions share, as at a hub with one uplink:
#
#   sudo env PATH="$PATH" sh benchmarks/hub/line.sh 1gbit --params 200M --nodes 4 --codec int8 --json
#
# Hub and nodes run in a network namespace of their own, whose loopback passes a token bucket. Linux, as root.
set -eu
[ $# -gt 0 ] || { echo "usage: line.sh RATE OPTIONS: a rate for tc, such as 1gbit, and options of run.py" >&2; exit 2; }
rate=$1
shift
exec unshare --net sh -euc '
    ip link set lo up
    tc qdisc add dev lo root tbf rate "$1" burst 2mb latency 100ms
    shift
    exec python "$@"
' line "$rate" "$(dirname "$0")/run.py" "$@"
