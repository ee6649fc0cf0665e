"""`titanlike export` and `titanlike import`: models for other programs, and recipes and checkpoints from what users bring."""

import argparse
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.recipe.load import dump
from titanlike.tools.arguments import positive_int
from titanlike.tools.cli.command import add_command
from titanlike.utils.atomic_write import atomic_write_text

EXPORT = """\
Writes a checkpoint of any layout as a folder that transformers loads: the weights as safetensors with their index, config.json,
generation_config.json and the tokenizer. The folder appears whole or not at all.

  titanlike export runs/NAME model/
  titanlike export runs/NAME/checkpoints/step-00001000 model/ --dtype bfloat16

Of a run with LoRA, it writes the model with the adapters merged into it or, with --adapter, the adapters in PEFT's format.

With --format dcp, it writes a checkpoint that torchtitan and torch.distributed.checkpoint load: weights, the state of AdamW, the
learning-rate schedule and the step. The position in the data is not part of it.

  titanlike export runs/NAME outputs/checkpoint/step-1000 --format dcp"""

IMPORT = """\
Writes a recipe that starts from the weights of a Hugging Face folder: its [model], [tokenizer] and checkpoint.initial, with a
learning rate for fine-tuning. Set the data in it: without data.path it does not run.

  titanlike import Llama-3.2-1B/ finetune.toml && titanlike train finetune.toml --data.path=chats.jsonl --check 8

Or writes the recipe of a job of another program: a job config of torchtitan 0.1 to 0.2, or a shell script that starts Megatron-LM's
pretrain_gpt.py. Each key of the file is in the recipe, or named in its comments with the reason why not.

  titanlike import torchtitan.toml recipe.toml --gpus 64
  titanlike import pretrain_llama.sh recipe.toml

Of a checkpoint of torch.distributed.checkpoint that torchtitan or Megatron-LM wrote, it writes a checkpoint of the recipe's run:
the weights and, where they can be converted, the state of AdamW and the step. The run resumes from it under any layout.

  titanlike import outputs/checkpoint/step-1000 train.toml --from torchtitan && titanlike train train.toml"""
