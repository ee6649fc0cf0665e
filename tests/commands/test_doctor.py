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
