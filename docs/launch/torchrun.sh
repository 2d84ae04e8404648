#!/usr/bin/env bash
# Start a program on this node. Run the same line on every node:
#
#   HEAD=node-0 NODES=4 docs/launch/torchrun.sh train.py --its --arguments
#
# HEAD is the host name or address of one of these nodes, at which the others can reach it.
set -euo pipefail

: "${HEAD:?the node where all nodes meet, such as node-0}"
: "${NODES:?how many nodes}"
: "${PORT:=29400}"                 # a free port of HEAD
: "${RANKS_PER_NODE:=gpu}"         # one per GPU; give a number on machines without GPUs
: "${JOB:=mesh-attention}"         # jobs that share HEAD need different names and ports
: "${OMP_NUM_THREADS:=4}"
export OMP_NUM_THREADS

# No restarts: after a failure the remaining ranks wait for the lost one, and a training loop has to reload anyway.
exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:$PORT" \
    --rdzv-id "$JOB" \
    --rdzv-conf join_timeout=600 \
    --max-restarts 0 \
    "$@"
