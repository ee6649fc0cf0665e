"""Token files of Megatron-LM, llm.c and nanoGPT: sequences, documents, splits, mixtures, and the errors of damaged ones."""

import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.data.sequences import batches
from tests.token_files import write_llm_c, write_megatron, write_nanogpt
from titanlike.config import UserError
from titanlike.config.sections import Data, Evaluation
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches.best_fit import BestFitDataset
from titanlike.data.batches.packed_dataset import PackedDataset
from titanlike.data.batches.sources import open_sources
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields, read_documents
from titanlike.data.tokens import token_files
from titanlike.data.tokens.datasets import open_validation
from titanlike.data.tokens.token_files import open_shards
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks.machine import _data_files, evaluation_files
from titanlike.tools.data.inspection import inspect_shards, shards_as_json, verify_shards

EOS = 256  # of the byte tokenizer
BYTES, BYTES_BOS = build_tokenizer(Section()), build_tokenizer(Section(special="bos", bos="<|endoftext|>"))
LENGTHS = [3, 17, 1, 40, 8, 25, 2, 33, 12]
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 256, length).tolist() for length in LENGTHS]
CLOSED = [[*text, EOS] for text in TEXTS]
OPENED = [[EOS, *text] for text in TEXTS]
TOKENS, OPENED_TOKENS = (list(itertools.chain(*documents)) for documents in (CLOSED, OPENED))


def megatron(folder: Path, dtype: str = "int32") -> str:
    """Writes documents of one, two and no tokens more than one sequence, and names the prefix."""
    documents = [
        [document[:2], document[2:]] if number % 3 == 1 else [document] for number, document in enumerate(CLOSED)
    ]
    return str(write_megatron(folder / "corpus_text_document", documents, dtype)).removesuffix(".bin")


WRITERS: dict[str, Callable[[Path], tuple[str, list[int]]]] = {
    "megatron int32": lambda folder: (megatron(folder), TOKENS),
    "megatron uint16": lambda folder: (f"{megatron(folder, 'uint16')}.bin", TOKENS),
    "megatron int64": lambda folder: (f"{megatron(folder, 'int64')}.idx", TOKENS),
    "megatron folder": lambda folder: (str(Path(megatron(folder, "int16")).parent), TOKENS),
    "llm.c": lambda folder: (str(write_llm_c(folder / "fineweb_train_000001.bin", OPENED_TOKENS)), OPENED_TOKENS),
    "llm.c llama": lambda folder: (str(write_llm_c(folder / "a.bin", OPENED_TOKENS, 20240801, 7)), OPENED_TOKENS),
    "nanogpt": lambda folder: (str(write_nanogpt(folder / "train.bin", TOKENS)), TOKENS),
}


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[int]]:
    return WRITERS[request.param](tmp_path / "data")


def tokenizer_of(tokens: list[int]) -> Any:
    return BYTES_BOS if tokens is OPENED_TOKENS else BYTES


def test_tokens_are_read_in_place_from_local_and_remote_files(written: tuple[str, list[int]]) -> None:
    path, tokens = written
    for name in (path, f"file://{path}"):
        shards = open_shards(name, tokenizer=tokenizer_of(tokens))
        assert shards.num_tokens == len(tokens)
        for length in (1, 7, len(tokens)):
            starts = np.arange(len(tokens) - length + 1)
            rows = np.array(tokens)[starts[:, None] + np.arange(length)]
            np.testing.assert_array_equal(shards.read(starts, length), rows)
        assert shards.loss_mask(np.array([0]), 5) is None
    assert shards.fingerprint == open_shards(path).fingerprint


def test_sequences_and_labels_are_those_of_nanogpt(written: tuple[str, list[int]]) -> None:
    """Its rule is x = data[i : i + T] and y = data[i + 1 : i + 1 + T], here at every multiple i of T."""
    path, tokens = written
    data, seq_len = np.array(tokens), 16
    packed = PackedDataset(open_shards(path), seq_len)
    assert packed.num_sequences == (len(data) - 1) // seq_len
    for index in range(packed.num_sequences):
        [sequence] = packed.read(np.array([index])).tokens
        start = index * seq_len
        np.testing.assert_array_equal(sequence[:-1], data[start : start + seq_len])
        np.testing.assert_array_equal(sequence[1:], data[start + 1 : start + 1 + seq_len])
    loader = batches(packed)
    pairs = {(row[0].item(), row[1].item()) for batch in loader.microbatches(1) for row in batch.labels}
    assert pairs <= {(int(data[i + 1]), int(data[i + 2])) for i in range(0, len(data) - seq_len, seq_len)}


