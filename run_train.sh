#!/usr/bin/env bash
# Train a recipe:  ./run_train.sh [RECIPE.toml] [--section.key=value ...]        (--help lists every key)
#
# One process for each GPU, or NPROC of them. Several machines: NNODES, NODE_RANK and MASTER_ADDR on each,
# or `srun ./run_train.sh ...` under Slurm. MAX_RESTARTS=3 starts the processes again, three times at most, when one dies;
# the run goes on from its newest checkpoint. titanlike/cli/launch.py does the work.
set -euo pipefail

here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
python=$(command -v python || command -v python3) || { echo "error: there is no python on the PATH" >&2; exit 2; }

# The library beside this script is the one that runs, whatever else is installed or lies in the current folder.
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$here/titanlike/cli/launch.py" "$@"
