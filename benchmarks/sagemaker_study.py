"""Repeats a published study on SageMaker: Llama 3 8B in four variants, from a plain baseline to float8 all-gather.

    python -m benchmarks.sagemaker_study --dry-run
    python -m benchmarks.sagemaker_study --role ARN --channel data.path=s3://BUCKET/tokens ...
    python -m benchmarks.sagemaker_study --runs FOLDER

Submits one job for each variant, with the options of `titanlike launch sagemaker`; the dry run prints their plans and the cost.
`--runs` prints the speeds of runs that have been copied from S3 beside the published ones.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from titanlike.config.shipped import recipe_path
from titanlike.tools.metrics_file import read_records
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.plan import plan_or_none
from titanlike.tools.planning.report import brief
from titanlike.tools.programs import load_known

NODES, INSTANCE_TYPE = 4, "ml.p5.48xlarge"
# Tokens per second and GPU on 4 p5.48xlarge (32 H100), batch size 1 per GPU, sequence length 8,192.
PUBLISHED = {"baseline": 6475, "compile": 7166, "float8": 8624, "float8_all_gather": 8950}


def main() -> None:
    """Executes the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sagemaker_study", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--dry-run", action="store_true", help="submit nothing; print what each job would cost")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="folder of the runs study-VARIANT")
    options, others = parser.parse_known_args()
    if options.runs:
        print(table(measured(options.runs)))
    elif options.dry_run:
        print(cost())
    else:
        for variant in PUBLISHED:
            words = ["launch", "sagemaker", f"study/{variant}", f"--nodes={NODES}", f"--run=study-{variant}", *others]
            subprocess.run([sys.executable, "-m", "titanlike", *words], check=True)


def cost() -> str:
    """Returns the plan of each job, and the price of all."""
    hardware, lines, dollars = load_hardware(INSTANCE_TYPE), [], 0.0
    num_gpus = NODES * hardware.gpus_per_node
    for variant in PUBLISHED:
        plan = plan_or_none(load_known(recipe_path(f"study/{variant}"), {}), num_gpus, hardware)
        assert plan
        dollars += plan.hours * num_gpus * hardware.dollars_per_gpu_hour
        lines.append(f"{variant:18}{brief(plan)}")
    return "\n".join([*lines, f"all four on {num_gpus} x {hardware.name}: ${dollars:,.0f} ({hardware.price_source})"])


def measured(runs: Path) -> dict[str, float]:
    """Returns the median tokens per second and GPU of the second half of each run."""
    speeds = {}
    for variant in PUBLISHED:
        folder = runs / f"study-{variant}"
        if (folder / "metrics.jsonl").exists():
            found = [each["tokens_per_second"] for each in read_records(folder / "metrics.jsonl") if "loss" in each]
            processes = json.loads((folder / "environment.json").read_text())["processes"]
            speeds[variant] = statistics.median(found[len(found) // 2 :]) / processes
    return speeds


def table(speeds: dict[str, float]) -> str:
    """Formats measured and published throughput, each with its gain over the baseline."""
    lines = ["| Variant | tokens/s per GPU | gain | published | gain |", "|---|---|---|---|---|"]
    for name, speed in speeds.items():
        gains = [
            f"{value / base - 1:+.1%}" if base else ""
            for value, base in ((speed, speeds.get("baseline")), (PUBLISHED[name], PUBLISHED["baseline"]))
        ]
        lines.append(f"| {name} | {speed:,.0f} | {gains[0]} | {PUBLISHED[name]:,} | {gains[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
