"""Verifies and loads checkpoints, whatever layout saved them."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.checkpoint import store
from titanlike.checkpoint.files import FILE, MANIFEST, STATE, LocalFile, content_of, file_of, name_of
from titanlike.checkpoint.format import CheckpointCorrupt, FileDigest, ShardRange
from titanlike.checkpoint.optimizer_values import OptimizerValues
from titanlike.checkpoint.reader import Entry, TensorReader, corrupt_unless_read, read_header, verify_file
from titanlike.checkpoint.staging import named_tensors, shard_range_of
from titanlike.checkpoint.store import CheckpointMetadata
from titanlike.config import UserError
from titanlike.distributed import process_group
from titanlike.utils.dtensor import local_tensor


def verify(
    location: store.Store, step: int, *, content: bool
) -> tuple[str, CheckpointMetadata | None, dict[str, dict[str, Entry]]]:
    """Verifies a checkpoint, each rank a part of its files: their size and, with `content`, their hash.

    Returns the first problem, or an empty string and the metadata; and the tensor shards in each file. Raises `UserError` if the
    location cannot be read: falling back to an earlier checkpoint would discard a valid one.
    """
    problem, is_corrupt, metadata = "", True, None
    entries: dict[str, dict[str, Entry]] = {}  # by file
    try:
        files = read_manifest(location, step)
        rank, world_size = process_group.rank(), process_group.world_size()
        # Consecutive files: a rank needs most of their shards itself. All ranks read the state, below.
        share = sorted(files)[rank * len(files) // world_size : (rank + 1) * len(files) // world_size]
        for name in dict.fromkeys((STATE, *share)):
            hashed = content or name == STATE  # the latter is small
            with corrupt_unless_read(f"{location}/{name_of(step)}/{name}"):
                file = location.open(step, name, download=hashed)
            verify_file(file, files[name], content=hashed)
            if name != STATE:
                entries[name] = read_header(file).entries
        metadata = read_state(location, step)
    except UserError as error:
        problem, is_corrupt = str(error), isinstance(error, CheckpointCorrupt)
    found = process_group.all_gather_object((problem, is_corrupt, entries))
    for problem, is_corrupt, _ in found:
        if problem and not is_corrupt:
            raise UserError(problem)
    problem = next((problem for problem, *_ in found if problem), "")
    shards = {name: content for *_, part in found for name, content in part.items()}
    return problem, None if problem else metadata, shards


def read_manifest(location: store.Store, step: int) -> dict[str, FileDigest]:
    """Reads and validates a manifest. Returns the files of the checkpoint."""
    directory = f"{location}/{name_of(step)}"
    with corrupt_unless_read(f"{directory}/{MANIFEST}"):
        try:
            manifest = json.loads(content_of(location.open(step, MANIFEST, download=True)))
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{directory} has no {MANIFEST}") from None
        if manifest.pop("sha256") != store.manifest_hash(manifest):
            raise ValueError("SHA-256 mismatch")
        if manifest["step"] != step:
            raise ValueError(f"it belongs to step {manifest['step']}")
        if manifest["format"] != store.FORMAT:
            raise UserError(
                f"{directory} has format {manifest['format']}; this version of titanlike reads format {store.FORMAT}"
            )
        files = {name: FileDigest(**digest) for name, digest in manifest["files"].items()}
        if not all(FILE.fullmatch(name) for name in files):
            raise ValueError("unknown file names")
        if not {STATE, file_of(0)} <= files.keys():
            raise ValueError(f"{STATE} or {file_of(0)} is missing")
    return files


def read_state(location: store.Store, step: int) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint. The caller verifies the file against the manifest."""
    with corrupt_unless_read(f"{location}/{name_of(step)}/{STATE}"):
        state = json.loads(content_of(location.open(step, STATE, download=True)))
        state.pop("format")
        metadata = CheckpointMetadata(**state)
        if metadata.step != step:
            raise ValueError(f"it belongs to step {metadata.step}")
    return metadata


@torch.no_grad()
def load_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, nn.Module],
    reader: TensorReader,
    values: OptimizerValues,
    records: Mapping[str, Any],
    *,
    num_threads: int = 1,
) -> None:
    """Loads a checkpoint into a model, its optimizer and other modules, whatever layout saved it. `records` are the values of the
    optimizer that are not tensors. `num_threads` tensors are read at a time."""
    _initialize_state(optimizer)
    parameters = {name: parameter for parameter, name in values.names.items()}
    shards = [
        (name, local.detach(), shard_range_of(tensor))
        for name, tensor in named_tensors(model, optimizer, others)
        if (local := local_tensor(tensor)).numel()
    ]

    def fill(name: str, local: Tensor, shard_range: ShardRange) -> bool:
        with torch.cuda.device_of(local):  # new threads use GPU 0
            return reader.fill(name, local, shard_range)

    with ThreadPoolExecutor(num_threads) as threads:
        found = list(threads.map(lambda shard: fill(*shard), shards))
    values.load(records)
    for (name, *_), was_found in zip(shards, found, strict=True):
        if not was_found:
            if not name.startswith("optimizer."):
                raise CheckpointCorrupt(f"the checkpoint has no {name}")
            # A parameter that never had a gradient has no optimizer state.
            optimizer.state.pop(parameters[name.removeprefix("optimizer.").rpartition(".")[0]], None)
    for module in (
        model,
        *others.values(),
    ):  # runs load_state_dict hooks, which refresh what is derived from the weights
        module.load_state_dict({}, strict=False)


def _initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the optimizer's state by a step with zero gradients and a learning rate of 0. Restores the gradients, and
    the options of parameter groups that the optimizer changes in this step."""
    options = [
        {key: list(value) if isinstance(value, list) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    gradients = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter, _ in gradients:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in gradients:  # an optimizer's own `zero_grad` may keep them
        parameter.grad = gradient
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - before.keys() - {"params"}:
            del group[key]
        group.update(before)


def read_whole(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Returns the full tensors of a checkpoint, by module ("model", "optimizer", ...) and name. Needs no process group."""
    reader, entries = open_checkpoint(checkpoint)
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name, entry in entries.items():
        module, _, key = name.partition(".")
        tensors.setdefault(module, {})[key] = _read_full(reader, name, entry)
    return tensors


def open_checkpoint(checkpoint: Path) -> tuple[TensorReader, dict[str, Entry]]:
    """Returns a reader of a checkpoint, and one of the shards of every tensor."""
    files = sorted(checkpoint.glob("rank-*.safetensors"))
    if not files:
        raise UserError(f"{checkpoint} is not a checkpoint: it contains no rank-*.safetensors")
    reader = TensorReader(read_header(LocalFile(file)) for file in files)
    return reader, {name: entry for header in reader.headers for name, entry in header.entries.items()}


def _read_full(reader: TensorReader, name: str, entry: Entry) -> Tensor:
    shape = entry.global_shape
    values = torch.empty(shape, dtype=entry.dtype)
    reader.fill(name, values, ShardRange(shape, (0,) * len(shape), shape))
    return values
