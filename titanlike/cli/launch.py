"""What `run_train.sh` runs: find the recipe's program, check the recipe, and run the program here or in many processes."""

import importlib.util
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Before the first import that takes a moment: Ctrl-C ends what has not begun without a stack trace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    missing = [name for name in ("torch", "pydantic", "tiktoken", "tomli") if importlib.util.find_spec(name) is None]
    if missing:
        repository = Path(__file__).resolve().parents[2]
        print(f"error: {sys.executable} lacks {', '.join(missing)}; run: pip install -e {repository}", file=sys.stderr)
        sys.exit(2)

import runpy
import subprocess
from typing import NoReturn

from titanlike.config import UserError
from titanlike.distributed import environment
from titanlike.run.start import Arguments, program_of, shutdown_timeout_of
from titanlike.utils import system


def main() -> NoReturn:
    """Be the training program, or the launcher of several."""
    words = sys.argv[1:]
    try:
        arguments = Arguments(words)
        program = program_of(arguments.recipe, arguments.overrides.get("recipe"))
        if arguments.help or arguments.check or arguments.resolved or environment.has_rank_variables():
            _run_here(program, words)
        slurm = environment.rank_variables_from_slurm()
        if slurm is not None:
            system.set_variables(slurm)
            _run_here(program, words)
        job = environment.job()
        if job.world_size == 1 and not job.max_restarts:
            _run_here(program, words)
        preflight = [sys.executable, str(program), *words, f"--preflight={job.world_size}"]
        checked = subprocess.run(preflight, stdout=subprocess.DEVNULL, check=False)
        if checked.returncode:
            sys.exit(checked.returncode)
        if job.num_nodes > 1 and job.node_rank == 0 and not system.port_is_free(job.master_port):
            raise UserError(
                f"MASTER_PORT={job.master_port} is in use on this machine, perhaps by an earlier job; end that one, or set "
                "MASTER_PORT to a free port on all machines"
            )
    except UserError as error:
        environment.fail(error)
    system.set_variables(system.share_cores(job.processes))
    environment.set_launch_id()
    print(f"launch  {job.processes} process{'es' if job.processes > 1 else ''}", flush=True)  # while torch is imported
    from titanlike.cli.torchrun import torchrun  # imports torch

    sys.exit(torchrun(job, [str(program), *words], shutdown_timeout_of(arguments)))


def _run_here(program: Path, words: list[str]) -> NoReturn:
    """Run the program in this process, as `python program.py words` would."""
    sys.argv = [str(program), *words]
    sys.path[0] = str(program.parent)
    runpy.run_path(str(program), run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    main()
