"""`titanlike verify` as a user runs it, on a correct recipe, on programs with a planted error, and on a module."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import ROOT, python
from tests.programs import blocks, edited, verify
from titanlike.config import UserError
from titanlike.config.sections import Data, Tokenizer
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import SequenceBatch
from titanlike.data.batches.sources import open_sources
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.run.checks import check_recipe
from titanlike.tools.programs import load_known
from titanlike.tools.verify.batches import first_difference, read_batches
from titanlike.tools.verify.compiled import verify_compiled_file
from titanlike.tools.verify.options import parse_layout, parse_tolerance
from titanlike.tools.verify.recipe import TOLERANCES, Result, differences
from titanlike.tools.verify.small_recipe import shrink


def copied(folder: Path, old: str, new: str) -> str:
    """Writes a copy of the shipped program with one line changed, and a recipe for it."""
    (folder / "mine.py").write_text(edited((ROOT / "recipes/pretrain.py").read_text(), (old, new)))
    (folder / "mine.toml").write_text((ROOT / "train_configs/debug.toml").read_text().replace('"pretrain"', '"mine"'))
    return "mine.toml"


def test_a_shipped_recipe_is_equal_under_a_layout(tmp_path: Path) -> None:
    # The batch of the recipe has too few micro-batches for the layout: the comparison takes another batch.
    done = verify(
        tmp_path, str(ROOT / "train_configs/llama3_8b.toml"), "--layout", "tensor=2,pipeline=2", "--steps", "2",
        "--training.local_batch_size=64", "--training.global_batch_size=64", "--optimizer.eps=1e-5", "--tolerance=weights=1e-3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")
    assert "under pipeline 2 x tensor 2 (4 processes) against one process, 2 steps on the CPU" in done.stdout
    assert "with the batch of the recipe, this layout is refused: parallelism.pipeline_schedule = '1f1b'" in done.stdout
    assert re.search(r"model\.dim +4096 -> 64\n", done.stdout)
    assert re.search(r"model\.vocab_size +128256 -> 320\n", done.stdout)
    assert re.search(r"training\.local_batch_size +64 -> 1\n", done.stdout)
    assert re.search(r"optimizer\.lr +0\.0003 -> 0\.01\n", done.stdout)
    assert "optimizer.eps" not in done.stdout  # set by the user
    assert re.search(r"weights .*; tolerance 1e-03\n", done.stdout)
    first = re.search(r"^ +1 +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert first
    assert [float(first[1]), float(first[3])] == pytest.approx([float(first[2]), float(first[4])])
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [("llama3_8b_128k", "shard=2,context=2"), ("finetune_llama3_8b", "tensor=2,shard=2")]
)
def test_a_recipe_at_scale_is_equal_under_a_layout(name: str, layout: str, tmp_path: Path) -> None:
    """Also with LoRA and initial weights."""
    done = verify(tmp_path, name, "--layout", layout, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")


@pytest.mark.slow
def test_a_loss_averaged_twice_is_detected(tmp_path: Path) -> None:
    recipe = copied(
        tmp_path,
        "model, microbatches, num_tokens, mesh,",
        "model, microbatches, num_tokens * mesh.num_data_ranks, mesh,",
    )
    done = verify(tmp_path, recipe, "--layout", "shard=2")
    assert done.returncode == 1
    assert done.stdout.endswith("\nNOT equal: loss, gradient norm\n")  # both runs clip their gradients to the same norm


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tensr=2", "'tensr=2' is not KEY=VALUE with a key of [parallelism], such as tensor=2; did you mean tensor?"),
        ("shard=-1", "'shard=-1': give a number of processes"),
        ("tensor=8,pipeline=8", "more than 32 processes on one machine"),
    ],
)
def test_layouts(layout: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_layout(layout)
    assert message in str(caught.value)
    chosen = parse_layout("pipeline=2,pipeline_split=[1, 3],tensor=2")
    assert (chosen["pipeline_split"], chosen["tensor"], chosen["shard"]) == ("[1, 3]", "2", "1")


@pytest.mark.parametrize(
    ("name", "layout", "processes"),
    [
        ("llama3_405b", "pipeline=2,tensor=2,shard=2", 8),
        ("gemma3_4b", "tensor=4", 4),
        ("mixtral_8x7b", "pipeline=2,pipeline_schedule=zbv", 2),
        ("llama3_8b_float8", "tensor=4", 4),
    ],
)
def test_the_shrunk_recipe_is_valid_for_the_layout(name: str, layout: str, processes: int) -> None:
    recipe = ROOT / f"train_configs/{name}.toml"
    chosen = {f"parallelism.{key}": value for key, value in parse_layout(layout).items()}
    sections = {
        key: vars(value) for key, value in vars(load_known(recipe, chosen)).items() if hasattr(value, "__dict__")
    }
    smaller = shrink(sections, processes, steps=5)
    words = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in smaller.items()}
    made = load_known(recipe, chosen | words)
    check_recipe(made, processes)
    assert made.model.num_parameters() < 1_500_000


def test_the_shrunk_recipe_writes_nothing_where_the_recipe_does() -> None:
    """Neither to its checkpoints nor to its trackers: the runs that are compared have their own folder."""
    own = {"dir": "s3://bucket/runs", "resume_from": 8}
    values = {
        key: vars(value)
        for key, value in vars(load_known(ROOT / "train_configs/debug.toml", {})).items()
        if hasattr(value, "__dict__")
    }
    values["checkpoint"] = values["checkpoint"] | own | {"export": "newest"}
    values["metrics"] = values["metrics"] | {"tensorboard_dir": "s3://bucket/events", "prometheus": "127.0.0.1:9400"}
    smaller = shrink(values, 1, steps=5)
    assert {key: smaller[key] for key in ("checkpoint.dir", "checkpoint.resume_from", "checkpoint.export")} == {
        "checkpoint.dir": "", "checkpoint.resume_from": 0, "checkpoint.export": "none",
    }  # fmt: skip
    assert smaller["metrics.tensorboard_dir"] == smaller["metrics.prometheus"] == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", TOLERANCES),
        ("1e-3", dict.fromkeys(TOLERANCES, 1e-3)),
        ("loss=1e-4,gradient_norm=0.01", TOLERANCES | {"loss": 1e-4, "gradient norm": 0.01}),
    ],
)
def test_tolerances(text: str, expected: dict[str, float]) -> None:
    assert parse_tolerance(text, TOLERANCES) == expected
    for wrong in ("losses=1e-3", "nan", "-1"):
        with pytest.raises(UserError, match="is neither a number, such as 1e-3, nor a quantity"):
            parse_tolerance(wrong, TOLERANCES)


def test_nan_is_never_equal() -> None:
    def made(loss: float, validation: float = 1.0) -> Result:
        return Result([1.0, loss], [1.0, 1.0], [validation], {"model": {"w": torch.ones(2)}})

    assert differences(made(1.0), made(1.0))["loss"] == (0.0, "step 1")
    assert differences(made(1.0, validation=1.5), made(1.0))["loss"] == (0.5, "validation")
    assert differences(made(float("nan")), made(1.0))["loss"] == (float("inf"), "step 2")
    spoiled = made(1.0)
    spoiled.state["model"]["w"] = torch.tensor([1.0, float("nan")])
    assert differences(spoiled, made(1.0))["weights"] == (float("inf"), "w")


def test_batches_are_compared_in_any_order_of_their_sequences(tmp_path: Path) -> None:
    class ByRank:
        """Reads rows by their index in the share of a rank, but those of step 1."""

        def __init__(self, source: Any) -> None:
            self.source, self.seq_len = source, source.seq_len

        def read(self, step: int, rows: range) -> SequenceBatch:
            batch: SequenceBatch = self.source.read(step, rows if step == 1 else range(len(rows)))
            return batch

        def position(self) -> None:
            return None

    def recorded(name: str, num_data_ranks: int, *, reads: Any = lambda source: source, copies: int = 1) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        for rank in range(num_data_ranks * copies):
            source = open_sources(
                Data(source="synthetic"), build_tokenizer(Tokenizer()), seq_len=8, global_batch_size=4, seed=0, validate=False
            ).training  # fmt: skip
            loader = BatchLoader(
                reads(source), global_batch_size=4, local_batch_size=1, data_rank=rank // copies, num_data_ranks=num_data_ranks,
                seed=0, device=torch.device("cpu"), record=folder / f"training.{rank}",
            )  # fmt: skip
            for step in (1, 2):
                loader.build(step)
        return read_batches(folder)

    one = recorded("one", 1)
    assert sum(one["training", 2].values()) == 4
    assert first_difference(one, recorded("shard", 2)) is None
    assert first_difference(one, recorded("tensor-shard", 2, copies=2)) is None
    assert first_difference(one, recorded("by-rank", 2, reads=ByRank)) == ("step 2", 4, 2)
    assert first_difference(one, {("training", 1): one["training", 1]}) == ("step 2", 0, 0)


def write_build(folder: Path, *changes: tuple[str, str]) -> None:
    """Writes the module of the documentation."""
    (program,) = blocks(ROOT / "docs/verify.md", "python")
    (folder / "build.py").write_text(edited(program, *changes))


def test_the_module_of_the_documentation_is_equal_under_its_layout(tmp_path: Path) -> None:
    write_build(tmp_path)
    done = verify(tmp_path, "build.py:model", "--layout", "shard=2,tensor=2", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(
        "build.py:model under shard 2 x tensor 2 (4 processes) against one process, 1 step on the CPU\n"
        "batch: ranks of shard have consecutive rows; ranks of tensor have the same rows\n\n"
    )
    assert re.search(r"^  gradients, step 1 +6 tensors   \d\.\de-\d\d$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("\nequal within tolerance\n")


@pytest.mark.slow
def test_a_wrong_plan_of_a_module_is_reported(tmp_path: Path) -> None:
    write_build(tmp_path, ('"down": RowwiseParallel()', '"down": RowwiseParallel(use_local_output=False)'))
    done = verify(tmp_path, "build.py:model", "--layout", "tensor=2", "--steps", "1")
    assert done.returncode == 2  # a tensor and a DTensor
    assert "got mixed torch.Tensor and DTensor" in done.stderr
    assert re.search(r"\nerror: rank [01] raised the exception above\n$", done.stderr)
    unsharded = 'fully_shard(model, mesh=mesh["shard"])'
    write_build(tmp_path, (unsharded, f"{unsharded}.set_gradient_divide_factor(1.0)"))
    done = verify(tmp_path, "build.py:model", "--layout", "shard=2", "--steps", "1")
    assert done.returncode == 1
    assert "\nNOT equal: gradients, step 1: down.bias is 2 times that of one process (all 6 are wrong" in done.stdout
    assert "\nusual cause: it is summed over the 2 ranks that share the batch" in done.stdout


def test_a_rank_that_is_killed_is_reported(tmp_path: Path) -> None:
    write_build(tmp_path, ("def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:\n", KILLED))
    done = verify(tmp_path, "build.py:model", "--layout", "shard=2", "--steps", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: rank 1 was ended by SIGKILL; if the machine has too little memory, use")
    assert done.stderr.count("\n") == 1


KILLED = """def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    import os
    import signal

    if mesh.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_function_of_the_library_starts_the_processes(tmp_path: Path) -> None:
    write_build(tmp_path)
    (call,) = blocks(ROOT / "docs/verify.md", "py")
    *imports, _, line = call.splitlines()
    program = "\n".join(
        [*imports, "from build import batch, model, parallelize", "", 'if __name__ == "__main__":', f"    {line}"]
    )
    (tmp_path / "program.py").write_text(program)
    done = python(tmp_path, "program.py", variables={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")


def compared(capsys: pytest.CaptureFixture[str], target: Path, backend: str, steps: int = 1) -> tuple[Any, str]:
    """Returns the exit code of `verify --compile`, and what it prints."""
    with pytest.raises(SystemExit) as ended:
        verify_compiled_file(f"{target}:model", backend, steps)
    return ended.value.code, capsys.readouterr().out


TWO_BLOCKS = """

class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(), MLP()])
        self.blocks[1].wrong = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def net() -> nn.Module:
    return Net()
"""


def test_compiled_code_of_a_module_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_build(tmp_path)
    build = tmp_path / "build.py"
    code, text = compared(capsys, build, "aot_eager", steps=3)
    assert code == 0
    assert text.startswith(
        f"{build}:model compiled with aot_eager (torch {torch.__version__}) against eager code, 3 steps"
    )
    assert re.search(r"^  accumulated gradients, step 3 +6 tensors   \d\.\de[+-]\d\d$", text, re.MULTILINE)
    assert text.endswith("\nequal within tolerance\n")
    # An error of the first part of the compiler, in the second of two blocks.
    write_build(
        tmp_path,
        ("    def __init__(self) -> None:\n", "    wrong = 0.0\n\n    def __init__(self) -> None:\n"),
        ("return x + ", "return x * (1.0 + self.wrong * torch.compiler.is_compiling()) + "),
        ("def model() -> nn.Module:\n    return MLP()\n", TWO_BLOCKS.replace("net()", "model()")),
    )
    code, text = compared(capsys, build, "aot_eager")
    assert code == 1
    assert "NOT equal: outputs, step 1: blocks.1 is not proportional to that of eager code (relative" in text
    assert re.search(r"rounding explains a relative difference of 1e-04; this one is \d\.\de-0[12]\n", text)
    assert "part of the compiler: TorchDynamo, which captures the graph (backend eager is the first" in text
    # A bug of the installed torch.
    write_build(tmp_path, ("x + self.down(", "x + nn.functional.dropout(self.down("), (".relu())", ".relu()), 0.2)"))
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        code, text = compared(capsys, build, "aot_eager")
    assert code == 1 and "NOT equal: gradients with dropout: down.bias is not proportional" in text
    assert "part of the compiler: AOTAutograd, which traces the backward pass" in text
    assert text.endswith("or dropout that is a function of its inputs\n") and "has pytorch #190758: " in text


@pytest.mark.slow
def test_compiled_code_of_a_recipe_is_compared(tmp_path: Path) -> None:
    done = verify(
        tmp_path, str(ROOT / "train_configs/debug.toml"), "--compile", "--compile.backend=aot_eager", "--steps", "2",
        "--activation_checkpoint.mode=full", "--training.compute_dtype=bfloat16",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^  accumulated gradients, step 2 +21 tensors   [1-9]\.\de-0[78]$", done.stdout, re.MULTILINE)
    assert re.search(
        r"bfloat16, distance from eager float32; eager bfloat16 explains outputs \d\.\de-0[123], loss", done.stdout
    )
    assert done.stdout.count("\nequal within tolerance\n") == 2


@pytest.mark.every
def test_the_code_of_inductor_is_compared(tmp_path: Path) -> None:
    done = verify(tmp_path, "debug", "--compile", "--activation_checkpoint.mode=selective", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"debug\.toml compiled with inductor \(torch ", done.stdout)
    assert done.stdout.endswith("\nequal within tolerance\n")
