#!/usr/bin/env bash
# Start pretrain_qwen35.py with torchrun, on one node or on this node of several.
#
#   examples/launch.sh [pretrain flags]               one node: NGPU processes
#
#   on every node of several, with its own NODE_RANK (0 .. NNODES-1) and the same other values:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500 examples/launch.sh [pretrain flags]
#
#   NGPU=8          processes on this node: one per GPU, or any number where there is no GPU
#   TORCHRUN=PATH   default: that of .venv, which examples/setup_env.sh makes
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NGPU=${NGPU:-8}
NNODES=${NNODES:-1}
TORCHRUN=${TORCHRUN:-$ROOT/.venv/bin/torchrun}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

command -v -- "$TORCHRUN" >/dev/null ||
    die "$TORCHRUN does not run; make .venv with examples/setup_env.sh, or set TORCHRUN=/path/to/torchrun."

if ((NNODES == 1)); then
    # Its own free port, so that two jobs on one machine do not meet.
    TORCHRUN_ARGS=(--standalone --local-addr 127.0.0.1)
    # One node needs no name of its own that other machines can resolve.
    if [[ -e /sys/class/net/lo ]]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
else
    [[ -n ${NODE_RANK:-} ]] || die "NNODES=$NNODES needs NODE_RANK, this node's number from 0 to $((NNODES - 1))."
    [[ -n ${MASTER_ADDR:-} ]] || die "NNODES=$NNODES needs MASTER_ADDR, the name or address of node 0."
    TORCHRUN_ARGS=(
        --nnodes "$NNODES"
        --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR"
        --master-port "${MASTER_PORT:-29500}"
    )
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads of one process; on a CPU the processes share the cores
exec "$TORCHRUN" "${TORCHRUN_ARGS[@]}" --nproc-per-node "$NGPU" "$ROOT/pretrain_qwen35.py" "$@"
