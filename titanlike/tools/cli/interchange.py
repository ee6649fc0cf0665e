"""`titanlike export` and `titanlike import`: models for other programs, and recipes and checkpoints from what users bring."""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from titanlike.config import UserError
from titanlike.tools.arguments import add_script_options, positive_int
from titanlike.tools.cli.command import add_command

EXPORT = """\
Writes a checkpoint of any layout as a folder that transformers loads. It has the weights as safetensors with their index,
config.json, generation_config.json and the tokenizer, and appears whole or not at all.

  titanlike export runs/NAME model/
  titanlike export runs/NAME/checkpoints/step-00001000 model/ --dtype bfloat16

Of a run with LoRA, it writes the model with the adapters merged into it or, with --adapter, the adapters in PEFT's format.

With --format dcp, it writes a checkpoint that torchtitan 0.3 and torch.distributed.checkpoint load: weights, the state of AdamW,
the learning-rate schedule and the step. The position in the data is not part of it.

  titanlike export runs/NAME outputs/checkpoint/step-1000 --format dcp

With --format gguf, it writes a file that llama.cpp reads, also of a Hugging Face folder.

  titanlike export runs/NAME model.gguf --format gguf --dtype q8_0"""

IMPORT = """\
Writes a recipe from a model or from a job of another program, or converts its checkpoint. From a Hugging Face folder, the recipe
has [model], [tokenizer] and checkpoint.initial, with a learning rate for fine-tuning. Set the data in it: without data.path it does
not run.

  titanlike import Llama-3.2-1B/ finetune.toml && titanlike train finetune.toml --data.path=chats.jsonl --check 8

From a job of another program, it writes the recipe of the job. That is a config of torchtitan 0.3, which the Python of its
environment builds without a GPU, or its JSON, a job config of torchtitan 0.2, or a shell script that starts Megatron-LM's
pretrain_gpt.py, which is run with bash and a recorder in place of programs. Each key is in the recipe, or named in its comments
with the reason why not.

  titanlike import --python venv/bin/python recipe.toml --gpus 64 -- --module llama3 --config llama3_8b --training.steps 1000
  titanlike import torchtitan.toml recipe.toml --gpus 64
  titanlike import pretrain_llama.sh recipe.toml --env NNODES=8

Of a checkpoint of torch.distributed.checkpoint that torchtitan or Megatron-LM wrote, it writes a checkpoint of the recipe's run:
the weights and, where they can be converted, the state of AdamW and the step. The run resumes from it under any layout.

  titanlike import outputs/checkpoint/step-1000 train.toml --from torchtitan && titanlike train train.toml"""

