"""`titanlike evaluate`: tasks and the loss of text with a model. Imports torch late, to start fast."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from titanlike.config import UserError
from titanlike.config.base import validate
from titanlike.config.sections import Evaluation
from titanlike.inference.tasks import FORMATS
from titanlike.run.checks.machine import evaluation_files
from titanlike.tools.arguments import non_negative_int, positive_int
from titanlike.tools.cli.command import add_command
from titanlike.tools.cli.processes import add_model_options, session, start_processes
from titanlike.utils.live_line import LiveLine

if TYPE_CHECKING:
    import torch

    from titanlike.interop.weights import Weights

DESCRIPTION = """\
Evaluates a model on text and on tasks. Prints loss, perplexity and bits per byte of text or token shards, and the scores of tasks
from local JSON lines files, computed as lm-evaluation-harness does. Starts one process per GPU, or NPROC. FSDP shards the weights
over them, unless --tensor, --pipeline or --context say otherwise. The layout does not change the result.

  titanlike evaluate runs/NAME --data heldout.txt --task hellaswag_val.jsonl
  NPROC=8 titanlike evaluate llama/ --tensor 2 --task arc.jsonl --task piqa.jsonl --json"""

MAX_SEQ_LEN = 2048  # of text, where the checkpoint does not record the training's


def add(commands: Any) -> None:
    """Adds `evaluate` to the commands of `titanlike`."""
    parser = add_command(commands, "evaluate", DESCRIPTION, run)
    add_model_options(parser)
    text = "text files, JSON lines, Parquet or token shards"
    parser.add_argument("--data", action="append", default=[], metavar="PATH", help=text)
    text = f"JSON lines file with the items of a task in a format of {', '.join(FORMATS)}"
    parser.add_argument("--task", action="append", default=[], metavar="FILE", help=text)
    text = "items of each task, and sequences of --data, from the first (default: all)"
    parser.add_argument("--limit", type=non_negative_int, default=0, metavar="N", help=text)
    text = "length of the sequences of --data (default: as in training, or 2048)"
    parser.add_argument("--seq-len", type=positive_int, metavar="N", help=text)
    text = "field of a record that has its text (default: as in training, or text)"
    parser.add_argument("--text-field", metavar="NAME", help=text)
    parser.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="sequences at a time")
    for name in ("tensor", "pipeline", "context"):
        parser.add_argument(f"--{name}", type=positive_int, default=1, metavar="N", help=f"{name}-parallel processes")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")


def run(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    values = {"tasks": arguments.task, "data": arguments.data, "limit": arguments.limit}
    try:
        section = validate(Evaluation, values)
    except ValueError as error:  # a path that is too long
        raise UserError(f"--{error}".replace("tasks", "task").replace("Value error, ", "")) from None
    problems = [*section.problems()] or [*evaluation_files(section)]
    if not section.tasks and not section.data:
        problems.append("there is nothing to evaluate; give --data or --task")
    if problems:
        text = "\n".join(problems).replace("evaluation.tasks: ", "")
        for key, option in (("tasks", "--task"), ("data", "--data")):
            text = text.replace(f"evaluation.{key}", option)
        raise UserError(text)
    start_processes()
    with session(arguments.device) as device:
        _evaluate(arguments, section, device)


def _evaluate(arguments: argparse.Namespace, section: Evaluation, device: "torch.device") -> None:
    from titanlike.config.sections import Parallelism, Sample, Training
    from titanlike.data.tokens.tokenizer import build_tokenizer
    from titanlike.distributed import process_group
    from titanlike.inference.evaluator import Evaluator
    from titanlike.interop.weights import open_weights
    from titanlike.models.common.layers import attention_backend
    from titanlike.parallelisms.mesh import build_mesh
    from titanlike.tools.inference.load import default_dtype, load_for_evaluation

    sizes = {name: getattr(arguments, name) for name in ("tensor", "pipeline", "context")}
    try:
        parallelism = Parallelism(**sizes).resolve(process_group.world_size())
    except UserError as error:
        raise UserError(str(error).replace("parallelism.", "--")) from None
    mesh = build_mesh(device.type, **parallelism.dimensions())
    share = process_group.rank(), process_group.world_size()
    weights = open_weights(arguments.path, step=arguments.step, verify_share=share)
    tokenizer = build_tokenizer(weights.tokenizer, weights.config.vocab_size, str(weights.path))
    data, trained_seq_len = _data_section(weights, arguments.text_field)
    max_length = weights.config.max_seq_len
    seq_len = arguments.seq_len or min(trained_seq_len or MAX_SEQ_LEN, max_length)
    if not 2 <= seq_len <= max_length:
        raise UserError(f"--seq-len {seq_len}: use 2 to {max_length} tokens, the context of the model")
    training = Training(seq_len=seq_len, local_batch_size=arguments.batch_size)
    evaluator = Evaluator(section, Sample(), data, training, weights.config, tokenizer, 0)
    model = load_for_evaluation(weights, mesh, parallelism, device, arguments.dtype or default_dtype(device))

    line = LiveLine(bar=True, transient=True)
    shows = process_group.is_main() and not arguments.json

    def print_metrics(name: str, metrics: dict[str, float]) -> None:
        if shows:
            line.print(f"{name}: {_format_metrics(metrics)}")

    def show_progress(name: str, batch: int, num_batches: int) -> None:
        if shows and line.is_terminal:
            line.update(f"{name}: batch {batch:,} of {num_batches:,}", batch, num_batches)

    try:
        with attention_backend("auto"):
            results = evaluator.evaluate(model, mesh, print_metrics, show_progress)
    finally:
        line.close()
    if process_group.is_main() and arguments.json:
        print(json.dumps({"model": str(weights.path), "results": results}, indent=1))


def _data_section(weights: "Weights", text_field: str | None) -> tuple[Any, int]:
    """Returns how the training read documents, and its sequence length; defaults for a Hugging Face folder."""
    from titanlike.config.sections import Data
    from titanlike.tools.inference.load import training_recipe

    recipe = training_recipe(weights)
    saved = recipe.get("data", {})
    known = {name: saved[name] for name in ("text_field", "prompt_field", "document_masks") if name in saved}
    if text_field:
        known |= {"text_field": text_field}
    return Data(**known), recipe.get("training", {}).get("seq_len", 0)


def _format_metrics(metrics: dict[str, float]) -> str:
    """Formats metrics on one line."""
    return "  ".join(
        f"{name} {value:,.0f}" if name in ("tokens", "bytes") else f"{name} {value:.4f}"
        for name, value in metrics.items()
    )
