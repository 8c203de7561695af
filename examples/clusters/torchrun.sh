#!/usr/bin/env bash
# One worker or more on each of several machines. Start it on every machine, the first included:
#
#   FIRST=first-machine NODES=2 STORE=/data/shop RUN=/data/runs/shop ./torchrun.sh --strategy sar --set train.epochs=100
#
# HOST=1 on the first machine and HOST=0 on the others where they do not find out by themselves; ADDRESS=… where a
# machine has several.
set -euo pipefail
: "${FIRST:?the name or address of the first machine}" "${STORE:?the store}" "${RUN:?the directory of the run}"
NODES=${NODES:-2}
EACH=${EACH:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / EACH > 0 ? $(nproc) / EACH : 1))}

exec python -m torch.distributed.run \
  --nnodes "$NODES" --nproc-per-node "$EACH" --max-restarts "${RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "$FIRST:${PORT:-29400}" --rdzv-id "${ID:-gnnfleet}" \
  ${HOST:+--rdzv-conf is_host=$HOST} ${ADDRESS:+--local-addr $ADDRESS} \
  -m gnnfleet train "$STORE" --run-dir "$RUN" "$@"
