#!/usr/bin/env bash
# The hub of a run. It continues where it was when it is started again with the same state directory.
#   launchers/hub.sh RECIPE STATE_DIR [INIT_DIR] --keys DIR/hub [more options of `spes-mega hub`]
# LISTEN=HOST:PORT, default 0.0.0.0:7070.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,4s/^# \?//p' "$0" >&2
  exit 2
fi
recipe=$1 state=$2
shift 2
init=()
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  init=(--init "$1")
  shift
fi
exec spes-mega hub "$recipe" --state "$state" --listen "${LISTEN:-0.0.0.0:7070}" ${init[@]+"${init[@]}"} "$@"
