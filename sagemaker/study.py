"""Repeats a published study: Llama 3 8B in four variants, from a plain baseline to float8 all-gather, one job after another.

    python sagemaker/study.py --instances 4 --role ARN --channel data.path=s3://BUCKET/tokens ...

Accepts the options of launch.py, without a recipe. Reads the runs' metrics, and plots throughput and loss beside the published
figures. Completed variants are not submitted again; `--gather` submits none.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from launch import EXAMPLE_BUCKET, REPOSITORY, bucket_of, launch  # first: it makes `titanlike` importable
from options import build_parser
from report import measured_speed
from request import base_name
from service import Clients, NotFound, make_clients

from titanlike.config import UserError
from titanlike.distributed.command_line import command_line
from titanlike.distributed.environment import fail
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.start import Arguments
from titanlike.tools.metrics_file import read_records

# Tokens per second and GPU on 4 p5.48xlarge (32 H100), batch size 1 per GPU, sequence length 8,192.
PUBLISHED = {"baseline": 6475, "compile": 7166, "float8": 8624, "float8_all_gather": 8950}
FILES = ("metrics.jsonl", "environment.json")


@command_line()
def main() -> None:
    """Executes the command line."""
    parser = argparse.ArgumentParser(
        prog="python sagemaker/study.py", description=__doc__, allow_abbrev=False, add_help=False
    )
    parser.add_argument("--gather", action="store_true", help="submit nothing, plot existing results")
    parser.add_argument("--only", nargs="+", choices=PUBLISHED, default=list(PUBLISHED), help="variants to run (all)")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the results (runs/study)")
    if {"-h", "--help"} & set(sys.argv):
        parser.print_help()
        print("\nand the options of: python sagemaker/launch.py --help")
        return
    options, rest = parser.parse_known_args()
    try:
        code = study(rest, options.only, options.out, submit=not options.gather)
    except UserError as error:
        fail(error)
    sys.exit(code)


def study(arguments: list[str], variants: list[str], out: Path, *, submit: bool) -> int:
    """Runs the variants in order until one fails, then plots the results. Returns the exit code."""
    for variant in variants:
        recipe = REPOSITORY / f"train_configs/study/{variant}.toml"
        options, rest = build_parser().parse_known_args([str(recipe), f"--run=study-{variant}", *arguments])
        overrides = Arguments([str(recipe), *rest]).overrides
        options.wait = True
        if submit and fetch(options, out / variant) < load(PretrainRecipe, recipe, overrides).training.steps:
            code = _attach(options) if not (options.dry_run or options.simulate) else None
            code = launch(options, overrides) if code is None else code
            if code:
                print(f"study: {variant} failed (exit code {code}); repeat the command to resume", file=sys.stderr)
                return code
        fetch(options, out / variant)
    results: dict[str, Any] = {}
    for metrics in (out / variant / FILES[0] for variant in variants):
        if metrics.exists():
            records = [record for record in read_records(metrics) if "loss" in record]
            results[metrics.parent.name] = {
                "tokens_per_second_per_gpu": measured_speed(metrics),
                "steps": [record["step"] for record in records],
                "losses": [record["loss"] for record in records],
            }
    if not results:
        return 0
    (out / "study.json").write_text(json.dumps({"command": sys.argv, "variants": results}, indent=1) + "\n")
    print(table(results))
    plot(results, out / "study.png")
    print(f"{out / 'study.png'}, {out / 'study.json'}")
    return 0


def _attach(options: argparse.Namespace) -> int | None:
    """Waits for the active job of a run, as after this command was interrupted. Returns its exit code, or None without one."""
    import monitor
    from job_status import active_job

    clients, _ = _bucket(options.region, bucket_of(options))
    job = active_job(clients, options.run, base_name(options.prefix, options.run))
    return monitor.wait(clients, job.name) if job else None


@cache
def _bucket(region: str, name: str) -> tuple[Clients, str]:
    clients = make_clients(region)
    return clients, name or clients.default_bucket()


def fetch(options: argparse.Namespace, folder: Path) -> int:
    """Copies a run's metrics to `folder`. Returns the last step, or 0 without metrics."""
    if options.dry_run:
        return 0
    for file in FILES:
        key = f"{options.prefix}/runs/{options.run}/{file}"
        try:
            if options.simulate:
                content = (options.folder / "s3" / (bucket_of(options) or EXAMPLE_BUCKET) / key).read_bytes()
            else:
                clients, bucket = _bucket(options.region, bucket_of(options))
                content = clients.read_object(bucket, key)
        except (FileNotFoundError, NotFound):
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return max((record["step"] for record in read_records(folder / FILES[0]) if "loss" in record), default=0)


def table(results: dict[str, Any]) -> str:
    """Formats measured and published throughput, each with its gain over the baseline."""
    lines = ["| Variant | tokens/s per GPU | gain | published | gain |", "|---|---|---|---|---|"]
    baseline = results.get("baseline", {}).get("tokens_per_second_per_gpu")
    for name, result in results.items():
        speed, published = result["tokens_per_second_per_gpu"], PUBLISHED[name]
        gain = f"{speed / baseline - 1:+.1%}" if baseline else ""
        lines.append(
            f"| {name} | {speed:,.0f} | {gain} | {published:,} | {published / PUBLISHED['baseline'] - 1:+.1%} |"
        )
    return "\n".join(lines)


def plot(results: dict[str, Any], picture: Path) -> None:
    """Plots throughput beside the published one, and the losses."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is not installed; run: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), dpi=130)
    speeds = [result["tokens_per_second_per_gpu"] for result in results.values()]
    positions = range(len(results))
    left.bar(
        [x - 0.2 for x in positions], [PUBLISHED[name] for name in results], 0.4, label="published", color="#b8c4d0"
    )
    left.bar([x + 0.2 for x in positions], speeds, 0.4, label="this run", color="#1f6fb4")
    left.set_xticks(list(positions), [name.replace("_", "\n", 1) for name in results])
    left.set_ylabel("tokens per second and GPU")
    for name, result in results.items():
        right.plot(result["steps"], result["losses"], label=name, linewidth=1.2)
    right.set(xlabel="step", ylabel="loss")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


if __name__ == "__main__":
    main()
