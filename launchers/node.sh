#!/usr/bin/env bash
# One node of a run: all GPUs of this machine, under the deepspeed launcher.
#   launchers/node.sh RECIPE NODE HUB_HOST:PORT --keys DIR/node-NODE [more options of `spes-mega launch`]
# It starts again after a failure that is not the user's to repair (a lost hub, a machine out of memory),
# up to RETRIES times (default 3), RETRY_SECONDS apart (default 30).
set -uo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,5s/^# \?//p' "$0" >&2
  exit 2
fi
recipe=$1 node=$2 hub=$3
shift 3
export SPES_MEGA_ATTEMPT  # in all its tries: what --resume says is done once, and then gone on from
SPES_MEGA_ATTEMPT=$(date +%s)-$$-$RANDOM
retries=${RETRIES:-3}
child=
stopping=
forward() { stopping=1; [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; }
trap forward INT TERM
while true; do
  spes-mega launch "$recipe" --node "$node" --hub "$hub" "$@" &
  child=$!
  wait "$child"; code=$?
  # a trapped signal interrupts the first wait
  while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
  case $code in
    0 | 2 | 3 | 4 | 5 | 6 | 8 | 9 | 130 | 143) exit "$code" ;;  # done, asked to stop, or wrong input
  esac
  if [ -n "$stopping" ] || [ "$retries" -le 0 ]; then exit "$code"; fi
  retries=$((retries - 1))
  echo "node $node ended with exit code $code; starting it again in ${RETRY_SECONDS:-30} s" >&2
  sleep "${RETRY_SECONDS:-30}" &
  child=$!
  wait "$child"
  if [ -n "$stopping" ]; then exit 143; fi
done
