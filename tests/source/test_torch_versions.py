"""The record of the tests with other versions of torch covers the supported range, and the documentation has its table."""

import json
import re

from benchmarks.torch_versions import RECORD, ROOT, release, table


def test_the_torch_versions_are_those_of_the_record() -> None:
    recorded = json.loads(RECORD.read_text())
    (oldest, above) = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0]
    first, *others, end = map(release, (oldest, *recorded, above))
    assert first in others and (end[0], end[1] - 1) in others, (
        "docs/torch_versions.json lacks the oldest or the newest version"
    )
    assert all(first <= version < end for version in others)
    for version, result in recorded.items():
        assert result["packages"]["torch"].startswith(f"{version}.")
        assert result["failures"] == [] and result["passed"] > 1000
    assert f"-->\n\n{table(recorded)}\n\n" in (ROOT / "docs/installing.md").read_text()
