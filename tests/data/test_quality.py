"""The stages of `titanlike data prepare` besides tokenization: duplicates, filters, repeated lines; splits and the report."""

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.preparing import BYTES, content, read_split
from tests.inference.tasks import evaluator_of
from titanlike.config import UserError
from titanlike.config.sections import Evaluation
from titanlike.data.documents import readers
from titanlike.data.documents.readers import BadRecord, Fields
from titanlike.data.tokens import work_units
from titanlike.data.tokens.shards import TEST, TRAIN, VALIDATION
from titanlike.tools.data import workers
from titanlike.tools.data.prepare import prepare
from titanlike.tools.data.quality import documents as documents_of_units
from titanlike.tools.data.quality import duplicates as merging
from titanlike.tools.data.quality import hashing
from titanlike.tools.data.quality.filters import Thresholds, open_filter, parse_thresholds
from titanlike.tools.data.quality.options import Quality
from titanlike.tools.data.quality.report import read_report

VOCAB = [f"{first}{second}{third}" for first in "bdkst" for second in "aeiou" for third in ("n", "r", "ll", "")]
MENU = "Home | About us | Contact"


def prose(rng: random.Random, num_sentences: int = 12) -> str:
    return "\n".join(" ".join(rng.choices(VOCAB, k=12)).capitalize() + "." for _ in range(num_sentences))


def write(path: Path, texts: Sequence[str], **fields: Any) -> Path:
    path.write_text("".join(json.dumps({"text": text, **fields}) + "\n" for text in texts))
    return path