def test_documents_are_those_of_the_index_or_end_at_separators(
    written: tuple[str, list[int]], monkeypatch: Any
) -> None:
    path, tokens = written
    monkeypatch.setattr(token_files, "SCAN", 7)  # several reads
    separator = tokenizer_of(tokens).separator
    shards = open_shards(path, tokenizer=tokenizer_of(tokens))
    [shard] = shards.shards
    assert shards.document_lengths(shard).tolist() == [length + 1 for length in LENGTHS]
    packed = BestFitDataset(shards, 16, separator, separate=True)
    whole = {tuple(document) for document in (OPENED if tokens is OPENED_TOKENS else CLOSED) if len(document) <= 17}
    found = packed.read(np.arange(packed.num_sequences))
    assert found.document_ids is not None
    pieces = {
        tuple(row[ids == number].tolist())
        for row, ids in zip(found.tokens, found.document_ids, strict=True)
        for number in np.unique(ids)
    }
    assert whole <= pieces


def options(**changes: Any) -> dict[str, Any]:
    return dict(seq_len=16, global_batch_size=8, seed=0, validate=True) | changes


def test_the_files_of_a_folder_are_its_splits(tmp_path: Path) -> None:
    """As in nanoGPT's folder, beside its other files; and llm.c's, of which several are one array."""
    write_nanogpt(tmp_path / "owt" / "train.bin", TOKENS * 8)
    write_nanogpt(tmp_path / "owt" / "val.bin", TOKENS[:60])
    (tmp_path / "owt" / "prepare.py").write_text("...")
    sources = open_sources(Data(source="shards", path=str(tmp_path / "owt")), BYTES, **options())
    assert f"{len(TOKENS) * 8:,} tokens" in sources.training.describe(1)
    assert sources.validation is not None and "60 tokens" in sources.validation.describe(1)
    for name, part in (("train_000001", TOKENS[:70]), ("train_000002", TOKENS[70:]), ("val_000000", TOKENS[:40])):
        write_llm_c(tmp_path / "fineweb" / f"fineweb_{name}.bin", part)
    for path in ("fineweb", "fineweb/fineweb_train_*.bin", "fineweb/*.bin"):
        shards = open_shards(str(tmp_path / path))
        assert shards.read(np.array([0]), len(TOKENS)).tolist() == [TOKENS]
        assert len(shards.shards) == 2
    assert open_shards(str(tmp_path / "fineweb"), "validation").num_tokens == 40
    assert open_shards(str(tmp_path / "fineweb" / "fineweb_val_*.bin")).num_tokens == 40  # there are no others
    section = Data(source="text", path="a.txt", validation_path=str(tmp_path / "owt" / "val.bin"))
    assert open_validation(section, BYTES).num_tokens == 60
    section = Data(source="shards", path="a", validation_path=str(tmp_path / "owt"))
    assert open_validation(section, BYTES).num_tokens == 60


@pytest.mark.parametrize("kind", ["megatron int32", "llm.c", "nanogpt"])
def test_the_fingerprint_covers_tokens_and_documents(tmp_path: Path, kind: str) -> None:
    path, _ = WRITERS[kind](tmp_path / "data")
    before = open_shards(path).fingerprint
    [data] = (tmp_path / "data").glob("*.bin")
    content = bytearray(data.read_bytes())
    content[-4] ^= 1
    data.write_bytes(content)
    assert open_shards(path).fingerprint != before
    if kind == "megatron int32":
        write_megatron(tmp_path / "data" / "corpus_text_document", [[document] for document in CLOSED])
        assert open_shards(path).fingerprint != before


