#!/usr/bin/env bash
# One worker or more on each of several machines. Start it on every machine, the first included:
#
#   FIRST=first-machine NODE=0 NODES=2 STORE=/data/shop RUN=/data/runs/shop ./torchrun.sh --strategy sar
#
# NODE counts the machines: 0 on the first, 1 on the second, and so on. The static rendezvous unpickles nothing, unlike
# c10d; its port has no password all the same, so use a private network.
set -euo pipefail
: "${FIRST:?the name or address of the first machine}" "${NODE:?the number of this machine, 0 on the first}"
: "${STORE:?the store}" "${RUN:?the directory of the run}"
NODES=${NODES:-2}
EACH=${EACH:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / EACH > 0 ? $(nproc) / EACH : 1))}

exec python -m torch.distributed.run \
  --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$EACH" --max-restarts "${RESTARTS:-3}" \
  --rdzv-backend static --master-addr "$FIRST" --master-port "${PORT:-29400}" \
  -m gnnfleet train "$STORE" --run-dir "$RUN" "$@"
