"""Plots the training and validation loss of a run: python benchmarks/draw_loss.py METRICS.jsonl IMAGE.png"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main(metrics: Path, image: Path) -> None:
    """Reads the records of one run and writes the plot."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(8, 3.2), dpi=130)
    for key, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = [(record["step"], record[key]) for record in records if key in record]
        axes.plot(*zip(*points, strict=True), style, markersize=4, linewidth=1.4, label=label)
    axes.set(xlabel="step", ylabel="loss per byte (nats)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(image)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
