"""The null GPU: what it records of programs with planted faults, and training under each layout over NCCL."""

from pathlib import Path

import pytest

from tests.null_gpu.recording import run, torchrun
from tests.training import QWEN3_MOE
from titanlike.tools.null_gpu.collectives import Call, Log, mismatch

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_program_is_recorded_with_its_synchronization_and_its_leak(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:
        code, found = run([str(HERE / "program.py")], stdout=file)
    assert code == 0
    assert "CUDA out of memory. Tried to allocate 80.00 GiB" in output.read_text()
    [process] = found["processes"]
    last = process["steps"][-1]
    assert last["launches"]["matmul"] == 2  # x @ weight, and the gradient of the weight
    assert last["launches"]["attention"] >= 2
    assert last["launches"]["generated"] == 2  # forward and backward of `gate`
    [(place, count)] = last["locations"].items()
    lines = (HERE / "program.py").read_text().split("\n")
    number = next(number for number, line in enumerate(lines, 1) if ".item()" in line)
    assert f"program.py:{number} step" in place
    assert count == last["synchronizations"] == 1
    assert process["growth"] == 2**20
    assert process["graphs"] == 1
    kernels = {kernel["name"]: kernel for kernel in process["compiled_kernels"]}
    assert all(kernel["registers"] > 0 for kernel in kernels.values())
    assert any("silu" in name for name in kernels)


OFFLOAD = """
forward a
side 0: to cpu, pinned
forward b
side 0: to cpu, pinned
wait for side 0
forward c
side 0: to cpu, pinned
wait for side 0
forward d
wait for side 0
2 MiB
backward d
side 1: to cuda, pinned
backward c
side 1: to cuda, pinned
wait for side 1
wait for side 1
backward b
side 1: to cuda, pinned
wait for side 1
wait for side 1
backward a
wait for side 1
wait for side 1
"""


@pytest.mark.slow
def test_offloaded_activations_are_copied_while_the_neighbouring_blocks_compute(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:
        code, _ = run([str(HERE / "offload_order.py")], stdout=file)
    assert code == 0
    assert OFFLOAD in output.read_text().partition("offload")[2]


@pytest.mark.slow
def test_collectives_in_another_order_are_found_with_both_sequences() -> None:
    code, found = run(torchrun(2, "tests/null_gpu/collectives_out_of_order.py"))
    assert code == 0  # without the comparison, nothing shows
    text = found["mismatch"]
    assert "NCCL would hang" in text
    assert "-> 0: all_reduce of 1024 elements" in text
    assert "-> 0: all_reduce of 1048576 elements" in text


@pytest.mark.slow
def test_all_layouts_train_over_nccl_in_the_same_order_on_all_ranks(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:
        code, found = run(torchrun(4, "-m", "tests.null_gpu.layouts", str(tmp_path)), stdout=file, stderr=file)
    assert code == 0, output.read_text()
    assert found["mismatch"] is None
    assert len(found["processes"]) == 4
    operations = {name for group in found["processes"][0]["total"]["collectives"] for name in group["calls"]}
    assert operations >= {"all_gather", "reduce_scatter", "all_reduce", "send", "receive"}
    # The last layout, expert parallelism with selective checkpointing, exchanges the numbers of rows once in a micro-batch.
    locations = found["processes"][0]["steps"][-1]["locations"]
    assert [count for place, count in locations.items() if "exchange_counts" in place] == [QWEN3_MOE.num_layers * 4]


def log(rank: int, *calls: Call) -> Log:
    return Log("a", "shard", 2, rank, rank, list(calls))


GATHER, REDUCE = Call("all_gather", 7, 0, 4), Call("all_reduce", 7, 0, 4)


def test_the_order_of_collectives_is_compared_within_a_communicator() -> None:
    assert mismatch([log(0, GATHER, REDUCE), log(1, GATHER, REDUCE)]) is None
    assert "call 1: the order of collectives differs" in (
        mismatch([log(0, GATHER, REDUCE), log(1, GATHER, GATHER)]) or ""
    )
    assert "-> 1: nothing" in (mismatch([log(0, GATHER, REDUCE), log(1, GATHER)]) or "")
    assert "ranks [1] never joined" in (mismatch([log(0, GATHER)]) or "")


def test_messages_are_compared_between_sender_and_receiver() -> None:
    send, receive = Call("send", 7, 1, 4), Call("receive", 7, 0, 4)
    assert mismatch([log(0, send, GATHER), log(1, GATHER, receive)]) is None
    assert "messages sent are not those received" in (mismatch([log(0, send), log(1, Call("receive", 7, 0, 5))]) or "")
