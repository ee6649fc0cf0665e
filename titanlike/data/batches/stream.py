"""Text that is tokenized while training, from local or remote files.

**Readers** serve the rows of each global batch. A reader owns a share of the files and a fixed set of rows, so the text of a row
depends on the recipe and the files alone; a rank runs the readers of its rows. The number of readers is the largest divisor of
the global batch size for which each reader has a file. Readers are `torchdata.nodes`: the state of one is a few numbers, from
which it resumes exactly, on any rank.
"""

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np
from torchdata.nodes import BaseNode

from titanlike.config import UserError
from titanlike.config.layout import BatchSizes, Ramp
from titanlike.data.batches.packed_dataset import Position, SequenceBatch
from titanlike.data.batches.shuffle import Mixture, shuffled
from titanlike.data.documents.data_files import File
from titanlike.data.documents.readers import BadRecord, Document, Fields, read_documents
from titanlike.data.tokens.arrays import Flags, Numbers
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.utils.counter_rng import derive_seed
from titanlike.utils.live_line import print_line

BLOCK = 256  # records that are shuffled together: the most that a resumed reader reads again
MAX_READERS = 64
MAX_WARNINGS = 5  # bad records of a file that are reported individually

State = dict[str, Any]
Packed = tuple[Numbers, Flags]  # tokens and loss mask


class Cursor(NamedTuple):
    """Position of a token. File and document are indices into the shuffled order of the epoch."""

    epoch: int = 0
    file: int = 0
    block: int = 0
    document: int = 0
    token: int = 0