def damaged(path: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    changed = change(content)
    path.write_bytes(changed if isinstance(changed, bytes | bytearray) else content)


def entry(array: str, number: int, value: int) -> Callable[[bytearray], None]:
    """Returns a change of an entry of the index that `megatron` writes: 9 documents in 12 sequences."""
    offset, width = {"lengths": (34, 4), "pointers": (34 + 48, 8), "documents": (34 + 144, 8)}[array]

    def change(content: bytearray) -> None:
        at = offset + number * width
        content[at : at + width] = value.to_bytes(width, "little", signed=True)

    return change


MEGATRON_DAMAGE = [
    (".bin", lambda c: c[:-4], r"\.bin is truncated: it has 596 bytes, but its index \S+\.idx says 150 tokens, which take 600"),
    (".bin", lambda c: c + b"1234", r"\.bin is too long: it has 604 bytes, but its index"),
    (".idx", lambda c: c[:20], r"\.idx is not an index of Megatron-LM: it begins with b'MMIDIDX\\x00\\x00'"),
    (".idx", lambda c: c[:-8], r"\.idx is truncated: it has 250 bytes, but its header says 12 sequences and 10 document"),
    (".idx", lambda c: c + bytes(12), r"\.idx is the index of a multimodal dataset, which is not read"),
    (".idx", lambda c: c[:9] + b"\2" + c[10:], r"\.idx: its version is 2 and its code of the type 4; read are version 1 and"),
    (".idx", entry("pointers", 5, 4), r"\.idx: sequence 5 has \d+ tokens from byte 4 on, but the one before it ends at"),
    (".idx", entry("lengths", 3, -1), r"\.idx: sequence 3 has -1 tokens"),
    (".idx", entry("documents", 4, 99), r"\.idx: document boundary 4 is sequence 99, which is not between the one"),
    (".idx", entry("documents", 9, 11), r"\.idx: its last document does not end with its last sequence"),
]  # fmt: skip


@pytest.mark.parametrize("block", [1, 2**13])
@pytest.mark.parametrize(("suffix", "change", "message"), MEGATRON_DAMAGE)
def test_a_damaged_file_of_megatron_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, suffix: str, change: Any, message: str
) -> None:
    monkeypatch.setattr(token_files, "CHECKED_ENTRIES", block)
    prefix = megatron(tmp_path)
    open_shards(prefix)
    damaged(Path(f"{prefix}{suffix}"), change)
    with pytest.raises(UserError, match=f"corpus_text_document{message}"):
        open_shards(prefix)


