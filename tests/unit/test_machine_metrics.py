"""What a machine does: an NVML library with planted values, rates of bytes, throttled GPUs, and systems without the packages."""

import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import nvml
from tests.launching import ROOT, free_port
from titanlike.config.sections import Metrics
from titanlike.metrics import Monitor, host, machine
from titanlike.metrics.gpu import GPU, nvml_problem, throttle_reasons
from titanlike.metrics.host import Host
from titanlike.metrics.machine import BITS, QUANTITIES, Place, Sampler, ThrottleWarnings, summarize

PLACES = [Place(f"node-{rank // 2}", str(rank % 2)) for rank in range(8)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpu(library: Path, tmp_path: Path) -> Iterator[tuple[GPU, Path]]:
    """A GPU, and the file of its values."""
    nvml.plant(tmp_path / "values")
    nvml.use(library, tmp_path / "values")
    found = GPU(nvml.ADDRESS)
    yield found, tmp_path / "values"
    found.close()
    nvml.forget()


def row(**values: float) -> list[float]:
    """Returns what a rank has sampled, by names without their group."""
    short = {name.partition("/")[2]: name for name in QUANTITIES}
    known = {short[name]: value for name, value in values.items()}
    return [known.get(name, math.nan) for name in QUANTITIES]


def test_values_of_a_gpu_are_those_of_nvml(gpu: tuple[GPU, Path]) -> None:
    found, file = gpu
    nvml.plant(file, reasons=0x4, sent=3, received=5)
    assert found.read() == {
        "gpu/utilization": 0.9, "gpu/memory_gib": 60.0, "gpu/power_watts": 650.0, "gpu/temperature_celsius": 60.0,
        "gpu/throttle_bits": 4.0, "gpu/nvlink_sent_bytes_per_second": 3072.0,
        "gpu/nvlink_received_bytes_per_second": 5120.0,
    }  # fmt: skip
    assert found.read().keys() == {name for name in QUANTITIES if name.startswith("gpu/")}
    assert found.index == 5


def test_what_a_gpu_does_not_have_is_unknown(gpu: tuple[GPU, Path]) -> None:
    """An instance of a GPU (MIG) has no utilization, and some GPUs no NVLink."""
    found, file = gpu
    nvml.plant(file, utilization=-1, sent=-1, received=-1)
    values = found.read()
    assert [name for name, value in values.items() if math.isnan(value)] == [
        "gpu/utilization", "gpu/nvlink_sent_bytes_per_second", "gpu/nvlink_received_bytes_per_second",
    ]  # fmt: skip
    sampler = Sampler([], 1.0)
    sampler._sources = [found]
    sampler.sample()
    assert summarize([sampler.take()]) == {
        "gpu/memory_gib": 60.0, "gpu/power_watts": 650.0, "gpu/temperature_celsius": 60.0, "gpu/num_throttled": 0,
    }  # fmt: skip
    with pytest.raises(OSError, match="NVML: Not Found"):
        GPU("x")


def test_a_problem_of_nvml_is_named(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.use(library, tmp_path / "values")
    assert nvml_problem() == ""
    monkeypatch.delenv("FAKE_NVML")
    assert nvml_problem() == "NVML: Not Found"
    nvml.forget()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_problem() == "the package nvidia-ml-py is not installed"
    with pytest.raises(OSError, match="nvidia-ml-py"):
        GPU(nvml.ADDRESS)


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x1 | 0x2 | 0x4 | 0x10 | 0x100, []),  # idle, set clocks, power cap, sync boost, display: normal
        (0x8, ["hardware slowdown"]),
        (0x8 | 0x40, ["hardware thermal slowdown"]),
        (0x8 | 0x80 | 0x4, ["power brake"]),
        (0x20 | 0x40, ["hardware thermal slowdown", "software thermal slowdown"]),
    ],
)
def test_only_faults_are_reasons_of_throttling(bits: int, reasons: list[str]) -> None:
    assert throttle_reasons(bits) == reasons


class Counter:
    """Sends 500 bytes in each sample."""

    def __init__(self) -> None:
        self.sent = 10_000

    def read(self) -> Mapping[str, float]:
        self.sent += 500
        return {"host/network_sent_bytes_per_second": self.sent, "gpu/utilization": self.sent / 10_000, BITS: 0x4}


def test_a_rate_is_that_since_the_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    sampler, source = Sampler([], 1.0), Counter()
    sampler._sources = [source]

    def record(*pauses: float) -> dict[str, float]:
        for pause in pauses:
            clock.now += pause
            sampler.sample()
        return machine.by_name(sampler.take())

    sent = "host/network_sent_bytes_per_second"
    assert sent not in record(1.0)  # one total is no rate
    found = record(2.0, 2.0)
    assert found[sent] == 250.0  # 1,000 bytes in 4 s, and not those of the second sample only
    assert found["gpu/utilization"] == pytest.approx((1.1 + 1.15) / 2)
    assert record() == found  # no new sample
    source.sent = 0
    assert sent not in record(1.0)  # the counter began again
    assert record(5.0)[sent] == 100.0


