"""Ranks and launch configurations from the variables that launchers set, and settings of the process."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from titanlike.config import PretrainRecipe, UserError
from titanlike.distributed.environment import (
    LaunchConfig,
    RankInfo,
    child_environment,
    first_host,
    launch_config,
    rank_info,
    rank_variables_from_slurm,
    set_launch_id,
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
    assert rank_info({}) == RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, started_by_launcher=False)
    assert launch_config(NO_GPU) == LaunchConfig(
        num_nodes=1, node_rank=0, processes_per_node=1, master_address="127.0.0.1", master_port=29500
    )


def test_rank_from_torchrun() -> None:
    assert rank_info(TORCHRUN) == RankInfo(
        rank=3, world_size=8, local_rank=1, local_world_size=2, started_by_launcher=True
    )


@pytest.mark.parametrize("missing", TORCHRUN)
def test_missing_rank_variable_is_named(missing: str) -> None:
    with pytest.raises(UserError, match=f"set, but {missing} not: start with ./run_train.sh or torchrun"):
        rank_info({name: value for name, value in TORCHRUN.items() if name != missing})


def test_rank_outside_the_world_size_is_refused() -> None:
    with pytest.raises(UserError, match="RANK=8 is not below WORLD_SIZE=8"):
        rank_info(TORCHRUN | {"RANK": "8"})
    with pytest.raises(UserError, match="RANK=x is not an integer"):
        rank_info(TORCHRUN | {"RANK": "x"})


def test_default_is_one_process_per_gpu() -> None:
    assert launch_config({"CUDA_VISIBLE_DEVICES": "0,3,5"}).processes_per_node == 3
    assert launch_config({"CUDA_VISIBLE_DEVICES": "0,3,5", "NPROC": "2"}).processes_per_node == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    with pytest.raises(UserError, match="NPROC=0: at least one process"):
        launch_config({"NPROC": "0"})
    with pytest.raises(UserError, match="NPROC=two is not an integer"):
        launch_config({"NPROC": "two"})


def test_max_restarts() -> None:
    assert launch_config(NO_GPU | {"MAX_RESTARTS": "3"}).max_restarts == 3
    assert launch_config(NO_GPU | {"MAX_RESTARTS": ""}).max_restarts == 0
    with pytest.raises(UserError, match="MAX_RESTARTS=abc is not an integer"):
        launch_config(NO_GPU | {"MAX_RESTARTS": "abc"})
    with pytest.raises(UserError, match="MAX_RESTARTS=-1: give the number of restarts, 0 for none"):
        launch_config(NO_GPU | {"MAX_RESTARTS": "-1"})
    with pytest.raises(UserError, match="MAX_RESTARTS=3, but srun started one task per process"):
        rank_variables_from_slurm(SLURM | {"SLURM_NTASKS": "4", "MAX_RESTARTS": "3"})


def test_restarts_and_launch_id_need_rank_variables() -> None:
    torchelastic = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TITANLIKE_LAUNCH_ID": "id"}
    found = rank_info(TORCHRUN | torchelastic)
    assert (found.restart_count, found.max_restarts, found.launch_id) == (1, 3, "id")
    assert rank_info(torchelastic) == RankInfo()  # variables left in a shell


def test_child_environment_has_no_variables_of_the_parent_job(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = {
        "HOME": "/",
        "RANK": "1",
        "TITANLIKE_LAUNCH_ID": "id",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "MAX_RESTARTS": "3",
    }
    monkeypatch.setattr("os.environ", parent)
    assert child_environment({"NPROC": "2"}) == {"HOME": "/", "NPROC": "2"}
    set_launch_id()
    assert os.environ["TITANLIKE_LAUNCH_ID"] != "id"


def test_several_nodes_from_variables() -> None:
    variables = NO_GPU | {"NPROC": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    found = launch_config(variables)
    assert found == LaunchConfig(
        num_nodes=2, node_rank=1, processes_per_node=4, master_address="host", master_port=1234
    )
    assert found.world_size == 8
    with pytest.raises(UserError, match="NNODES=2, but NODE_RANK and MASTER_ADDR not set"):
        launch_config(NO_GPU | {"NNODES": "2"})
    with pytest.raises(UserError, match="NODE_RANK=2 is not below NNODES=2"):
        launch_config(variables | {"NODE_RANK": "2"})


def test_slurm_with_one_task_per_node_launches_the_processes_of_that_node() -> None:
    variables = NO_GPU | SLURM | {"SLURM_NTASKS": "2", "NPROC": "8"}
    assert rank_variables_from_slurm(variables) is None
    assert launch_config(variables) == LaunchConfig(
        num_nodes=2, node_rank=1, processes_per_node=8, master_address="gpu007", master_port=29500
    )


def test_slurm_with_one_task_per_rank_sets_rank_variables() -> None:
    found = rank_variables_from_slurm(SLURM | {"SLURM_NTASKS": "4"})
    assert found is not None
    assert rank_info(found) == RankInfo(
        rank=3, world_size=4, local_rank=1, local_world_size=2, started_by_launcher=True
    )
    assert found["MASTER_ADDR"] == "gpu007"


def test_shell_inside_a_slurm_allocation_is_not_a_task() -> None:
    variables = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_NTASKS": "4"}
    assert rank_variables_from_slurm(variables) is None
    assert launch_config(NO_GPU | variables).num_nodes == 1


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[007-009,12],cpu1", "gpu007"), ("p5-dy-[1-4]", "p5-dy-1")],
)
def test_first_host_of_a_slurm_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_port_in_use_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not port_is_free(server.getsockname()[1])


def test_compile_cache_sets_the_inductor_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keeps pytest's own handler
    start(PretrainRecipe, [f"--run.dir={tmp_path}"])
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    start(PretrainRecipe, [f"--run.dir={tmp_path}", "--compile.cache=kept"])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept")
    start(PretrainRecipe, [f"--run.dir={tmp_path}", "--compile.cache=other"])  # does not override what is set
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept")


MEASURE_FREED_MEMORY = """
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


@pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="requires glibc")
@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_TOP_PAD_": "0"}, False)])
def test_freed_memory_is_kept_unless_the_user_sets_malloc_variables(variables: dict[str, str], kept: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    out = subprocess.run(
        [sys.executable, "-c", MEASURE_FREED_MEMORY], env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert (int(out) > 200) is kept, f"{out} MiB kept"


@pytest.mark.parametrize(("version", "skipped"), [("12", True), ("11.4.0", True), ("9.4.0", False), ("", False)])
def test_isa_checks_are_skipped_with_a_recent_compiler(
    version: str, skipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho {version}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert bool(skip_isa_checks()) is skipped
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert skip_isa_checks() == {}
