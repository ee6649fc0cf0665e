"""Checkpoints of torchtitan and Megatron-LM become checkpoints of a run, and the other way around. Tensors are converted one by
one."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from titanlike.checkpoint import loader
from titanlike.checkpoint.files import file_of, name_of
from titanlike.checkpoint.format import write_tensors
from titanlike.checkpoint.store import CheckpointMetadata, complete, open_store
from titanlike.config import UserError
from titanlike.config.base import shown, validate
from titanlike.config.optimizer import Optimizer, Schedule
from titanlike.interop.export import SHARD_SIZE, files_of, whole_folder
from titanlike.interop.hf_parameters import whole
from titanlike.interop.weights import CheckpointWeights
from titanlike.models.common.config import TransformerConfig
from titanlike.optim.schedule import learning_rate
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.dpo import reference_of
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.run.run_dir import RunDirectory, recipe_as_json, versions
from titanlike.tools.migration.dcp import DCPFolder, write_dcp
from titanlike.tools.migration.parameter_map import Part, megatron_parts, torchtitan_parts
from titanlike.tools.output_files import refuse_existing
from titanlike.utils.rng import generator_states, seed_generators

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class CheckpointFormat:
    """What the checkpoints of another program are recognized by, and where things are in them."""

    parts: Callable[[TransformerConfig, Collection[str]], dict[str, Part]]
    state_parts: Callable[[TransformerConfig, Collection[str]], dict[str, Part]]  # as if they were of weights
    evidence: str  # in the key of a weight
    head: str  # the LM head, saved even if it is tied
    state_key: str  # of the optimizer state {kind} of the tensor {key}
    master_key: str  # of the float32 weights, if the model has low precision
    step: Callable[[DCPFolder], int]
    ignored: str  # keys that have no weights

    def weight(self, part: Part, folder: DCPFolder) -> Part:
        """Returns the place of a parameter's values in the highest precision."""
        master = self.master_key.format(key=part.key)
        return replace(part, key=master) if master in folder.tensors else part

    def moment(self, part: Part, kind: str) -> Part:
        """Returns the place of a parameter's optimizer state."""
        return replace(part, key=self.state_key.format(key=part.key, kind=kind))

    def is_weight(self, key: str) -> bool:
        """Whether a tensor belongs to the model."""
        return not re.match(self.ignored, key)


def _torchtitan_step(folder: DCPFolder) -> int:
    return folder.value("train_state.step") if "train_state.step" in folder.values else 0


def _megatron_step(folder: DCPFolder) -> int:
    match = re.fullmatch(r"iter_(\d+)", folder.path.resolve().name)
    return int(match[1]) if match else 0


TORCHTITAN_STATE, TORCHTITAN_IGNORED = "optimizer.state.{key}.{kind}", r"optimizer\.|.*freqs_cis$"
PROGRAMS = {
    "torchtitan": CheckpointFormat(
        parts=torchtitan_parts,
        state_parts=partial(torchtitan_parts, is_state=True),
        evidence="layers.0.attention.qkv_linear.",
        head="lm_head.weight",
        state_key=TORCHTITAN_STATE,
        master_key="",
        step=_torchtitan_step,
        ignored=TORCHTITAN_IGNORED,
    ),
    "torchtitan_0_2": CheckpointFormat(
        parts=partial(torchtitan_parts, is_0_2=True),
        state_parts=partial(torchtitan_parts, is_0_2=True),
        evidence="layers.0.attention.wq.",
        head="output.weight",
        state_key=TORCHTITAN_STATE,
        master_key="",
        step=_torchtitan_step,
        ignored=TORCHTITAN_IGNORED,
    ),
    "megatron": CheckpointFormat(
        parts=megatron_parts,
        state_parts=megatron_parts,
        evidence="self_attention.linear_qkv.",
        head="output_layer.weight",
        state_key="optimizer.state.{kind}.{key}",
        master_key="optimizer.state.fp32_param.{key}",
        step=_megatron_step,
        ignored=r"optimizer\.|.*_extra_state|rng_state|rerun_state",
    ),
}