def test_throttling_between_two_samples_of_a_record_is_not_missed() -> None:
    sampler = Sampler([], 1.0)
    for bits in (0x4, 0x40, 0x4):
        sampler._sources = [SimpleNamespace(read=lambda bits=bits: {BITS: bits})]
        sampler.sample()
    assert summarize([sampler.take()]) == {"gpu/num_throttled": 1}


def test_a_record_has_the_median_and_the_extremes_of_the_ranks() -> None:
    rows = [row(utilization=0.1 * rank, temperature_celsius=50 + rank, throttle_bits=0) for rank in range(5)]
    rows[1] = row(utilization=0.9, temperature_celsius=91, throttle_bits=0x40, cpu_utilization=0.5)
    assert summarize(rows) == {
        "gpu/utilization": 0.3, "gpu/min_utilization": 0.0, "gpu/max_utilization": 0.9, "gpu/min_utilization_rank": 0,
        "gpu/temperature_celsius": 53, "gpu/min_temperature_celsius": 50, "gpu/max_temperature_celsius": 91,
        "gpu/max_temperature_celsius_rank": 1, "gpu/num_throttled": 1,
        "host/cpu_utilization": 0.5,  # the only host
    } | {"gpu/utilization": pytest.approx(0.3), "gpu/max_utilization": 0.9}  # fmt: skip
    assert len(summarize([row(**{name.partition("/")[2]: 1.0 for name in QUANTITIES})] * 512)) < 60


def test_a_throttled_gpu_is_named_once() -> None:
    warnings = ThrottleWarnings()
    healthy = [row(throttle_bits=0x4)] * 8
    hot, braked = list(healthy), [row(throttle_bits=0x80)] * 8
    hot[3] = row(throttle_bits=0x8 | 0x40)
    assert warnings.update(healthy, PLACES) == []
    message = "the GPU of rank 3 (host node-1, GPU 1) is throttled: hardware thermal slowdown"
    assert warnings.update(hot, PLACES) == [message]
    # Clocks of a hot GPU rise and fall.
    for rows in (healthy, hot, healthy, healthy, hot, healthy, healthy, healthy):
        assert warnings.update(rows, PLACES) == []
    assert warnings.update(hot, PLACES) == [message]
    (found,) = warnings.update(braked, PLACES)
    assert found == (
        "the GPU of rank 0 (host node-0, GPU 0), rank 1 (host node-0, GPU 1), rank 2 (host node-1, GPU 0), "
        "rank 3 (host node-1, GPU 1) and 4 other ranks is throttled: power brake"
    )


