"""The program behind `run_train.sh` and `titanlike train`: checks the recipe, then runs its program in one process or several."""

import importlib.util
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Before the first slow import: Ctrl-C ends the process without a stack trace.
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
from titanlike.distributed import environment, launch_config
from titanlike.distributed.command_line import command_line
from titanlike.run.start import Arguments, program_of, shutdown_timeout_of
from titanlike.utils import system
from titanlike.utils.live_line import LiveLine


@command_line()
def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the training program, or launches several processes that do."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = Arguments(argv)
        program = program_of(arguments.recipe, arguments.overrides.get("program"))
        starts_nothing = arguments.help is not None or arguments.check or arguments.resolved
        if starts_nothing or environment.rank_info().started_by_launcher:
            _run_in_process(program, argv)
        slurm_variables = launch_config.rank_variables_from_slurm()
        if slurm_variables is not None:
            system.set_variables(slurm_variables)
            _run_in_process(program, argv)
        config = launch_config.launch_config()
        launch_config.announce(config)
        if config.world_size == 1 and not config.max_restarts and not config.max_nodes:
            _run_in_process(program, argv)
        if config.num_nodes > 1 or config.max_nodes:
            environment.check_address(config.master_address)
        preflight = [sys.executable, str(program), *argv, f"--preflight={config.world_size}"]
        code = subprocess.run(preflight, stdout=subprocess.DEVNULL, check=False).returncode
        if code:
            sys.exit(code)
        is_first = config.num_nodes > 1 and config.node_rank == 0 and not config.max_nodes
        if is_first and not system.port_is_free(config.master_port):
            raise UserError(
                f"MASTER_PORT={config.master_port} is in use on this machine, perhaps by an earlier job; end that job, or set "
                "MASTER_PORT to a free port on all nodes"
            )
    except UserError as error:
        environment.fail(error)
    system.set_variables(system.share_cores(config.processes_per_node))
    system.raise_open_file_limit()  # the launcher of node 0 has the key-value store
    launch_config.set_launch_id()
    LiveLine().print(f"launch  {config.label()}")  # before the slow import of torch
    from titanlike.distributed.torchrun import torchrun

    sys.exit(torchrun(config, [str(program), *argv], shutdown_timeout_of(arguments)))


def _run_in_process(program: Path, argv: list[str]) -> NoReturn:
    """Runs the program in this process, as `python program.py ...` would."""
    sys.argv = [str(program), *argv]
    sys.path[0] = str(program.parent)
    runpy.run_path(str(program), run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    main()
