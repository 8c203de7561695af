#!/usr/bin/env bash
# tma on a Ray cluster: trainers are actors wherever there is room, the coordinator runs here. pip install 'gnnfleet[ray]'
# on all machines, the store under the same path on all of them, RAY_ADDRESS=host:6379 for a cluster that is up; without
# it Ray is started on this machine and ended with the run.
#
#   RAY_ADDRESS=head:6379 STORE=/data/shop RUN=/data/runs/shop ./ray.sh --set strategy.interval=10
#
# With a cluster the coordinator listens on every interface of this machine, without a password: LISTEN=ADDRESS:PORT
# names the one to use.
set -euo pipefail
: "${STORE:?the store}" "${RUN:?the directory of the run}"
LISTEN=${LISTEN:-${RAY_ADDRESS:+0.0.0.0:29500}}

exec gnnfleet train "$STORE" --strategy tma --launcher ray --workers "${WORKERS:-4}" --max-restarts 3 \
  --set "strategy.listen=${LISTEN:-127.0.0.1:0}" --run-dir "$RUN" "$@"
