"""`titanlike doctor`: each check under planted conditions, the exit code and the JSON."""

import json
import resource
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.launching import Cli
from titanlike.tools.doctor import checks as doctor
from titanlike.tools.doctor import interconnect
from titanlike.tools.doctor.finding import Finding
from titanlike.utils import system

Usage = namedtuple("Usage", "total used free")
NVLINK = """\
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      NV18    PXB     0-47            0
GPU1    NV18     X      SYS     0-47            0
NIC0    PXB     SYS      X
"""
NOT_THROTTLED = "0, Not Active, Not Active, Not Active, Not Active\n"


def only(findings: Any) -> Finding:
    (finding,) = findings
    assert isinstance(finding, Finding)
    return finding


def test_this_machine_can_train(cli: Cli) -> None:
    lines = cli("doctor").out.splitlines()
    findings = json.loads(cli("doctor", "--json").out)
    assert [line.split()[0] for line in lines] == [finding["status"] for finding in findings]
    assert all(finding["remedy"] for finding in findings if finding["status"] != "ok")
    assert {"python", "torch", "gpu", "disk", "port", "clock"} <= {finding["subject"] for finding in findings}


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "requires", lambda _: ["nowhere>=2", "numpy>=1.26", 'later>=1; extra == "dev"'])
    assert only(doctor.packages()) == Finding("missing", "nowhere", "not installed", 'pip install "nowhere>=2"')
    assert 'missing  nowhere          not installed: pip install "nowhere>=2"' in cli("doctor", code=1).out
    monkeypatch.setattr(metadata, "version", lambda name: "1.0" if name == "nowhere" else real(name))
    assert only(doctor.packages()).text == "1.0 is not a supported version"
    # Optional packages are named, and do not change the exit code.
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "EXTRAS", {"data": ("nowhere",)})
    assert next(iter(doctor.extras())) == Finding(
        "missing", "extra data", "nowhere", 'pip install "titanlike[data]"', optional=True
    )
    cli("doctor")


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BASIC_CHECKS", ())
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    finding = only(doctor.examine())
    assert finding.status == "missing" and "cannot be imported" in finding.text and "pip install" in finding.remedy


def test_resources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert only(doctor.disk(tmp_path)).status in ("ok", "warning")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(64 * 2**20, 0, 5 * 2**30))
    assert only(doctor.disk(tmp_path)).status == "warning"
    assert only(doctor.shared_memory(tmp_path)).status == "ok"
    assert list(doctor.shared_memory(tmp_path / "missing")) == []
    monkeypatch.setattr(system, "num_gpus", lambda: 2)
    assert "--ipc=host" in only(doctor.shared_memory(tmp_path)).remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert "limited to 4,096" in only(doctor.open_files()).text
    monkeypatch.setattr(system, "cxx_compiler", lambda: None)
    assert "apt-get install g++" in only(doctor.compiler()).remedy
    monkeypatch.setattr(system, "port_is_free", lambda _: False)
    monkeypatch.setattr(system, "can_resolve", lambda _: False)
    assert [finding.status for finding in doctor.port()] == ["warning", "warning"]


def plant_gpus(monkeypatch: pytest.MonkeyPatch, number: int, capability: tuple[int, int], *, peers: bool) -> None:
    monkeypatch.setattr(system, "num_gpus", lambda: number)
    answers = {"topo": NVLINK, "--query-gpu=driver_version": "555.42\n"}
    monkeypatch.setattr(doctor, "output", lambda *command: answers.get(command[1], NOT_THROTTLED))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name, value in {
        "is_available": True, "device_count": number, "get_device_name": "NVIDIA H100", "get_device_capability": capability,
        "get_device_properties": SimpleNamespace(total_memory=80 * 2**30), "can_device_access_peer": peers,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))


