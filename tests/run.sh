#!/usr/bin/env bash
# Set up .venv and run the tests: all of them, or what the arguments say.
#
#   tests/run.sh [pytest flags]       e.g. tests/run.sh tests/unit -k layout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
examples/setup_env.sh
export OMP_NUM_THREADS=1 # the distributed tests start several processes, often on few cores
exec .venv/bin/python -m pytest "$@"
