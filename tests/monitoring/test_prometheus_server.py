"""The files of `monitoring/` with a real Prometheus."""

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.debian import require
from tests.launching import ROOT, SMALL, free_port, start

MONITORING = ROOT / "monitoring"
METRIC = re.compile(r"\btitanlike_\w+")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for program in ("prometheus", "promtool"):
        require(program, "prometheus")


def promtool(folder: Path, *words: str) -> str:
    done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_alert_fires_for_its_fault_only(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    assert "SUCCESS" in promtool(tmp_path, "test", "rules", "alerts_test.yml")
    assert "SUCCESS: 10 rules found" in promtool(MONITORING, "check", "config", "prometheus.yml")


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Any]:
    """A server that scrapes a run of two processes each second. Returns a function: the results of a query."""
    port, own_port = free_port(), free_port()
    options = {
        "training.steps": "1000000", "schedule.decay": "none", "validation.interval": "100", "checkpoint.interval": "20",
        "metrics.prometheus": f"127.0.0.1:{port}", "metrics.interval": "10", "run.name": "scraped",
        "metrics.machine_interval": "1", "training.z_loss": "1e-4", "model.name": "deepseek_v3", "model.balance_loss": "0.01",
        "model.num_mtp_layers": "1",
    }  # fmt: skip
    config = (MONITORING / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(config.replace("15s", "1s").replace("9400", port))
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    small = {
        name: value for name, value in SMALL.items() if name != "model.num_kv_heads"
    }  # which DeepSeek does not have
    job = start(tmp_path, {"NPROC": "2"}, **small | options)
    server = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{own_port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def ask(expression: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{own_port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    yield ask
    server.terminate()
    server.wait(60)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=120)
    assert "stopped by SIGTERM" in output


def test_a_server_scrapes_every_metric_of_the_dashboard_and_the_alerts(query: Any) -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    # Without a GPU and a teacher; tests/unit/test_machine_metrics.py has names of GPUs.
    absent = re.compile(r"titanlike_(rank_)?gpu_|titanlike_kl\b")
    expressions = [expression for expression in expressions if not absent.match(expression)]
    named = set(METRIC.findall("\n".join(expressions) + (MONITORING / "alerts.yml").read_text()))
    named = {name for name in named if not absent.match(name)}
    assert len(named) > 15
    # An expression with `increase` has a result after two scrapes of its metric, which are not at the same time for all of them.
    wanted = [*named, *(expression.replace("$run", "scraped") for expression in expressions)]
    end = time.monotonic() + 180
    while True:
        try:
            wanted = [expression for expression in wanted if not query(expression)]
        except OSError as error:  # the server starts
            print(error)
        if not wanted:
            break
        assert time.monotonic() < end, f"no result: {wanted}"
        time.sleep(0.5)
    (step,) = query("titanlike_step")
    assert step["metric"]["run"] == "scraped"
    assert float(step["value"][1]) > 1
    # The ranks of a busy machine differ in speed, which makes these two alerts pending.
    assert query('ALERTS{alertname!~"SlowRank|ThroughputDrop"}') == []
