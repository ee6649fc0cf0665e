"""Data sources: text tokenized once, shards and their splits, mixtures, streams, and the errors of each."""

import base64
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.durability import Disk
from titanlike.config import UserError
from titanlike.config.sections import Checkpoint, Data, Validation
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches.packed_dataset import ShuffledMixture
from titanlike.data.batches.sources import Sources, open_sources
from titanlike.data.batches.stream import Stream
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens import cache as cache_module
from titanlike.data.tokens import work_units
from titanlike.data.tokens.tokenization import tokenize
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_recipe
from titanlike.tools.data.prepare import prepare

BYTES = build_tokenizer(Section())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "titanlike" / "tokens"


def open_(validate: bool = False, seq_len: int = 4, **keys: Any) -> Sources:
    return open_sources(
        Data(**{"holdout_every": 0} | keys), BYTES, seq_len=seq_len, global_batch_size=2, seed=0, validate=validate
    )


def tokens_of(source: Any) -> list[int]:
    """Returns all tokens of the first dataset of a source, unshuffled."""
    assert isinstance(source, ShuffledMixture)
    array = source.datasets[0].tokens
    return array.read(np.array([0]), array.num_tokens)[0].tolist()


def texts(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_each_text_file_is_a_document_with_an_eos(tmp_path: Path, cache: Path, disk: Disk) -> None:
    folder = texts(tmp_path / "text", b="Bb", empty="")
    texts(folder / "sub", a="aa")
    assert tokens_of(open_(source="text", path=str(folder)).training) == [*b"Bb", 256, *b"aa", 256]
    [tokens] = (path for path in cache.iterdir() if path.is_dir())
    disk.assert_published(tokens)
    assert tokens_of(open_(source="text", path=str(folder / "**/a*"), seq_len=2).training) == [*b"aa", 256]


def test_a_changed_file_is_tokenized_again(tmp_path: Path) -> None:
    folder = texts(tmp_path / "text", a="some text")
    assert tokens_of(open_(source="text", path=str(folder)).training) == [*b"some text", 256]
    (folder / "a.txt").write_text("more text")  # same size, new modification time
    assert tokens_of(open_(source="text", path=str(folder)).training) == [*b"more text", 256]


def test_an_interrupted_tokenization_resumes(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [json.dumps({"text": f"{number} " * 20}) + "\n" for number in range(100)]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.txt").write_text("the last document")
    expected = tokens_of(open_(source="text", path=str(folder), cache=str(tmp_path / "undisturbed")).training)
    monkeypatch.setattr(work_units, "MIN_SIZE", 1_000)
    monkeypatch.setattr(work_units, "MAX_SIZE", 1_000)
    units: list[int] = []
    interrupted = 3

    def counted(unit: Any, *others: Any) -> Any:
        result = tokenize(unit, *others)
        if unit.number == interrupted:
            raise KeyboardInterrupt
        units.append(unit.number)
        return result

    monkeypatch.setattr(cache_module, "tokenize", counted)
    with pytest.raises(KeyboardInterrupt):
        open_(source="text", path=str(folder))
    interrupted = 5
    with pytest.raises(KeyboardInterrupt):
        open_(source="text", path=str(folder))
    [partial] = cache.glob("*.partial")
    (partial / "train-00001.tokens").write_bytes(b"short")  # as after a loss of power
    interrupted = -1
    assert tokens_of(open_(source="text", path=str(folder)).training) == expected
    assert units == [0, 1, 2, 3, 4, 1, *range(5, units[-1] + 1)] and units[-1] > 5
    [complete] = (path for path in cache.iterdir() if path.is_dir())
    assert {path.suffix for path in complete.iterdir()} == {".tokens", ".documents", ".json"}
    assert [path.name for path in complete.glob("*.json")] == ["manifest.json"]


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = texts(tmp_path / "text", a="some text")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/tokens cannot store the tokens of .*text: .*; set data\.cache"):
        open_(source="text", path=str(folder), cache=str(tmp_path / "file"))


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    folder = texts(tmp_path / "d [v1]", a="a a a")
    assert tokens_of(open_(source="text", path=str(folder)).training) == [*b"a a a", 256]
    (folder / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"bad\.txt: byte 3 is not UTF-8"):
        open_(source="text", path=str(folder))
    assert tokens_of(open_(source="text", path=str(folder), bad_records="skip").training) == [*b"a a a", 256]
    with pytest.raises(UserError, match=r"bad\.txt: byte 3 is not UTF-8"):  # although the cache has the other records
        open_(source="text", path=str(folder))


def test_synthetic_tokens_are_deterministic() -> None:
    one, other = (open_(source="synthetic").training for _ in range(2))
    assert one.fingerprint == other.fingerprint and tokens_of(one) == tokens_of(other)
    assert max(tokens_of(one)) == 256


def shards(folder: Path, name: str, texts: list[str], share: float = 0.0, **keys: str) -> str:
    """Writes shards with one document per text."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text, "prompt": "?" * len(text)}) + "\n" for text in texts))
    out = folder / name
    fields = Fields("text", keys.pop("prompt", ""))
    prepare([str(file)], out, Section(**keys), fields=fields, validation_share=share, workers=0)  # type: ignore[arg-type]
    return str(out)


def test_the_keys_of_a_mixture_reach_its_source(tmp_path: Path) -> None:
    paths = tuple(str(texts(tmp_path / name, **{name: f"text {name} " * 20, "c": "another " * 20})) for name in "ab")
    ramp: Any = ((2, 1),)

    def opened(tokenizer: Any = BYTES, *, validate: bool = False, **others: Any) -> Any:
        keys: dict[str, Any] = dict(source="stream", mixture=paths, weights=(3.0, 1.0), holdout_every=2)
        return open_sources(
            Data(**keys | others), tokenizer, seq_len=4, global_batch_size=2, seed=0, validate=validate, batch_ramp=ramp
        )

    text = opened(source="text", validate=True)
    assert (text.training.weights, text.validation.weights) == ([3.0, 1.0], [3.0, 1.0])
    assert [each.holdout_every for each in text.training.datasets] == [2, 2]
    with_validation = opened(source="text", validation_path=paths[0], validate=True)
    assert [each.holdout_every for each in with_validation.training.datasets] == [0, 0]
    stream = opened(workers=3).training
    assert (stream.weights, stream.workers) == ([3.0, 1.0], 3)
    assert text.training.batch_sizes.of(1) == stream.batch_sizes.of(1) == 1
    changes: list[dict[str, Any]] = [
        {}, dict(weights=(1.0, 1.0)), dict(text_field="body"), dict(prompt_field="ask"), dict(mixture=paths[:1] * 2),
        dict(tokenizer=SimpleNamespace(fingerprint="of another one")),
    ]  # fmt: skip
    assert len({opened(**each).training.fingerprint for each in changes}) == len(changes)
    for path in paths:
        Path(path, "c.txt").write_bytes(b"abc\xff")
    stopping, skipping = opened().training, opened(bad_records="skip").training
    with pytest.raises(UserError, match="not UTF-8"):
        for step in range(1, 200):
            stopping.read(step, range(stopping.batch_sizes.of(step)))
    for step in range(1, 200):
        skipping.read(step, range(skipping.batch_sizes.of(step)))


def test_shards_are_not_read_as_text(tmp_path: Path) -> None:
    path = shards(tmp_path, "some", ["document"] * 20)
    with pytest.raises(UserError, match="some has token shards, not text"):
        open_(source="text", path=path)


def test_shards_have_a_validation_split_or_an_error_names_the_remedy(tmp_path: Path) -> None:
    path = shards(tmp_path, "split", [f"document {number}" for number in range(200)], share=0.2)
    data = open_(True, source="shards", path=path, holdout_every=7)
    assert data.validation is not None
    everything = [f"document {number}" for number in range(200)]
    parts = [
        bytes(t if t < 256 else 0 for t in tokens_of(source)).decode().split("\0")[:-1]
        for source in (data.training, data.validation)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(everything)
    assert 20 < len(parts[1]) < 60
    with pytest.raises(UserError, match=r"has no validation split, and data\.holdout_every = 0; set that"):
        open_(True, source="shards", path=shards(tmp_path, "no_split", everything))


def test_validation_path_names_shards_or_text(tmp_path: Path) -> None:
    train = shards(tmp_path, "train", ["training text."] * 9)
    held_out = shards(tmp_path, "held_out", ["what is held out"])
    file = tmp_path / "held_out.txt"
    file.write_text("what is held out")
    found = [open_(True, source="shards", path=train, validation_path=path) for path in (held_out, str(file))]
    for data in found:
        assert tokens_of(data.validation) == [*b"what is held out", 256]
        assert len(tokens_of(data.training)) == 9 * 15
    # Validation data does not change the fingerprint of the training data.
    assert (
        len({data.training.fingerprint for data in found} | {open_(source="shards", path=train).training.fingerprint})
        == 1
    )


def test_the_fingerprint_of_a_mixture_covers_datasets_and_weights(tmp_path: Path) -> None:
    one, other = (shards(tmp_path, name, [name * 9] * 9) for name in ("one", "other"))
    mixed = [
        open_(source="shards", mixture=parts, weights=weights).training.fingerprint
        for parts, weights in (((one, other), ()), ((one, other), (1.0, 2.0)), ((other, one), ()), ((one,), ()))
    ]
    assert len(set(mixed)) == 4
    assert open_(source="shards", mixture=(one, other), weights=(1.0, 1.0)).training.fingerprint == mixed[0]
    assert mixed[3] == open_(source="shards", path=one).training.fingerprint


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path = shards(tmp_path, "other", ["text"] * 9)
    (tmp_path / "bytes").write_text("".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256)))
    opened = build_tokenizer(
        Section(str(tmp_path / "bytes"), special="both", eos="<|end_of_text|>", bos="<|begin_of_text|>")
    )
    with pytest.raises(UserError, match="other was made with another tokenizer") as error:
        open_sources(Data(source="shards", path=path), opened, seq_len=4, global_batch_size=2, seed=0, validate=False)
    assert re.findall(r"tokenizer\.(\w+) = ", str(error.value)) == ["encoding", "special", "eos", "bos"]
    manifest = Path(path, "manifest.json")
    values = json.loads(manifest.read_text())
    values["tokenizer"]["fingerprint"] = "0" * 16
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match="its file has changed; restore that file, or prepare the data again"):
        open_(source="shards", path=path)


def test_the_fingerprint_of_a_stream_covers_file_names_and_sizes(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        texts(tmp_path / folder / "sub", a="text a", b="text b")
    one, two = (open_(source="stream", path=str(tmp_path / folder)) for folder in ("one", "two"))
    assert isinstance(one.training, Stream)
    assert one.training.fingerprint == two.training.fingerprint
    (tmp_path / "two/sub/b.txt").write_text("longer text")
    assert open_(source="stream", path=str(tmp_path / "two")).training.fingerprint != one.training.fingerprint
    assert open_(source="stream", path=str(tmp_path / "one/sub/a.txt")).training.fingerprint != one.training.fingerprint


@pytest.mark.parametrize("source", ["text", "stream", "shards"])
def test_a_source_without_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """It does not read the folder that happens to have the name of the source, nor the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / source).mkdir()
    (tmp_path / source / "a.txt").write_text("words " * 1000)
    message = f"data.source = '{source}' requires data.path, which is empty"
    with pytest.raises(UserError, match=message):
        open_(source=source)
    base = PretrainRecipe(validation=Validation(interval=0))
    for data in (Data(source=source), Data(source=source, mixture=("",))):  # type: ignore[arg-type]
        with pytest.raises(UserError, match=message if not data.mixture else "data.mixture contains an empty path"):
            check_recipe(dataclasses.replace(base, data=data), 1)


@pytest.mark.parametrize("location", ["memory://runs", "https://host/runs"])
def test_checkpoints_that_would_be_lost_are_refused(location: str) -> None:
    recipe = PretrainRecipe(validation=Validation(interval=0), checkpoint=Checkpoint(dir=location))
    with pytest.raises(UserError, match=r"checkpoint.dir = '.*' (is lost when the process ends|cannot be written)"):
        check_recipe(recipe, 1)
