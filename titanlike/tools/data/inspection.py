"""Prints the sequences that a rank reads, and the contents of token shards."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from titanlike.config import UserError
from titanlike.config.layout import BatchSizes
from titanlike.data.batches import openers
from titanlike.data.batches.masked_tokens import MaskedSource
from titanlike.data.batches.packed_dataset import BatchSource, SequenceBatch, separate_documents
from titanlike.data.batches.span_corruption import SpanCorruptedSource
from titanlike.data.tokens.shards import totals
from titanlike.data.tokens.token_files import find_token_files, open_shards
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.losses import IGNORE
from titanlike.recipe import PretrainRecipe
from titanlike.tools.data.quality.report import read_report, render_report

DOCUMENT_COLORS = ("default", "cyan")  # alternating
SEPARATOR_STYLE = "bold black on yellow"
NO_LABEL = " … "


def inspect_recipe(
    recipe: PretrainRecipe, *, step: int, rank: int, ranks: int, limit: int, validation: bool, console: Console
) -> None:
    """Prints up to `limit` of the sequences that data-parallel rank `rank` of `ranks` reads in a step."""
    training = recipe.training
    sizes = BatchSizes(training.global_batch_size, () if validation else training.batch_ramp)
    if sizes.divisor() % ranks or rank >= ranks:
        raise UserError(
            f"--rank {rank} --ranks {ranks}: training.global_batch_size = {training.global_batch_size} and the sizes of "
            "training.batch_ramp must be divisible by --ranks, and --rank counts from 0"
        )
    if step > training.steps and not validation:
        raise UserError(f"--step {step}: the recipe has training.steps = {training.steps}; give one of them")
    if problems := [*recipe.data.problems()]:
        raise UserError("\n".join(problems))
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size, recipe.checkpoint.initial)
    data = openers.of(recipe)(
        recipe.data,
        tokenizer,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        seed=recipe.run.seed,
        validate=validation,
        batch_ramp=training.batch_ramp,
    )
    source = data.validation if validation else data.training
    if source is None:
        raise UserError("--validation: a stream has no held-out sequences; set data.validation_path")
    first = 1 if source.position() is not None else step  # a stream has to be read from its start
    for each in range(first, step + 1):
        num_rows = sizes.of(each) // ranks
        batch = source.read(each, range(rank * num_rows, (rank + 1) * num_rows))
    name = "validation" if validation else recipe.data.source
    console.print(
        f"data    {name}: {source.describe(recipe.validation.batches if validation else training.steps)}\n"
        f"        fingerprint {data.training.fingerprint}, tokenizer {recipe.tokenizer.encoding} {tokenizer.fingerprint}\n"
        f"step    {step}, data-parallel rank {rank} of {ranks}: {num_rows} sequences of {training.seq_len} tokens",
        markup=False,
        highlight=False,
    )
    for text in _render(batch, tokenizer, _names(source, tokenizer), limit):
        console.print(text)
    if num_rows > limit:
        console.print(f"\n{num_rows - limit} more; --sequences {num_rows} shows all")


def verify_shards(path: str) -> None:
    """Checks the hash of each file of token shards."""
    for name in open_shards(path).manifest.splits:
        open_shards(path, name).verify()


def inspect_shards(path: str, *, limit: int, console: Console) -> None:
    """Prints the contents of token shards or token files, and the report of what was removed from the text."""
    training = open_shards(path)
    manifest = training.manifest
    tokenizer = manifest.tokenizer
    made_by = f"of {manifest.source['program']}" if find_token_files(path) else f"tokenizer {tokenizer.get('encoding')}"
    lines = [f"shards  {path}: {manifest.dtype}, {made_by} {tokenizer['fingerprint']}".rstrip()]
    for name, shards in manifest.splits.items():
        num_tokens, num_documents = totals(shards)
        num_prompt = sum(shard.prompt_tokens for shard in shards)
        documents = f"{num_documents:,}" if num_documents else "an unknown number of"
        lines.append(
            f"        {name}: {num_tokens:,} tokens, {documents} documents, {len(shards)} shard"
            f"{'s' * (len(shards) != 1)}"
            + (f", {num_prompt:,} prompt tokens (excluded from the loss)" if num_prompt else "")
        )
        split = open_shards(path, name)
        for shard in shards[:limit]:
            lengths = np.sort(split.document_lengths(shard))
            lines.append(f"          {shard.name}: {shard.tokens:,} tokens")
            if len(lengths):  # of a file without an index, they depend on the tokenizer
                middle = lengths[len(lengths) // 2]
                lines[-1] += f"; documents of {lengths[0]:,} to {lengths[-1]:,} tokens, median {middle:,}"
    lines.append(f"        {manifest.skipped:,} records skipped; fingerprint {training.fingerprint}")
    report = read_report(path)
    if report:
        lines += render_report(report, limit)
    console.print("\n".join(lines), highlight=False, markup=False)


def shards_as_json(path: str) -> str:
    """Returns the manifest of token shards or token files, and the report of what was removed from the text, as JSON."""
    training = open_shards(path)
    values = asdict(training.manifest) | {"fingerprint": training.fingerprint, "report": read_report(path)}
    return json.dumps(values, indent=1)


def _names(source: BatchSource, tokenizer: Tokenizer) -> dict[int | None, str]:
    """Returns the names of tokens that are highlighted, some of which the tokenizer does not have."""
    names = {tokenizer.eos: "<eos>", tokenizer.bos: "<bos>", IGNORE: NO_LABEL}
    if isinstance(source, MaskedSource):
        names[source.mask] = "<mask>"
    if isinstance(source, SpanCorruptedSource):
        names |= {token: f"<extra_id_{number}>" for number, token in enumerate(source.sentinels.tolist())}
    return names


def _render(batch: SequenceBatch, tokenizer: Tokenizer, names: Mapping[int | None, str], limit: int) -> Iterator[Text]:
    """Yields sequences as text: documents in alternating colors, prompts dim, separators highlighted. Labels that are not the next
    tokens follow, without what has no label."""
    arrays = dict(batch.others)
    tokens, labels = batch.tokens[:limit, :-1], arrays.get("labels", batch.labels)
    document_ids = arrays.get("document_ids", batch.document_ids)
    if document_ids is None:
        document_ids = separate_documents(tokens, tokenizer.separator)
    loss_mask = np.ones(tokens.shape, bool) if batch.loss_mask is None else batch.loss_mask
    for row, sequence_id in enumerate(batch.sequence_ids[:limit]):
        documents = document_ids[row, : tokens.shape[1]]
        is_text = documents >= 0  # not padding of pairs of texts
        if batch.document_ids is not None:  # padding of packed items is a document of separators
            last = documents == documents[-1]
            is_text &= ~(last & (tokens[row][last] == tokenizer.separator.token).all())
        count = len(np.unique(documents[is_text]))
        text = Text("\n")
        text.append(f"sequence {sequence_id}  ", style="bold")
        text.append(f"{count} document{'s' * (count > 1)}\n", style="default")
        columns = (each[is_text] for each in (tokens[row], documents, loss_mask[row, : len(documents)]))
        _append(text, tokenizer, names, *columns)
        if labels is not None:
            text.append("\nlabels\n", style="bold")
            last = np.flatnonzero(labels[row] != IGNORE).max(initial=-1)
            found = labels[row, : last + 1]
            label_documents = arrays.get("decoder_document_ids", np.zeros_like(labels))[row]
            _append(text, tokenizer, names, found, label_documents, np.ones(len(found), bool))
        yield text


def _append(text: Text, tokenizer: Tokenizer, names: Mapping[int | None, str], *columns: npt.NDArray[Any]) -> None:
    """Appends tokens, given with the numbers of their documents and whether they are labels."""
    rows = zip(*(column.tolist() for column in columns), strict=False)
    for (name, document, is_label), run in itertools.groupby(rows, lambda row: (names.get(row[0]), *row[1:])):
        ids = [token for token, *_ in run]
        style = f"{DOCUMENT_COLORS[document % 2]}{'' if is_label else ' dim'}"
        if name == NO_LABEL:
            text.append(NO_LABEL, style="dim")
        else:
            text.append(name * len(ids) if name else tokenizer.decode(ids), style=SEPARATOR_STYLE if name else style)
