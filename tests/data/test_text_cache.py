"""Text that one machine of a job has in its cache, and another tokenizes first."""

import datetime
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.pool import Ranks
from tests.training import LLAMA
from titanlike.config import UserError
from titanlike.config.sections import Data, Evaluation, Sample, Training
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches.dataloaders import build_dataloaders
from titanlike.data.tokens import cache
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.inference.evaluator import Evaluator

TIMEOUT = 1.5  # seconds, of collectives


@contextmanager
def timeout_of_collectives(seconds: float) -> Iterator[None]:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    before = backend.options._timeout
    backend._set_default_timeout(datetime.timedelta(seconds=seconds))
    try:
        yield
    finally:
        backend._set_default_timeout(before)


def _open(folder: Path, has_locks: bool) -> tuple[str, int, list[int]]:
    """Opens the data of a run as a rank of two machines, of which the second takes longer than the timeout to tokenize it. Returns
    the fingerprint, the number of tokens of the evaluation, and the sizes of the texts that this rank tokenizes."""
    node, written = dist.get_rank() // 2, list[int]()
    original = cache.write_shards

    def write(files: Any, *others: Any, **options: Any) -> None:
        written.append(sum(file.size for file in files))
        time.sleep(1.2 * TIMEOUT * node)
        original(files, *others, **options)

    tokenizer, training = build_tokenizer(Section()), Training(seq_len=4, global_batch_size=2, local_batch_size=2)
    section = Data(source="text", path=str(folder / "text"), holdout_every=0)
    without_locks = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / f"node-{node}"), LOCAL_RANK=str(dist.get_rank() % 2)),
        mock.patch.object(fcntl, "flock", fcntl.flock if has_locks else without_locks),
        mock.patch.object(cache, "write_shards", write),
        timeout_of_collectives(TIMEOUT),
    ):
        data = build_dataloaders(
            section, training, tokenizer, seed=0, validate=False, dropout=False, data_rank=0, num_data_ranks=1,
            position_ids=torch.arange(4), device=torch.device("cpu"),
        )  # fmt: skip
        texts = Evaluation(interval=1, data=(str(folder / "evaluated"),))
        evaluator = Evaluator(texts, Sample(), section, training, LLAMA, tokenizer, 0)
        dist.barrier()  # the next collective of a run
    return data.fingerprint, next(iter(evaluator.texts.values())).num_tokens, written


@pytest.mark.parametrize(
    "has_locks", [pytest.param(True, id="locks"), pytest.param(False, id="no locks", marks=pytest.mark.slow)]
)
def test_machines_wait_for_one_that_tokenizes(ranks: Ranks, tmp_path: Path, has_locks: bool) -> None:
    for name, text in (("text", "some text"), ("evaluated", "another")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
    results = ranks(4).run(_open, tmp_path, has_locks)
    assert len({fingerprint for fingerprint, _, _ in results}) == 1
    assert [num_tokens for _, num_tokens, _ in results] == [8] * 4
    for ranks_of_node in (results[:2], results[2:]):  # one process of each machine tokenizes each text
        assert sorted(size for _, _, written in ranks_of_node for size in written) == [7, 9]


def _different_data(folder: Path) -> tuple[int, str]:
    """Opens the same text on both ranks, and then another one on each. Returns the seed of the batches, and the error."""
    tokenizer, training = build_tokenizer(Section()), Training(seq_len=4, global_batch_size=2, local_batch_size=2)
    options: dict[str, Any] = dict(
        seed=7, validate=False, dropout=True, data_rank=0, num_data_ranks=1, position_ids=torch.arange(4),
        device=torch.device("cpu"),
    )  # fmt: skip
    both, own = (
        Data(source="text", path=str(folder / name), holdout_every=0, cache=str(folder / f"cache-{dist.get_rank()}"))
        for name in ("0", str(dist.get_rank()))
    )
    data = build_dataloaders(both, training, tokenizer, **options)
    with pytest.raises(UserError) as error:
        build_dataloaders(own, training, tokenizer, **options)
    return data.training.seed, str(error.value)


def test_ranks_with_other_data_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text {name}")
    for seed, error in ranks(2).run(_different_data, tmp_path):
        assert seed == 7 and "the data differs across ranks: " in error