def program_of_checkpoint(folder: DCPFolder) -> str:
    """Returns the program that wrote a checkpoint, which the names of its tensors show."""
    for name, program in PROGRAMS.items():
        if any(program.evidence in key for key in folder.tensors):
            return name
    raise UserError(
        f"{folder.path} is not a checkpoint of {', '.join(PROGRAMS)}: its tensors are "
        f"{shown(', '.join(sorted(folder.tensors)[:5]))}, ...; export it as a Hugging Face folder with its own program, and import "
        "that"
    )


def import_checkpoint(source: Path, recipe: PretrainRecipe, name: str = "", *, weights_only: bool = False) -> str:
    """Writes the checkpoint of another program as one of the run that a recipe describes, which then resumes from it under any
    layout. Without the state of the optimizer, or with `weights_only`, it is the checkpoint of step 0. Returns what was imported.

    Args:
        name: the program, one of `PROGRAMS`. Default: recognized by the names of the tensors.
    """
    folder = DCPFolder(source)
    name = name or program_of_checkpoint(folder)
    program = PROGRAMS[name]
    if isinstance(recipe, FinetuneRecipe) and recipe.lora.rank:
        raise UserError(
            "lora.rank: a run with LoRA starts from checkpoint.initial; import without LoRA, export, and set that key"
        )
    if reference_of(recipe):
        raise UserError(
            "program = 'dpo': the reference model is checkpoint.initial; import with a recipe of pretrain or finetune, and "
            "set that key to its run"
        )
    if not recipe.run.name:
        raise UserError(
            "run.name is not set, so that `titanlike train` would start a new run without this checkpoint; set it in the recipe"
        )
    run = RunDirectory(recipe)
    if open_store(run.checkpoints).steps() or run.metrics.exists():
        raise UserError(f"{run.path} holds a run already; set run.name in the recipe to import into a new one")
    parts, states = (find(recipe.model, folder.tensors) for find in (program.parts, program.state_parts))
    _check(folder, program, parts, recipe.model)
    problem = "--weights-only is set" if weights_only else _state_problem(folder, program, states, recipe)
    step = 0 if problem else program.step(folder)
    if step >= recipe.training.steps:
        raise UserError(
            f"{source} is of step {step}, but training.steps = {recipe.training.steps}; set it to the steps in total"
        )

    sources = {f"model.{parameter}": program.weight(part, folder) for parameter, part in parts.items()}
    counts = {}
    if step:
        for parameter, part in states.items():
            counts[f"optimizer.{parameter}.step"] = torch.tensor(float(step))
            for kind in MOMENTS:
                sources[f"optimizer.{parameter}.{kind}"] = program.moment(part, kind)
    dtype, shapes = getattr(torch, recipe.training.master_dtype), recipe.model.parameters()
    specs = {target: torch.empty(shapes[_parameter_of(target)].shape, dtype=dtype, device="meta") for target in sources}

    def read(target: str) -> Tensor:
        return counts[target] if target in counts else _read(folder, sources[target]).to(dtype)

    size = _write(
        run,
        CheckpointMetadata(
            step=step,
            recipe=recipe_as_json(recipe),
            tokens=recipe.training.num_tokens(step),
            versions=versions(),
            imported=name,
        ),
        specs | counts,
        read,
    )
    what = f"weights and optimizer state of step {step:,}" if step else f"weights ({problem}: the run starts at step 1)"
    return (
        f"{run.checkpoints}/{name_of(step)}: {what} of {name}, {size:,} bytes; the data continues where the recipe's data is "
        f"after step {step:,}"
    )


