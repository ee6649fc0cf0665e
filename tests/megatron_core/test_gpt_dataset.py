"""Sequences, labels, masks and shares of a blend equal those of Megatron-LM's datasets on files that it wrote itself. Requires it:

pip install --no-deps megatron-core && pytest -n 0 -m slow tests/megatron_core
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.sequences import batches
from tests.token_files import write_megatron
from titanlike.config.sections import Data
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches.packed_dataset import PackedDataset
from titanlike.data.batches.sources import open_sources
from titanlike.data.tokens.token_files import open_shards
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.losses import IGNORE

pytest.importorskip("megatron.core.package_info", reason="megatron-core is not installed; .ci/run installs it")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of Megatron-LM are not ours

EOS, SEQ_LEN = 256, 32
BYTES = build_tokenizer(Section())


def documents(seed: int, count: int = 60) -> list[list[list[int]]]:
    """Returns documents of one or two sequences, which end with EOS."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        tokens = [*rng.integers(1, 256, int(rng.integers(1, 90))).tolist(), EOS]
        found.append([tokens[:5], tokens[5:]] if number % 4 == 0 and len(tokens) > 6 else [tokens])
    return found


def build(prefix: Path, found: list[list[list[int]]], dtype: Any) -> str:
    """Writes documents with Megatron-LM's builder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype)
    for document in found:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(get_idx_path(str(prefix)))
    return str(prefix)


def gpt_dataset(prefix: str, monkeypatch: pytest.MonkeyPatch, *, masks: bool = False, shuffled: bool = False) -> Any:
    from megatron.core.datasets import gpt_dataset as module
    from megatron.core.datasets.utils import Split

    if not shuffled:
        monkeypatch.setattr(
            module, "_build_document_index", lambda documents, epochs, *_: np.tile(documents, epochs).astype(np.int32)
        )
        monkeypatch.setattr(module, "_build_shuffle_index", lambda _, total, __: np.arange(total, dtype=np.uint32))
    tokenizer = SimpleNamespace(eod=EOS, pad=-1, vocab_size=257, unique_identifiers={})
    config = module.GPTDatasetConfig(
        random_seed=0, sequence_length=SEQ_LEN, blend=([prefix], None), split="1,0,0", tokenizer=tokenizer,
        reset_position_ids=masks, reset_attention_mask=masks, eod_mask_loss=masks, mid_level_dataset_surplus=0.005,
    )  # fmt: skip
    low_level = module.GPTDataset.build_low_level_dataset(prefix, config)
    indices = np.arange(module.GPTDataset.numel_low_level_dataset(low_level), dtype=np.int32)
    return module.GPTDataset(low_level, prefix, indices, None, Split.train, config)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_sequences_and_labels_are_those_of_gpt_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    prefix = build(tmp_path / "corpus_text_document", documents(0), getattr(np, dtype))
    theirs = gpt_dataset(prefix, monkeypatch)
    ours = PackedDataset(open_shards(prefix), SEQ_LEN)
    assert len(theirs) == ours.num_sequences > 50
    for index in range(len(theirs)):
        [sequence] = ours.read(np.array([index])).tokens
        np.testing.assert_array_equal(theirs[index]["tokens"], sequence[:-1])
        np.testing.assert_array_equal(theirs[index]["labels"], sequence[1:])


def test_document_masks_are_those_of_the_options_that_reset_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--reset-attention-mask --reset-position-ids --eod-mask-loss`, for a batch of each sequence."""
    prefix = build(tmp_path / "corpus_text_document", documents(1), np.int32)
    theirs = gpt_dataset(prefix, monkeypatch, masks=True)
    loader = batches(PackedDataset(open_shards(prefix), SEQ_LEN), document_separator=BYTES.separator)
    by_tokens = {tuple(item["tokens"].tolist()): item for item in (theirs[index] for index in range(len(theirs)))}
    seen = 0
    for step in range(1, len(theirs) // 8 + 1):
        for batch in loader.microbatches(step):
            for row in range(len(batch.labels)):
                inputs = {name: values[row] for name, values in batch.inputs.items()}
                item = by_tokens[tuple(inputs["tokens"].tolist())]
                expected = torch.where(item["loss_mask"] == 0, IGNORE, item["labels"])
                assert torch.equal(batch.labels[row], expected)
                assert torch.equal(inputs["position_ids"], item["position_ids"])
                ids = inputs["document_ids"]
                visible = (ids[:, None] == ids[None]) & torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
                assert torch.equal(~visible, item["attention_mask"][0])
                seen += int((expected == IGNORE).sum())
    assert seen > 20


def test_the_test_files_of_the_default_tests_are_those_that_megatron_writes(tmp_path: Path) -> None:
    for dtype in ("uint16", "int32", "int64"):
        write_megatron(tmp_path / f"ours_{dtype}", documents(2), dtype)
        build(tmp_path / f"theirs_{dtype}", documents(2), getattr(np, dtype))
        for suffix in ("bin", "idx"):
            ours, theirs = ((tmp_path / f"{who}_{dtype}.{suffix}").read_bytes() for who in ("ours", "theirs"))
            assert ours == theirs


def test_a_mixture_has_the_shares_of_a_blend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets.blended_dataset import BlendedDataset

    weights, size = [0.7, 0.2, 0.1], 2048
    prefixes = [build(tmp_path / f"corpus{number}", documents(number, 4000), np.int32) for number in range(3)]
    parts = [gpt_dataset(prefix, monkeypatch, shuffled=True) for prefix in prefixes]
    blend = BlendedDataset(parts, weights, size, parts[0].config)
    theirs = np.bincount(blend.dataset_index, minlength=3)
    section = Data(source="shards", mixture=tuple(prefixes), weights=tuple(weights), holdout_every=0)
    ours = open_sources(section, BYTES, seq_len=SEQ_LEN, global_batch_size=size, seed=0, validate=False).training
    sources, _ = ours.mixture.pick(np.arange(size))  # type: ignore[attr-defined]
    assert np.abs(np.bincount(sources, minlength=3) - theirs).max() <= 1
    assert np.abs(theirs - size * np.array(weights)).max() <= 1
