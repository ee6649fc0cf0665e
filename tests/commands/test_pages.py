"""The pages of `titanlike compare` and `titanlike plan` in a headless browser: what they draw, and the keyboard."""

import json
import math
import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser
from tests.launching import Cli
from titanlike.tools.comparison.page import page
from titanlike.tools.comparison.runs import load

SPIKE = 87.5  # loss of one step, which the page must have
STEPS = 12_000  # more than a page has points
PROBE = """(async () => {
const seen = {loads: performance.getEntriesByType("resource").map((entry) => entry.name)};
const curves = () => div.data.filter((trace) => trace.xaxis === "x" && trace.showlegend);
const choose = (name, value) => {
  byId(name).value = value;
  byId(name).dispatchEvent(new Event("change"));
};
const press = (key) => div.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
const drag = (from, to) => {
  const box = div.querySelector(".nsewdrag").getBoundingClientRect();
  const at = (x) => ({clientX: box.left + x, clientY: box.top + 60, button: 0, buttons: 1, bubbles: true});
  div.querySelector(".nsewdrag").dispatchEvent(new MouseEvent("mousedown", at(from)));
  document.dispatchEvent(new MouseEvent("mousemove", at(to)));
  document.dispatchEvent(new MouseEvent("mouseup", at(to)));
};
const pause = () => new Promise((resolve) => setTimeout(resolve, 100));
seen.charts = charts;
seen.drawn = document.querySelectorAll("#charts .scatterlayer .trace path.js-line").length;
seen.curves = curves().filter((trace) => trace.visible === true).map((trace) => trace.name);
seen.first = [curves()[0].x, curves()[0].y];
seen.crosses = div.data.filter((trace) => trace.mode === "markers").map((trace) => [trace.name, trace.x]);
seen.smooth = div.data.filter((trace) => trace.xaxis === "x" && trace.mode === "lines" && !trace.showlegend).length;
seen.unit = div.layout.xaxis.title.text;
seen.range = div.layout.xaxis.range;
seen.type = div.layout.yaxis.type;
seen.hash = location.hash;
seen.wide = document.documentElement.scrollWidth <= innerWidth;
seen.last = [];
for (const name of ["tokens", "hours", "step"]) {
  choose("x", name);
  seen.last.push(curves()[0].x.at(-1));
}
drag(100, 300);
await pause();
seen.zoom = view.zoom;
press("Escape");
await pause();
seen.reset = view.zoom;
press("+");
await pause();
seen.keyZoom = view.zoom;
press("Escape");
press("ArrowRight");
await pause();
seen.tooltip = document.querySelector("#charts .hoverlayer").textContent;
Plotly.restyle(div, {visible: "legendonly"}, div.data.flatMap((trace, i) => (trace.name === "run-0" ? [i] : [])));
await pause();
seen.hidden = location.hash;
seen.changed = [...document.querySelectorAll("td.changed")].map((cell) => cell.textContent);
return seen;
})()"""

pytestmark = pytest.mark.slow


def write_run(folder: Path, steps: int, seed: int) -> None:
    """Writes the recipe and the metrics of a run that records every step, in the format of `metrics.jsonl`."""
    values = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        f'program = "pretrain"\n\n[run]\nname = "{folder.name}"\nseed = {seed}\n\n[training]\nsteps = {steps}\n\n'
        f"[optimizer]\nlr = {1e-4 * (1 + seed)}\n"
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "loss": SPIKE if step == steps // 3 else 2 + 8 / math.sqrt(step) + values.gauss(0, 0.05),
                **dict.fromkeys(("grad_norm", "learning_rate", "mfu", "tokens_per_second"), values.random()),
                "tokens": step * 524_288,
                "memory_gib": 61.25,
                "elapsed_seconds": 0.25 * step,
            }
            file.write(json.dumps(record) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "validation_loss": 2 + 8 / math.sqrt(step)}) + "\n")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(folder / f"run-{seed}", STEPS, seed)
    lines = (folder / "run-1/metrics.jsonl").read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if f'"step": {STEPS // 2},' in line)
    lines[number] = re.sub(r'"loss": [\d.]+', '"loss": null', lines[number])
    (folder / "run-1/metrics.jsonl").write_text("".join(lines))
    (folder / "page.html").write_text(page(load([folder / "run-0", folder / "run-1"])))
    return folder / "page.html"


