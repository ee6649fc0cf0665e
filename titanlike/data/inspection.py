"""What a rank will read, as people read it. No torch."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from titanlike.config import PretrainRecipe, UserError
from titanlike.data.packed_dataset import SequenceBatch, document_ids_and_positions
from titanlike.data.sources import open_sources
from titanlike.data.text.tokenizer import Tokenizer, build_tokenizer
from titanlike.data.token_shards import Shards, read_manifest, totals

DOCUMENTS = ("default", "cyan")  # colours, in turn
GIVEN, SEPARATOR = "dim", "bold black on yellow"


def inspect_recipe(
    recipe: PretrainRecipe, *, step: int, rank: int, ranks: int, most: int, validation: bool, console: Console
) -> None:
    """Show the sequences that one of so many data ranks reads in a step."""
    training = recipe.training
    if training.global_batch_size % ranks or rank >= ranks:
        raise UserError(
            f"--rank {rank} --ranks {ranks}: training.global_batch_size = {training.global_batch_size} sequences are shared "
            "evenly by ranks that count from 0"
        )
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size)
    data = open_sources(
        recipe.data,
        tokenizer,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        seed=recipe.run.seed,
        validate=validation,
    )
    feed = data.validation if validation else data.training
    assert feed is not None
    share = training.global_batch_size // ranks
    mine = range(rank * share, (rank + 1) * share)
    for earlier in range(1 if feed.position() is not None else step, step):
        feed.rows(earlier, mine)  # what is read in order has no other way to the step
    rows = feed.rows(step, mine)
    what = feed.describe(recipe.validation.batches) if validation else feed.describe(training.steps)
    name = "held out" if validation else recipe.data.source
    console.print(f"data    {name}: {what}", markup=False, highlight=False)
    console.print(
        f"        fingerprint {data.fingerprint}, tokenizer {recipe.tokenizer.encoding} {tokenizer.fingerprint}"
    )
    console.print(f"step    {step}, data rank {rank} of {ranks}: {share} sequences of {training.seq_len} tokens")
    for line in show(rows, tokenizer, most):
        console.print(line)
    if share > most:
        console.print(f"\n{share - most} more; --sequences {share} shows all")


def inspect_shards(place: str, *, verify: bool, most: int, console: Console) -> None:
    """Tell what a folder of shards has, and if asked whether it is what was written."""
    manifest = read_manifest(place)
    of = manifest.tokenizer
    console.print(
        f"shards  {place}: {manifest.dtype}, tokenizer {of.get('encoding')} {of['fingerprint']}", highlight=False
    )
    for name, shards in manifest.splits.items():
        num_tokens, num_documents = totals(shards)
        given = sum(shard.given for shard in shards)
        console.print(
            f"        {name}: {num_tokens:,} tokens, {num_documents:,} documents, {len(shards)} shard{'s' * (len(shards) != 1)}"
            + (f", {given:,} tokens given and not learnt" if given else ""),
            highlight=False,
        )
        row = Shards(place, name)
        for shard in shards[:most]:
            lengths = row.lengths(shard)
            console.print(
                f"          {shard.name}: {shard.tokens:,} tokens; documents of {lengths.min():,} to {lengths.max():,}, half of "
                f"them below {int(sorted(lengths)[len(lengths) // 2]):,}",
                highlight=False,
            )
        if verify:
            row.verify()
    console.print(f"        {manifest.skipped:,} records left out; fingerprint {manifest.fingerprint}", highlight=False)
    if verify:
        console.print("        every file is what was written", style="green")


def show(rows: SequenceBatch, tokenizer: Tokenizer, most: int) -> Iterator[Text]:
    """Some of the sequences: documents in turning colours, what is given and not learnt dim, what parts documents marked."""
    separator = tokenizer.separator
    numbers, _ = document_ids_and_positions(rows.tokens[:, :-1], separator)
    names = {tokenizer.eos: "<eos>", tokenizer.bos: "<bos>"}
    for row in range(min(most, len(rows.tokens))):
        tokens = rows.tokens[row, :-1].tolist()
        loss_mask = [True] * len(tokens) if rows.loss_mask is None else rows.loss_mask[row, :-1].tolist()
        text = Text("\n")
        text.append(f"sequence {rows.numbers[row]}  ", style="bold")
        count = int(numbers[row, -1]) + 1
        text.append(f"{count} document{'s' if count > 1 else ''}", style="default")
        text.append("\n")
        start = 0
        for place in range(1, len(tokens) + 1):
            kind = _kind(tokens, numbers[row], loss_mask, start, names)
            if place < len(tokens) and _kind(tokens, numbers[row], loss_mask, place, names) == kind and kind[2] is None:
                continue
            document, is_learnt, name = kind
            style = SEPARATOR if name else f"{DOCUMENTS[document % 2]}{'' if is_learnt else ' ' + GIVEN}"
            text.append(name or tokenizer.decode(tokens[start:place]), style=style)
            start = place
        yield text


def _kind(
    tokens: list[int], documents: "list[int]", loss_mask: list[bool], place: int, names: dict[int | None, str]
) -> tuple[int, bool, str | None]:
    return int(documents[place]), loss_mask[place], names.get(tokens[place])
