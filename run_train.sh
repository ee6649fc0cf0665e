#!/usr/bin/env bash
# Train a recipe:  ./run_train.sh [RECIPE.toml] [--section.key=value ...]        (--help lists every key)
#
# One process for each GPU, or NPROC of them. Several machines: NNODES, NODE_RANK and MASTER_ADDR on each,
# or `srun ./run_train.sh ...` under Slurm. titanlike/cli/launch.py does the work.
set -euo pipefail

python=$(command -v python || command -v python3) || { echo "error: there is no python on the PATH" >&2; exit 2; }
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("titanlike") is None)'; then
    echo "error: titanlike is not installed for $python; run: pip install -e \"$(cd "$(dirname "$0")" && pwd)\"" >&2
    exit 2
fi
exec "$python" -m titanlike.cli.launch "$@"
