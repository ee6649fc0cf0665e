"""The tests of a GPU run on null GPUs: each line of theirs, with the comparisons of values and times switched off."""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.null_gpu.recording import run
from titanlike.tools.null_gpu.values import compare_values

# Number of tests by file.
ALL = {
    "data_gpu": 1, "document_masks_gpu": 9, "float8_gpu": 10, "inference_gpu": 4, "moe_gpu": 7, "one_gpu": 8, "profiling_gpu": 3,
    "saving_gpu": 2, "speed_gpu": 9, "two_gpus": 8,
}  # fmt: skip
IN_CI = {name: ALL[name] for name in ("data_gpu", "inference_gpu", "saving_gpu")}


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("expected", [IN_CI, pytest.param(ALL, marks=pytest.mark.every)], ids=["part", "all"])
def test_the_tests_of_a_gpu_pass_on_null_gpus(tmp_path: Path, expected: dict[str, int]) -> None:
    output, report = tmp_path / "output", tmp_path / "report.xml"
    files = [f"tests/gpu/test_{name}.py" for name in expected]
    with output.open("w") as file:
        code, _ = run(
            ["-m", "pytest", *files, "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--junit-xml", str(report)],
            stdout=file, stderr=file,
        )  # fmt: skip
    assert code == 0, output.read_text()
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert not [case.get("name") for case in cases if case.find("skipped") is not None]
    assert Counter(case.get("classname") for case in cases) == {
        f"tests.gpu.test_{name}": count for name, count in expected.items()
    }


def test_comparisons_of_values_count_on_anything_but_a_null_gpu() -> None:
    with pytest.raises(AssertionError), compare_values():
        assert 0.0 == 1.0
