"""An optimizer of a user's own, with Python values in its state and its parameter groups, saved and resumed."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from recipes import pretrain
from tests.checkpoints import assert_identical, drop_last, saved_steps
from tests.pool import Ranks, user_error
from tests.training import result, tiny, train_on_rank
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.checkpoint.format import CheckpointCorrupt
from titanlike.checkpoint.optimizer_values import OptimizerValues
from titanlike.config.sections import Checkpoint, Parallelism
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.utils.dtensor import local_tensor

WEIGHT = "layers.0.attention.wq.weight"


class Adaptive(torch.optim.Optimizer):
    """SGD whose step sizes depend on every kind of value that it keeps."""

    def __init__(self, parameters: Iterable[Any], lr: float, decay: float = 0.9) -> None:
        super().__init__(parameters, dict(lr=lr, decay=decay, k=0, d=1.0, phase="warmup", bounds=(0, 1.0)))
        for group in self.param_groups:
            group["history"] = []  # a default would be one list for all groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 0.97
            group["history"].append(group["d"])
            group["phase"] = "warmup" if group["k"] < 3 else "stable"
            group["bounds"] = (group["k"], group["d"])
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"momentum": torch.zeros_like(parameter), "step": 0, "first": True, "scale": 1.0}
                    state |= {"seen": torch.zeros(()), "columns": torch.zeros(parameter.shape[-1])}
                    state |= {"log": [], "note": None}
                weight, gradient, momentum = map(local_tensor, (parameter, parameter.grad, state["momentum"]))
                state["step"] += 1
                state["scale"] *= 0.9 + 0.1 / state["step"]
                state["seen"] += 1
                state["columns"] += state["step"]
                state["log"].append(state["step"])
                state["first"] = False
                momentum.lerp_(gradient, 1 - group["decay"])
                factor = group["d"] * state["scale"] / (1 + state["seen"].item() / 50 + state["columns"][0].item() / 90)
                factor *= 0.5 + sum(group["history"]) / (1 + group["k"]) if group["phase"] == "stable" else 1.0
                weight -= group["lr"] * factor * momentum


def build_adaptive(model: torch.nn.Module, section: Any, seed: int) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "decay": section.beta1},
    ]
    return Adaptive([group for group in groups if group["params"]], lr=section.lr)


def train_adaptive(recipe: Any) -> None:
    built_in = pretrain.build_optimizer
    pretrain.build_optimizer = build_adaptive
    try:
        train_on_rank(recipe)
    finally:
        pretrain.build_optimizer = built_in


def saved_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "state.json").read_text())["optimizer"]
    return values


@pytest.mark.parametrize(
    "layout",
    [
        Parallelism(shard=2),
        Parallelism(shard=1, pipeline=2),
    ],
    ids=["shard", "pipeline"],
)
def test_a_resumed_run_is_bit_exact(ranks: Ranks, tmp_path: Path, layout: Parallelism) -> None:
    recipe = tiny(
        tmp_path, "run", parallelism=layout, training=dict(steps=4), checkpoint=dict(interval=2), validation=dict(interval=0)
    )  # fmt: skip
    pool = ranks(math.prod(layout.dimensions().values()))
    pool.run(train_adaptive, recipe)
    expected, values = result(recipe), saved_values(saved_steps(tmp_path / "run")[-1])
    drop_last(tmp_path / "run")
    pool.run(train_adaptive, recipe)
    again = result(recipe)
    assert_identical(again, expected)
    found = saved_values(saved_steps(tmp_path / "run")[-1])
    assert json.dumps(found) == json.dumps(values)
    assert found[WEIGHT]["state"] == {
        "first": False, "log": [1, 2, 3, 4], "note": None, "scale": pytest.approx(0.95 * 14 / 15 * 0.925), "step": 4,
    }  # fmt: skip
    d = found[WEIGHT]["options"]["d"]
    assert found["norm.weight"]["options"] == {  # not "decay", which the optimizer does not change
        "bounds": {"tuple": [4, d]}, "d": d, "history": [0.97, 0.97**2, pytest.approx(0.97**3), d], "k": 4, "phase": "stable",
    }  # fmt: skip
    assert len(found) == len(expected.state["model"])


def test_values_follow_the_parameters_to_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(training=dict(steps=4), checkpoint=dict(interval=2), validation=dict(interval=0))
    recipe = tiny(tmp_path, "run", parallelism=Parallelism(shard=1, pipeline=2), **options)
    ranks(2).run(train_adaptive, recipe)
    expected, values = result(recipe), saved_values(saved_steps(tmp_path / "run")[-1])
    drop_last(tmp_path / "run")
    ranks(1).run(train_adaptive, tiny(tmp_path, "run", **options))
    assert saved_values(saved_steps(tmp_path / "run")[-1]) == values
    assert result(recipe).losses == pytest.approx(expected.losses, rel=1e-5)


def small(value: Callable[[Tensor], Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model on all ranks, and an optimizer with one value in the state of each parameter."""

    class Stateful(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["value"] = value(parameter)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 6, bias=False))
    if dist.get_world_size() > 1:
        apply_fsdp(model, build_mesh("cpu", shard=dist.get_world_size()).fsdp)
    return model, Stateful(model.parameters(), {"lr": 0.1})


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "infinite": lambda parameter: [math.inf, -0.0, math.nan, 2**70, "a", True, None],
    "tuple": lambda parameter: (0.9, 1),
    "gram": lambda parameter: torch.full((6, 6), 2.0),
    "sharded": torch.zeros_like,
    "deque": lambda parameter: deque([1]),
    "complex": lambda parameter: torch.ones(1, dtype=torch.complex64),
    "local": lambda parameter: torch.zeros_like(local_tensor(parameter)),
    "rank": lambda parameter: dist.get_rank() + 0.5,
}