class Stream:
    """Sequences of one or more sources of text files, mixed by weight."""

    def __init__(
        self,
        sources: Sequence[Sequence[File]],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        *,
        fields: Fields,
        seq_len: int,
        global_batch_size: int,
        batch_ramp: Ramp = (),
        seed: int,
        workers: int = 1,
        skip_bad: bool = False,
        fingerprint: str = "",
    ) -> None:
        self.seq_len = seq_len
        self.fingerprint = fingerprint
        self.sources = sources
        self.weights = weights
        self.seed = seed
        self.batch_sizes = BatchSizes(global_batch_size, batch_ramp)
        self.workers = workers
        most = min([MAX_READERS, *map(len, sources)])
        self.num_readers = max(n for n in range(1, most + 1) if self.batch_sizes.divisor() % n == 0)
        self._open_text = partial(PackedText, tokenizer=tokenizer, fields=fields, seq_len=seq_len, skip_bad=skip_bad)
        self._pool: ThreadPool | None = None
        self._readers: dict[int, Reader] = {}
        self._resumed: dict[int, State] = {}

    def describe(self, steps: int) -> str:
        files = [file for source in self.sources for file in source]
        size = sum(file.size for file in files)
        return f"{len(files):,} file{'s' * (len(files) > 1)}, {size:,} bytes, readers: {self.num_readers}"

    def load_position(self, position: Position | None) -> None:
        self._resumed, self._readers = dict(position or ()), {}

    def read(self, step: int, rows: range) -> SequenceBatch:
        """Returns these rows of the global batch. Steps must be read in order."""
        rows_per_reader = self.batch_sizes.of(step) // self.num_readers
        first = rows.start // rows_per_reader
        readers = [self._reader(number) for number in range(first, (rows.stop - 1) // rows_per_reader + 1)]
        num_earlier = self.batch_sizes.through(step - 1)
        for reader in readers:
            assert reader.num_read == num_earlier // self.num_readers, "a stream is read in the order of the steps"
            reader.num_rows = rows_per_reader
        if self.workers > 1 and len(readers) > 1:
            # torchdata's ParallelMapper is not used: its threads call torch.set_num_threads(1), which also applies to every
            # thread that torch starts later, and to the main thread if it has not computed yet.
            if self._pool is None:
                self._pool = ThreadPool(min(self.workers, len(readers)))
                weakref.finalize(self, self._pool.terminate)  # does not wait for a read that blocks
            packed = self._pool.map(next, readers, chunksize=1)
        else:
            packed = [next(reader) for reader in readers]
        start = rows.start - first * rows_per_reader
        tokens, loss_mask = (np.concatenate(part)[start : start + len(rows)] for part in zip(*packed, strict=True))
        sequence_ids = np.array(rows, np.int64) + num_earlier
        return SequenceBatch(sequence_ids, tokens, None if loss_mask.all() else loss_mask)

    def position(self) -> Position:
        """Returns the number and the state of each reader of this rank."""
        return [[number, reader.state_dict()] for number, reader in self._readers.items()]

    def _reader(self, number: int) -> "Reader":
        if number not in self._readers:
            texts = [
                self._open_text(files[number :: self.num_readers], seed=derive_seed(self.seed, f"source {source}"))
                for source, files in enumerate(self.sources)
            ]
            # The label determines the order of the data: do not rename it.
            mixture = Mixture(self.weights, derive_seed(self.seed, f"lane {number}"))
            reader = self._readers[number] = Reader(texts, mixture)
            reader.reset(self._resumed.get(number))
        return self._readers[number]


class Reader(BaseNode[Packed]):
    """Yields the `num_rows` rows that one reader contributes to a step: tokens (N, T + 1) and their loss mask."""

    num_rows: int

    def __init__(self, texts: "Sequence[PackedText]", mixture: Mixture) -> None:
        super().__init__()
        self.texts, self.mixture = texts, mixture

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self.num_read = initial_state["num_read"] if initial_state else 0
        for index, text in enumerate(self.texts):
            text.reset(initial_state["texts"][index] if initial_state else None)

    def next(self) -> Packed:
        sources, _ = self.mixture.pick(np.arange(self.num_read, self.num_read + self.num_rows))
        rows = [next(self.texts[source]) for source in sources.tolist()]
        self.num_read += self.num_rows
        tokens, loss_mask = (np.stack(part) for part in zip(*rows, strict=True))
        return tokens, loss_mask

    def get_state(self) -> State:
        return {"num_read": self.num_read, "texts": [text.state_dict() for text in self.texts]}


class PackedText(BaseNode[Packed]):
    """Yields packed sequences of an unbounded stream over files: tokens (T + 1,) and their loss mask.

    Each epoch visits the files in a new order and shuffles the records of each block. The last token of a sequence is the
    first of the next.
    """

    def __init__(
        self, files: Sequence[File], *, tokenizer: Tokenizer, fields: Fields, seq_len: int, seed: int, skip_bad: bool
    ) -> None:
        super().__init__()
        self.files, self.tokenizer, self.fields = files, tokenizer, fields
        self.seq_len, self.seed, self.skip_bad = seq_len, seed, skip_bad
        self.warnings: dict[str, _Warnings] = {}  # by file name

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._cursor = Cursor(*initial_state["cursor"]) if initial_state else Cursor()
        self._documents = self._read(self._cursor)
        self._pending: deque[tuple[Cursor, Numbers, Flags]] = deque()  # documents, without the tokens already yielded

    def get_state(self) -> State:
        return {"cursor": list(self._cursor)}

    def next(self) -> Packed:
        length = self.seq_len + 1
        num_pending = sum(len(tokens) for _, tokens, _ in self._pending)
        while num_pending < length:
            cursor, document = next(self._documents)
            ids, num_prompt = self.tokenizer.document(document.text, document.prompt)
            tokens = ids[cursor.token :].astype(np.int64)
            self._pending.append((cursor, tokens, np.arange(cursor.token, len(ids)) >= num_prompt))
            num_pending += len(tokens)
        packed = [np.concatenate([each[part][:length] for each in self._pending])[:length] for part in (1, 2)]
        remaining = self.seq_len
        while remaining >= len(self._pending[0][1]):
            remaining -= len(self._pending.popleft()[1])
        cursor, tokens, loss_mask = self._pending[0]
        self._cursor = cursor._replace(token=cursor.token + remaining)
        self._pending[0] = self._cursor, tokens[remaining:], loss_mask[remaining:]
        return packed[0], packed[1]

    def _read(self, start: Cursor) -> Iterator[tuple[Cursor, Document]]:
        """Yields documents, the first of them at `start`."""
        epoch, first_file, first_block, first_document, token = start
        while True:
            order = shuffled(np.arange(len(self.files)), len(self.files), derive_seed(self.seed, f"epoch {epoch}"))
            empty = True
            for number in range(first_file, len(self.files)):
                file = self.files[int(order[number])]
                for block, documents in self._blocks(file, first_block):
                    seed = derive_seed(self.seed, f"{epoch} {order[number]} {block}")
                    permutation = shuffled(np.arange(len(documents)), len(documents), seed).tolist()
                    for index in range(first_document, len(documents)):
                        empty = False
                        yield Cursor(epoch, number, block, index, token), documents[permutation[index]]
                        token = 0
                    first_document = 0
                first_block = first_document = 0
            if empty:
                names = ", ".join(file.name for file in self.files[:3])
                raise UserError(f"{names}{' and others' if len(self.files) > 3 else ''}: no document found")
            epoch, first_file = epoch + 1, 0

    def _blocks(self, file: File, first: int) -> Iterator[tuple[int, list[Document]]]:
        """Yields the documents of a file in blocks of `BLOCK` records, from the block `first` on."""
        bad = self.warnings.setdefault(file.name, _Warnings(file)) if self.skip_bad else None
        documents = read_documents(file, self.fields, first=first * BLOCK, bad=bad)
        for block, group in itertools.groupby(documents, lambda document: document.record // BLOCK):
            yield block, list(group)


class _Warnings:
    """Prints the first bad records of a file, once each, and then one line for all others."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.seen: set[str] = set()

    def __call__(self, problem: BadRecord) -> None:
        if len(self.seen) > MAX_WARNINGS or str(problem) in self.seen:  # a record of an earlier epoch
            return
        self.seen.add(str(problem))
        if len(self.seen) <= MAX_WARNINGS:
            print_line(f"warning: skipped {problem}", sys.stderr)
        else:
            print_line(f"warning: skipped more records of {self.file.name}", sys.stderr)
