"""Which process this is, and how many to start, from the variables that launchers set."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from titanlike.config import PretrainRecipe, UserError
from titanlike.distributed.environment import (
    Job,
    Ranks,
    Restarts,
    first_host,
    job,
    launch_id,
    rank_variables_from_slurm,
    ranks,
    restarts,
    set_launch_id,
    variables,
)
from titanlike.run.start import start
from titanlike.utils.system import num_gpus, port_is_free, skip_isa_checks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_no_variables_mean_one_process() -> None:
    assert ranks({}) == Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, started_by_launcher=False)
    assert job(NO_GPU) == Job(num_nodes=1, node_rank=0, processes=1, master_address="127.0.0.1", master_port=29500)


def test_torchrun_tells_the_rank() -> None:
    assert ranks(TORCHRUN) == Ranks(rank=3, world_size=8, local_rank=1, local_world_size=2, started_by_launcher=True)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_missing_rank_variable_is_named(missing: str) -> None:
    with pytest.raises(UserError, match=f"set, but {missing} not: start with ./run_train.sh or torchrun"):
        ranks({name: value for name, value in TORCHRUN.items() if name != missing})


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(UserError, match="RANK=8 is not below WORLD_SIZE=8"):
        ranks(TORCHRUN | {"RANK": "8"})
    with pytest.raises(UserError, match="RANK=x is not a whole number"):
        ranks(TORCHRUN | {"RANK": "x"})


def test_processes_are_one_a_gpu_unless_said_otherwise() -> None:
    assert job({"CUDA_VISIBLE_DEVICES": "0,3,5"}).processes == 3
    assert job({"CUDA_VISIBLE_DEVICES": "0,3,5", "NPROC": "2"}).processes == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    with pytest.raises(UserError, match="NPROC=0: at least one process"):
        job({"NPROC": "0"})
    with pytest.raises(UserError, match="NPROC=two is not a whole number"):
        job({"NPROC": "two"})


def test_restarts_are_a_number() -> None:
    assert job(NO_GPU | {"MAX_RESTARTS": "3"}).max_restarts == 3
    assert job(NO_GPU | {"MAX_RESTARTS": ""}).max_restarts == 0
    with pytest.raises(UserError, match="MAX_RESTARTS=abc is not a whole number"):
        job(NO_GPU | {"MAX_RESTARTS": "abc"})
    with pytest.raises(UserError, match="MAX_RESTARTS=-1: give the number of restarts, 0 for none"):
        job(NO_GPU | {"MAX_RESTARTS": "-1"})
    with pytest.raises(UserError, match="MAX_RESTARTS=3, but srun started one task a process"):
        rank_variables_from_slurm(SLURM | {"SLURM_NTASKS": "4", "MAX_RESTARTS": "3"})


def test_restarts_and_the_stamp_are_for_processes_of_a_launcher() -> None:
    torchelastic = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TITANLIKE_STARTED": "then"}
    assert restarts(TORCHRUN | torchelastic) == Restarts(count=1, limit=3)
    assert launch_id(TORCHRUN | torchelastic) == "then"
    assert restarts(torchelastic) == Restarts()  # left over in a shell
    assert launch_id(torchelastic) is None


def test_a_nested_run_has_no_part_in_the_job_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {
        "HOME": "/",
        "RANK": "1",
        "TITANLIKE_STARTED": "then",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "MAX_RESTARTS": "3",
    }
    monkeypatch.setattr("os.environ", ours)
    assert variables({"NPROC": "2"}) == {"HOME": "/", "NPROC": "2"}
    set_launch_id()
    assert os.environ["TITANLIKE_STARTED"] != "then"


def test_several_machines_by_hand() -> None:
    variables = NO_GPU | {"NPROC": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    found = job(variables)
    assert found == Job(num_nodes=2, node_rank=1, processes=4, master_address="host", master_port=1234)
    assert found.world_size == 8
    with pytest.raises(UserError, match="NNODES=2, but NODE_RANK and MASTER_ADDR not set"):
        job(NO_GPU | {"NNODES": "2"})
    with pytest.raises(UserError, match="NODE_RANK=2 is not below NNODES=2"):
        job(variables | {"NODE_RANK": "2"})


def test_slurm_with_one_task_a_machine_starts_the_processes_of_that_machine() -> None:
    variables = NO_GPU | SLURM | {"SLURM_NTASKS": "2", "NPROC": "8"}
    assert rank_variables_from_slurm(variables) is None
    assert job(variables) == Job(num_nodes=2, node_rank=1, processes=8, master_address="gpu007", master_port=29500)


def test_slurm_with_one_task_a_rank_is_taken_as_it_is() -> None:
    found = rank_variables_from_slurm(SLURM | {"SLURM_NTASKS": "4"})
    assert found is not None
    assert ranks(found) == Ranks(rank=3, world_size=4, local_rank=1, local_world_size=2, started_by_launcher=True)
    assert found["MASTER_ADDR"] == "gpu007"


def test_a_shell_inside_a_slurm_allocation_is_not_a_task() -> None:
    variables = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_NTASKS": "4"}
    assert rank_variables_from_slurm(variables) is None
    assert job(NO_GPU | variables).num_nodes == 1


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[007-009,12],cpu1", "gpu007"), ("p5-dy-[1-4]", "p5-dy-1")],
)
def test_the_first_machine_of_a_slurm_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_a_port_in_use_is_seen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not port_is_free(server.getsockname()[1])


def test_compiled_code_is_kept_where_the_recipe_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own Ctrl-C
    start(PretrainRecipe, [f"--run.dir={tmp_path}"])
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    start(PretrainRecipe, [f"--run.dir={tmp_path}", "--compile.cache=kept"])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept")
    start(PretrainRecipe, [f"--run.dir={tmp_path}", "--compile.cache=other"])  # what the user has set stays
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept")


KEEP = """
import resource, sys, mmap
from titanlike.utils.system import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

keep_freed_memory()
before = resident()
block = bytearray(b"x") * (256 << 20)
del block
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="glibc keeps or gives back"
)
@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_TOP_PAD_": "0"}, False)])
def test_freed_memory_is_kept_unless_the_user_has_a_word_on_it(variables: dict[str, str], kept: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    out = subprocess.run([sys.executable, "-c", KEEP], env=environ, capture_output=True, text=True, check=True).stdout
    assert (int(out) > 200) is kept, f"{out} MiB stayed"


@pytest.mark.parametrize(("version", "trusted"), [("12", True), ("11.4.0", True), ("9.4.0", False), ("", False)])
def test_a_recent_compiler_is_trusted_with_the_processors_instructions(
    version: str, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho {version}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert bool(skip_isa_checks()) is trusted
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert skip_isa_checks() == {}
