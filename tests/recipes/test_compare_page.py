"""The page of `titanlike compare` in a headless browser: curves, a spike, the x axis, zoom, legend and keyboard."""

import base64
import json
import math
import random
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.crashes import Crash
from tests.debian import require
from titanlike.tools.comparison.page import page
from titanlike.tools.comparison.runs import load

# The last option: the browser crashes where /dev/shm is small.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=6000",
    "--disable-dev-shm-usage",
)  # fmt: skip
SPIKE = 87.5  # loss of one step, which the page must have
STEPS = 12_000  # more than a page has points
PROBE = """<script>{
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
(async () => {
  try {
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
  } catch (error) { seen.error = String(error.stack); }
  document.title = "seen" + btoa(JSON.stringify(seen).replace(/[^\\x20-\\x7e]/g, "?"));
})();
}</script>"""

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
            seconds = 0.25 + values.gauss(0, 0.004)
            record = {
                "step": step,
                "loss": SPIKE if step == steps // 3 else 2 + 8 / math.sqrt(step) + values.gauss(0, 0.05),
                "grad_norm": math.exp(values.gauss(0, 0.2)),
                "learning_rate": 1e-4 * (1 + seed) * (1 - step / steps),
                "tokens": step * 524_288,
                "tokens_per_second": 524_288 / seconds,
                "tflops_per_device": 400 + values.gauss(0, 4),
                "mfu": 0.4 + values.gauss(0, 0.004),
                "memory_gib": 61.25,
                "data_wait": abs(values.gauss(0, 0.001)),
                "step_seconds": seconds,
                "elapsed_seconds": 0.25 * step,
            }
            file.write(json.dumps(record) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "validation_loss": 2 + 8 / math.sqrt(step)}) + "\n")


def browse(tmp_path: Path, text: str, fragment: str = "", size: str = "1200,900") -> tuple[dict[str, Any], str]:
    """Opens a page from disk with the probe at its end. Returns what the probe has seen, and the browser's log."""
    file = tmp_path / "probed.html"
    file.write_text(text.replace("</body>", f"{PROBE}</body>"))
    command = [
        require("chromium", "chromium"), *OPTIONS,
        f"--window-size={size}", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"{file.as_uri()}{fragment}",
    ]  # fmt: skip
    run = partial(subprocess.run, command, capture_output=True, text=True, check=True, timeout=240)
    try:
        done = run()
    except Crash:  # of the browser, which is not ours
        done = run()
    found = re.search(r"<title>seen([\w+/=]+)</title>", done.stdout)
    assert found, done.stderr
    return json.loads(base64.b64decode(found[1])), done.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(folder / f"run-{seed}", STEPS, seed)
    lines = (folder / "run-1/metrics.jsonl").read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if f'"step": {STEPS // 2},' in line)
    lines[number] = re.sub(r'"loss": [\d.]+', '"loss": null', lines[number])
    (folder / "run-1/metrics.jsonl").write_text("".join(lines))
    return page(load([folder / "run-0", folder / "run-1"]))


def test_the_page_in_a_browser(tmp_path: Path, text: str) -> None:
    assert text.count(f",{SPIKE},") == 2
    seen, log = browse(tmp_path, text)
    assert "error" not in seen, seen["error"]
    assert "CONSOLE" not in log and seen["loads"] == []
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


def test_the_address_has_the_view_and_a_narrow_window_does_not_scroll_sideways(tmp_path: Path, text: str) -> None:
    seen, log = browse(tmp_path, text, "#x=tokens&y=log&hidden=run-1&zoom=1e9,2e9&smoothing=0", size="500,900")
    assert "error" not in seen and "CONSOLE" not in log
    assert seen["curves"] == ["run-0"] and seen["unit"] == "tokens" and seen["smooth"] == 0
    assert seen["range"] == [1e9, 2e9] and seen["type"] == "log"
    assert seen["wide"] and "y=log" in seen["hash"]