# Lines of an imported recipe, and the comments on them.
COMMENTS = {
    'source = "chat"': 'conversations or instructions; "text" or "shards" for continued pre-training',
    'path = ""': "name your data here: the recipe does not run without it",
    "lr = 1e-05": "of all weights; LoRA (lora.rank) usually has ten times as much",
    "warmup_steps = 50": "the optimizer state is new",
}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands to the parser."""
    command = add_command(commands, "export", "write a checkpoint as a Hugging Face folder", EXPORT, _export)
    command.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run directory or checkpoint")
    command.add_argument("folder", type=Path, help="folder to write")
    command.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="convert to this precision")
    command.add_argument("--step", type=positive_int, default=0, help="checkpoint of a run (default: the newest)")
    command.add_argument(
        "--shard-size", type=positive_int, default=5000, metavar="MB", help="largest file (default: 5000)"
    )
    command.add_argument("--adapter", action="store_true", help="write the LoRA adapters, in PEFT's format")
    text = "hf: a folder for transformers (default); dcp: a checkpoint for torchtitan"
    command.add_argument("--format", choices=["hf", "dcp"], default="hf", help=text)
    command = add_command(
        commands,
        "import",
        "write a recipe from a Hugging Face folder or a job of another program, or convert a checkpoint",
        IMPORT,
        run,
    )
    command.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="Hugging Face folder, a job's .toml or .sh file, or a checkpoint of torchtitan or Megatron-LM",
    )
    command.add_argument(
        "recipe", type=Path, help="recipe to write, or, for a checkpoint, the recipe of the run to continue"
    )
    text = "GPUs of the job, if its batch or layout depends on their number"
    command.add_argument("--gpus", type=positive_int, metavar="N", help=text)
    text = "program that wrote the checkpoint (default: recognized by its tensors)"
    command.add_argument("--from", dest="program", choices=["torchtitan", "megatron"], default="", help=text)
    command.add_argument("--weights-only", action="store_true", help="start at step 1 with a new optimizer")


def run(arguments: argparse.Namespace) -> None:
    """Runs `import`."""
    if arguments.program or arguments.weights_only or _is_dcp(arguments.source):
        _import_checkpoint(arguments)
    elif arguments.source.is_file():
        from titanlike.tools.migration import formats

        formats.import_recipe(arguments.source, arguments.recipe, arguments.gpus)
    else:
        import_recipe(arguments.source, arguments.recipe)


def _export(arguments: argparse.Namespace) -> None:
    from titanlike.interop.export import export
    from titanlike.interop.weights import CheckpointWeights, open_weights
    from titanlike.tools.adapter import export_adapter

    weights = open_weights(arguments.source, step=arguments.step)
    if arguments.format == "dcp":
        from titanlike.tools.migration.checkpoints import export_checkpoint

        if not isinstance(weights, CheckpointWeights):
            raise UserError(f"{arguments.source} is a Hugging Face folder; --format dcp exports checkpoints of a run")
        if arguments.dtype or arguments.adapter:
            raise UserError("--format dcp has no --dtype and no --adapter: it keeps the checkpoint's precision")
        print(export_checkpoint(weights, arguments.folder))
        return
    if arguments.adapter and arguments.dtype:
        raise UserError("--adapter has no --dtype: it keeps the checkpoint's precision")
    if arguments.adapter:
        size = export_adapter(weights, arguments.folder)
        print(f"{arguments.folder}: {size:,} bytes of LoRA adapters, from {weights.path}")
        return
    size = export(weights, arguments.folder, dtype=arguments.dtype or "", shard_size=arguments.shard_size * 10**6)
    print(f"{arguments.folder}: {weights.config.label()}, {size:,} bytes of weights, from {weights.path}")


def _is_dcp(source: Path) -> bool:
    """Whether a folder, or one in it, is a checkpoint of torch.distributed.checkpoint."""
    return (source / ".metadata").exists() or any(source.glob("*/.metadata"))


def _import_checkpoint(arguments: argparse.Namespace) -> None:
    from titanlike.tools.migration.checkpoints import import_checkpoint
    from titanlike.tools.programs import load_known

    recipe = load_known(arguments.recipe, {})
    print(import_checkpoint(arguments.source, recipe, arguments.program, weights_only=arguments.weights_only))


def import_recipe(source: Path, recipe: Path) -> None:
    """Writes a recipe that starts from the weights of a folder."""
    from titanlike.interop.hf_folder import fields_of
    from titanlike.interop.weights import open_weights

    weights = open_weights(source)
    if recipe.exists():
        raise UserError(f"{recipe} exists; choose another file, or remove it")
    config, folder = weights.config, str(source.absolute())
    tables: dict[str, Any] = {
        "program": "finetune",
        "model": fields_of(config),
        "tokenizer": {"encoding": folder, "special": weights.tokenizer.special},
        "data": {"source": "chat", "path": ""},
        "training": {"seq_len": min(2048, config.max_seq_len)},
        "optimizer": {"lr": 1e-5},
        "schedule": {"warmup_steps": 50, "decay": "cosine", "min_ratio": 0.1},
        "checkpoint": {"initial": folder},
    }
    if not config.causal:
        tables |= {"program": "mlm", "data": {"source": "text", "path": ""}}
    if config.is_encoder_decoder:
        fields = {"prompt_field": "source", "text_field": "target"}
        tables |= {"program": "seq2seq", "data": {"source": "text", "path": "", **fields}}
    lines = [f"# Starts from the weights in {shown(folder)}. Set [data], and the rest of [training]."]
    for line in dump(tables).splitlines():
        lines.append(f"{line.ljust(30)} # {COMMENTS[line]}" if line in COMMENTS else line)
    try:
        atomic_write_text(recipe, "\n".join(lines) + "\n")
    except OSError as error:
        raise UserError(f"{recipe} cannot be written: {error.strerror}") from None
    print(f"{recipe}: {config.label()}, {config.num_parameters():,} parameters")
