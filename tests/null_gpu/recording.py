"""Programs that run on null GPUs, and what they record."""

import sys
from typing import Any

import pytest

from tests.forkserver import ROOT
from titanlike.tools.null_gpu import library, record


def require_null_gpu() -> None:
    try:
        library.build()
    except library.Unavailable as reason:  # this torch has no CUDA
        pytest.skip(str(reason))


def run(arguments: list[str], **options: Any) -> tuple[int, dict[str, Any]]:
    require_null_gpu()
    return record.run([sys.executable, *arguments], cwd=ROOT, **options)


def torchrun(processes: int, *arguments: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *arguments]
