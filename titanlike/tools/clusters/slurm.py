"""The batch file of a Slurm job: one launcher per node, which stops before the time limit, is requeued and resumes."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlike.config.shipped import REPOSITORY
from titanlike.tools.clusters.cluster_job import STOPPED, ClusterJob

SCRIPT = """\
#!/usr/bin/env bash
# Trains {name}: {nodes} node(s) with {processes} process(es) each. Submit it again to resume the run.
{directives}
set -uo pipefail

{exports}
# Jobs that share a node need ports of their own. The launchers of all nodes meet on the first host of the allocation.
export MASTER_PORT=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}}
# Restarts of all processes after a failure, within this job. Slurm requeues a job whose node fails.
export MAX_RESTARTS=${{MAX_RESTARTS:-3}}

# {grace} s before the time limit, Slurm sends SIGUSR1 to this shell, and srun forwards it: the run saves a checkpoint and exits.
stopping='' step=''
trap 'stopping=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1

# An option of srun on SageMaker HyperPod, which then replaces a node that fails and requeues the job.
resume=''
[ ! -d /opt/sagemaker_cluster ] || resume=--auto-resume=1
srun $resume --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait={grace} {command} &
step=$!

# A trapped signal interrupts `wait`, which returns the exit code of srun once srun has ended.
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?

# {stopped}: stopped by a signal. A job that was cancelled or failed for another reason is not requeued.
if [ -n "$stopping" ] && {{ {is_stopped}; }}; then
  echo "stopped before the time limit: requeueing job $SLURM_JOB_ID, which resumes the run"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def batch_file(job: ClusterJob, recipe: Path, time_limit: str, options: Sequence[str]) -> str:
    """Returns the batch file.

    Args:
        job: The job.
        recipe: The resolved recipe, on a path that all nodes have.
        time_limit: Time limit in Slurm's format.
        options: Further options of sbatch, such as `--partition=gpu`.
    """
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.num_nodes}",
        "--ntasks-per-node=1",
        *(
            [f"--gpus-per-node={job.gpus_per_node}", "--exclusive"]
            if job.gpus_per_node
            else [f"--cpus-per-task={job.processes_per_node}"]
        ),
        f"--time={time_limit}",
        f"--signal=B:USR1@{job.grace}",
        "--requeue",
        "--open-mode=append",
        f"--output={recipe.parent}/slurm-%j.out",
        f"--chdir={Path.cwd()}",
        *options,
    ]
    exports = {"NPROC": str(job.processes_per_node)}
    if job.efa_interfaces:  # without it, if EFA is unavailable, NCCL falls back to sockets without an error
        exports["FI_PROVIDER"] = "${FI_PROVIDER:-efa}"
    if (REPOSITORY / "pyproject.toml").exists():  # not installed from a wheel
        exports["PYTHONPATH"] = f"{shlex.quote(str(REPOSITORY))}${{PYTHONPATH:+:$PYTHONPATH}}"
    codes = [STOPPED["SIGUSR1"], STOPPED["SIGTERM"]]
    return SCRIPT.format(
        name=job.name,
        nodes=job.num_nodes,
        processes=job.processes_per_node,
        directives="\n".join(f"#SBATCH {shlex.quote(option)}" for option in directives),
        exports="\n".join(f"export {name}={value}" for name, value in exports.items()),
        command=shlex.join([sys.executable, "-m", "titanlike.run.launch", str(recipe)]),
        grace=job.grace,
        stopped=" and ".join(map(str, codes)),
        is_stopped=" || ".join(f'[ "$code" -eq {code} ]' for code in codes),
    )
