"""Makes the pictures of `docs/screenshots/` again: runs the commands in a terminal, and pages in a headless browser.

    python docs/screenshots.py                    all of them, in a few minutes
    python docs/screenshots.py profile plan       some of them
    python docs/screenshots.py --list             their commands

Requires the extra `dev` and, for pages, chromium. Figures in the pictures are those of the machine that makes them.
"""

import argparse
import os
import pty
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from dataclasses import dataclass
from fcntl import ioctl
from io import StringIO
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "screenshots"


@dataclass(frozen=True)
class Capture:
    """A command in a terminal of this size, and the text at which the picture is taken: by default at the end."""

    command: str
    columns: int = 100
    rows: int = 45
    until: str = ""  # regular expression
    before: str = ""  # a command that prepares it


# A sweep of six short trials, with its recipe.
SWEEP = """
cat > short.toml <<EOF
extends = "train_configs/debug.toml"
training.steps = 20
training.global_batch_size = 8
schedule.warmup_steps = 4
validation.interval = 4
validation.batches = 1
metrics.interval = 1
sample.tokens = 0
EOF
cat > sweep.toml <<EOF
recipe = "short.toml"
trials = 6
startup_trials = 4
pruning.startup_trials = 2
search."optimizer.lr" = { low = 1e-3, high = 1e-1, log = true }
search."optimizer.weight_decay" = { values = [0.0, 0.1] }
EOF
"""

# By the name of the file.
CAPTURES = {
    "training": Capture(
        "./run_train.sh train_configs/debug.toml --run.name=debug", rows=36, until=r"step +1[0-2]\d/170"
    ),
    "completion": Capture("./run_train.sh train_configs/debug.toml --run.name=short --training.steps=40", rows=48),
    "profile": Capture(
        "titanlike profile train_configs/debug.toml --hardware mine.toml",
        before="titanlike plan --calibrate mine.toml",
        rows=100,
    ),
    "plan": Capture("titanlike plan train_configs/llama3_8b.toml --gpus 64", rows=80),
    "sweep": Capture("titanlike sweep sweep.toml", columns=120, rows=60, before=SWEEP),
    "doctor": Capture("titanlike doctor", columns=110),
    "init": Capture("titanlike init mine.toml --gpus 8 && cat mine.toml", columns=110, rows=100),
    "launch": Capture(
        "titanlike launch slurm llama3_8b --nodes 4 --hardware ml.p5.48xlarge --out job --dry-run && cat job/job.sbatch",
        136,
        60,
    ),
}

PLAN_PAGE = "titanlike plan llama3_8b --gpus 8 --hardware h100 --html"

# Short runs that `comparison` compares: not long enough to say which settings are better.
RUNS = {
    "muon": [],
    "adamw": ["--optimizer.groups=[]", "--optimizer.lr=1.5e-3"],
    "adamw-high-lr": ["--optimizer.groups=[]", "--optimizer.lr=6e-3"],
}
OF_ALL_RUNS = {
    "training.steps": 40, "training.global_batch_size": 8, "validation.interval": 8, "validation.batches": 1, "metrics.interval": 1,
    "sample.tokens": 0, "metrics.trackers": "[]",
}  # fmt: skip


def comparison(folder: Path) -> None:
    """Trains three short runs, and makes the pictures of `titanlike compare`."""
    for name, options in RUNS.items():
        keys = [f"--{key}={value}" for key, value in OF_ALL_RUNS.items()]
        run(folder, "./run_train.sh", "train_configs/debug.toml", f"--run.name={name}", *keys, *options)
    runs = [f"runs/{name}" for name in ("adamw", "adamw-high-lr", "muon")]
    capture("comparison_table", Capture(f"titanlike compare {' '.join(runs)}", columns=150), folder)
    run(folder, "titanlike", "compare", *runs, "--html", "compare.html", "--png", str(FOLDER / "comparison.png"))
    page("comparison_page", f"file://{folder}/compare.html", folder, "1280,1240")


def plan_page(folder: Path) -> None:
    """Makes the pictures of the page of `titanlike plan`, light and dark."""
    run(folder, *f"{PLAN_PAGE} plan.html".split())
    for name, scheme in (("plan_page", 1), ("plan_page_dark", 0)):
        page(name, f"file://{folder}/plan.html", folder, "1180,945", f"--blink-settings=preferredColorScheme={scheme}")


