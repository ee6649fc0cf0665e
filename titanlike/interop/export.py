"""Export of a checkpoint to a Hugging Face folder, tensor by tensor."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlike.checkpoint.format import write_tensors
from titanlike.config import UserError
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer, with_sentinels
from titanlike.interop.generation_config import GENERATION_CONFIG, generation_config, trained_template
from titanlike.interop.hf_folder import CONFIG, INDEX
from titanlike.interop.hf_parameters import join_parts, stored_tensors
from titanlike.interop.tokenizer_files import tokenizer_files
from titanlike.interop.weights import CheckpointWeights, Weights
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory

SHARD_SIZE = 5 * 10**9  # bytes of a file, as transformers writes them


def export(
    weights: Weights,
    folder: Path,
    *,
    dtype: str = "",
    shard_size: int = SHARD_SIZE,
    replace: bool = False,
) -> int:
    """Writes a folder that transformers loads. It appears whole or not at all. Returns the size of the weights in bytes.

    Args:
        dtype: precision of the weights, such as "bfloat16". Default: as in the checkpoint. The balancing bias of experts is in
            float32, as in transformers.
        shard_size: maximum number of bytes in a file, unless a tensor is larger.
        replace: whether to replace a folder that exists.
    """
    if os.path.lexists(folder) and not replace:
        raise UserError(f"{folder} exists; choose another name, or remove it")
    tokenizer = build_tokenizer(weights.tokenizer, weights.config.vocab_size, str(weights.path))
    check_tokenizer(weights, tokenizer)
    plan = _Plan(weights, getattr(torch, dtype) if dtype else None)
    with whole_folder(folder) as partial:
        if weights.config.is_encoder_decoder:
            tokenizer = with_sentinels(tokenizer, weights.config.vocab_size)
        closes = weights.config.is_encoder_decoder or not weights.config.causal
        files = tokenizer_files(tokenizer, weights.config.max_seq_len, closes=closes)
        if template := trained_template(weights, tokenizer):
            files["chat_template.jinja"] = template.source.encode()
        for name, content in files.items():
            atomic_write_text(partial / name, content)
        _write_configs(partial, plan, generation_config(weights, tokenizer))
        return _write_tensors(partial, plan, shard_size)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Creates a folder to write files into, which takes the place of `folder` at the end, and is removed after an error."""
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        fsync_directory(partial)
        if os.path.lexists(folder):
            shutil.rmtree(folder)
        partial.rename(folder)
        fsync_directory(folder.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _Plan:
    """The tensors of a folder by name: shapes, precision, and what each consists of."""

    def __init__(self, weights: Weights, dtype: torch.dtype | None) -> None:
        self.weights = weights
        self.config = weights.config.to_hugging_face()  # first: its error names the option without an equivalent
        self.tensors = stored_tensors(weights.config)
        self.specs = {}
        for name, tensor in self.tensors.items():
            parameter, _ = tensor.parts[0]
            stored = torch.float32 if tensor.spec.keeps_float32 else dtype or weights.dtype(parameter)
            self.specs[name] = torch.empty(tensor.shape, dtype=stored, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the first tensor, and of all others unless a checkpoint mixes precisions."""
        return next(iter(self.specs.values())).dtype

    def read(self, stored: str) -> Tensor:
        """Returns the values of a tensor."""
        tensor, spec = self.tensors[stored], self.specs[stored]
        parts = [self.weights.read(*part).to(spec.dtype) for _, part in sorted(tensor.parts.items())]
        return join_parts(tensor.spec, parts).contiguous().view(spec.shape)


def _write_tensors(folder: Path, plan: _Plan, shard_size: int) -> int:
    shards = list(files_of(plan.specs, shard_size))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / file).open("xb", buffering=0) as stream:
            write_tensors(stream, {name: plan.specs[name] for name in names}, plan.read, {})
            os.fsync(stream.fileno())
        weight_map |= dict.fromkeys(names, file)
    size = sum(spec.nbytes for spec in plan.specs.values())
    parameters = sum(spec.numel() for spec in plan.specs.values())
    index = {"metadata": {"total_size": size, "total_parameters": parameters}, "weight_map": weight_map}
    _write_json(folder / INDEX, index)
    return size


def files_of(specs: Mapping[str, Tensor], size_of_file: int) -> Iterator[list[str]]:
    """Yields the names of the tensors of each file."""
    names: list[str] = []
    size = 0
    for name, spec in specs.items():
        if names and size + spec.nbytes > size_of_file:
            yield names
            names, size = [], 0
        names.append(name)
        size += spec.nbytes
    yield names


def _write_configs(folder: Path, plan: _Plan, generation: dict[str, Any]) -> None:
    # The keys are written without a value too: transformers has a default for them in some architectures.
    ids = {key: generation.get(key) for key in ("bos_token_id", "eos_token_id")}
    dtype = str(plan.dtype).removeprefix("torch.")
    # transformers 5 reads dtype, 4 torch_dtype.
    _write_json(folder / CONFIG, {**plan.config, **ids, "dtype": dtype, "torch_dtype": dtype})
    _write_json(folder / GENERATION_CONFIG, generation)


def check_tokenizer(weights: Weights, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if the tokenizer is no longer the one that the model was trained with."""
    saved = weights.metadata.tokenizer if isinstance(weights, CheckpointWeights) else ""
    if saved not in ("", tokenizer.fingerprint):
        raise UserError(
            f"tokenizer.encoding = {weights.tokenizer.encoding!r} is not the tokenizer of {weights.path}: its fingerprint is "
            f"{tokenizer.fingerprint}, not {saved}; restore the file"
        )


def _write_json(file: Path, values: dict[str, Any]) -> None:
    atomic_write_text(file, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
