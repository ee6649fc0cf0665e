#!/usr/bin/env bash
# Trains a recipe:  ./run_train.sh [RECIPE.toml] [--section.key=value ...]        (--help lists the sections of a recipe)
#
# Starts one process per GPU, or NPROC processes. For several nodes, set NNODES, NODE_RANK and MASTER_ADDR on each of them, or use
# `srun ./run_train.sh ...` under Slurm. MAX_RESTARTS=3 restarts all processes after a failure, at most three times, from the newest
# checkpoint. The launcher is titanlike/run/launch.py.
set -euo pipefail

repository=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
python=$(command -v python || command -v python3) || { echo "error: no python on the PATH" >&2; exit 2; }

# The library beside this script takes precedence over an installed one and over modules in the current directory.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$repository/titanlike/run/launch.py" "$@"
