"""`titanlike verify RECIPE --compile`: compares the compiled model of a recipe with its eager model, on the CPU."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import tomli
import torch
from torch import Tensor, nn

from titanlike.config.layout import LAYOUT_KEYS
from titanlike.config.sections import ActivationCheckpoint, Compile, Data
from titanlike.data.batches import openers, sources
from titanlike.data.batches.dataloaders import build_dataloaders
from titanlike.data.batches.loader import Batch
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.distributed import process_group
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.parallelisms.mesh import Mesh, build_mesh
from titanlike.parallelize import parallelize
from titanlike.recipe import PretrainRecipe, to_toml
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.mlm import MlmRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.run.loop import forward_backward, num_labels
from titanlike.tools.programs import load_known, toml
from titanlike.tools.verify import comparison as phases
from titanlike.tools.verify.compiled import check_backend, compare_compiled, print_comparison, print_title
from titanlike.tools.verify.module import Report
from titanlike.tools.verify.options import parse_tolerance
from titanlike.tools.verify.record import Functions, record
from titanlike.tools.verify.small_recipe import print_changes, shrink

ROWS = 4
# What rounding to bfloat16 explains of the distance from float32: this multiple of that of eager code, and at least its precision.
BFLOAT16_FACTOR, BFLOAT16_EPS = 3.0, 2.0**-8
BFLOAT16_KINDS = (phases.OUTPUTS, phases.LOSS, phases.GRADIENTS, phases.ACCUMULATED)


def verify_compiled_recipe(path: Path, steps: int, tolerance: str, overrides: Mapping[str, str]) -> NoReturn:
    """Exits with 0 if the compiled model agrees with the eager model, 1 if not."""
    tolerances = parse_tolerance(tolerance, phases.COMPILED_TOLERANCES)
    keys = dict(overrides) | dict.fromkeys((f"parallelism.{name}" for name in LAYOUT_KEYS), "1")
    keys |= {"parallelism.pipeline_split": "[]", "parallelism.pipeline_stages": "0", "compile.mode": "block"}
    recipe = load_known(path, keys)
    check_backend(recipe.compile.backend)
    values = tomli.loads(to_toml(recipe))
    smaller = shrink(values, 1, steps)
    # What is compared.
    smaller = {
        key: value for key, value in smaller.items() if key not in ("compile.mode", "activation_checkpoint.mode")
    }
    smaller |= {"training.global_batch_size": ROWS, "training.local_batch_size": ROWS}
    small = load_known(path, keys | {key: toml(value) for key, value in smaller.items()})
    print_title(str(path), recipe.compile.backend, steps)
    print_changes(values, smaller)
    print(flush=True)
    with process_group.session("cpu"):
        torch.set_float32_matmul_precision("highest")
        functions = partial(functions_of, small, build_mesh("cpu"))
        agrees = print_comparison(
            functions("", "float32"), lambda each: functions(each, "float32"), recipe.compile.backend, steps, tolerances
        )
        if agrees and recipe.training.compute_dtype == "bfloat16":
            report, explained = compare_bfloat16(functions, recipe.compile.backend)
            print(f"\nbfloat16, distance from eager float32; eager bfloat16 explains {explained}\n{report}")
            agrees = report.finding is None
    sys.exit(0 if agrees else 1)


def functions_of(recipe: PretrainRecipe, mesh: Mesh, backend: str, dtype: Literal["float32", "bfloat16"]) -> Functions:
    """Returns the model of a recipe, compiled with its activation checkpointing or, without a backend, eager, and its batches."""
    section = Data(source="synthetic", document_masks=recipe.data.document_masks)
    opener = openers.of(recipe) if isinstance(recipe, MlmRecipe | Seq2SeqRecipe) else sources.open_sources
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size, "")
    data = build_dataloaders(
        section, recipe.training, tokenizer, seed=recipe.run.seed, validate=False, dropout=recipe.model.dropout > 0,
        vocab_size=recipe.model.vocab_size, num_next_tokens=recipe.model.num_mtp_layers, device=torch.device("cpu"),
        open_sources=opener, **mesh.data_shard(recipe.training.seq_len),
    )  # fmt: skip

    def model() -> nn.Module:
        with torch.device("meta"):
            built = build_model(recipe.model)
        training = replace(recipe.training, compute_dtype=dtype)
        checkpointing, compile = ActivationCheckpoint(), Compile(mode="none")
        if backend:
            checkpointing, compile = recipe.activation_checkpoint, replace(recipe.compile, backend=backend)
        built = parallelize(
            built, mesh, split=recipe.parallelism.split(recipe.model), training=training, parallelism=recipe.parallelism,
            float8=recipe.float8, lora=getattr(recipe, "lora", None), activation_checkpoint=checkpointing, compile=compile,
            static_shapes=isinstance(recipe, DistillRecipe),
        )  # fmt: skip
        initialize(built, torch.device("cpu"), recipe.run.seed)
        return built

    def batch(step: int) -> dict[str, Tensor]:
        tensors = data.training.build(step)[1]
        is_last = step % recipe.training.steps == 0  # of a step's two micro-batches
        length = recipe.training.seq_len * 3 // 4 if is_last else recipe.training.seq_len
        return {name: tensor[:, :length].contiguous() for name, tensor in tensors.items()}

    def backward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        microbatch = Batch({name: tensor for name, tensor in batch.items() if name != "labels"}, batch["labels"])
        return forward_backward(model, [microbatch], num_labels([microbatch]), mesh).mean

    return Functions(model, batch, backward=backward)


def compare_bfloat16(functions: Any, backend: str) -> tuple[Report, str]:
    """Compares the distance of compiled bfloat16 code from eager float32 code with that of eager bfloat16 code. Returns the result
    and what rounding explains."""
    exact, eager = (record(functions("", dtype), steps=1, mode="eager") for dtype in ("float32", "bfloat16"))
    exact, eager = exact.only(BFLOAT16_KINDS), eager.only(BFLOAT16_KINDS)
    rounding = phases.compare(exact, [eager], (), dict.fromkeys(BFLOAT16_KINDS, float("inf")))
    tolerances = {each.kind: max(BFLOAT16_FACTOR * each.worst, BFLOAT16_EPS) for each in rounding}
    explained = ", ".join(f"{kind} {tolerance:.1e}" for kind, tolerance in tolerances.items())
    return compare_compiled(exact, functions(backend, "bfloat16"), 1, tolerances), explained
