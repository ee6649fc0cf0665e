"""Data under parallel layouts: document masks, and streams that are read and resumed identically on any layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import assert_identical, drop_last
from tests.layouts import recipe_for, training_batches
from tests.pool import Ranks
from tests.training import assert_same, result, train


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Writes files of short documents, most of them shorter than a sequence."""
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
    pytest.param("PPzbv-TP", "llama", marks=pytest.mark.slow),
])  # fmt: skip
def test_document_masks_give_the_same_loss_under_any_layout(
    ranks: Ranks, tmp_path: Path, corpus: Path, layout: str, model: str
) -> None:
    masked = data("text", corpus, document_masks=True) | {"training": dict(steps=2)}
    single = train(ranks(1), recipe_for(tmp_path, "one", model, None, **masked))
    assert_same(train(ranks(4), recipe_for(tmp_path, "four", model, layout, **masked)), single)
    unmasked = train(
        ranks(1), recipe_for(tmp_path, "unmasked", model, None, training=dict(steps=2), **data("text", corpus))
    )
    assert abs(unmasked.losses[0] - single.losses[0]) > 1e-4  # the mask changes the loss


@pytest.mark.parametrize("layout", ["HSDP", pytest.param("CP-FSDP", marks=pytest.mark.slow)])
def test_a_stream_has_the_order_of_one_process(ranks: Ranks, tmp_path: Path, corpus: Path, layout: str) -> None:
    options: dict[str, Any] = dict(
        training=dict(steps=3), checkpoint=dict(enabled=False), validation=dict(interval=0), **data("stream", corpus)
    )
    single = ranks(1).run(training_batches, recipe_for(tmp_path, "one", "llama", None, **options))[0]
    for rank in ranks(4).run(training_batches, recipe_for(tmp_path, "four", "llama", layout, **options)):
        for local, full in zip(rank, single, strict=True):
            index = local["sequence"][:, None], local["position_ids"]
            assert torch.equal(local["tokens"], full["tokens"][index])
            assert torch.equal(local["labels"], full["labels"][index])


@pytest.mark.parametrize("layout", ["FSDP", pytest.param("PPzbv-TP", marks=pytest.mark.slow)])
def test_a_stream_resumes_bit_for_bit_and_on_another_layout_with_the_same_text(
    ranks: Ranks, tmp_path: Path, corpus: Path, layout: str
) -> None:
    options: dict[str, Any] = dict(training=dict(steps=4), checkpoint=dict(interval=2), **data("stream", corpus))
    recipe = recipe_for(tmp_path, "run", "llama", layout, **options)
    uninterrupted = train(ranks(4), recipe)
    expected = ranks(1).run(training_batches, recipe_for(tmp_path, "single", "llama", None, **options))[0]
    drop_last(tmp_path / "run")
    assert_identical(train(ranks(4), recipe), uninterrupted)
    drop_last(tmp_path / "run")
    single = recipe_for(tmp_path, "run", "llama", None, **options)
    batches = ranks(1).run(training_batches, single)[0]
    assert len(batches) == 2
    for actual, wanted in zip(batches, expected[2:], strict=True):
        assert torch.equal(actual["tokens"], wanted["tokens"])
    assert result(single).losses == pytest.approx(uninterrupted.losses, rel=1e-5)


def test_a_changed_stream_is_not_resumed(ranks: Ranks, tmp_path: Path, corpus: Path) -> None:
    options: dict[str, Any] = dict(validation=dict(interval=0), **data("stream", corpus))
    recipe = recipe_for(tmp_path, "run", "llama", None, **options)
    train(ranks(1), recipe)
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    recipe = recipe_for(tmp_path, "run", "llama", None, **dict(options, **data("stream", moved)))
    train(ranks(1), recipe)  # the path is not part of the fingerprint
    (moved / "3.jsonl").write_text("{}")
    with pytest.raises(Exception, match=r"trained on other data \(fingerprint"):
        train(ranks(1), recipe)
