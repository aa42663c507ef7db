# shellcheck shell=bash
# What the pretrain scripts beside this file have in common: model, data, training. Not run by itself.
#
#   MODEL=35b_a3b           model_$MODEL.sh
#   DATA_PATH=PREFIX        made by python -m megatron_gdn prepare-data; required
#   TOKENIZER=byte|FOLDER   what it was prepared with; required
#   SAVE=runs/...           checkpoints, loss curve and log
#   and what examples/launch.sh takes: NGPU, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT

# pretrain [pretrain flags]: the flags win over those below.
pretrain() {
    local here model=${MODEL:-35b_a3b}
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    if [[ -z ${DATA_PATH:-} || -z ${TOKENIZER:-} ]]; then
        echo "error: set DATA_PATH=PREFIX and TOKENIZER=byte|FOLDER, as given to" \
            "python -m megatron_gdn prepare-data." >&2
        return 2
    elif [[ ! -f $here/model_$model.sh ]]; then
        echo "error: MODEL=$model has no file $here/model_$model.sh; choose from: $(cd "$here" && echo model_*.sh)." >&2
        return 2
    fi
    # shellcheck source=examples/qwen35_moe/model_debug.sh
    source "$here/model_$model.sh"

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
        --save "${SAVE:-runs/$model-$(basename "$0" .sh)}"
        --save-interval 500
    )
    exec "$here/../launch.sh" "${MODEL_ARGS[@]}" "${data_args[@]}" "${train_args[@]}" "$@"
}