# Formats of `export` for torch.distributed.checkpoint, and the programs that they are for.
DCP = {"dcp": "torchtitan", "dcp_0_2": "torchtitan_0_2"}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands to the parser."""
    command = add_command(commands, "export", EXPORT, _export)
    command.add_argument("source", type=Path, metavar="RUN|CHECKPOINT", help="run or checkpoint")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write, or file")
    command.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", "q8_0"],
        help="precision of the weights (default: the checkpoint's); q8_0: 8 bits, in a GGUF file",
    )
    command.add_argument(
        "--step", type=positive_int, default=0, metavar="N", help="step of the run (default: the newest)"
    )
    command.add_argument("--shard-size", type=positive_int, default=5000, metavar="MB", help="size of the largest file")
    text = "where the run's tokenizer is now, as in a recipe (default: where it was in training)"
    command.add_argument("--tokenizer", default="", metavar="ENCODING", help=text)
    command.add_argument("--adapter", action="store_true", help="write the LoRA adapters, in PEFT's format")
    text = "hf: a folder for transformers; gguf: a file for llama.cpp; dcp: a checkpoint for torchtitan 0.3; dcp_0_2: for 0.2"
    command.add_argument("--format", choices=["hf", "gguf", *DCP], default="hf", help=text)
    command = add_command(
        commands,
        "import",
        IMPORT,
        run,
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="Hugging Face folder, a job's .toml, .json or .sh file, a checkpoint of torchtitan or Megatron-LM, or, after -- at "
        "the end, the arguments of torchtitan 0.3",
    )
    text = "recipe to write, or, for a checkpoint, the recipe of the run to continue"
    command.add_argument("recipe", type=Path, metavar="RECIPE.toml", help=text)
    text = "Python that imports torchtitan 0.3 (default: this one)"
    command.add_argument("--python", default=sys.executable, metavar="PYTHON", help=text)
    text = "GPUs of the job, if its batch or layout depends on their number"
    command.add_argument("--gpus", type=positive_int, metavar="N", help=text)
    text = "program that wrote the checkpoint (default: recognized by its tensors)"
    command.add_argument(
        "--from", dest="program", choices=["torchtitan", "torchtitan_0_2", "megatron"], default="", help=text
    )
    add_script_options(command)
    command.add_argument("--weights-only", action="store_true", help="start at step 1 with a new optimizer")


def with_source(words: list[str]) -> list[str]:
    """Returns the words of a command line, in which what follows -- is the SOURCE of `import`."""
    if words[:1] != ["import"] or "--" not in words:
        return words
    end = words.index("--")
    return ["import", f" {shlex.join(words[end + 1 :])}", *words[1:end]]  # with a space it is no option


def run(arguments: argparse.Namespace) -> None:
    """Runs `import`."""
    source, recipe = Path(arguments.source), arguments.recipe
    if arguments.source.startswith(" --"):
        from titanlike.tools.migration.formats import import_command_line

        import_command_line(shlex.split(arguments.source), arguments.python, recipe, arguments.gpus)
    elif arguments.program or arguments.weights_only or _is_dcp(source):
        from titanlike.tools.migration.checkpoints import import_checkpoint
        from titanlike.tools.programs import load_known

        print(import_checkpoint(source, load_known(recipe, {}), arguments.program, weights_only=arguments.weights_only))
    else:
        from titanlike.tools.migration.formats import import_recipe

        env = dict(arguments.env)
        import_recipe(source, recipe, arguments.gpus, env, trust=arguments.trust)


def _export(arguments: argparse.Namespace) -> None:
    from titanlike.interop.export import export
    from titanlike.interop.weights import CheckpointWeights, open_weights
    from titanlike.tools.adapter import export_adapter

    weights = open_weights(arguments.source, step=arguments.step)
    if arguments.tokenizer and (arguments.format in DCP or arguments.adapter):
        raise UserError("--tokenizer is of an export with a tokenizer: omit it with --adapter and --format dcp")
    if arguments.tokenizer:  # compared with the fingerprint in the checkpoint
        weights.tokenizer = replace(weights.tokenizer, encoding=arguments.tokenizer)
    if arguments.format in DCP:
        from titanlike.tools.migration.checkpoints import export_checkpoint

        if not isinstance(weights, CheckpointWeights):
            raise UserError(
                f"{arguments.source} is a Hugging Face folder; --format {arguments.format} exports checkpoints of a run"
            )
        if arguments.dtype or arguments.adapter:
            raise UserError(
                f"--format {arguments.format} has no --dtype and no --adapter: it keeps the checkpoint's precision"
            )
        print(export_checkpoint(weights, arguments.folder, DCP[arguments.format]))
        return
    if arguments.format == "gguf":
        from titanlike.tools.gguf_file import export_gguf

        if arguments.adapter:
            raise UserError("--format gguf has no --adapter: it writes the model with the adapters merged into it")
        size = export_gguf(weights, arguments.folder, dtype=arguments.dtype or "")
        print(f"{arguments.folder}: {weights.config.label()}, {size:,} bytes, from {weights.path}")
        return
    if arguments.dtype == "q8_0":
        raise UserError("--dtype q8_0 requires --format gguf")
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