class Blocked:
    """A driver that does not answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def read(self) -> Mapping[str, float]:
        self.answers.wait(60)
        return {BITS: 0}


def test_a_driver_that_does_not_answer_delays_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "JOIN_TIMEOUT", 0.0)
    source = Blocked()
    sampler = Sampler([source], 0.1)
    assert machine.by_name(sampler.take()) == {}
    sampler.close()
    source.answers.set()


def test_a_source_that_fails_is_left_out(tmp_path: Path) -> None:
    def fail() -> Mapping[str, float]:
        raise RuntimeError("no /proc")

    sampler = Sampler([], 1.0)
    sampler._sources = [SimpleNamespace(read=fail), Counter()]
    sampler.sample()
    sampler.sample()
    assert machine.by_name(sampler.take())["gpu/utilization"] > 1.0
    assert sampler.take_problem() == "SimpleNamespace is not measured any more, training continues: no /proc"
    assert sampler.take_problem() == ""


def test_a_rate_whose_source_failed_is_unknown() -> None:
    source = Counter()
    sampler = Sampler([], 1.0)
    sampler._sources = [source]
    sampler.sample()
    source.sent = None  # type: ignore[assignment]  raises TypeError
    sampler.sample()
    assert "host/network_sent_bytes_per_second" not in machine.by_name(sampler.take())
    assert "Counter is not measured any more" in sampler.take_problem()


def build_monitor(folder: Path, **section: Any) -> Monitor:
    return Monitor(
        folder=folder, device=torch.device("cpu"), num_devices=1, first_step=1, num_steps=4, num_tokens=lambda step: 10 * step,
        flops_per_token=1, section=Metrics(interval=1, trackers=(), **section), recipe={},
    )  # fmt: skip


def train(folder: Path, wait: Callable[[], bool] = lambda: True, **section: Any) -> list[dict[str, Any]]:
    """Returns the records of a run of which each step waits for something."""
    with build_monitor(folder, **section) as monitor:
        for step in range(1, 5):
            end = time.monotonic() + 30
            while not wait() and time.monotonic() < end:
                time.sleep(0.01)
            monitor.step(step, loss=torch.tensor(1.0), grad_norm=torch.tensor(1.0), lr=0.1)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_without_a_gpu_records_its_host(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="requires psutil")
    samples: list[dict[str, float]] = []
    real = Host.read

    def read(self: Host) -> dict[str, float]:
        samples.append(real(self))
        return samples[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "read", read)
        last = train(tmp_path, lambda: len(samples) > 2, machine_interval=0.02)[-1]
        threads = [thread.name for thread in threading.enumerate()]
    assert "machine metrics" not in threads  # it has ended with the run
    names = {name for name in QUANTITIES if name.startswith("host/")}
    assert {name for name in last if "/" in name} == names
    assert 0 < last["host/memory_utilization"] < 1
    assert 0 < last["host/disk_utilization"] <= 1 and last["host/disk_free_gib"] >= 0
    assert all(samples[-1].keys() == sample.keys() == names for sample in samples)


def test_a_run_without_the_packages_records_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psutil", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    records = train(tmp_path, machine_interval=0.02)
    assert len(records) == 4 and not any("/" in name for record in records for name in record)


def test_an_interval_of_zero_disables_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "open_sources", None)
    assert not any("/" in name for name in train(tmp_path, machine_interval=0.0)[-1])


def test_bytes_of_rdma_devices_and_of_the_interfaces_that_are_devices_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psutil", reason="requires psutil")
    port = tmp_path / "rdma/mlx5_0/ports/1"
    for name, value in {"counters/port_xmit_data": 25, "counters/port_rcv_data": 50, "hw_counters/tx_bytes": 7}.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{value}\n")
    (tmp_path / "net/eth0/device").mkdir(parents=True)
    monkeypatch.setattr(host, "RDMA", tmp_path / "rdma")
    monkeypatch.setattr(host, "NETWORK", tmp_path / "net")
    found = Host(None)
    interface = SimpleNamespace(bytes_sent=1000, bytes_recv=2000)
    interfaces = {"lo": interface, "eth0": interface, "docker0": interface}
    found._psutil = SimpleNamespace(net_io_counters=lambda pernic: interfaces)
    assert found._network_bytes() == (1000 + 4 * 25 + 7, 2000 + 4 * 50)
    (tmp_path / "net/eth0/device").rmdir()  # as in a container
    assert found._network_bytes() == (2000 + 4 * 25 + 7, 4000 + 4 * 50)


def test_the_memory_of_a_container_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil", reason="requires psutil")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    found = Host(None)
    found._psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=1000, available=750))
    assert found._memory() == 0.25
    for name, text in {
        "memory.max": "100",
        "memory.current": "95",
        "memory.stat": "anon 60\ninactive_file 15\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert found._memory() == 0.8
    (tmp_path / "memory.max").write_text("max\n")
    assert found._memory() == 0.25


def test_prometheus_has_the_gpus_of_all_ranks_and_the_dashboard_names_no_other(tmp_path: Path) -> None:
    from urllib.request import urlopen

    from prometheus_client.parser import text_string_to_metric_families

    port = free_port()
    with build_monitor(tmp_path, prometheus=f"127.0.0.1:{port}") as monitor:
        every = {name.partition("/")[2]: 0.5 for name in QUANTITIES}
        rows = [row(**every | dict(throttle_bits=bits)) for bits in (0x4, 0x40)]
        assert monitor._records and monitor._machines
        monitor._records.log_ranks(PLACES[:2], rows)
        monitor._track(1, summarize(rows))
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = {one.name: one.samples for one in text_string_to_metric_families(answer.read().decode())}
    throttled = [(sample.labels, sample.value) for sample in families["titanlike_rank_gpu_throttled"]]
    assert throttled == [
        ({"run": tmp_path.name, "rank": str(rank), "host": "node-0", "gpu": str(rank)}, value)
        for rank, value in enumerate((0.0, 1.0))
    ]
    assert families["titanlike_gpu_num_throttled"][0].value == 1
    assert {sample.labels["gpu"] for sample in families["titanlike_rank_host_memory_utilization"]} == {""}
    text = "".join((ROOT / "monitoring" / name).read_text() for name in ("grafana.json", "alerts.yml"))
    named = set(re.findall(r"titanlike_(?:rank_)?(?:gpu|host)_\w+", text))
    assert len(named) > 12
    assert named <= families.keys()


def test_the_gpu_of_a_process_is_found_by_its_address(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES numbers the GPUs of a process anew."""
    asked: list[str] = []
    address = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xA7, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: address)
    monkeypatch.setattr(machine, "GPU", lambda name: asked.append(name) or GPU(name))
    device = torch.device("cuda", 0)
    nvml.use(library, tmp_path / "values")
    found = machine.open_gpu(device)
    assert asked == ["00000001:a7:00.0"] and found is not None
    assert machine.place_of(device, found).of(3).endswith(", GPU 5)")
    found.close()
    monkeypatch.delenv("FAKE_NVML")
    assert machine.open_gpu(device) is None
    nvml.forget()
    assert machine.place_of(device, None).of(3).endswith(", GPU 0)")
    assert machine.place_of(torch.device("cpu"), machine.open_gpu(torch.device("cpu"))).gpu == ""
