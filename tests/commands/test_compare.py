"""`titanlike compare`: reading, repeated steps, down-sampling, differences, tables, files and mistakes."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launching import Cli
from titanlike.tools.comparison import table
from titanlike.tools.comparison.page import page
from titanlike.tools.comparison.runs import ComparedRun, differences, find, load, unique_names
from titanlike.tools.comparison.series import Series, make_series
from titanlike.tools.metrics_file import read_lines
from titanlike.utils.file_lock import FileLock


def record(step: int, **values: Any) -> str:
    defaults = {
        "loss": 4.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 100 * step, "tokens_per_second": 50.0, "mfu": None,
        "memory_gib": 2.0, "elapsed_seconds": 2.0 * step,
    }  # fmt: skip
    return json.dumps({"step": step, **defaults, **values}) + "\n"


def validation(step: int, loss: float | None, elapsed: float) -> str:
    return json.dumps({"step": step, "validation_loss": loss, "elapsed_seconds": elapsed}) + "\n"


def make(folder: Path, lines: str, recipe: str = "[training]\nsteps = 3\n", **environment: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "recipe.toml").write_text(recipe)
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def loaded(*paths: Path) -> list[ComparedRun]:
    return load(paths)


def test_a_file_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == ([], [])  # not there yet
    third = record(3, loss=None)
    path.write_text(record(1) + record(2) + third[:60])
    records, damaged = read_lines(path)
    assert [each["step"] for each in records] == [1, 2] and damaged == []
    with path.open("a") as file:
        file.write(third[60:].rstrip())  # complete, but for the line break
    records, damaged = read_lines(path)
    assert [each["loss"] for each in records] == [4.0, 2.0, None] and damaged == []


def test_damaged_lines_are_counted_and_the_others_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = '\x00\x00\n{"step": 2, "lo{"step": 2}\n[1]\n{"step": "3", "loss": 1}\n'
    path = make(tmp_path / "run", record(1) + damaged + '{"step": 2, "loss": NaN}\n\n' + record(3))
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "x": "\xff"}\n')
    (run,) = loaded(path)
    assert run.summary.damaged_lines == (2, 3, 4, 5, 9)
    assert run.series["loss"].steps.tolist() == [1, 2, 3] and np.isnan(run.series["loss"].values[1])


def test_of_repeated_steps_the_later_record_counts(tmp_path: Path) -> None:
    first = "".join([record(1), record(2), validation(2, 9.0, 4.5), record(3), validation(3, 9.5, 6.5), record(4)])
    # Resumed at step 2, and stopped again at step 3.
    second = record(3, loss=7.0, elapsed_seconds=1.0) + validation(3, 8.0, 1.5)
    (run,) = loaded(make(tmp_path / "run", first + second, "[training]\nsteps = 9\n"))
    loss, validations = run.series["loss"], run.series["validation_loss"]
    assert (loss.steps.tolist(), loss.values.tolist()) == ([1, 2, 3], [4.0, 2.0, 7.0])
    assert (validations.steps.tolist(), validations.values.tolist()) == ([2, 3], [9.0, 8.0])
    # 8 s of the first start, which includes the steps it lost.
    assert (3600 * run.axis["hours"]).tolist() == [2.0, 4.0, 9.0]
    summary = run.summary
    assert (summary.state, summary.step, summary.num_steps, summary.wall_seconds) == ("stopped", 3, 9, 9.5)
    assert (summary.best_validation_loss, summary.best_validation_step) == (8.0, 3)


def test_numbers_of_tokens_have_three_digits() -> None:
    found = [table.count(value) for value in (None, 0, 999, 999.6, 12_345, 999_499, 999_600, 1.234e9, 5e12)]
    assert found == ["-", "0", "999", "1.00K", "12.3K", "999K", "1.00M", "1.23B", "5.00T"]


def series_of(values: np.ndarray, num_buckets: int) -> Series:
    return make_series(np.arange(float(len(values))), values, num_buckets, averaged=False)


def test_downsampling_keeps_spikes_and_non_finite_values_of_every_place() -> None:
    generator = np.random.default_rng(0)
    for count in (2_001, 99_999, 100_000):
        for place in (0, 1, count // 3, count - 2, count - 1):
            for value in (1e6, -1e6, np.nan, np.inf):
                values = generator.normal(size=count)
                values[place] = value
                series = series_of(values, 1000)
                kept = series.steps
                assert place in kept and kept[0] == 0 and kept[-1] == count - 1
                assert len(kept) <= 3002 and (np.diff(kept) > 0).all()
                assert np.array_equal(series.values, values[kept.astype(int)], equal_nan=True)
    assert series_of(np.arange(2000.0), 1000).steps.tolist() == list(range(2000))
    assert len(series_of(np.full(100_000, np.nan), 100).steps) <= 202


def test_means_are_those_of_the_buckets() -> None:
    values = np.arange(1.0, 9_996.0)
    values[3] = np.nan
    series = make_series(np.arange(1.0, 9_996.0), values, 100, averaged=True)
    assert len(series.means) == 100
    assert series.means[0] == pytest.approx((5050 - 4) / 99) and series.means[99] == pytest.approx(9948.0)
    assert series.mean_steps[[0, 99]].tolist() == [50.5, 9948.0]


def test_differences_are_the_keys_whose_values_differ(tmp_path: Path) -> None:
    recipe = 'program = "pretrain"\n[run]\nname = "{name}"\n[training]\nsteps = 3\nseq_len = {seq_len}\n[optimizer]\nlr = 0.1\n'
    paths = [
        make(tmp_path / "a", "", recipe.format(name="a", seq_len=8), device="cpu", git_commit="1"),
        make(tmp_path / "b", "", recipe.format(name="b", seq_len=16), device="cpu", git_commit="2"),
        make(
            tmp_path / "c", "", recipe.format(name="c", seq_len=8).replace("pretrain", "mine") + "[ema]\ndecay = 0.9\n",
            device="cpu", git_commit="1",
        ),
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(record(1))  # without a recipe: not a difference
    found = {each.name: each.values for each in differences(loaded(*paths, tmp_path / "metrics.jsonl"))}
    assert found == {
        "program": ('"pretrain"', '"pretrain"', '"mine"', None),
        "training.seq_len": ("8", "16", "8", None),
        "ema.decay": (None, None, "0.9", None),
        "environment.git_commit": ('"1"', '"2"', '"1"', None),
    }


def test_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    baseline = make(tmp_path / "runs/baseline-of-a-long-name-0123456789-0123456789", "".join(map(record, (1, 2, 3))))
    lines = record(1, tokens_per_second=1.0, mfu=0.1) + record(2, tokens_per_second=75.0, mfu=0.4, memory_gib=3.5)
    changed = make(
        tmp_path / "runs/changed", lines + validation(2, 1.5, 5.0) + '{"step": 3, "skipped": "loss"}\n{"damaged',
        "[training]\nsteps = 4000\n",
    )  # fmt: skip
    with (changed / "metrics.jsonl").open("a") as file:
        file.write("\n")
    monkeypatch.chdir(tmp_path)
    lock = FileLock(changed / "lock")
    found = json.loads(cli("compare", "--json", "--baseline", baseline).out)
    first, second = found["runs"]
    assert found["baseline"] == first["run"] == baseline.name and second["run"] == "changed"
    assert (first["state"], first["ratio"], first["validation_loss"]) == ("complete", 1.0, None)
    expected = {
        "state": "running", "step": 2, "num_steps": 4000, "tokens": 200, "training_loss": 2.0, "validation_loss": 1.5,
        "best_validation_step": 2, "tokens_per_second": 75.0, "ratio": 1.5, "mfu": 0.4, "peak_memory_gib": 3.5,
        "wall_seconds": 5.0, "skipped_steps": 1, "damaged_lines": [5],
    }  # fmt: skip
    assert {name: second[name] for name in expected} == expected
    assert found["differences"] == {"training.steps": {baseline.name: "3", "changed": "4000"}}
    lock.release()
    for width, tables in (("80", 2), ("140", 1)):
        monkeypatch.setenv("COLUMNS", width)
        output = cli("compare").out
        assert max(map(len, output.splitlines())) <= int(width)
        assert sum(line.startswith("run ") for line in output.splitlines()) == tables
        words = [word for line in output.splitlines() if line.startswith("changed") for word in line.split()]
        assert {"stopped", "2/4,000", "1.5000", "75", "1.50", "40.0%", "3.50", "0:00:05"} <= set(words)
        assert "1 line is damaged in its metrics: 5" in output and "steps" in output


def test_files_are_written_and_a_page_has_no_address(tmp_path: Path, cli: Cli) -> None:
    name = "<!--<script>alert(1)"
    lines = "".join(record(step, loss=None if step == 2 else 1.0) for step in (1, 2, 3))
    path = make(tmp_path / "runs" / name, lines, recipe='[data]\npath = "</script>"\n[training]\nsteps = 3\n')
    other = make(tmp_path / "runs/_$other$", "")
    printed = cli("compare", path, other, "--html", tmp_path / "a.html", "--png", tmp_path / "a.png").out
    text = (tmp_path / "a.html").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    start, _, rest = text.partition("<script>")  # of plotly
    own = start + rest.partition("</script>")[2]
    assert own.count("<script") == own.count("</script>") == 2
    assert "http" not in own.replace("http-equiv", "")
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["runs"][0]["name"] == name and data["runs"][0]["series"]["loss"]["y"] == [1, None, 1]
    assert data["refresh"] == 0 and "wrote" in printed


def test_steps_of_a_page_are_exact_and_values_have_six_digits(tmp_path: Path) -> None:
    lines = record(1_234_567, loss=1.23456789, grad_norm=1.5e-9, tokens=123_456_789_012)
    text = page(loaded(make(tmp_path / "run", lines)))
    assert '"step":[1234567],"tokens":[123456789012]' in text and '"x":[1234567],"y":[1.23457]' in text
    assert '"y":[1.5e-09]' in text


def test_watching_ends_when_all_runs_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    path = make(tmp_path / "run", record(1))
    refreshes = []

    def train(seconds: float) -> None:
        refreshes.append((seconds, '"refresh":7.0' in (tmp_path / "a.html").read_text()))
        with (path / "metrics.jsonl").open("a") as file:
            file.write(record(len(refreshes) + 1))

    monkeypatch.setattr("time.sleep", train)
    printed = cli("compare", path, "--html", tmp_path / "a.html", "--watch", "7").out
    assert refreshes == [(7.0, True)] * 2
    text = (tmp_path / "a.html").read_text()
    assert '"refresh":0.0' in text and '"step":[1,2,3]' in text
    assert "complete" in printed


def test_names_are_unique(tmp_path: Path) -> None:
    paths = [Path("/x/a/run"), Path("/x/b/run"), Path("/x/other")]
    assert unique_names(paths) == ["a/run", "b/run", "other"]
    run = make(tmp_path / "runs/b", "")
    assert find([run, tmp_path / "runs", Path(f"{run}/../b")]) == [run]


def test_mistakes_are_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    run = make(tmp_path / "runs/first", record(1))
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    monkeypatch.chdir(tmp_path / "empty")
    for arguments, message in (
        (["../runs/frist"], "../runs/frist does not exist; did you mean ../runs/first?"),
        (["../empty"], "../empty is not the directory of a run, and contains none: it has no metrics.jsonl"),
        (["../pipe.jsonl"], "../pipe.jsonl is not a run: give the directory of a run"),
        ([], "give the runs to compare: titanlike compare RUN RUN; there is no directory runs/ here"),
        ([run, "--html", "missing/a.html"], "directory missing does not exist"),
    ):
        error = cli("compare", *arguments, code=2).err
        assert message in error and error.count("\n") == 1
    monkeypatch.setattr("titanlike.tools.cli.compare.find_spec", lambda name: None)
    for option, package in (("--png", "matplotlib"), ("--html", "plotly")):
        message = f'error: {option} requires {package}; run: pip install "titanlike[plot]"'
        assert message in cli("compare", run, option, f"a.{option[2:]}", code=2).err


def test_names_cannot_control_a_terminal_or_be_no_text(tmp_path: Path, cli: Cli) -> None:
    names = ["a\x1b[2J", "b\n", "c\x9b", os.fsdecode(b"d\xff")]
    for number, name in enumerate(names):
        recipe = f'[training]\nsteps = 3\n"\\u001b[3J" = {number}\n"\\u009b" = "\\u009b{number}"\n'
        make(tmp_path / "runs" / name, record(1), recipe, host=f"\ud800\x1b{number}", torch=f"\udcff{number}")
    (tmp_path / "runs" / names[3] / "environment.json").write_text("[")
    for option in ("--json", f"--html={tmp_path / 'page.html'}"):
        output = cli("compare", tmp_path / "runs", option).out
        assert all(line.isprintable() for line in output.split("\n")), ascii(output)
    for name in (r"a\x1b[2J", r"b\n", r"c\x9b", r"d\udcff"):
        assert name in output
        assert json.dumps(name) in (tmp_path / "page.html").read_text()


def test_damaged_recipes_are_named_and_the_run_is_compared(tmp_path: Path, cli: Cli) -> None:
    path = make(tmp_path / "run", record(1), recipe="[training\n")
    output = "".join(cli("compare", path).out.split())  # without the line breaks within a long path
    assert "unknown" in output and "recipe.tomlcannotberead" in output