def _write(
    run: RunDirectory, metadata: CheckpointMetadata, specs: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> int:
    """Writes a checkpoint, tensor by tensor. Returns its size in bytes."""
    store, step, size = open_store(run.checkpoints), metadata.step, sum(spec.nbytes for spec in specs.values())
    if "://" not in run.checkpoints:
        Path(run.checkpoints).mkdir(parents=True, exist_ok=True)
    store.begin(step, size)
    seed_generators(run.recipe.run.seed)
    states = json.dumps(generator_states())  # of a new run
    digests = {}
    for number, names in enumerate(files_of(specs, SHARD_SIZE)):  # ranks verify them together
        ranges = {target: [list(specs[target].shape), [0] * specs[target].dim()] for target in names}
        notes = {"shards": json.dumps(ranges), "generators": states}
        with store.create(step, file_of(number)) as stream:
            digests[file_of(number)] = write_tensors(stream, {target: specs[target] for target in names}, read, notes)
    complete(store, metadata, digests)
    return size


def _parameter_of(target: str) -> str:
    """Returns the parameter that a tensor of a checkpoint belongs to."""
    return re.sub(r"^model\.|^optimizer\.|\.(exp_avg|exp_avg_sq|step)$", "", target)


def _read(folder: DCPFolder, part: Part) -> Tensor:
    """Returns the values of a parameter."""
    shape, offset = part.shape, (0,) * len(part.shape)
    if part.layer is None:
        values = folder.read(part.key, offset, shape)
    else:
        values = folder.read(part.key, (part.layer, *offset[1:]), (1, *shape[1:]))[0]
    return (values if part.rows is None else values[part.rows]).contiguous()


def _check(folder: DCPFolder, program: CheckpointFormat, parts: Mapping[str, Part], config: TransformerConfig) -> None:
    """Raises `UserError` unless a checkpoint has exactly the weights of a model."""
    expected = {part.key: part.shape for part in parts.values()}
    found = {key for key in folder.tensors if program.is_weight(key)}
    head = program.head
    if config.tied_head and head in found:  # saved twice
        embedding = parts["tok_embeddings.weight"]
        is_equal = folder.shape(head) == folder.shape(embedding.key)
        if not (is_equal and torch.equal(_read(folder, replace(embedding, key=head)), _read(folder, embedding))):
            raise UserError(
                f"model.tied_head = true, but {head} of {folder.path} differs from {embedding.key}; set model.tied_head = false"
            )
        found.remove(head)
    surplus, missing = sorted(found - expected.keys()), sorted(expected.keys() - found)
    for kind, keys in (("lacks", missing), ("also has", surplus)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise UserError(
                f"{folder.path} {kind} {shown(', '.join(keys[:3]))}{more}, which the recipe's model.name = {config.name!r} with "
                f"num_layers = {config.num_layers} {'has' if kind == 'lacks' else 'lacks'}; correct [model]"
            )
    for key, shape in expected.items():
        if folder.shape(key) != shape:
            raise UserError(
                f"{folder.path}: {key} has shape {folder.shape(key)}, but the recipe's model has {shape}; correct [model]"
            )


def _state_problem(
    folder: DCPFolder, program: CheckpointFormat, parts: Mapping[str, Part], recipe: PretrainRecipe
) -> str:
    """Returns why the state of the optimizer cannot be imported, or "" if it can."""
    optimizer = recipe.optimizer
    keys = [program.moment(part, kind).key for part in parts.values() for kind in MOMENTS]
    missing = [key for key in keys if key not in folder.tensors]
    if len(missing) == len(keys):
        other = any(key.startswith("optimizer.") for key in folder.tensors)
        return "its optimizer state has another format" if other else "it has no optimizer state"
    if missing:
        return f"it lacks the optimizer state {missing[0]}"
    if any(group.optimizer != "adamw" for group in optimizer.groups):
        return "optimizer.groups has another optimizer than AdamW"
    if optimizer.state_dtype != "full" or optimizer.stochastic_rounding:
        return "the recipe's optimizer state has low precision"
    if recipe.data.source == "stream":
        return "data.source = 'stream' has no position at a step of another program"
    if not program.step(folder):
        return "the step is not known: Megatron-LM has it in the name of the folder, iter_0001000"
    return ""


def export_checkpoint(weights: CheckpointWeights, folder: Path, name: str = "torchtitan") -> str:
    """Writes a checkpoint of a run as one of torchtitan, which `torch.distributed.checkpoint` reads: weights, the state of AdamW,
    the learning-rate schedule and the step. Returns what was exported."""
    recipe, step, program = weights.metadata.recipe, weights.metadata.step, PROGRAMS[name]
    refuse_existing(folder)
    if weights.adapted_layers:
        raise UserError(f"{weights.path} has LoRA adapters; export a Hugging Face folder, which has them merged")
    parts, states = (find(weights.config, ()) for find in (program.parts, program.state_parts))
    reader, entries = loader.open_checkpoint(Path(weights.path))
    state: dict[str, Any] = {}
    sources: dict[str, list[tuple[str, Part]]] = {}

    def add(target: dict[str, Any], key: str, full_key: str, name: str, part: Part) -> None:
        target[key] = torch.empty(part.shape, dtype=entries[name].dtype, device="meta")
        sources.setdefault(full_key, []).append((name, part))

    for parameter, part in _with_head(parts, program, weights.config):
        add(state, part.key, part.key, f"model.{parameter}", part)
    note = ""
    if missing := [p for p in parts for kind in (*MOMENTS, "step") if f"optimizer.{p}.{kind}" not in entries]:
        note = f"; without optimizer state, because the state of {missing[0]} is not AdamW's"
    else:
        optimizer: dict[str, Any] = {}
        section = validate(Optimizer, recipe["optimizer"])
        options, schedule = _torchtitan_options(section, recipe, step)
        decays = {
            parameter: _weight_decay(section, parameter, len(part.shape) > 1) for parameter, part in parts.items()
        }
        if name == "torchtitan_0_2" and len({*decays.values()}) > 1:
            note = f"; torchtitan has one weight decay for all parameters, also norms: {section.weight_decay}"
        for parameter, part in _with_head(states, program, weights.config):
            for kind in (*MOMENTS, "step"):
                key = f"state.{part.key}.{kind}"
                place = part if kind in MOMENTS else Part(key, ())
                add(optimizer, key, f"optimizer.{key}", f"optimizer.{parameter}.{kind}", place)
            own = options if name == "torchtitan_0_2" else options | {"weight_decay": decays[parameter]}
            optimizer |= {f"param_groups.{part.key}.{option}": value for option, value in own.items()}
        state |= {"optimizer": optimizer, "lr_scheduler": schedule}
    state["train_state"] = {"step": step, "ntokens_seen": weights.metadata.tokens}

    def read(key: str) -> Tensor:
        (first, place), *_ = sources[key]
        joined = torch.empty(place.shape, dtype=entries[first].dtype)
        for source, part in sources[key]:
            values = torch.empty(entries[source].global_shape, dtype=entries[source].dtype)
            reader.fill(source, values, whole(values.shape))
            joined[... if part.rows is None else part.rows] = values
        return joined

    with whole_folder(folder) as partial_folder:
        write_dcp(partial_folder, state, read)
    return f"{folder}: {weights.config.label()} of step {step:,} for {name}, from {weights.path}{note}"


def _with_head(
    parts: Mapping[str, Part], program: CheckpointFormat, config: TransformerConfig
) -> list[tuple[str, Part]]:
    """Returns the places of parameters, and of an LM head that is tied, which torchtitan loads by its own name."""
    embedding = "tok_embeddings.weight"
    head = [(embedding, replace(parts[embedding], key=program.head))] if config.tied_head else []
    return [*parts.items(), *head]


def _weight_decay(section: Optimizer, name: str, is_matrix: bool) -> float:
    group = section.group_of(name, is_matrix=is_matrix)
    if group and group.weight_decay is not None:
        return group.weight_decay
    return section.weight_decay if is_matrix else 0.0


def _torchtitan_options(
    section: Optimizer, recipe: Mapping[str, Any], step: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of torchtitan's optimizer, which has one group of parameters, and the state of its learning-rate schedule
    after a step."""
    peak, schedule, steps = section.lr, validate(Schedule, recipe["schedule"]), recipe["training"]["steps"]
    rate = learning_rate(min(step + 1, steps), steps, peak, schedule)  # of the next step
    optimizer = torch.optim.AdamW(
        [torch.empty(1)],
        peak,
        (section.beta1, section.beta2),
        section.eps,
        section.weight_decay,
        foreach=False,
        fused=True,
    )
    state = LambdaLR(optimizer, lambda _: 1.0).state_dict()
    del state["lr_lambdas"]
    state |= {"last_epoch": step, "_step_count": step + 1, "_last_lr": [rate]}
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return options | {"lr": rate}, state
