#!/usr/bin/env bash
# Set up, prepare real text, and pretrain a small Qwen3.5 MoE twice from the same seed: on two
# context-parallel ranks and on one. Prints both loss curves and their largest relative difference.
#
#   examples/quickstart.sh [pretrain flags]    the flags go to both runs and win over those below, e.g.
#       examples/quickstart.sh --spec megatron_gdn.layer_specs get_qwen35_headwise_cp_spec
#       examples/quickstart.sh --cp-comm-type p2p --cp-layout contiguous --train-iters 60
#
#   CP=4                another number of context-parallel ranks
#   RUN=FOLDER          where logs, curves and checkpoints go; default runs/quickstart-DATE-TIME
#
# Runs on two or more GPUs over NCCL, and on the CPU over gloo where there are fewer.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
CP=${CP:-2}
DATA=data/python_stdlib_bytes # the Python standard library's own source, byte by byte
RUN=${RUN:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}

MODEL_ARGS=(--qwen35-size debug)
SPEC_ARGS=(--spec megatron_gdn.layer_specs get_qwen35_chunkwise_cp_spec)
CP_ARGS=(--cp-comm-type all_gather --cp-layout zigzag)
DATA_ARGS=(
    --data-path "$DATA"
    --data-cache-path data/cache
    --tokenizer byte
    --split "98,2,0"
    --seq-length 1024
    --dataloader-inter-document-masking
)
TRAIN_ARGS=(
    --micro-batch-size 2
    --global-batch-size 2
    --train-iters 80
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --eval-interval 30
    --eval-iters 20
    --save-interval 1000
    --log-interval 1
)

say() { printf '\n== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# pretrain NAME RANKS WHAT-TO-SHOW [flags]: train into $RUN/NAME, keep all output there, show part of it.
pretrain() {
    local name=$1 ranks=$2 show=$3
    shift 3
    local log=$RUN/$name/output.log
    mkdir -p "$RUN/$name"
    echo "   everything Megatron says: $log"
    if ! NGPU=$ranks examples/launch.sh "${MODEL_ARGS[@]}" "${SPEC_ARGS[@]}" "${CP_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${TRAIN_ARGS[@]}" --save "$RUN/$name" --context-parallel-size "$ranks" "$@" 2>&1 |
        tee "$log" | sed -un "$show"; then
        printf '\nerror: the run with %s rank(s) failed; the end of %s:\n' "$ranks" "$log" >&2
        tail -n 25 "$log" >&2
        exit 1
    fi
}

for flag in "$@"; do
    case $flag in
        --context-parallel-size* | --save | --save=*)
            die "${flag%%=*} is what this script itself sets; use CP=N for the number of ranks, and" \
                "examples/launch.sh for a run of your own." ;;
    esac
done

examples/setup_env.sh

if [[ ! -e $DATA.bin || ! -e $DATA.idx ]]; then
    say "preparing data: the source files of Python's standard library"
    .venv/bin/python -m megatron_gdn prepare-data --tokenizer byte --output-prefix "$DATA" \
        --input "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
        --suffix .py --exclude site-packages test tests
fi

GPUS=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
if ((GPUS > 0 && GPUS < CP)); then
    say "found $GPUS GPU(s), but CP=$CP needs $CP; running on the CPU"
    export CUDA_VISIBLE_DEVICES=
fi

STEPS='s/^ step \(1 of .*\)/   step \1/p; s/^ step \([0-9]*0 of .*\)/   step \1/p'
HELD_OUT='/^ validation loss at/ {
    s/^.* iteration \([0-9]*\) .* lm loss value: \([^ ]*\) .*/   held-out text after \1 steps: loss \2/; s/E+00$//; p
}'
SETTINGS='/^  model  /,/^  tokens per step/p'

say "pretraining with --context-parallel-size $CP"
pretrain "cp$CP" "$CP" "$SETTINGS; $STEPS; $HELD_OUT" "$@"
say "pretraining the same with --context-parallel-size 1"
pretrain cp1 1 "$STEPS; $HELD_OUT" "$@"

say "loss in nats per byte; guessing all 257 tokens alike gives ln 257 = 5.55"
.venv/bin/python examples/compare_runs.py "CP=$CP:$RUN/cp$CP" "CP=1:$RUN/cp1" --picture "$RUN/both.png"
cat <<END

loss curves        $RUN/both.png, and of each run: $RUN/cp$CP/loss_curve.png, $RUN/cp1/loss_curve.png
log, JSON lines    $RUN/cp$CP/training_log.jsonl
checkpoint         $RUN/cp$CP
END
