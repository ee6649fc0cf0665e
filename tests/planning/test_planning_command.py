"""`titanlike plan` and `--check`: output for people and programs, and one sentence for each mistake."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.launching import Cli
from titanlike.run.checks import check_recipe
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.ranges import ANCHORED
from titanlike.tools.programs import load_known

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "train_configs/llama3_8b.toml")
H100 = load_hardware("h100")


def test_report(cli: Cli) -> None:
    output = cli("plan", RECIPE, "--gpus", "64").out
    for text in (
        "llama 3-8B: 8.03 billion parameters", "64 x H100 SXM 80 GB: 8 nodes", "optimizer states", "peak, reserved", "none  ",
        "selective (recipe)", "reduce-scatter", "MFU", "range ", "errors ", "limits this layout with",
    ):  # fmt: skip
        assert text in output
    assert max(map(len, output.splitlines())) <= 80 and "\x1b" not in output


def test_json_and_exit_code_of_a_recipe_that_does_not_fit(cli: Cli) -> None:
    arguments = ["--gpus=8", "--json", "--training.local_batch_size=16", "--activation_checkpoint.mode=none"]
    values = json.loads(cli("plan", RECIPE, *arguments, code=1).out)
    assert values["fits"] is False and values["peak_reserved_bytes"] > values["available_bytes"]
    assert values["advice"].startswith("It does not fit by ") and values["advice_changes"]


def test_a_measured_speed_is_the_anchor_of_other_plans(cli: Cli) -> None:
    captured = cli("plan", RECIPE, "--gpus=8,64", "--json", "--measured=6000")
    first, second = json.loads(captured.out)["points"]
    assert first["tokens_per_second_per_gpu"] == pytest.approx(6000)
    assert second["tokens_per_second_per_gpu"] == pytest.approx(5900, rel=0.05)
    low, high = second["tokens_per_second_per_gpu_range"]
    assert low == pytest.approx(second["tokens_per_second_per_gpu"] * ANCHORED.low) and high > low
    assert captured.err.startswith("measured  6,000 tokens/s per GPU on 8 GPUs: efficiency 0.6")


def test_scaling_and_search_as_json(cli: Cli, tmp_path: Path) -> None:
    points = json.loads(cli("plan", RECIPE, "--gpus=8,64,100", "--json").out)["points"]
    assert [point["num_gpus"] for point in points] == [8, 64, 100] and "problem" in points[2]
    best = tmp_path / "best.toml"
    fixed = [f"--parallelism.{name}=1" for name in ("pipeline", "context", "replicate")]
    search = cli("plan", RECIPE, "--gpus=8", "--json", "--search", "--write", best, *fixed)
    values = json.loads(search.out)
    assert values["best"][0]["fits"] and values["candidates"] > len(values["best"])
    check_recipe(load_known(best, {}), 8)
    assert load_known(best, {}).training.global_batch_size == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((RECIPE,), "--gpus is missing"),
        (("--gpus=8",), "give the recipe to plan"),
        ((RECIPE, "--gpus=0"), "--gpus 0: '0' is not a number of GPUs; give 1 to 1,000,000"),
        ((RECIPE, "--gpus=8", "--hardware=h10"), "--hardware h10 is unknown; did you mean h100?"),
        ((RECIPE, "--gpus=100"), "training.global_batch_size = 128 does not divide over 100 data-parallel ranks"),
        ((RECIPE, "--gpus=8", "--model.num_layers=10000"), "model.num_layers = 10,000: plans are for up to 1,000 blocks"),
        (("missing.toml", "--gpus=8"), "missing.toml: recipe not found"),
        ((RECIPE, "--gpus=8", "--program=torchtitn"), "--program torchtitn is unknown; did you mean torchtitan?"),
        ((RECIPE, "--gpus=8", "--search", "--program=megatron"), "--search writes recipes of this toolkit"),
        ((RECIPE, "--gpus=8", "--measured=1e9"), "--measured 1e+09: this recipe cannot have that speed on 8 x H100"),
        ((RECIPE, "--gpus=8", "--write=best.toml"), "--write needs --search"),
        ((RECIPE, "--gpus=8,16", "--search"), "--search takes one number of GPUs"),
        ((RECIPE, "--gpus=8", "--html=plan.pdf"), "give the name of a .html file"),
        ((RECIPE, "--gpus=8", "--search", f"--write={RECIPE}"), "exists and was not written by --search"),
        ((str(ROOT / "train_configs/llama3_405b.toml"), "--gpus=16", "--search",
          "--parallelism.tensor=8", "--parallelism.pipeline=2"), "fits on 16 x H100 SXM 80 GB"),
        ((RECIPE, "--gpus=8", "--hardware=a100", "--search", "--float8.scaling=rowwise"),
         'no layout of 8 GPUs has float8.scaling = "rowwise"; use another'),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    captured = cli("plan", *arguments, code=2)
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert captured.err.startswith("error: ") and message in captured.err


def test_a_page_has_the_plans_of_the_commands_that_it_shows(cli: Cli, tmp_path: Path) -> None:
    fixed = ["--parallelism.pipeline=1", "--training.local_batch_size=2", "--activation_checkpoint.mode=full"]
    file = tmp_path / "plan.html"
    printed = cli("plan", "debug", "--gpus=1,2", "--scaling=weak", "--json", "--html", file, *fixed)
    assert f"wrote {file}" in printed.err
    found = re.search(r'<script id="data" type="application/json">(.*)</script>', file.read_text())
    assert found
    data = json.loads(found[1])
    candidates = data["candidates"]
    seq_len = load_known(ROOT / "train_configs/debug.toml", {}).training.seq_len
    expected = {
        "gpus": {1, 2}, "seq_len": {seq_len // 2, seq_len, 2 * seq_len}, "layout": {"one GPU", "FSDP 2", "TP 2"},
        "batch": {2}, "mode": {"full"},
    }  # fmt: skip
    assert {name: {each[name] for each in candidates} for name in expected} == expected
    assert candidates[data["initial"]]["flags"] == ""
    points = {(point["num_gpus"], point["run_seconds"]) for point in json.loads(printed.out)["points"]}
    assert points < {(each["gpus"], each["hours"] * 3600) for each in candidates}
    for each in candidates[::7]:
        words = [*shlex.split(data["command"])[1:], f"--gpus={each['gpus']}", *shlex.split(each["flags"]), "--json"]
        plan = json.loads(cli(*words).out)
        assert each["reserved"] == plan["peak_reserved_bytes"] and each["hours"] * 3600 == plan["run_seconds"]
        assert ["float8" in each["precision"], each["batch"]] == [
            "float8" in each["flags"],
            plan["microbatch_sequences"],
        ]
