#!/usr/bin/env bash
# Start a program on this node. Run the same line on every node:
#
#   HEAD=node-0 NODES=4 docs/launch/torchrun.sh train.py --its --arguments
#
# HEAD is a host name or address of any one of the nodes, at which the others reach it; it must be among them.
set -euo pipefail

: "${HEAD:?the node at which all meet, such as node-0}"
: "${NODES:?how many nodes}"
: "${PORT:=29400}"                 # a free port of HEAD
: "${RANKS_PER_NODE:=gpu}"         # one for each GPU; a number on machines without
: "${JOB:=mesh-attention}"         # jobs that share HEAD need names and ports of their own
: "${OMP_NUM_THREADS:=4}"
export OMP_NUM_THREADS

# No restarts: after a failure the ranks that are left wait for the lost one, and a training loop has to reload anyway.
exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:$PORT" \
    --rdzv-id "$JOB" \
    --rdzv-conf join_timeout=600 \
    --max-restarts 0 \
    "$@"