@dataclass
class Planted:
    """Documents with known copies and rubbish."""

    inputs: list[str]
    originals: list[str]
    exact: int
    near: int
    rubbish: dict[str, str]  # by reason


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """Creates files with copies within a file, between files and of long texts, and rubbish."""
    rng, folder = random.Random(0), tmp_path / "planted"
    folder.mkdir()
    originals = [prose(rng) for _ in range(120)]
    near = []
    for text in originals[30:60]:
        words = text.split(" ")
        words[rng.randrange(len(words))] = "changed"
        near.append(" ".join(words).upper() if len(near) % 2 else " ".join(words))
    rubbish = {
        "length": "Too short.",
        "symbols": "=-=" * 60,
        "repeated_lines": "Buy this now!\nIt is cheap, really.\n" * 20,
        "repeated_paragraphs": "\n\n".join([text := prose(rng, 3), prose(rng, 3), text]),
        "repeated_words": " ".join(["again and again and"] * 40),
    }
    write(folder / "a.jsonl", [*originals[:90], *originals[:10], *near[:15]])
    rows = [{"text": text} for text in [*originals[90:], *originals[10:20], *near[15:]]]
    pq.write_table(pa.Table.from_pylist(rows), folder / "b.parquet", row_group_size=7)
    for number, text in enumerate(rubbish.values()):
        (folder / f"c{number}.txt").write_text(text)
    return Planted([str(folder)], originals, 20, 30, rubbish)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes work units, groups and parts of a merge so small that there are many."""
    monkeypatch.setattr(work_units, "MIN_SIZE", 8_000)
    for module in (hashing, documents_of_units):
        monkeypatch.setattr(module, "GROUP", 4_000)
    monkeypatch.setattr(merging, "MAX_RECORDS", 300)


def texts_of(out: Path, *splits: str) -> list[str]:
    return [bytes(document[:-1]).decode() for split in splits for document in read_split(out, split)]


def prepared(inputs: Sequence[str | Path], out: Path, *stages: Any, **options: Any) -> list[str]:
    """Prepares files in this process, with these options of `Quality` unless they are given. Returns the texts for training."""
    quality = options.pop("quality", Quality(*stages))
    prepare([*map(str, inputs)], out, BYTES, quality=quality, workers=0, **options)
    return texts_of(out, TRAIN)


def report_of(out: Path) -> dict[str, Any]:
    report = read_report(str(out))
    assert report
    return report


ALL = Quality("remove-near", Thresholds(), repeated_lines=20)


def test_duplicates_and_rubbish_are_removed(planted: Planted, tmp_path: Path, small_units: None) -> None:
    assert prepared(planted.inputs, tmp_path / "out", "remove-near", Thresholds()) == planted.originals
    report = report_of(tmp_path / "out")
    assert report["duplicates"] == {"exact": planted.exact, "near": planted.near}
    removed = {reason: tally["documents"] for reason, tally in report["removed"].items()}
    assert removed == dict.fromkeys(planted.rubbish, 1) | {"exact_duplicates": 20, "near_duplicates": 30}
    for reason, text in planted.rubbish.items():
        tally = report["removed"][reason]
        assert tally["bytes"] == len(text.encode())
        assert tally["examples"][0]["text"] == text[:200]
        assert tally["examples"][0]["where"].endswith(".txt")
    for reason in ("exact_duplicates", "near_duplicates"):
        examples = report["removed"][reason]["examples"]
        assert len(examples) == 10
        assert len({each["where"] for each in examples}) == 10
        assert all(each["detail"].startswith("kept: ") for each in examples)
    documents = report["documents"]
    assert documents["kept"]["documents"] == 120
    assert documents["read"]["documents"] == 175
    assert documents["read"]["bytes"] - documents["kept"]["bytes"] == sum(
        tally["bytes"] for tally in report["removed"].values()
    )
    assert not (tmp_path / "out/stages").exists()


def test_modes_of_duplicates(planted: Planted, tmp_path: Path, small_units: None) -> None:
    both = {"exact": 20, "near": 30}
    for mode, kept, found, removed in (
        ("count-near", 175, both, set()),
        ("remove", 155, {"exact": 20}, {"exact_duplicates"}),
    ):
        assert len(prepared(planted.inputs, tmp_path / mode, mode)) == kept
        report = report_of(tmp_path / mode)
        assert (report["duplicates"], set(report["removed"])) == (found, removed)
        assert report["documents"]["kept"]["documents"] == kept


def test_one_document_with_many_copies(tmp_path: Path, small_units: None) -> None:
    rng = random.Random(3)
    text, other = prose(rng), prose(rng)
    file = write(tmp_path / "a.jsonl", [text] * 200 + [other] + [f"{text} {number}" for number in range(200)])
    assert prepared([file], tmp_path / "out", "remove-near") == [text, other]
    report = report_of(tmp_path / "out")
    assert report["duplicates"] == {"exact": 199, "near": 200}


def test_texts_without_spaces_and_short_texts(tmp_path: Path) -> None:
    rng = random.Random(0)
    characters = [chr(0x4E00 + number) for number in range(2000)]
    chinese = ["".join(rng.choices(characters, k=300)) for _ in range(20)]
    copies = [f"{text[:150]}。{text[150:]}" for text in chinese]
    short = ["one two three", "One, two: three", "one two four", "…", "?!", "?!"]
    file = write(tmp_path / "a.jsonl", [*chinese, *copies, *short])
    assert prepared([file], tmp_path / "out", "remove-near") == [*chinese, "one two three", "one two four", "…", "?!"]


def test_prompts_are_part_of_a_document(tmp_path: Path) -> None:
    records = [{"ask": ask, "text": "yes"} for ask in ("is it?", "was it?", "is it?")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for duplicates, kept in (("count", 3), ("remove", 2)):
        out = tmp_path / duplicates
        assert len(prepared([tmp_path / "a.jsonl"], out, duplicates, fields=Fields("text", "ask"))) == kept
        report = report_of(out)
        assert report["duplicates"] == {"exact": 1}


def test_lines_of_many_documents_are_removed(tmp_path: Path, small_units: None) -> None:
    rng = random.Random(0)
    texts = [prose(rng) for _ in range(90)]
    with_menu = [f"{MENU}\n{text}" if number % 3 == 0 else text for number, text in enumerate(texts)]
    mostly_menu = f"{MENU}\n{MENU}\nSee you!"
    copied = f"{prose(rng, 2)}\n{prose(rng, 2)}"  # its lines are not boilerplate, since one copy of it is kept
    file = write(tmp_path / "a.jsonl", [*with_menu[:50], *[copied] * 40, mostly_menu, *with_menu[50:]])
    assert prepared([file], tmp_path / "out", quality=Quality("remove", repeated_lines=20)) == [
        *texts[:50],
        copied,
        *texts[50:],
    ]
    report = report_of(tmp_path / "out")
    assert report["removed"]["boilerplate"]["documents"] == 1
    assert report["removed"]["boilerplate"]["bytes"] == len(mostly_menu)
    assert report["documents"]["cleaned"]["documents"] == 30
    assert report["documents"]["cleaned"]["bytes"] == 30 * (len(MENU) + 1)
    assert report["documents"]["cleaned"]["examples"][0]["detail"] == f"removed line: {MENU}"
    # Visible bytes count: most of the letters of this document are its own, if few of its bytes with spaces are.
    spaced = write(tmp_path / "b.jsonl", [f"s p a c e d {number % 2}\nOnlyhere{number:02}.\n" for number in range(40)])
    assert prepared([spaced], tmp_path / "spaced", quality=Quality("remove", repeated_lines=20)) == [
        f"Onlyhere{number:02}.\n" for number in range(40)
    ]
    # In fewer documents, they stay.
    assert prepared([file], tmp_path / "few", quality=Quality("remove", repeated_lines=32))[0] == with_menu[0]


def test_lines_are_compared_without_white_space_around_them(tmp_path: Path) -> None:
    menu = ("Home and away", "  Home and away\t", "Home and away\r", "Home  and away", "Home", "}")
    texts = [
        f"{menu[number % 6]}\nOnly in this document, and nowhere else: {number}\n{menu[number % 6]}"
        for number in range(12)
    ]
    expected = [
        f"Only in this document, and nowhere else: {number}\n" if number % 6 < 3 else texts[number]
        for number in range(12)
    ]
    file = write(tmp_path / "a.jsonl", [*texts, texts[0]])
    assert prepared([file], tmp_path / "out", quality=Quality("remove", repeated_lines=3)) == expected
    report = report_of(tmp_path / "out")
    assert report["documents"]["cleaned"]["documents"] == 6 and report["removed"]["exact_duplicates"]["documents"] == 1


FILTER = """
import re
import numpy
def keep(text): return numpy.bool_("changed" not in text.lower())
def shorter(text): return text[:50] if "a" in text else False
def by_field(record): return record.get("lang") == "en"
def nothing(text): pass
def ends(text): raise SystemExit(0)
"""


@pytest.fixture
def filters(tmp_path: Path) -> Callable[[str], Quality]:
    (tmp_path / "my.py").write_text(FILTER)
    return lambda name: Quality(own=open_filter(f"{tmp_path}/my.py:{name}"))


def test_own_filter(planted: Planted, tmp_path: Path, small_units: None, filters: Callable[[str], Quality]) -> None:
    kept = prepared(planted.inputs, tmp_path / "keep", quality=filters("keep"))
    report = report_of(tmp_path / "keep")
    assert report["removed"]["filter"]["documents"] == 30
    assert all(
        "changed" in each["text"].lower() or len(each["text"]) == 200
        for each in report["removed"]["filter"]["examples"]
    )
    shorter = prepared(planted.inputs, tmp_path / "shorter", quality=filters("shorter"))
    assert {*shorter} >= {text[:50] for text in kept if "a" in text} and max(map(len, shorter)) == 50
    records = [{"text": prose(random.Random(number)), "lang": "en" if number % 2 else "de"} for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        assert prepared([tmp_path / name], tmp_path / f"{name}.out", quality=filters("by_field")) == [
            each["text"] for each in records[1::2]
        ]


def test_filters_see_long_documents_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: Callable[[str], Quality]
) -> None:
    monkeypatch.setattr(readers, "CHUNK_SIZE", 200)
    rng = random.Random(0)
    texts = [prose(rng, 30) for _ in range(4)]
    for number, text in enumerate([*texts, texts[0], texts[1] + " changed"]):
        (tmp_path / f"{number}.txt").write_text(text)
    inputs = [str(tmp_path / "*.txt")]
    prepare(inputs, tmp_path / "counted", BYTES, workers=0)
    assert report_of(tmp_path / "counted")["duplicates"] == {"exact": 1}
    assert prepared(inputs, tmp_path / "filtered", quality=filters("keep")) == [*texts, texts[0]]
    assert prepared(inputs, tmp_path / "removed", "remove-near") == texts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"a\.jsonl, line 1: --filter .*my\.py:nothing returned NoneType; return True to keep"),
        ("ends", r"a\.jsonl, line 1: --filter .*my\.py:ends raised SystemExit: 0"),
    ],
)
def test_errors_of_a_filter_name_the_record(
    planted: Planted, tmp_path: Path, filters: Callable[[str], Quality], name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(planted.inputs, tmp_path / "out", BYTES, quality=filters(name), workers=0)


@pytest.mark.parametrize(
    ("num_files", "ending", "message"),
    [
        # One work unit, which this process would do itself without a filter.
        (1, "os._exit(0)", r"ended with exit code 0 .*, or --filter .*my\.py:keep ended it"),
        (40, "os.kill(os.getpid(), 9)", r"was killed by SIGKILL .*, or --filter .*my\.py:keep ended it"),
    ],
)
def test_a_filter_that_ends_its_process_is_named(
    tmp_path: Path, small_units: None, num_files: int, ending: str, message: str
) -> None:
    (tmp_path / "my.py").write_text(f"import os\ndef keep(text):\n    {ending}\n")
    (tmp_path / "text").mkdir()
    for number in range(num_files):
        (tmp_path / "text" / f"{number:02}.txt").write_text("word " * 100)
    quality = Quality(own=open_filter(f"{tmp_path}/my.py:keep"))
    with pytest.raises(UserError, match=message):
        prepare([str(tmp_path / "text")], tmp_path / "out", BYTES, quality=quality, workers=2)


def test_filters_that_cannot_be_used(tmp_path: Path, filters: Callable[[str], Quality]) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(UserError) as caught:
            open_filter(name)
        return str(caught.value).replace(f"{tmp_path}/", "")

    assert refusal("my.py") == "--filter my.py: give a file and a function, such as my_filter.py:keep"
    assert refusal(f"{tmp_path}/my.py:kept").startswith(
        "--filter my.py:kept: my.py has no function 'kept'; its functions: keep, shorter"
    )
    (tmp_path / "bad.py").write_text("import nothing_like_it\n")
    assert "bad.py cannot be imported: ModuleNotFoundError: No module named 'nothing_like_it'" in refusal(
        f"{tmp_path}/bad.py:a"
    )


def test_limits_of_quality() -> None:
    assert parse_thresholds("default") == Thresholds()
    assert parse_thresholds("min_characters=5, max_symbols=0.25") == Thresholds(min_characters=5, max_symbols=0.25)
    for text, message in (
        ("max_symbol=1", "max_symbol = 1: unknown key; did you mean max_symbols?"),
        ("max_symbols=1.5", "max_symbols = 1.5 must be a number > 0 and <= 1"),
    ):
        with pytest.raises(UserError, match=re.escape(f"--quality {text}: {message}")):
            parse_thresholds(text)


def test_everything_removed_is_an_error(planted: Planted, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="every document was removed: 175 for length; give other limits"):
        prepared(planted.inputs, tmp_path / "out", "count", Thresholds(min_characters=10**6))
    assert not (tmp_path / "out.partial").exists()


def test_test_split(planted: Planted, tmp_path: Path, alone: None) -> None:
    prepare(planted.inputs, tmp_path / "two", BYTES, validation_share=0.2, workers=0)
    prepare(planted.inputs, tmp_path / "three", BYTES, validation_share=0.2, test_share=0.3, workers=0)
    two, three = ({name: texts_of(tmp_path / out, name) for name in names} for out, names in (
        ("two", (TRAIN, VALIDATION)), ("three", (TRAIN, VALIDATION, TEST))
    ))  # fmt: skip
    assert three[VALIDATION] == two[VALIDATION]
    assert sorted(three[TRAIN] + three[TEST]) == sorted(two[TRAIN])
    evaluated = evaluator_of(Evaluation(data=(f"{tmp_path}/three",))).texts
    assert evaluated["three"].num_documents == len(three[TEST]) != len(three[VALIDATION])
    assert 0.15 < len(three[TEST]) / 175 < 0.45
    sets = [set(texts) for texts in three.values()]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    with pytest.raises(UserError, match="leave no document for training"):
        prepared(planted.inputs, tmp_path / "out", validation_share=0.5, test_share=0.5)


def test_near_copies_are_not_in_two_splits(planted: Planted, tmp_path: Path) -> None:
    quality = Quality("remove-near", Thresholds())
    prepare(planted.inputs, tmp_path / "out", BYTES, quality=quality, validation_share=0.3, test_share=0.3, workers=0)
    found = [texts_of(tmp_path / "out", split) for split in (TRAIN, VALIDATION, TEST)]
    assert min(map(len, found)) > 10
    assert sorted(texts_of(tmp_path / "out", TRAIN, VALIDATION, TEST)) == sorted(planted.originals)


class Interrupted(Exception):
    pass


@pytest.fixture
def every_stage(filters: Callable[[str], Quality]) -> dict[str, Any]:
    quality = Quality("remove-near", Thresholds(), 5, filters("keep").own)
    return {"quality": quality, "validation_share": 0.2, "test_share": 0.1}


def test_result_does_not_depend_on_the_number_of_workers(
    planted: Planted, tmp_path: Path, small_units: None, every_stage: dict[str, Any]
) -> None:
    prepare(planted.inputs, tmp_path / "serial", BYTES, workers=0, **every_stage)
    prepare(planted.inputs, tmp_path / "out", BYTES, workers=2, **every_stage)
    assert content(tmp_path / "out") == content(tmp_path / "serial")
    assert len(json.loads((tmp_path / "out/plan.json").read_text())["units"]) > 8


def test_result_does_not_depend_on_interruptions(
    planted: Planted, tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch, every_stage: dict[str, Any]
) -> None:
    prepare(planted.inputs, tmp_path / "undisturbed", BYTES, workers=0, **every_stage)
    expected = content(tmp_path / "undisturbed")
    assert "report.json" in expected
    num_units = len(json.loads(expected["plan.json"])["units"])
    done: list[tuple[str, int]] = []
    original = workers.process

    def process_work_unit(unit: Any, job: Any, *rest: Any) -> Any:
        if (job.stage, unit.number) == stop:
            raise Interrupted
        done.append((job.stage, unit.number))
        return original(unit, job, *rest)

    monkeypatch.setattr(workers, "process", process_work_unit)
    stop: tuple[str, int] | None
    for stage, unit in itertools.product(("duplicates", "lines", "tokenize"), (0, 3, num_units - 1)):
        stop = (stage, unit)
        with pytest.raises(Interrupted):
            prepare(planted.inputs, tmp_path / "out", BYTES, workers=0, **every_stage)
    (tmp_path / "out.partial/unit-00001.json").unlink()
    (tmp_path / "out.partial/train-00002.tokens").write_bytes(b"short")  # as after a loss of power
    stop = None
    prepare(planted.inputs, tmp_path / "out", BYTES, workers=0, **every_stage)
    assert content(tmp_path / "out") == expected
    assert len(done) == 3 * num_units + 2


def test_resuming_with_other_stages_is_refused(
    planted: Planted, tmp_path: Path, filters: Callable[[str], Quality]
) -> None:
    quality = filters("keep")
    prepare(planted.inputs, tmp_path / "out", BYTES, quality=quality, workers=0)

    def refusal(**options: Any) -> str:
        with pytest.raises(UserError) as caught:
            prepare(planted.inputs, tmp_path / "out", BYTES, workers=0, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    assert "--filter was 'my.py:keep' and is None" in refusal()
    assert "--duplicates was None and is 'remove'" in refusal(quality=Quality("remove", own=quality.own))
    assert "--test was None and is 0.5" in refusal(quality=quality, test_share=0.5)
    (tmp_path / "my.py").write_text(FILTER + "\n")
    assert "the source of --filter my.py:keep has changed" in refusal(quality=filters("keep"))


def test_bad_records_are_skipped_in_every_pass(planted: Planted, tmp_path: Path, small_units: None) -> None:
    file = tmp_path / "planted/a.jsonl"
    lines = file.read_text().splitlines()
    lines[10:10] = ["{", "[]"]
    file.write_text("\n".join(lines))
    with pytest.raises(BadRecord, match=r"a\.jsonl, line 11: not JSON"):
        prepare(planted.inputs, tmp_path / "out", BYTES, quality=ALL, workers=0)
    manifest = prepare(planted.inputs, tmp_path / "out", BYTES, quality=ALL, workers=0, bad="skip")
    assert manifest.skipped == 2
    assert texts_of(tmp_path / "out", TRAIN) == planted.originals
