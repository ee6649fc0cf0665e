"""What is refused before anything starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titanlike.check import check, check_files
from titanlike.config import PretrainRecipe, UserError
from titanlike.config.models import GPT, Llama
from titanlike.config.sections import Data, Parallelism, Run, Tokenizer, Training


def recipe(**sections: Any) -> PretrainRecipe:
    """Defaults, with keyword arguments for some sections' fields, or whole sections."""
    base = PretrainRecipe()
    changed = {n: replace(getattr(base, n), **v) if isinstance(v, dict) else v for n, v in sections.items()}
    return replace(base, **changed)


def test_the_defaults_are_right() -> None:
    check(PretrainRecipe(), 1)
    check(PretrainRecipe(), 8)
    check(recipe(training=dict(steps=3)), 1)  # shorter than the warm-up


@pytest.mark.parametrize(
    ("sections", "processes", "message"),
    [
        (
            dict(training=dict(global_batch_size=16)),
            3,
            "= 16 does not divide over 3 data ranks; use 15 or 18, or another",
        ),
        (dict(training=dict(global_batch_size=2)), 3, "= 2 does not divide over 3 data ranks; use 3, or another"),
        (
            dict(training=dict(global_batch_size=24, local_batch_size=8)),
            2,
            "local_batch_size = 8 does not divide the 12 sequences of a rank (global_batch_size 24 over 2 data ranks); use 3,",
        ),
        (dict(parallelism=dict(replicate=3)), 4, "replicate = 3 does not divide the 4 processes; use 1, 2 or 4"),
        (dict(parallelism=dict(replicate=2, shard=2)), 2, "2 x 2 = 4, but there are 2 processes; start 4, or set"),
        (dict(parallelism=dict(shard=0)), 1, "shard = 0 is not a number of ranks; use 1 or more, or -1"),
        (dict(parallelism=dict(shard=-2)), 1, "shard = -2 is not a number of ranks"),
        (
            dict(training=dict(seq_len=9000)),
            1,
            "seq_len = 9000 is longer than the model's max_seq_len = 8192; use 8192",
        ),
        (dict(model=Llama(num_heads=5)), 1, "num_heads = 5 does not divide model.dim = 192; use 3, 4, 6 or 8"),
        (dict(model=Llama(num_kv_heads=3)), 1, "num_kv_heads = 3 does not divide model.num_heads = 4; use 1, 2 or 4"),
        (dict(model=Llama(dim=12, num_heads=4)), 1, "model.dim / model.num_heads = 3 is odd"),
        (dict(model=GPT(vocab_size=256)), 1, "vocab_size = 256 is smaller than the tokenizer's 257 tokens; use 257"),
        (dict(schedule=dict(warmup_steps=600, decay_steps=401)), 1, "600 + 401 is more than training.steps = 1000"),
        (
            dict(activation_checkpoint=dict(mode="memory_budget"), compile=dict(mode="none")),
            1,
            "a choice that the compiler makes, but compile.mode = 'none'; set compile.mode = 'block'",
        ),
        (dict(data=dict(validation_every=0)), 1, "holds nothing out; set validation.interval = 0, or"),
        (dict(data=dict(validation_every=1)), 1, "validation_every = 1 holds everything out; use 2 or more"),
        (dict(parallelism=dict(cpu_offload=True), run=dict(device="cpu")), 1, "but run.device = 'cpu'; set it false"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(sections: dict[str, Any], processes: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check(recipe(**sections), processes)
    assert message in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        check(recipe(training=dict(seq_len=9000, global_batch_size=5), schedule=dict(decay_steps=5000)), 1)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(("processes", "passes"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_the_rest_of_the_batch_is_accumulated(processes: int, passes: int) -> None:
    assert Training(global_batch_size=32, local_batch_size=8).num_microbatches(processes) == passes


def test_shard_takes_what_is_left() -> None:
    assert Parallelism(replicate=2).resolve(8) == Parallelism(replicate=2, shard=4)
    assert Parallelism(replicate=2, shard=1).resolve(2) == Parallelism(replicate=2, shard=1)


def test_a_missing_data_path_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path = '.*/none' does not exist here.*data\.source = 'synthetic'"):
        check_files(recipe(data=Data(source="text", path=str(tmp_path / "none")), run=Run(dir=str(tmp_path))))


def test_a_missing_tokenizer_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.encoding = '.*tokenizer\.model': there is no such file"):
        check_files(recipe(tokenizer=Tokenizer(encoding=str(tmp_path / "tokenizer.model")), run=Run(dir=str(tmp_path))))


def test_an_unknown_encoding_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'gpt-2' is neither a file nor a tiktoken encoding; did you mean 'gpt2'\?"):
        check_files(recipe(tokenizer=Tokenizer(encoding="gpt-2"), run=Run(dir=str(tmp_path))))


def test_a_data_path_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "d [v1]").mkdir()
    check_files(recipe(data=Data(source="text", path=str(tmp_path / "d [v1]")), run=Run(dir=str(tmp_path))))


def test_a_run_folder_below_a_file_is_told_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"taken is a file, not a folder; choose another run\.dir"):
        check_files(recipe(run=Run(dir=str(tmp_path / "taken" / "runs"), name="x")))
    check_files(recipe(run=Run(dir=str(tmp_path / "new"), name="x")))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
