"""The files of `monitoring/` with a real Prometheus, a real node_exporter, and a page in place of NVIDIA's DCGM exporter."""

import json
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.debian import require
from tests.launching import ROOT, SMALL, free_port, start

MONITORING = ROOT / "monitoring"
METRIC = re.compile(r"\b(?:titanlike|node(?!_exporter)|DCGM_FI)_\w+")
HOST = "127.0.0.1"
VALUES = ((0, 1.0), (1, 40.0))  # of each GPU, in each field: the second one is throttled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for program in ("prometheus", "promtool"):
        require(program, "prometheus")
    require("prometheus-node-exporter", "prometheus-node-exporter")


def promtool(folder: Path, *words: str) -> str:
    done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_alert_fires_for_its_fault_only(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    assert "SUCCESS" in promtool(tmp_path, "test", "rules", "alerts_test.yml")
    assert "SUCCESS: 10 rules found" in promtool(MONITORING, "check", "config", "prometheus.yml")


def serve_dcgm() -> ThreadingHTTPServer:
    """Serves two GPUs with the fields of `dcgm-counters.csv`, in the format and with the labels of the DCGM exporter."""
    rows = [line.split(", ") for line in (MONITORING / "dcgm-counters.csv").read_text().splitlines() if line[0] != "#"]
    page = "".join(
        f"# HELP {field} {text}\n# TYPE {field} {kind}\n"
        + "".join(f'{field}{{gpu="{gpu}",device="nvidia{gpu}",Hostname="node-0"}} {value}\n' for gpu, value in VALUES)
        for field, kind, text in rows
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Any]:
    """A server that scrapes a run of two processes and the exporters each second. Returns a function: the results of a query."""
    port, own_port, node_port = free_port(), free_port(), free_port()
    gpus = serve_dcgm()
    options = {
        "training.steps": "1000000", "schedule.decay": "none", "validation.interval": "100", "checkpoint.interval": "20",
        "metrics.prometheus": f"127.0.0.1:{port}", "metrics.interval": "10", "run.name": "scraped",
        "training.z_loss": "1e-4", "model.name": "deepseek_v3", "model.balance_loss": "0.01",
        "model.num_mtp_layers": "1",
    }  # fmt: skip
    config = (MONITORING / "prometheus.yml").read_text()
    for default, used in {"15s": "1s", "9401": port, "9400": str(gpus.server_port), "9100": node_port}.items():
        assert default in config
        config = config.replace(default, used)
    (tmp_path / "prometheus.yml").write_text(config)
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
    node = subprocess.Popen(
        ["prometheus-node-exporter", f"--web.listen-address={HOST}:{node_port}"], stderr=subprocess.DEVNULL
    )

    def ask(expression: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{own_port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    yield ask
    for process in (server, node):
        process.terminate()
        process.wait(60)
    gpus.shutdown()
    gpus.server_close()
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=120)
    assert "stopped by SIGTERM" in output


def test_a_server_scrapes_every_metric_of_the_dashboard_and_the_alerts(query: Any) -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    absent = re.compile(r"titanlike_kl\b|node_infiniband")  # without a teacher and without InfiniBand
    expressions = [expression for expression in expressions if not absent.search(expression)]
    named = set(METRIC.findall("\n".join(expressions) + (MONITORING / "alerts.yml").read_text()))
    assert len(named) > 30
    # An expression with `increase` has a result after two scrapes of its metric, which are not at the same time for all of them.
    wanted = [*named, *(one.replace("$run", "scraped").replace("$host", HOST) for one in expressions)]
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
    # The ranks of a busy machine differ in speed, and its memory or a disk may be nearly full.
    (throttled,) = query('ALERTS{alertname!~"SlowRank|ThroughputDrop|HostMemoryNearlyFull|DiskNearlyFull"}')
    assert (throttled["metric"]["alertname"], throttled["metric"]["gpu"]) == ("GPUThrottled", "1")
