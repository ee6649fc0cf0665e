"""Data under layouts: streams read alike by any ranks and resumed exactly, documents that do not see each other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_checkpoint import drop_last
from tests.distributed.test_layouts import _batches_seen, recipe_for
from tests.pool import Pool
from tests.training import assert_same, result, train

Ranks = Callable[[int], Pool]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files of short documents, most shorter than a sequence."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(8):
        lines = [json.dumps({"text": f"{number} and {line}; " * (1 + line % 3)}) for line in range(60)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


def data(source: str, corpus: Path, **keys: Any) -> dict[str, Any]:
    return dict(
        data=dict(
            source=source, path=str(corpus), validation_path=str(corpus / "7.jsonl"), cache=str(corpus.parent), **keys
        )
    )


@pytest.mark.parametrize(("layout", "model"), [
    ("CP-FSDP", "llama"),
    pytest.param("TP-FSDP", "gpt", marks=pytest.mark.slow),
    pytest.param("CP-FSDP", "gpt", marks=pytest.mark.slow),
    pytest.param("PPzbv-TP", "llama", marks=pytest.mark.slow),
])  # fmt: skip
def test_documents_are_apart_under_any_layout(
    ranks: Ranks, tmp_path: Path, corpus: Path, layout: str, model: str
) -> None:
    apart = data("text", corpus, document_masks=True) | {"training": dict(steps=2)}
    alone = train(ranks(1), recipe_for(tmp_path, "one", model, None, **apart))
    assert_same(train(ranks(4), recipe_for(tmp_path, "four", model, layout, **apart)), alone)
    together = train(
        ranks(1), recipe_for(tmp_path, "seen", model, None, training=dict(steps=2), **data("text", corpus))
    )
    assert abs(together.losses[0] - alone.losses[0]) > 1e-4  # it does make a difference


@pytest.mark.parametrize("layout", ["HSDP", pytest.param("CP-FSDP", marks=pytest.mark.slow)])
def test_a_stream_is_read_in_the_order_of_one_process(ranks: Ranks, tmp_path: Path, corpus: Path, layout: str) -> None:
    options: dict[str, Any] = dict(
        training=dict(steps=3), checkpoint=dict(enabled=False), validation=dict(interval=0), **data("stream", corpus)
    )
    alone = ranks(1).run(_batches_seen, recipe_for(tmp_path, "one", "llama", None, **options))[0]
    for rank in ranks(4).run(_batches_seen, recipe_for(tmp_path, "four", "llama", layout, **options)):
        for mine, everything in zip(rank, alone, strict=True):
            places = mine["sequence"][:, None], mine["position_ids"]
            assert torch.equal(mine["tokens"], everything["tokens"][places])
            assert torch.equal(mine["labels"], everything["labels"][places])


@pytest.mark.parametrize("layout", ["FSDP", pytest.param("PPzbv-TP", marks=pytest.mark.slow)])
def test_a_stream_is_resumed_bit_for_bit_and_elsewhere_with_the_same_text(
    ranks: Ranks, tmp_path: Path, corpus: Path, layout: str
) -> None:
    options: dict[str, Any] = dict(training=dict(steps=4), checkpoint=dict(interval=2), **data("stream", corpus))
    recipe = recipe_for(tmp_path, "run", "llama", layout, **options)
    whole = train(ranks(4), recipe)
    seen = ranks(1).run(_batches_seen, recipe_for(tmp_path, "seen", "llama", None, **options))[0]
    for _ in range(2):  # the second resume is where others break
        drop_last(tmp_path / "run")
        again = train(ranks(4), recipe)
        assert again.losses == whole.losses
        assert all(torch.equal(value, again.state["model"][name]) for name, value in whole.state["model"].items())
    drop_last(tmp_path / "run")
    elsewhere = recipe_for(tmp_path, "run", "llama", None, **options)
    later = ranks(1).run(_batches_seen, elsewhere)[0]
    assert len(later) == 2
    for ours, theirs in zip(later, seen[2:], strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
    assert result(elsewhere).losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_stream_that_has_changed_is_not_resumed(ranks: Ranks, tmp_path: Path, corpus: Path) -> None:
    options: dict[str, Any] = dict(validation=dict(interval=0), **data("stream", corpus))
    recipe = recipe_for(tmp_path, "run", "llama", None, **options)
    train(ranks(1), recipe)
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    recipe = recipe_for(tmp_path, "run", "llama", None, **dict(options, **data("stream", moved)))
    train(ranks(1), recipe)  # where it lies does not matter
    (moved / "3.jsonl").write_text("{}")
    with pytest.raises(Exception, match=r"trained on other data \(fingerprint"):
        train(ranks(1), recipe)
