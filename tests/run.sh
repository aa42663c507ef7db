#!/usr/bin/env bash
# Set up .venv and run the tests: all of them, or what the arguments say.
#
#   tests/run.sh [pytest flags]       e.g. tests/run.sh tests/unit -k layout
#
# Ranks are processes on the CPU, whatever the machine has; where there is a GPU, the tests marked gpu run on
# it afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
examples/setup_env.sh
export OMP_NUM_THREADS=1 # the distributed tests start several processes, often on few cores

CUDA_VISIBLE_DEVICES='' .venv/bin/python -m pytest "$@"

gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null)
if ((gpus > 0)); then
    status=0
    # Asks the driver library for devices: CUDA itself must not start before ranks are forked.
    PYTORCH_NVML_BASED_CUDA_CHECK=1 .venv/bin/python -m pytest -m gpu --timeout 1200 "$@" || status=$?
    ((status == 5)) || exit "$status" # 5: the arguments chose no such test
fi
