"""Shipped hardware files, and the errors of a user's own."""

import dataclasses
from pathlib import Path

import pytest
import tomli
import torch

from tests.launching import Cli
from titanlike.config import UserError
from titanlike.hardware.files import FOLDER, file_of_device
from titanlike.tools.new_recipe import find_source, new_recipe
from titanlike.tools.planning.calibrate import Description, _device
from titanlike.tools.planning.hardware import Hardware, hardware_names, load_hardware

MINIMAL = """
memory_gib = 80
bf16_tflops = 100.0
float32_tflops = 10
memory_gb_per_second = 2000
gpus_per_node = 8
node_gb_per_second = 300
network_gb_per_second = 25
"""


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", hardware_names())
def test_shipped_files(name: str) -> None:
    hardware = load_hardware(name)
    assert load_hardware(str(FOLDER / f"{name}.toml")) == hardware
    assert hardware.float32_tflops <= (hardware.tf32_tflops or hardware.bf16_tflops / 2) < hardware.bf16_tflops
    assert hardware.bfloat16 == (name.partition("_")[0] not in ("v100", "t4"))
    assert not hardware.float8_tflops or 1.9 < hardware.float8_tflops / hardware.bf16_tflops < 2.1
    assert hardware.network_gb_per_second < hardware.node_gb_per_second < hardware.memory_gb_per_second
    assert hardware.attention_backward < hardware.attention_forward < hardware.gemm_fraction
    assert hardware.gpu_watts > 0
    assert hardware.price_source or not hardware.dollars_per_gpu_hour
    assert name in hardware.name or not name.startswith("ml.")
    own = tomli.loads((FOLDER / f"{name}.toml").read_text())
    assert own["sources"] and all(len(source) > 10 for source in own["sources"])
    assert all(file_of_device(device) == name for device in own.get("devices", []))


def test_a_file_with_the_required_keys(tmp_path: Path) -> None:
    hardware = load_hardware(write(tmp_path, MINIMAL))
    assert (hardware.name, hardware.bf16_tflops, hardware.float8_tflops) == ("mine", 100.0, 0.0)
    required = {field.name for field in dataclasses.fields(Hardware) if field.default is dataclasses.MISSING}
    assert required == {"name", *tomli.loads(MINIMAL)}


def test_hardware_without_bfloat16_takes_float16(cli: Cli) -> None:
    name = "t4"
    hardware = load_hardware(name)
    assert hardware.efficiency == 1.0, "there is no measurement"
    with pytest.raises(UserError, match=r"compute_dtype = 'bfloat16', which .* does not have; set .* = 'float16'"):
        hardware.check_dtype("bfloat16")
    command = ["plan", "gpt2_124m", "--gpus", "8", "--hardware", name]
    assert "set training.compute_dtype = 'float16'" in cli(*command, code=2).err
    changes = ["--training.compute_dtype=float16", "--training.local_batch_size=1"]
    assert f"none of them on {hardware.name}" in " ".join(cli(*command, *changes).out.split())
    assert new_recipe(find_source(""), 8, hardware, "")["training"]["compute_dtype"] == "float16"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "bf16_tflops = 100.0",
            "bf16_tflops = -1.0",
            "bf16_tflops = -1.0 is not valid: input should be greater than or",
        ),
        (
            "bf16_tflops = 100.0",
            'bf16_tflops = "fast"',
            'bf16_tflops = "fast" is not valid: input should be a valid number',
        ),
        ("bf16_tflops", "bf16_tflop", "bf16_tflops is missing; add it, as in titanlike/hardware/h100.toml"),
        ("bf16_tflops", "bf16_tflop", "bf16_tflop is an unknown key; did you mean bf16_tflops?"),
        ("= 100.0", "=", "Invalid value (at "),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, MINIMAL.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_hardware(path)
    assert path in str(caught.value) and message in str(caught.value)


def test_unknown_hardware() -> None:
    with pytest.raises(UserError, match=r"^--hardware h10 is unknown; did you mean h100[?] use a100, a100_40gb, "):
        load_hardware("h10")
    with pytest.raises(UserError, match=r"^--hardware none/such.toml: .* No such file or directory"):
        load_hardware("none/such.toml")


def test_a_file_extends_a_shipped_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = "h100"\nnetwork_gb_per_second = 25\n')
    found, base = load_hardware(str(file)), load_hardware("h100")
    assert found == dataclasses.replace(base, network_gb_per_second=25.0)
    assert base.has_switch and not load_hardware("h200_nodes_of_4").has_switch
    file.write_text('extends = "ml.p5.4xlarge"\ndollars_per_gpu_hour = 5\n')
    found = load_hardware(str(file))
    assert found == dataclasses.replace(load_hardware("ml.p5.4xlarge"), dollars_per_gpu_hour=5.0)
    assert (found.gpus_per_node, found.network_gb_per_second, found.bf16_tflops) == (1, 12.5, base.bf16_tflops)
    file.write_text('extends = "h10"\n')
    with pytest.raises(UserError, match=r'mine\.toml: extends = "h10" is not a shipped file; use h100, for example$'):
        load_hardware(str(file))
    file.write_text('extends = "h100"\nnetwork_gb_per_sec = 25\n')
    with pytest.raises(UserError, match=r"network_gb_per_sec is an unknown key; did you mean network_gb_per_second\?"):
        load_hardware(str(file))


def test_a_calibration_keeps_what_the_data_sheet_says(tmp_path: Path) -> None:
    """Of a GPU that has a description; the figures themselves are measured."""
    for name in ("h100", "t4", "v100"):
        base, description = load_hardware(name), Description()
        _device(description, torch.device("cpu"), base, 8)
        values = tomli.loads("\n".join(description.lines))
        assert values.get("bfloat16", True) == base.bfloat16 and values.get("node_switch") == base.node_switch
        assert values.get("gpu_watts", 0.0) == base.gpu_watts
