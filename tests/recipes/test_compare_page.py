"""The page of `titanlike compare` in a headless browser: curves, a spike, the x axis, zoom, legend and keyboard."""

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import SPIKE, write_run
from tests.debian import require
from titanlike.tools.comparison.page import page
from titanlike.tools.comparison.runs import Runs

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2500")
STEPS = 12_000  # more than a page has points
PROBE = """<script>{
const seen = {loads: performance.getEntriesByType("resource").map((entry) => entry.name)};
const paths = (id) => [...document.querySelectorAll("#chart-" + id + " path.curve:not(.smooth)")];
const points = (path) => path.getAttribute("d").match(/[\\d.]+ [\\d.]+/g).map((pair) => pair.split(" ").map(Number));
const unit = () => document.querySelector("#chart-loss .unit").textContent;
const ticks = () => [...document.querySelectorAll("#chart-loss > text")].map((text) => text.textContent);
const press = (key) => byId("chart-loss").dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
const drag = (from, to) => {
  const box = byId("chart-loss").getBoundingClientRect();
  const at = (x) => ({clientX: box.left + x, clientY: box.top + 100, button: 0, bubbles: true});
  byId("chart-loss").dispatchEvent(new PointerEvent("pointerdown", at(from)));
  byId("chart-loss").dispatchEvent(new PointerEvent("pointermove", at(to)));
  dispatchEvent(new PointerEvent("pointerup", at(to)));
};
try {
  seen.charts = [...document.querySelectorAll("svg.chart")].map((svg) => svg.id.slice(6));
  seen.curves = paths("loss").map((path) => path.dataset.run);
  const curve = points(paths("loss")[0]);
  const top = Math.min(...curve.map((point) => point[1]));
  seen.points = curve.length;
  seen.spike = curve.filter((point) => point[1] === top).length;
  seen.second = Math.min(...curve.map((point) => point[1]).filter((y) => y > top)) - top;
  seen.spikeAt = (curve.find((point) => point[1] === top)[0] - curve[0][0]) / (curve[curve.length - 1][0] - curve[0][0]);
  seen.nonfinite = document.querySelectorAll("#chart-loss .nonfinite").length;
  seen.units = [unit()];
  seen.ticks = [ticks()];
  for (const name of ["tokens", "seconds"]) {
    byId("x-" + name).click();
    seen.units.push(unit());
    seen.ticks.push(ticks());
  }
  byId("x-step").click();
  drag(100, 300);
  seen.zoom = view.zoom;
  seen.zoomed = Math.max(...points(paths("loss")[0]).map((point) => point[0]));
  byId("chart-loss").dispatchEvent(new MouseEvent("dblclick"));
  seen.reset = view.zoom;
  press("+");
  seen.keyZoom = view.zoom;
  press("Escape");
  press("ArrowRight");
  seen.tooltip = byId("tooltip").textContent;
  byId("run-0").click();
  seen.hidden = paths("loss").map((path) => path.dataset.run);
  seen.pressed = byId("run-0").getAttribute("aria-pressed");
  seen.bars = [...document.querySelectorAll(".bar .value b")].map((bar) => bar.textContent);
  seen.changed = [...document.querySelectorAll("td.changed")].map((cell) => cell.textContent);
  seen.hash = location.hash;
  seen.wide = document.documentElement.scrollWidth <= innerWidth;
} catch (error) { seen.error = String(error.stack); }
document.title = "seen" + btoa(JSON.stringify(seen).replace(/[^\\x20-\\x7e]/g, "?"));
}</script>"""

pytestmark = pytest.mark.slow


def browse(tmp_path: Path, text: str, fragment: str = "", size: str = "1200,900") -> tuple[dict[str, Any], str]:
    """Opens a page from disk with the probe at its end. Returns what the probe has seen, and the browser's log."""
    file = tmp_path / "probed.html"
    file.write_text(text.replace("</body>", f"{PROBE}</body>"))
    done = subprocess.run(
        [
            require("chromium", "chromium"), *OPTIONS,
            f"--window-size={size}", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            f"{file.as_uri()}{fragment}",
        ],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
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
    return page(Runs().load([folder / "run-0", folder / "run-1"], keep=False))


def test_the_page_in_a_browser(tmp_path: Path, text: str) -> None:
    assert text.count(f",{SPIKE},") == 2
    seen, log = browse(tmp_path, text)
    assert "error" not in seen, seen["error"]
    assert "CONSOLE" not in log and seen["loads"] == []
    assert seen["charts"] == [
        "loss", "validation_loss", "tokens_per_second", "mfu", "memory_gib", "grad_norm", "learning_rate",
    ]  # fmt: skip
    # A spike of one step is one point, far above all others, at its step.
    assert seen["curves"] == ["run-0", "run-1"] and seen["points"] <= 3002
    assert seen["spike"] == 1 and seen["second"] > 100 and seen["spikeAt"] == pytest.approx(1 / 3, abs=0.002)
    assert seen["nonfinite"] == 1
    assert seen["units"] == ["step", "tokens", "wall time, h:mm:ss"]
    assert ["10,000" in seen["ticks"][0], "6B" in seen["ticks"][1], "0:30:00" in seen["ticks"][2]] == [True] * 3
    low, high = seen["zoom"]
    assert 0 < low < high < STEPS and seen["zoomed"] > 900 and seen["reset"] is None
    low, high = seen["keyZoom"]
    assert high - low == pytest.approx(STEPS / 2, rel=0.01)
    assert seen["tooltip"].startswith("step ") and "run-1" in seen["tooltip"] and "mean" in seen["tooltip"]
    assert seen["hidden"] == ["run-1"] and seen["pressed"] == "false"
    assert len(seen["bars"]) == 1 and re.fullmatch(r"[01]\.\d\d\?", seen["bars"][0])
    assert seen["changed"] == ["1", "0.0002"]
    assert "hidden=run-0" in seen["hash"] and "x=step" in seen["hash"]


def test_the_address_has_the_view_and_a_narrow_window_does_not_scroll_sideways(tmp_path: Path, text: str) -> None:
    seen, log = browse(tmp_path, text, "#x=tokens&y=log&hidden=run-1&zoom=1e9,2e9&smoothing=0", size="500,900")
    assert "error" not in seen and "CONSOLE" not in log
    assert seen["curves"] == ["run-0"] and seen["units"][0] == "tokens"
    assert "1.5B" in seen["ticks"][0] and "6B" not in seen["ticks"][0]
    assert seen["wide"] and "y=log" in seen["hash"]
