# shellcheck shell=bash
# What the pretrain scripts of qwen35_dense/ and qwen35_moe/ have in common: spec, data, training. Not run by itself.
#
#   MODE=chunkwise          how GatedDeltaNet layers use context parallelism: chunkwise or headwise
#   MODEL=...               model_$MODEL.sh beside the script; every script has its own default
#   DATA_PATH=PREFIX        made by python -m megatron_gdn prepare-data; required
#   TOKENIZER=byte|FOLDER   what it was prepared with; required
#   SAVE=runs/...           checkpoints, loss curve and log
#   and what examples/launch.sh takes: NGPU, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT

# pretrain MODEL [pretrain flags]: the flags win over those below.
pretrain() {
    local model=$1 scripts mode=${MODE:-chunkwise}
    shift
    scripts=$(cd "$(dirname "$0")" && pwd)
    if [[ -z ${DATA_PATH:-} || -z ${TOKENIZER:-} ]]; then
        echo "error: set DATA_PATH=PREFIX and TOKENIZER=byte|FOLDER, as given to" \
            "python -m megatron_gdn prepare-data." >&2
        return 2
    elif [[ ! -f $scripts/model_$model.sh ]]; then
        echo "error: MODEL=$model has no file $scripts/model_$model.sh; choose from:" \
            "$(cd "$scripts" && echo model_*.sh)." >&2
        return 2
    fi
    # shellcheck source=examples/qwen35_moe/model_debug.sh
    source "$scripts/model_$model.sh"

    local spec_args=(--spec megatron_gdn.layer_specs "get_qwen35_${mode}_cp_spec")
    local data_args=(
        --data-path "$DATA_PATH"
        --tokenizer "$TOKENIZER"
        --split "99,1,0"
        --dataloader-inter-document-masking
    )
    local train_args=(
        --bf16
        --micro-batch-size 1
        --global-batch-size 64
        --train-iters 10000
        --lr 3e-4
        --min-lr 3e-5
        --lr-decay-style cosine
        --lr-warmup-iters 200
        --weight-decay 0.1
        --adam-beta2 0.95
        --clip-grad 1.0
        --recompute-granularity full # keeps one layer's activations at a time
        --recompute-method uniform
        --recompute-num-layers 1
        --eval-interval 500
        --eval-iters 10
        --log-interval 10
        --save "${SAVE:-runs/$model-$mode}"
        --save-interval 500
    )
    exec "$scripts/../launch.sh" "${MODEL_ARGS[@]}" "${spec_args[@]}" "${data_args[@]}" "${train_args[@]}" "$@"
}
