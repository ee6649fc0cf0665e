"""The folder from which a container image is built: the wheel of this checkout, a recipe with its program, and a Dockerfile."""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomli

from titanlike.config import UserError
from titanlike.config.shipped import REPOSITORY
from titanlike.tools.clusters.cluster_job import ClusterJob, extras_of

CUDA_INDEX = "https://pypi.org/simple"  # on Linux, its torch is the build with CUDA libraries
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SOURCES = ("titanlike", "recipes", "train_configs", "pyproject.toml", "README.md", "LICENSE")

DOCKERFILE = """\
# Trains {name}. Build and run:
#   docker build --tag {image} {folder}
#   docker run --rm --init {gpus}--ipc=host --volume "$PWD/runs:/workspace/runs" {image}
# The user of the container has id 1000, and must be able to write to the mounted folder.
ARG PYTHON_VERSION=3.12
FROM python:${{PYTHON_VERSION}}-slim

# torch.compile needs a C++ compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The package index that has torch: {cuda} for CUDA,
# {cpu} for the CPU.
ARG TORCH_INDEX={index}
ARG TORCH_VERSION="{torch}"
RUN pip install --no-cache-dir --index-url "${{TORCH_INDEX}}" "torch${{TORCH_VERSION}}"

ARG EXTRAS={extras}
COPY {wheel} /tmp/
RUN pip install --no-cache-dir "/tmp/{wheel}[${{EXTRAS}}]" && rm /tmp/{wheel}

RUN useradd --create-home --uid 1000 titanlike && install --directory --owner=titanlike /workspace/runs
COPY recipe.toml {program} /app/
USER titanlike
WORKDIR /workspace
ENTRYPOINT ["python", "-m", "titanlike.run.launch"]
CMD ["/app/recipe.toml"]
"""


def dockerfile(job: ClusterJob, image: str, folder: Path, wheel: str) -> str:
    """Returns the Dockerfile.

    Args:
        job: The job.
        image: Name of the image.
        folder: The folder to build from.
        wheel: File name of the wheel.
    """
    project = tomli.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    torch = next(each for each in project["dependencies"] if re.match("torch[<>=]", each))
    return DOCKERFILE.format(
        name=job.name,
        image=image,
        folder=shlex.quote(str(folder)),
        gpus="--gpus all " if job.gpus_per_node else "",
        cuda=CUDA_INDEX,
        cpu=CPU_INDEX,
        index=CUDA_INDEX if job.gpus_per_node else CPU_INDEX,
        torch=torch.removeprefix("torch"),
        wheel=wheel,
        extras=",".join(sorted({"s3", *extras_of(job.recipe)})),
        program=job.program.name,
    )


def build_wheel(folder: Path) -> str:
    """Builds the wheel of this checkout into a folder, and returns its file name."""
    if not (REPOSITORY / "pyproject.toml").is_file():
        raise UserError(
            "the wheel is built from the source of titanlike, which an installed package does not have; use a clone"
        )
    with tempfile.TemporaryDirectory() as copy:  # setuptools writes into the source
        for name in SOURCES:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, Path(copy, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), copy]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("titanlike-*.whl"))
    if done.returncode or not wheels:
        raise UserError(f"the wheel could not be built: {(done.stderr.strip().splitlines() or ['no error'])[-1]}")
    return wheels[-1].name
