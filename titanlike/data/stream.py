"""Text that is read and made into tokens while the run goes on, from files here or far away. No torch.

The rows of a global batch are served by **lanes**, each of which reads files of its own, for ever: as many as divide the batch
and as there are files for. So which row has which text depends on the recipe and the files alone, and a rank reads the lanes
of its rows and no others. A lane can say where it is in its files in a few numbers, and go on from there.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np

from titanlike.config import UserError
from titanlike.data.packed_dataset import Flags, SequenceBatch
from titanlike.data.shuffle import Mixture, Numbers, shuffled
from titanlike.data.text.documents import BadRecord, Document, Fields, read_documents
from titanlike.data.text.files import File
from titanlike.data.text.tokenizer import Tokenizer
from titanlike.utils.counter_rng import derive_seed

BLOCK = 256  # records that are shuffled among each other: what is read again, at most, to go on from a position
MAX_READERS = 64
SHOWN = 5  # bad records of a file that are told one by one


class Cursor(NamedTuple):
    """Where a token is: the epoch, the file and the document in the orders of that epoch, and how far into the document."""

    epoch: int = 0
    file: int = 0
    block: int = 0
    document: int = 0
    token: int = 0


class Stream:
    """Sequences of the endless text of files, of one or more sources mixed by weight."""

    def __init__(
        self,
        sources: Sequence[Sequence[File]],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        *,
        fields: Fields,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        workers: int = 1,
        skip_bad: bool = False,
    ) -> None:
        self.seq_len = seq_len
        self.sources = sources
        few = min([MAX_READERS, *map(len, sources)])
        self.num_readers = max(number for number in range(1, few + 1) if global_batch_size % number == 0)
        self.rows_per_reader = global_batch_size // self.num_readers
        self.global_batch_size = global_batch_size
        self._readers: dict[int, _Reader] = {}
        self._positions: dict[int, tuple[int, list[Cursor]]] = {}
        self.workers = workers

        def reader(number: int) -> _Reader:
            texts = [
                _Text(
                    files[number :: self.num_readers],
                    tokenizer,
                    fields,
                    derive_seed(seed, f"source {source}"),
                    skip_bad,
                )
                for source, files in enumerate(sources)
            ]
            return _Reader(texts, Mixture(weights, derive_seed(seed, f"lane {number}")), seq_len)

        self._make_reader = reader

    def describe(self, steps: int) -> str:
        files = [file for source in self.sources for file in source]
        size = sum(file.size for file in files)
        return f"{len(files):,} file{'s' * (len(files) > 1)}, {size:,} bytes, lanes: {self.num_readers}"

    def begin(self, position: list[Any] | None) -> None:
        for number, taken, places in position or ():
            self._positions[number] = taken, [Cursor(*place) for place in places]

    def rows(self, step: int, mine: range) -> SequenceBatch:
        """These rows of the global batch. Steps follow one another."""
        numbers = range(mine.start // self.rows_per_reader, (mine.stop - 1) // self.rows_per_reader + 1)

        def make(number: int) -> tuple[Numbers, Flags]:
            return self._reader(number, step).take(self.rows_per_reader)

        if self.workers > 1 and len(numbers) > 1:
            # Lanes are independent of each other, and both reading and the tokenizer let other threads run.
            with ThreadPool(min(self.workers, len(numbers))) as pool:
                made = pool.map(make, numbers, chunksize=1)
        else:
            made = [make(number) for number in numbers]
        start = mine.start - numbers.start * self.rows_per_reader
        wanted = slice(start, start + len(mine))
        loss_mask = np.concatenate([flags for _, flags in made])[wanted]
        return SequenceBatch(
            numbers=np.array(mine, np.int64) + (step - 1) * self.global_batch_size,
            tokens=np.concatenate([tokens for tokens, _ in made])[wanted],
            loss_mask=None if loss_mask.all() else loss_mask,
        )

    def position(self) -> list[Any]:
        """Where each lane that this rank reads is: its number, the sequences it has given, and a place in each source."""
        return [
            [number, reader.taken, [list(text.place) for text in reader.texts]]
            for number, reader in self._readers.items()
        ]

    def _reader(self, number: int, step: int) -> "_Reader":
        if number not in self._readers:
            reader = self._readers[number] = self._make_reader(number)
            if number in self._positions:
                reader.taken, places = self._positions[number]
                for text, place in zip(reader.texts, places, strict=True):
                    text.begin(place)
        reader = self._readers[number]
        assert reader.taken == (step - 1) * self.rows_per_reader, "a stream is read one step after the other"
        return reader


class _Reader:
    """What serves some rows of each batch."""

    def __init__(self, texts: "list[_Text]", mixture: Mixture, seq_len: int) -> None:
        self.texts, self.mixture, self.seq_len = texts, mixture, seq_len
        self.taken = 0

    def take(self, count: int) -> tuple[Numbers, Flags]:
        """The next sequences (count, T + 1), and which of their tokens are learnt."""
        chosen, _ = self.mixture.pick(np.arange(self.taken, self.taken + count))
        made = [self.texts[number].take(self.seq_len) for number in chosen.tolist()]
        self.taken += count
        tokens, loss_mask = (np.stack(each) for each in zip(*made, strict=True))
        return tokens, loss_mask


class _Text:
    """The tokens of some files, for ever: each epoch has the files, and records near each other, in an order of its own."""

    def __init__(self, files: Sequence[File], tokenizer: Tokenizer, fields: Fields, seed: int, skip_bad: bool) -> None:
        self.files, self.tokenizer, self.fields, self.seed = files, tokenizer, fields, seed
        self.skip_bad = skip_bad
        self.bad: dict[str, _Bad] = {}  # by the name of the file
        self.begin(Cursor())

    def begin(self, place: Cursor) -> None:
        """Go on from a place."""
        self.place = place
        self._documents = self._read(place)
        self._waiting: deque[tuple[Cursor, Numbers, int]] = deque()  # place, tokens, how many of them are given
        self._num_waiting = -place.token  # of the first document, so many have been taken already

    def take(self, length: int) -> tuple[Numbers, Flags]:
        """The next tokens, and one more, which the next call gives again."""
        while self._num_waiting <= length:
            place, document = next(self._documents)
            found, given = self.tokenizer.document(document.text, document.prompt)
            self._waiting.append((place, found.astype(np.int64), given))
            self._num_waiting += len(found)
        tokens, loss_mask = np.empty(length + 1, np.int64), np.ones(length + 1, bool)
        filled, start = 0, self.place.token
        for _, piece, given in self._waiting:
            part = piece[start : start + length + 1 - filled]
            tokens[filled : filled + len(part)] = part
            loss_mask[filled : filled + min(max(given - start, 0), len(part))] = False
            filled, start = filled + len(part), 0
            if filled > length:
                break
        self._num_waiting -= length
        self._forget(self.place.token + length)
        return tokens, loss_mask

    def _forget(self, start: int) -> None:
        """Let go of what has been taken: the next token is the one at `start`, counted from what waits first."""
        while start >= len(self._waiting[0][1]):
            start -= len(self._waiting.popleft()[1])
        self.place = self._waiting[0][0]._replace(token=start)

    def _read(self, place: Cursor) -> Iterator[tuple[Cursor, Document]]:
        """Documents from that of `place` on."""
        epoch, first_file, first_block, first_document, _ = place
        while True:
            order = shuffled(np.arange(len(self.files)), len(self.files), derive_seed(self.seed, f"epoch {epoch}"))
            found = False
            for number in range(first_file, len(self.files)):
                file = self.files[int(order[number])]
                for block, documents in self._blocks(file, first_block):
                    seed = derive_seed(self.seed, f"{epoch} {order[number]} {block}")
                    mixed = shuffled(np.arange(len(documents)), len(documents), seed).tolist()
                    for index in range(first_document, len(documents)):
                        found = True
                        yield Cursor(epoch, number, block, index), documents[mixed[index]]
                    first_document = 0
                first_block = first_document = 0
            if not found:
                names = ", ".join(file.name for file in self.files[:3])
                raise UserError(f"{names}{' and others' if len(self.files) > 3 else ''}: there is no text in it")
            epoch, first_file = epoch + 1, 0

    def _blocks(self, file: File, first: int) -> Iterator[tuple[int, list[Document]]]:
        """The documents of a file, so many records at a time."""
        bad = self.bad.setdefault(file.name, _Bad(file)) if self.skip_bad else None
        documents = read_documents(file, self.fields, first=first * BLOCK, bad=bad)
        for block, some in itertools.groupby(documents, lambda document: document.record // BLOCK):
            yield block, list(some)


class _Bad:
    """Tells of the first bad records of a file, and that there are more."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.seen: set[str] = set()

    def __call__(self, problem: BadRecord) -> None:
        if str(problem) in self.seen:  # read again, in the next epoch
            return
        self.seen.add(str(problem))
        if len(self.seen) <= SHOWN:
            print(f"warning: left out: {problem}", file=sys.stderr, flush=True)
        elif len(self.seen) == SHOWN + 1:
            print(f"warning: left out: more of {self.file.name}", file=sys.stderr, flush=True)