def save_and_load(folder: Path, name: str) -> tuple[str, str]:
    """Returns the error of the first step, and that of the save. Without one, the loaded state is compared."""
    model, optimizer = small(VALUES[name])
    with CheckpointManager(str(folder), Checkpoint(mode="sync")) as checkpoints:
        checkpoints.register(model, optimizer)
        dist.barrier()  # a rank that is refused destroys its process group, to which the other may still connect
        if error := user_error(optimizer.step):
            return error, ""
        if error := user_error(checkpoints.save, model, optimizer, CheckpointMetadata(1)):
            return "", error
        assert not checkpoints.has_failed
        other, fresh = small(lambda parameter: torch.empty_like(VALUES[name](parameter)) if name in TENSORS else 0)
        found = checkpoints.find()
        assert found is not None
        checkpoints.load(other, fresh, found)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        expected, value = optimizer.state[one]["value"], fresh.state[two]["value"]
        assert isinstance(value, DTensor) == isinstance(expected, DTensor)
        assert torch.equal(expected, value) if name in TENSORS else repr(value) == repr(expected)
    return "", ""


TENSORS = ("gram", "sharded")
# The errors of a step, and of a save.
REFUSED = {
    "deque": (
        "optimizer state value of 0.weight is a deque, which cannot be saved; use a tensor in the state of a",
        "",
    ),
    "complex": ("optimizer state value of 0.weight has dtype torch.complex64, which cannot be saved", ""),
    "local": ("is a plain tensor with the shape (2, 4) of this rank's shard, which cannot be resharded", ""),
    "rank": ("", "the optimizer's values of 0.weight differ across ranks: {'state': {'value': 1.5}} on rank 1, {"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_restored_exactly_or_refused(ranks: Ranks, tmp_path: Path, name: str) -> None:
    expected = REFUSED.get(name, ("", ""))
    for found in ranks(2).run(save_and_load, tmp_path, name):
        assert [bool(error) for error in found] == [bool(error) for error in expected]
        assert all(part in error for part, error in zip(expected, found, strict=True)), found


@pytest.mark.parametrize("records", [["weight"], {"weight": 5}, {"weight": {"state": {"k": {"set": 1, "of": 2}}}}])
def test_corrupt_values_are_refused(records: Any) -> None:
    model = torch.nn.Linear(2, 2)
    values = OptimizerValues(model, torch.optim.SGD(model.parameters()), is_new=True)
    with pytest.raises(CheckpointCorrupt, match="the optimizer's record in the checkpoint is corrupt: "):
        values.load(records)
