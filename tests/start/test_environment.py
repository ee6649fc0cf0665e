"""Ranks and launch configurations from the variables that launchers set, and settings of the process."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanlike.config import UserError
from titanlike.distributed import environment
from titanlike.distributed.environment import RankInfo, is_first_on_node, rank_info, terminate_with_launcher
from titanlike.distributed.launch_config import (
    LaunchConfig,
    child_environment,
    first_host,
    launch_config,
    rank_variables_from_slurm,
    set_launch_id,
)
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import start
from titanlike.utils.system import num_gpus, port_is_free, reduce_fragmentation, skip_isa_checks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}  # fmt: skip
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


def test_default_is_one_process_per_gpu() -> None:
    assert launch_config({"CUDA_VISIBLE_DEVICES": "0,3,5"}).processes_per_node == 3
    assert launch_config({"CUDA_VISIBLE_DEVICES": "0,3,5", "NPROC": "2"}).processes_per_node == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_max_restarts() -> None:
    assert launch_config(NO_GPU | {"MAX_RESTARTS": "3"}).max_restarts == 3
    assert launch_config(NO_GPU | {"MAX_RESTARTS": ""}).max_restarts == 0


def test_restarts_and_launch_id_need_rank_variables() -> None:
    torchelastic = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TITANLIKE_LAUNCH_ID": "id"}
    found = rank_info(TORCHRUN | torchelastic)
    assert (found.restart_count, found.max_restarts, found.launch_id) == (1, 3, "id")
    assert rank_info(torchelastic) == RankInfo()  # variables left in a shell
    assert rank_info({"TITANLIKE_ELASTIC": "1"}) == RankInfo(is_elastic=True)


def test_child_environment_has_no_variables_of_the_parent_job(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE SLURM_PROCID SLURM_NTASKS SLURM_JOB_NUM_NODES MAX_RESTARTS "
        "TORCHELASTIC_MAX_RESTARTS TITANLIKE_ELASTIC TITANLIKE_LAUNCH_ID TITANLIKE_LAUNCHER_PID"
    )
    monkeypatch.setattr("os.environ", {"HOME": "/"} | dict.fromkeys(names.split(), "1"))
    assert child_environment({"NPROC": "2"}) == {"HOME": "/", "NPROC": "2"}
    set_launch_id()
    assert os.environ["TITANLIKE_LAUNCH_ID"] != "1"


def test_the_parent_is_the_launcher_whoever_has_adopted_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parents: list[int] = []
    monkeypatch.setattr(environment, "signal_at_parent_death", lambda parent, number: parents.append(parent))
    monkeypatch.setattr("os.getppid", lambda: 5)
    for launcher in ("123", "x"):
        variables = {"TORCHELASTIC_RUN_ID": "id", "TITANLIKE_LAUNCHER_PID": launcher}
        terminate_with_launcher(variables)
        assert variables == {"TORCHELASTIC_RUN_ID": "id"}
    terminate_with_launcher({"TORCHELASTIC_RUN_ID": "id"})
    terminate_with_launcher({"TITANLIKE_LAUNCHER_PID": "123"})  # not a rank
    assert parents == [123, 5, 5]


def test_a_range_of_nodes_makes_a_job_elastic() -> None:
    variables = NO_GPU | {"NPROC": "4", "NNODES": "2:4", "MASTER_ADDR": "host"}
    assert launch_config(variables) == LaunchConfig(2, 0, 4, "host", 29500, max_restarts=10, max_nodes=4)
    assert launch_config(variables | {"MAX_RESTARTS": "1"}).max_restarts == 1
    assert launch_config(variables).world_size == 8


def test_several_nodes_from_variables() -> None:
    variables = NO_GPU | {"NPROC": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    found = launch_config(variables)
    assert found == LaunchConfig(
        num_nodes=2, node_rank=1, processes_per_node=4, master_address="host", master_port=1234
    )
    assert found.world_size == 8


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
    variables |= {"SLURM_STEP_ID": "4294967290"}  # of salloc, where the site has LaunchParameters=use_interactive_step
    assert rank_variables_from_slurm(variables) is None
    assert launch_config(NO_GPU | variables).num_nodes == 1


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[007-009,12],cpu1", "gpu007"), ("p5-dy-[1-4]", "p5-dy-1")],
)
def test_first_host_of_a_slurm_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


NODES = NO_GPU | {"NPROC": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host"}


@pytest.mark.parametrize(
    ("read", "variables", "message"),
    [
        *((rank_info, TORCHRUN | {"MASTER_PORT": port}, "MASTER_PORT=") for port in ("0", "65536", "²", "1_0", " 3", "9" * 5000)),
        (launch_config, NO_GPU | {"MASTER_PORT": "-1"}, "MASTER_PORT=-1"),
        *((rank_info, {name: TORCHRUN[name] for name in TORCHRUN if name != missing}, f"set, but {missing} not: start with ")
          for missing in TORCHRUN),
        (rank_info, TORCHRUN | {"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        (rank_info, TORCHRUN | {"RANK": "x"}, "RANK=x is not an integer"),
        (rank_info, TORCHRUN | {"RANK": "-1"}, "RANK=-1 must be at least 0"),
        (rank_info, TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be at least 0 and at most 3"),
        (rank_info, TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=1 must be at least 2 and at most 8"),
        (rank_info, TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 must be at least 2 and at most 8"),
        (rank_info, TORCHRUN | {"WORLD_SIZE": "a\nb"}, "WORLD_SIZE=a\\nb is not an integer"),
        (launch_config, {"NPROC": "0"}, "NPROC=0 must be at least 1 and at most 1000000"),
        (launch_config, {"NPROC": "two"}, "NPROC=two is not an integer"),
        (launch_config, NO_GPU | {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 must be at least 0"),
        (launch_config, NO_GPU | {"NNODES": "2"}, "NNODES=2, but NODE_RANK and MASTER_ADDR not set"),
        (launch_config, NODES | {"NODE_RANK": "2"}, "NODE_RANK=2 is not below NNODES=2"),
        (launch_config, NODES | {"NPROC": "1000000"}, "2 nodes with NPROC=1000000 are 2000000 processes"),
        (launch_config, NODES | {"NNODES": "2:1000", "NPROC": "10000"}, "1000 nodes with NPROC=10000 are 10000000 processes"),
        (launch_config, NO_GPU | {"NNODES": "2:4"}, "NNODES=2:4, but MASTER_ADDR is not set: give all nodes the address of one"),
        *((launch_config, NODES | {"NNODES": wrong}, f"NNODES={wrong} is neither a number of nodes nor a range such as NNODES=2:4")
          for wrong in ("4:2", "0:2", ":", "2:", ":4", "1:2:3", "a:b", "2:-4", "1:99999999")),
        (rank_variables_from_slurm, SLURM | {"SLURM_NTASKS": "4", "MAX_RESTARTS": "3"}, "MAX_RESTARTS=3, but srun started"),
        *((read, NO_GPU | {name: SLURM[name] for name in SLURM if name != missing} | {"SLURM_NTASKS": tasks},
           f"SLURM_STEP_ID=0 is set, but {missing} not: start with srun")
          for read, tasks, missing in (
              (rank_variables_from_slurm, "4", "SLURM_LOCALID"), (rank_variables_from_slurm, "4", "SLURM_PROCID"),
              (rank_variables_from_slurm, "4", "SLURM_JOB_NODELIST"), (launch_config, "2", "SLURM_JOB_NODELIST"),
              (launch_config, "2", "SLURM_NODEID"),
          )),
    ],
)  # fmt: skip
def test_variables_that_cannot_work_are_refused(read: Any, variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        read(variables)
    assert message in str(error.value)


def test_slurm_tasks_may_be_distributed_unevenly() -> None:
    found = rank_variables_from_slurm(SLURM | {"SLURM_NTASKS": "5", "SLURM_LOCALID": "3"})  # 4 tasks and 1
    assert found is not None
    assert rank_info(found).local_world_size == 4


def test_an_empty_local_rank_is_that_of_the_first_process() -> None:
    assert is_first_on_node({"LOCAL_RANK": ""})
    assert not is_first_on_node({"LOCAL_RANK": "1"})


def test_a_launch_says_where_nodes_meet() -> None:
    job = {"CUDA_VISIBLE_DEVICES": "", "NPROC": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7", "NODE_RANK": "0"}
    assert launch_config(job).label() == "2 processes"
    assert launch_config(job | {"NNODES": "3"}).label() == "2 processes on each of 3 nodes, which meet at a:7"
    assert launch_config(job | {"NNODES": "1:3"}).label() == "2 processes on each of 1 to 3 nodes, which meet at a:7"


def test_port_in_use_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not port_is_free(server.getsockname()[1])


# After another run, the load average of the last minute is high, and no core is busy.
@pytest.mark.parametrize(
    ("load", "busy", "last_core", "policy"),
    [(1.0, 90.0, 3, "PASSIVE"), (1.0, 3.0, 3, None), (0.2, 90.0, 3, None), (1.0, 3.0, 5, "PASSIVE")],
)
def test_threads_sleep_while_they_wait_if_other_processes_use_the_cores(
    load: float, busy: float, last_core: int, policy: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 9.0, 9.0))
    # Of four cores, this process may use the last two. With cores offline, the number of the last may be above 3.
    monkeypatch.setattr("psutil.cpu_percent", lambda interval, percpu: [50.0, 0.0, busy, busy / 2])
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2, last_core}, raising=False)
    monkeypatch.setattr("titanlike.utils.system.num_cores", lambda: 2)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keeps pytest's own handler
    monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": ""})
    start(PretrainRecipe, [f"--run.dir={tmp_path}"])
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "ACTIVE"})
    start(PretrainRecipe, [f"--run.dir={tmp_path}"])
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"  # the user's


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


def test_gpu_memory_segments_are_expandable_unless_the_allocator_is_configured() -> None:
    for configured in ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}):
        environ = dict(configured)
        reduce_fragmentation(environ)
        assert environ == (configured or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