def tensorboard(folder: Path) -> None:
    """Trains with the debug recipe, and makes the picture of TensorBoard's scalars."""
    run(folder, "./run_train.sh", "train_configs/debug.toml", "--run.name=debug")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir=runs", "--host=127.0.0.1", f"--port={port}", "--load_fast=false"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_scalars(f"{address}/data/plugin/scalars/tags")
        shown = "|".join(("loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_gib"))
        scalars = f"{address}/#scalars&_smoothingWeight=0&tagFilter={shown}"
        page("tensorboard", scalars, folder, "1440,730", "--virtual-time-budget=20000")
    finally:
        server.terminate()
        server.wait(60)


def wait_for_scalars(address: str) -> None:
    """Waits until TensorBoard has read the records of the run."""
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                if "train/loss" in answer.read().decode():
                    return
        except OSError as error:  # the server starts
            reason = str(error)
        else:
            reason = "no records"
        if time.monotonic() > end:
            raise TimeoutError(f"{address}: {reason}")
        time.sleep(0.5)


def run(folder: Path, *words: str) -> None:
    """Runs a command without its output."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def page(name: str, address: str, folder: Path, size: str, *options: str) -> None:
    """Writes the picture of a page in a headless browser."""
    run(
        folder, "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars", f"--window-size={size}",
        f"--user-data-dir={folder / 'browser'}", f"--screenshot={FOLDER / name}.png", *options, address,
    )  # fmt: skip


def capture(name: str, item: Capture, folder: Path) -> None:
    """Runs the command of a picture and writes it."""
    environment = os.environ | {
        "TERM": "xterm-256color", "COLUMNS": str(item.columns), "LINES": str(item.rows), "COLORTERM": "truecolor",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    if item.before:
        subprocess.run(["bash", "-c", item.before], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    screen = pyte.Screen(item.columns, item.rows)
    stream = pyte.ByteStream(screen)
    words = ["bash", "-c", item.command]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(words[0], words, environment)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", item.rows, item.columns, 0, 0))
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                found = os.read(terminal, 65536)
            except OSError:  # the command has ended
                break
            if not found:
                break
            for path, shown in (
                (str(folder), "/home/you"),
                (sys.prefix, "/home/you/venv"),
                (str(ROOT), "/home/you/titanlike"),
            ):
                found = found.replace(path.encode(), shown.encode())
            stream.feed(found)
        if item.until and re.search(item.until, "\n".join(screen.display)):
            break
    write_svg(FOLDER / f"{name}.svg", screen, f"$ {item.command}")
    if item.until:
        os.kill(child, 15)
    os.close(terminal)
    os.waitpid(child, 0)


def write_svg(path: Path, screen: pyte.Screen, title: str) -> None:
    """Writes the screen of a terminal, without the empty lines at its end."""
    last = max((row for row, line in enumerate(screen.display) if line.strip()), default=0)
    console = Console(record=True, width=screen.columns, file=StringIO(), highlight=False)
    for row in range(last + 1):
        line = Text()
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        for style, part in groupby(
            cells, lambda cell: Style(color=color_of(cell.fg), bold=cell.bold, reverse=cell.reverse)
        ):
            line.append("".join(cell.data for cell in part), style)
        line.rstrip()
        console.print(line, no_wrap=True, crop=True, overflow="crop")
    svg = console.export_svg(title=title)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # fonts of the reader's machine


def color_of(name: str) -> str | None:
    """Returns rich's name of a color of pyte."""
    if name == "default":
        return None
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else {"brown": "yellow"}.get(name, name)


# The other pictures: the command, and what makes them.
PAGES = {
    "comparison": ("titanlike compare", comparison),
    "plan_page": (PLAN_PAGE, plan_page),
    "tensorboard": ("tensorboard --logdir runs", tensorboard),
}
NAMES = (*CAPTURES, *PAGES)


def main() -> None:
    """Makes all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--list", action="store_true", help="print the commands")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"{unknown[0]}: unknown; use {', '.join(NAMES)}")
    FOLDER.mkdir(exist_ok=True)
    for name in arguments.names or NAMES:
        if arguments.list:
            print(f"{name}: {CAPTURES[name].command if name in CAPTURES else PAGES[name][0]}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for path in ("run_train.sh", "train_configs"):
                Path(folder, path).symlink_to(ROOT / path)
            if name in CAPTURES:
                capture(name, CAPTURES[name], Path(folder))
            else:
                PAGES[name][1](Path(folder))
        print(f"made {name}")


if __name__ == "__main__":
    main()