def test_a_missing_half_of_megatrons_files_is_named(tmp_path: Path) -> None:
    prefix = megatron(tmp_path)
    Path(f"{prefix}.idx").rename(tmp_path / "idx")
    with pytest.raises(UserError, match=r"\.bin: every second of its first 300 tokens is 0"):
        open_shards(prefix)
    (tmp_path / "idx").rename(f"{prefix}.idx")
    Path(f"{prefix}.bin").unlink()
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        with pytest.raises(UserError, match=r"corpus_text_document\.bin is missing; copy it beside its index"):
            open_shards(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:-2], r"a\.bin is truncated: it has 1322 bytes, but its header says 150 tokens, which take 1324; copy"),
        (lambda c: c[:500], r"a\.bin is truncated: it has 500 bytes, and llm\.c's header alone has 1024"),
        (lambda c: b"", r"a\.bin is empty"),
        (lambda c: np.array([123, 1], "<i4").tobytes() + c[8:], r"its header are 123 and 1, but llm\.c's tokens have"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_llm_c_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = write_llm_c(tmp_path / "a.bin", OPENED_TOKENS)
    damaged(path, change)
    with pytest.raises(UserError, match=message):
        open_shards(str(path))


def test_a_damaged_file_of_nanogpt_is_named(tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path / "train.bin", TOKENS)
    damaged(path, lambda c: c[:-1])
    with pytest.raises(UserError, match=r"train\.bin is truncated: it has 299 bytes, but each token \(uint16\)"):
        open_shards(str(path))


@pytest.mark.parametrize("kind", ["megatron int32", "llm.c"])
def test_a_token_outside_of_the_vocabulary_is_named(tmp_path: Path, kind: str) -> None:
    path, _ = WRITERS[kind](tmp_path / "data")
    [data] = (tmp_path / "data").glob("*.bin")
    width = 4 if kind == "megatron int32" else 2
    at = data.stat().st_size - 30 * width
    damaged(data, lambda c: c[:at] + (999).to_bytes(width, "little") + c[at + width :])
    with pytest.raises(UserError, match=rf"{data.name} is damaged: token 120 is 999, but the tokenizer has 257"):
        _ = open_shards(path, tokenizer=BYTES).fingerprint
    if kind == "megatron int32":
        damaged(data, lambda c: c[:at] + b"\xff" * 4 + c[at + 4 :])
        with pytest.raises(UserError, match="token 120 is -1, but the tokenizer has 257"):
            _ = open_shards(path, tokenizer=BYTES).fingerprint


def opened(path: Any, section: Section) -> None:
    open_sources(Data(source="shards", path=str(path)), build_tokenizer(section), **options(validate=False))


def test_separators_of_another_tokenizer_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bos = Section(special="bos", bos="<|endoftext|>")
    closed = write_megatron(tmp_path / "closed", [[document] for document in CLOSED])
    opened(closed, Section())
    with pytest.raises(UserError, match=r"documents end with token 256, which .* set tokenizer\.special = 'eos'"):
        opened(closed, bos)
    llm_c = write_llm_c(tmp_path / "llm.bin", OPENED_TOKENS)
    opened(llm_c, bos)
    with pytest.raises(UserError, match=r"llm\.bin: documents begin with token 256, which"):
        opened(llm_c, Section())
    other = write_megatron(tmp_path / "other", [[[*text, 200]] for text in TEXTS])
    with pytest.raises(UserError, match=r"other\.bin: documents end with token 200, but tokenizer\.eos is token 256"):
        opened(other, Section())
    assert "warning" not in capfd.readouterr().err
    none = write_megatron(tmp_path / "none", [[text] for text in TEXTS])
    opened(none, Section())
    assert "none.bin: 0 of the 9 documents looked at end with token 256 (tokenizer.eos)" in capfd.readouterr().err
    opened(write_nanogpt(tmp_path / "b" / "none.bin", list(itertools.chain(*TEXTS))), Section())
    assert "none.bin: 0 of the 141 tokens looked at are token 256 (tokenizer.eos)" in capfd.readouterr().err


def test_tokens_of_characters_are_refused(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "train.bin", [token % 65 for token in TOKENS])
    (tmp_path / "meta.pkl").write_bytes(b"not read")
    with pytest.raises(UserError, match=r"meta\.pkl: nanoGPT's tokens beside it are characters"):
        opened(tmp_path, Section())


def test_files_of_one_path_have_tokens_of_one_type(tmp_path: Path) -> None:
    write_llm_c(tmp_path / "a.bin", OPENED_TOKENS)
    write_llm_c(tmp_path / "b.bin", OPENED_TOKENS, 20240801, 7)
    with pytest.raises(UserError, match=r"its files have tokens of different types: a\.bin has uint16 and b\.bin"):
        open_shards(str(tmp_path))


def test_as_text_a_token_file_names_the_source_that_reads_it(tmp_path: Path) -> None:
    for file in sorted(Path(megatron(tmp_path)).parent.glob("*.*")):
        with pytest.raises(UserError, match=r"is not text: .* of which data\.source = 'shards' reads token files"):
            list(read_documents(list_files(str(file))[0], Fields()))


def test_the_check_of_a_recipe_finds_missing_and_damaged_files(tmp_path: Path) -> None:
    recipe = PretrainRecipe()
    recipe = replace(recipe, model=replace(recipe.model, vocab_size=257))

    def problems(path: str, validation_path: str = "", source: str = "shards") -> list[str]:
        data = replace(recipe.data, source=source, path=path, validation_path=validation_path)
        return _data_files(replace(recipe, data=data))

    prefix = megatron(tmp_path)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx", str(tmp_path)):
        assert problems(path) == []
    assert ".bin files" in problems(str(tmp_path / "absent"))[0]
    # Validation data may be tokens or text, whatever the training data are.
    (text := tmp_path / "held_out.jsonl").write_text('{"text": "a"}\n')
    assert problems(prefix, str(text)) == problems(prefix, prefix) == problems(str(text), prefix, "text") == []
    assert [*evaluation_files(Evaluation(data=(prefix, f"{prefix}.bin", str(text))))] == []
    damaged(Path(f"{prefix}.bin"), lambda c: c[:-4])
    assert "truncated" in problems(prefix)[0]


def test_inspection_prints_files_and_documents(written: tuple[str, list[int]]) -> None:
    path, tokens = written
    text = io.StringIO()
    inspect_shards(path, limit=2, console=Console(file=text, width=200))
    program = next(name for name in ("Megatron-LM", "llm.c", "nanoGPT") if name in text.getvalue())
    assert (
        f"train: {len(tokens)} tokens, {'9' if program == 'Megatron-LM' else 'an unknown number of'} documents, 1 shard\n"
        in text.getvalue()
    )
    assert ("documents of 2 to 41 tokens, median 13" in text.getvalue()) == (program == "Megatron-LM")
    assert json.loads(shards_as_json(path))["source"] == {"program": program}
    with pytest.raises(UserError, match="has no hashes"):
        verify_shards(path)


def test_an_index_is_read_in_bounded_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large index, some blocks are checked; a small one is checked completely."""
    path = write_megatron(tmp_path / "a", [[[number % 256, EOS]] for number in range(5000)])
    monkeypatch.setattr(token_files, "CHECKED_ENTRIES", 16)
    monkeypatch.setattr(token_files, "MAX_CHECKS", 8)
    read: list[int] = []
    original = token_files._read_index
    monkeypatch.setattr(
        token_files,
        "_read_index",
        lambda *args: read.append(args[-1] - args[-2]) or original(*args),  # type: ignore[func-returns-value]
    )
    shards = open_shards(str(path), tokenizer=BYTES)
    assert sum(read) < 600
    assert shards.num_tokens == 10_000 and shards.document_lengths(shards.shards[0]).tolist() == [2] * 5000