def statuses(findings: Any) -> dict[str, str]:
    return {finding.subject: finding.status for finding in findings}


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_gpus(monkeypatch, 2, (9, 0), peers=True)
    findings = list(doctor.gpus())
    assert set(statuses(findings).values()) == {"ok"}
    assert findings[0].text == "2 x NVIDIA H100, 80.0 GiB each, driver 555.42, CUDA 12.8"
    subjects = ["gpu", "bfloat16", "float8", "flash3", "flash4", "nccl", "throttling", "symmetric memory", "links"]
    assert list(statuses(findings)) == subjects
    plant_gpus(monkeypatch, 2, (7, 5), peers=False)
    found = statuses(doctor.gpus())
    assert [found[name] for name in ("bfloat16", "float8", "symmetric memory")] == ["warning"] * 3
    plant_gpus(monkeypatch, 1, (8, 0), peers=True)
    expected = {"gpu": "ok", "bfloat16": "ok", "float8": "warning", "flash3": "ok", "flash4": "ok"}
    assert statuses(doctor.gpus()) == expected | {"nccl": "ok", "throttling": "ok"}


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_gpus(monkeypatch, 2, (9, 0), peers=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = only(doctor.gpus())
    assert (
        finding.status == "missing" and "driver 555.42" in finding.text and "update the NVIDIA driver" in finding.remedy
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "a build without CUDA" in only(doctor.gpus()).text


def test_throttled_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_gpus(monkeypatch, 2, (9, 0), peers=True)
    answers = [f"{NOT_THROTTLED}5, Active, Not Active, Not Active, Active\n", ""]
    asked: list[str] = []
    monkeypatch.setattr(doctor, "output", lambda *command: asked.append(command[1]) or answers[len(asked) - 1])
    text = "GPU 5 is throttled: hw_thermal_slowdown, hw_slowdown"
    assert doctor._throttling() == [Finding("warning", "throttling", text, "check cooling and power supply")]
    assert "clocks_event_reasons.hw_thermal_slowdown,clocks_event_reasons.sw_thermal_slowdown," in asked[0]
    assert doctor._throttling() == []  # nvidia-smi does not answer


def test_links() -> None:
    assert only(doctor.links(NVLINK)) == Finding("ok", "links", "NVLink between all GPUs (NV18)")
    assert only(doctor.links(NVLINK.replace("NV18", "PHB"))).status == "warning"
    assert doctor.links("") == []


# RDMA devices: made-up /sys and /proc, limits and variables.
UNLIMITED = resource.RLIM_INFINITY
NCCL = {"NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_NET"}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def plant_device(root: Path, name: str, driver: str, state: str = "4: ACTIVE", link: str = "InfiniBand") -> None:
    folder = f"sys/class/infiniband/{name}"
    port = {"state": state, "rate": "400 Gb/sec (4X NDR)", "link_layer": link}
    write(root, {f"{folder}/ports/1/{key}": text for key, text in port.items()})
    (root / "sys/bus/drivers" / driver).mkdir(parents=True, exist_ok=True)
    (root / folder / "device").mkdir()
    (root / folder / "device/driver").symlink_to(root / "sys/bus/drivers" / driver)


def plant_interface(root: Path, name: str, *, speed: int, mtu: int, state: str = "up", kind: int = 1) -> None:
    values = {"speed": speed, "mtu": mtu, "operstate": state, "type": kind}
    write(root, {f"sys/class/net/{name}/{key}": str(value) for key, value in values.items()})


def test_a_machine_without_such_devices_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_interface(tmp_path, "eth0", speed=1000, mtu=1500)
    monkeypatch.setattr(interconnect.system, "communication_variables", dict)
    for root in (tmp_path, tmp_path / "nothing"):
        for check in ("rdma", "locked_memory", "frame_size", "peer_memory", "variables"):
            assert list(getattr(interconnect, check)(root)) == []


def test_ports_of_devices(tmp_path: Path) -> None:
    plant_device(tmp_path, "mlx5_0", "mlx5_core")
    plant_device(tmp_path, "mlx5_1", "mlx5_core", state="1: DOWN")
    plant_device(tmp_path, "mlx5_2", "mlx5_core", state="2: INIT")
    active, down, initial = interconnect.rdma(tmp_path)
    text = "mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR) (mlx5_core, InfiniBand)"
    assert active == Finding("ok", "rdma", text)
    assert down.status == "warning" and "mlx5_1 port 1: DOWN" in down.text and "NCCL_IB_HCA" in down.remedy
    assert initial.status == "warning" and "subnet manager" in initial.remedy


def test_efa_needs_the_provider_of_libfabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_device(tmp_path, "rdmap0", "efa", link="Unspecified")
    monkeypatch.setattr(interconnect, "output", lambda *_: "")
    port, missing = interconnect.rdma(tmp_path)
    assert port.status == "ok" and (missing.status, missing.subject) == ("warning", "efa")
    monkeypatch.setattr(interconnect, "output", lambda name, *_: "provider: efa\n" if name.startswith("/opt") else "")
    assert [finding.status for finding in interconnect.rdma(tmp_path)] == ["ok", "ok"]


def test_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_device(tmp_path, "mlx5_0", "mlx5_core")
    for limits, status, remedy in (
        ((UNLIMITED, UNLIMITED), "ok", ""),
        ((2**26, UNLIMITED), "warning", "ulimit -l unlimited"),
        ((2**26, 2**26), "warning", "docker run --ulimit memlock=-1"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        (finding,) = interconnect.locked_memory(tmp_path)
        assert finding.status == status and finding.remedy.startswith(remedy)


def test_frames_of_fast_interfaces(tmp_path: Path) -> None:
    plant_interface(tmp_path, "slow", speed=1000, mtu=1500)
    plant_interface(tmp_path, "down", speed=100_000, mtu=1500, state="down")
    plant_interface(tmp_path, "ib0", speed=400_000, mtu=2044, kind=32)
    plant_interface(tmp_path, "small", speed=100_000, mtu=1500)
    plant_interface(tmp_path, "virtual", speed=-1, mtu=1500)
    plant_interface(tmp_path, "wide", speed=200_000, mtu=8896)
    small, wide = interconnect.frame_size(tmp_path)
    assert (small.status, small.text) == (
        "warning",
        "small: 1,500 bytes at 100 Gbit/s",
    ) and "ip link set small mtu 9000" in small.remedy
    assert wide == Finding("ok", "mtu", "wide: 8,896 bytes at 200 Gbit/s")


def test_peer_memory(tmp_path: Path) -> None:
    proprietary = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15"
    write(tmp_path, {"proc/driver/nvidia/version": proprietary, "proc/sys/kernel/osrelease": "5.15.0-1051"})
    plant_device(tmp_path, "rdmap0", "efa")
    assert list(interconnect.peer_memory(tmp_path)) == []
    plant_device(tmp_path, "mlx5_0", "mlx5_core")
    (finding,) = interconnect.peer_memory(tmp_path)
    assert finding.status == "warning" and finding.remedy.startswith("modprobe nvidia_peermem")
    write(tmp_path, {"proc/driver/nvidia/version": proprietary.replace("x86_64", "Open Kernel Module for x86_64")})
    assert [finding.text for finding in interconnect.peer_memory(tmp_path)] == [
        "DMA-BUF: open kernel modules, Linux 5.15.0-1051"
    ]
    write(tmp_path, {"proc/sys/kernel/osrelease": "5.4.0"})
    assert [finding.status for finding in interconnect.peer_memory(tmp_path)] == ["warning"]
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert list(interconnect.peer_memory(tmp_path)) == [Finding("ok", "peer memory", "module nvidia_peermem")]


@pytest.mark.parametrize(
    ("variables", "warnings"),
    [
        ({"NCCL_IB_HCA": "mlx5_0", "NCCL_VERSION": "2.27", "NCCL_FASTRAK_NUM_FLOWS": "2", "NCCL_P2P_DISABLE": "0"}, []),
        ({"NCCL_IB_DISABLED": "1"}, ["NCCL_IB_DISABLED is not known here -> did you mean NCCL_IB_DISABLE?"]),
        ({"NCCL_P2P_DISABLE": "1"}, ["through host memory instead of NVLink or PCIe -> unset NCCL_P2P_DISABLE"]),
        ({"NCCL_ALGO": "Ring"}, ["NCCL_ALGO=Ring: one algorithm for all sizes of messages -> unset NCCL_ALGO"]),
        ({"NCCL_IB_DISABLE": "1"}, ["although this machine has RDMA devices -> unset NCCL_IB_DISABLE"]),
        ({"NCCL_SOCKET_IFNAME": "ib"}, ["NCCL_SOCKET_IFNAME=ib selects none of eth0, lo -> "]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, []), ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, []), ({"NCCL_SOCKET_IFNAME": "=eth0"}, []),
        ({"NCCL_IB_HCA": "a\nb\x1b[2J"}, []),
    ],
)  # fmt: skip
def test_variables(
    variables: dict[str, str], warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_device(tmp_path, "mlx5_0", "mlx5_core")
    plant_interface(tmp_path, "eth0", speed=1000, mtu=1500)
    plant_interface(tmp_path, "lo", speed=-1, mtu=65536)
    monkeypatch.setattr(interconnect.system, "communication_variables", lambda: variables)
    monkeypatch.setattr(interconnect, "known_to_nccl", lambda: NCCL)
    monkeypatch.setattr(interconnect, "output", lambda *_: "# FI_PROVIDER: String\n# Restricts the providers\n")
    listed, *found = interconnect.variables(tmp_path)
    assert listed.status == "ok" and all(finding.text.isprintable() for finding in (listed, *found))
    assert [finding.status for finding in found] == ["warning"] * len(warnings)
    for finding, text in zip(found, warnings, strict=True):
        assert text in f"{finding.text} -> {finding.remedy}"


def test_the_names_that_a_library_has(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\x7fELF\0NCCL_IB_HCA\0ENCCL_WRONG\0set NCCL_WRONG to\0NCCL_NET\0")
    assert interconnect.known_to_nccl(library) == {"NCCL_IB_HCA", "NCCL_NET"}
    library.write_bytes(b"")
    assert interconnect.known_to_nccl(library) == interconnect.known_to_nccl(tmp_path / "missing") == set()
