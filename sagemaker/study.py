"""The published study as one command: Llama 3 8B in four steps from a plain baseline to float8 all-gathers, one job after another.

    python sagemaker/study.py --instances 4 --role ARN --channel data.path=s3://BUCKET/tokens ...

Takes what launch.py takes, but for a recipe. Then it reads the runs' metrics where they lie, and draws tokens a second and losses
beside the published figures. A variant whose run is done is not sent again; `--gather` sends none.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the library beside this folder

from launch import SOMEWHERE, launch
from options import build_parser
from report import measured_speed, records
from service import clients, is_missing, plainly
from upload import own_bucket

from titanlike.config import PretrainRecipe, UserError, load
from titanlike.distributed.environment import fail
from titanlike.run.start import REPOSITORY, Arguments

# Tokens a second of one H100, 32 of them on 4 p5.48xlarge, batch 1 a GPU, 8,192 tokens.
PUBLISHED = {"baseline": 6475, "compile": 7166, "float8": 8624, "float8_all_gather": 8950}
FILES = ("metrics.jsonl", "environment.json")


def main() -> None:
    """Send what is not done, gather what there is, and draw it."""
    own = argparse.ArgumentParser(
        prog="python sagemaker/study.py", description=__doc__, allow_abbrev=False, add_help=False
    )
    own.add_argument("--gather", action="store_true", help="send nothing, draw what there is")
    own.add_argument("--only", nargs="+", choices=PUBLISHED, default=list(PUBLISHED), help="some variants (all)")
    own.add_argument(
        "--out", type=Path, default=Path("runs/study"), help="where figures and the picture go (runs/study)"
    )
    if {"-h", "--help"} & set(sys.argv):
        own.print_help()
        print("\nand all of: python sagemaker/launch.py --help")
        return
    mine, words = own.parse_known_args()
    try:
        code = study(words, mine.only, mine.out, send=not mine.gather)
    except UserError as error:
        fail(error)
    sys.exit(code)


def study(words: list[str], variants: list[str], out: Path, *, send: bool) -> int:
    """Each variant in turn; the first that fails ends it."""
    for variant in variants:
        recipe = REPOSITORY / f"train_configs/study/{variant}.toml"
        options, rest = build_parser().parse_known_args([str(recipe), f"--run=study-{variant}", *words])
        overrides = Arguments(rest).overrides
        steps = load(PretrainRecipe, recipe, overrides).training.steps
        options.wait = True
        if send and last_step(options, out / variant) < steps:
            code = launch(options, overrides)
            if options.dry_run:
                continue
            if code:
                print(
                    f"study: {variant} did not come to its end (exit code {code}); the same command goes on",
                    file=sys.stderr,
                )
                return code
        last_step(options, out / variant)
    found = {name: figures(out / name) for name in variants if (out / name / "metrics.jsonl").exists()}
    if not found:
        return 0
    (out / "study.json").write_text(json.dumps({"command": sys.argv, "variants": found}, indent=1) + "\n")
    print(table(found))
    draw(found, out / "study.png")
    print(f"{out / 'study.png'}, {out / 'study.json'}")
    return 0


def last_step(options: argparse.Namespace, folder: Path) -> int:
    """Bring what a run has recorded here. Returns the last step of it, or 0."""
    fetch = from_folder(options) if options.simulate else from_s3(options)
    for file in FILES:
        content = fetch(f"{options.prefix}/runs/{options.run}/{file}") if not options.dry_run else None
        if content is None:
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return max((record["step"] for record in records(folder / "metrics.jsonl") if "loss" in record), default=0)


def from_folder(options: argparse.Namespace) -> Callable[[str], bytes | None]:
    """What reads where a simulation keeps what it calls S3."""
    bucket = options.folder / "s3" / (options.bucket or SOMEWHERE)
    return lambda key: (bucket / key).read_bytes() if (bucket / key).exists() else None


def from_s3(options: argparse.Namespace) -> Callable[[str], bytes | None]:
    """What reads the bucket."""
    from botocore.exceptions import ClientError

    asked = clients(options.region)
    with plainly(asked.region):
        bucket = options.bucket or own_bucket(asked)

    def read(key: str) -> bytes | None:
        with plainly(asked.region):
            try:
                return bytes(asked.s3.get_object(Bucket=bucket, Key=key)["Body"].read())
            except ClientError as error:
                if is_missing(error):
                    return None
                raise

    return read


def figures(folder: Path) -> dict[str, Any]:
    """What is drawn of a run."""
    steps = [record for record in records(folder / "metrics.jsonl") if "loss" in record]
    return {
        "tokens_per_second_per_gpu": measured_speed(folder / "metrics.jsonl"),
        "steps": [record["step"] for record in steps],
        "losses": [record["loss"] for record in steps],
    }


def table(found: dict[str, Any]) -> str:
    """Measured beside published, each with what it gains over the baseline."""
    lines = ["| Variant | tokens/s a GPU | gain | published | gain |", "|---|---|---|---|---|"]
    first = found.get("baseline", {}).get("tokens_per_second_per_gpu")
    for name, figure in found.items():
        speed, then = figure["tokens_per_second_per_gpu"], PUBLISHED[name]
        gain = f"{speed / first - 1:+.1%}" if first else ""
        lines.append(f"| {name} | {speed:,.0f} | {gain} | {then:,} | {then / PUBLISHED['baseline'] - 1:+.1%} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], picture: Path) -> None:
    """Two panels: speed beside the published one, and losses."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib, which draws the picture, is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), dpi=130)
    places = range(len(found))
    left.bar([p - 0.2 for p in places], [PUBLISHED[name] for name in found], 0.4, label="published", color="#b8c4d0")
    speeds = [one["tokens_per_second_per_gpu"] for one in found.values()]
    left.bar([p + 0.2 for p in places], speeds, 0.4, label="this run", color="#1f6fb4")
    left.set_xticks(list(places), [name.replace("_", "\n", 1) for name in found])
    left.set_ylabel("tokens a second, a GPU")
    for name, one in found.items():
        right.plot(one["steps"], one["losses"], label=name, linewidth=1.2)
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