def test_a_comparison(browser: Browser, comparison: Path) -> None:
    assert comparison.read_text().count(f",{SPIKE},") == 2
    browser.open(comparison.as_uri())
    seen = browser.evaluate(PROBE)
    assert seen["loads"] == [] == browser.messages
    assert seen["charts"] == [
        "loss", "validation_loss", "tokens_per_second", "mfu", "memory_gib", "grad_norm", "learning_rate",
    ]  # fmt: skip
    assert seen["drawn"] >= 2 * len(seen["charts"]) and seen["smooth"] == 2
    # A spike of one step is one point at its step.
    steps, losses = seen["first"]
    assert seen["curves"] == ["run-0", "run-1"] and len(steps) <= 3002
    assert losses.count(SPIKE) == 1 and steps[losses.index(SPIKE)] == STEPS // 3
    assert seen["crosses"] == [["run-1", [STEPS // 2]]]
    assert seen["last"] == [STEPS * 524_288, pytest.approx(STEPS / 4 / 3600), STEPS]
    low, high = seen["zoom"]
    assert 0 < low < high < STEPS and seen["reset"] is None
    low, high = seen["keyZoom"]
    assert high - low == pytest.approx(STEPS / 2, rel=0.1)
    assert "run-0" in seen["tooltip"] and "run-1" in seen["tooltip"]
    assert "hidden=run-0" in seen["hidden"] and "hidden=run-1" not in seen["hidden"]
    assert seen["changed"] == ["1", "0.0002"]


def test_the_address_of_a_comparison_has_the_view_and_a_narrow_window_does_not_scroll_sideways(
    browser: Browser, comparison: Path
) -> None:
    browser.open(f"{comparison.as_uri()}#x=tokens&y=log&hidden=run-1&zoom=1e9,2e9&smoothing=0", width=500)
    seen = browser.evaluate(PROBE)
    assert browser.messages == []
    assert seen["curves"] == ["run-0"] and seen["unit"] == "tokens" and seen["smooth"] == 0
    assert seen["range"] == [1e9, 2e9] and seen["type"] == "log"
    assert seen["wide"] and "y=log" in seen["hash"]


SEEN = """({
  command: byId("command").textContent, verdict: byId("verdict").textContent, over: byId("verdict").className,
  speed: byId("speed").innerText, hours: byId("hours").innerText, dollars: byId("dollars").innerText,
  moment: byId("moment").textContent,
  controls: Object.fromEntries(Object.entries(CONTROLS).map(([name, each]) => [name, each.text(current)])),
  focus: document.activeElement.id || document.activeElement.getAttribute("class"), point: byId("point").textContent,
  wide: document.documentElement.scrollWidth <= innerWidth, background: getComputedStyle(document.body).backgroundColor,
  loads: performance.getEntriesByType("resource").map((entry) => entry.name),
})"""


def numbers(text: str) -> list[float]:
    """Returns the numbers in a text."""
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", text)]


def check_plan(seen: dict[str, Any], cli: Cli) -> dict[str, Any]:
    """Compares what the page shows with the plan of the command that it shows, which is returned."""
    words = shlex.split(seen["command"])
    fits = seen["verdict"].startswith("Fits: ")
    plan: dict[str, Any] = json.loads(cli(*words[1:], "--json", code=0 if fits else 1).out)
    assert (plan["fits"], seen["over"]) == ((True, "") if fits else (False, "over"))
    reserved, available, left = numbers(seen["verdict"])
    assert [reserved, available] == [
        round(plan[name] / 2**30, 1) for name in ("peak_reserved_bytes", "available_bytes")
    ]
    assert left == pytest.approx(abs(available - reserved), abs=0.11)
    low, high = plan["tokens_per_second_per_gpu_range"]
    speed = [plan["tokens_per_second_per_gpu"], low, high, plan["mfu"] * 100]
    assert numbers(seen["speed"]) == pytest.approx(speed, rel=1e-3, abs=0.51)
    assert numbers(seen["hours"])[0] == pytest.approx(plan["run_seconds"] / 3600, rel=2e-3, abs=0.051)
    assert numbers(seen["dollars"])[0] == pytest.approx(plan["run_dollars"], rel=2e-3)
    return plan


def test_a_plan_with_the_keyboard(browser: Browser, cli: Cli, tmp_path: Path) -> None:
    keys = [f"--parallelism.{name}=1" for name in ("pipeline", "context", "replicate")]
    cli("plan", "llama3_8b", "--gpus=8", "--hardware=h100", "--html", tmp_path / "plan.html", *keys)
    browser.open((tmp_path / "plan.html").as_uri())

    def after(key: str, times: int = 1) -> dict[str, Any]:
        browser.press(key, times)
        return dict(browser.evaluate(SEEN))

    seen = browser.evaluate(SEEN)
    light = seen["background"]
    assert seen["loads"] == [] == browser.messages and seen["wide"]
    recipe = check_plan(seen, cli)  # the recipe itself comes first
    assert seen["command"] == f"titanlike plan llama3_8b --hardware h100 {' '.join(keys)} --gpus 8"
    assert seen["controls"]["seq_len"] == "8,192 tokens"

    assert after("Tab")["focus"] == "seq_len"
    seen = after("ArrowRight")
    assert seen["controls"]["seq_len"] == "16,384 tokens" and "--training.seq_len=16384" in seen["command"]
    longer = check_plan(seen, cli)
    assert longer["peak_reserved_bytes"] > recipe["peak_reserved_bytes"]
    assert longer["flops_per_step"] / longer["flops_per_token"] == recipe["flops_per_step"] / recipe["flops_per_token"]

    assert after("Tab")["focus"] == "layout"
    seen = after("End")
    assert check_plan(seen, cli)["layout"]["tensor"] > 1
    assert after("Tab")["focus"] == "precision" and after("Tab")["focus"] == "batch"
    largest = after("End")
    assert not check_plan(largest, cli)["fits"]
    assert largest["controls"] == seen["controls"] | {"batch": largest["controls"]["batch"]}

    assert after("Tab", 2)["focus"] == "memory"
    seen = after("Home")
    assert seen["moment"] == "forward, block 0"
    check_plan(seen, cli)
    assert after("ArrowRight")["moment"] == "forward, block 1"
    assert after("Escape")["moment"].startswith("At the peak: ")

    assert after("Tab")["focus"] == "front"
    first = check_plan(after("Enter"), cli)
    second = check_plan(after("ArrowRight"), cli)
    assert first["fits"] and second["fits"] and browser.evaluate("document.activeElement.ariaChecked") == "true"
    assert first["peak_reserved_bytes"] < second["peak_reserved_bytes"]
    assert first["tokens_per_second"] < second["tokens_per_second"]
    check_plan(after("End"), cli)
    fastest = browser.evaluate(
        "Math.max(...candidates.filter((each) => each.fits && each.seq_len === 16384).map((each) => each.speed))"
    )
    assert browser.evaluate("current.speed") == fastest

    # The address has the candidate. A phone shows it without scrolling sideways.
    browser.open(browser.evaluate("location.href"), width=360, scheme="dark")
    seen = browser.evaluate(SEEN)
    assert browser.evaluate("current.speed") == fastest
    assert seen["wide"] and seen["background"] != light and browser.messages == []
