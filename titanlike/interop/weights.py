"""Weights to start from: a Hugging Face folder, or a checkpoint of this library, read shard by shard.

`open_weights` validates a folder without reading the values. `load_weights` fills a model under any layout; each rank reads the
rows and the experts that it holds.
"""

import fnmatch
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import tomli
import torch
from torch import Tensor, nn

from titanlike.checkpoint import loader, store
from titanlike.checkpoint.files import STATE, STEP, LocalFile, ReadableFile, name_of
from titanlike.checkpoint.format import CHUNK_SIZE, ShardRange
from titanlike.checkpoint.reader import Entry, TensorReader, corrupt_unless_read, read_header, verify_file
from titanlike.checkpoint.staging import shard_range_of
from titanlike.config import UserError
from titanlike.config.base import shown, validate
from titanlike.config.finetune import Lora
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.distributed import process_group
from titanlike.interop.hf_folder import CONFIG, config_problems, is_hf_folder, read_config, read_json, tensor_files
from titanlike.interop.hf_parameters import hf_parameters, select_part, stored_part, stored_tensors, whole
from titanlike.interop.quantized import read_stored, with_quantized
from titanlike.interop.tokenizer_files import adds_bos_and_eos
from titanlike.models.common import lora
from titanlike.models.common.config import ParameterSpec, TransformerConfig
from titanlike.models.registry import registered_configs
from titanlike.utils.dtensor import local_tensor
from titanlike.utils.modules import copies_of

LM_HEAD = "lm_head.weight"
NO_SHARE = (2**30, 2**30 + 1)  # of the files of a checkpoint to verify: those that are loaded are verified
# Buffers that some versions of transformers saved and that the model computes.
COMPUTED = ("*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq")
NUM_SAMPLES, SAMPLE_SIZE = 256, 4096  # blocks of a folder that its fingerprint covers, and bytes in a block
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Weights(ABC):
    """The weights of a model by the names of our parameters, in files."""

    path: Path | str
    config: TransformerConfig
    tokenizer: TokenizerSection
    """The tokenizer that the model was trained with."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Returns the precision in which a parameter is stored."""

    @abstractmethod
    def fill(self, name: str, target: Tensor, shard_range: ShardRange) -> None:
        """Copies a shard of a parameter into `target`, and converts it to the precision of `target`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies the content of the files, wherever they are. Reads a bounded number of bytes."""

    def read(self, name: str, shard_range: ShardRange) -> Tensor:
        """Returns a shard of a parameter."""
        values = torch.empty(shard_range.shape, dtype=self.dtype(name))
        self.fill(name, values, shard_range)
        return values


def open_weights(path: Path, *, step: int = 0, verify_share: tuple[int, int] = (0, 1)) -> Weights:
    """Opens a Hugging Face folder, a run directory (its newest checkpoint, or the one of `step`) or a checkpoint.

    Of the files of a checkpoint, it verifies the hashes of a share: (0, 1) is all of them, (rank, number of ranks) a rank's share.
    Of an LM head that a Hugging Face folder has besides the embedding that it is tied to, it compares a share of the rows.
    """
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {problem}; give a run directory, a checkpoint or a Hugging Face folder")
    if is_hf_folder(path):
        if step:
            raise UserError(f"{path} is a Hugging Face folder, which has no steps; omit --step")
        return HFWeights(path, verify_share)
    return CheckpointWeights(*_find_checkpoint(path, step), verify_share)


def fingerprints(paths: Mapping[str, str]) -> dict[str, str]:
    """Returns the fingerprints of several weights, by the keys of their paths. Rank 0 reads them for all ranks."""
    found: dict[str, str] = {}

    def read() -> None:
        for key, path in paths.items():
            found[key] = open_weights(Path(path), verify_share=NO_SHARE).fingerprint()

    process_group.run_on_main(read)
    return process_group.broadcast_object(found)


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Fills the parameters of a model, which may be sharded or a pipeline stage, with weights."""
    copies = copies_of(model)
    for name, parameter in model.state_dict().items():
        local = local_tensor(parameter)
        if local.numel() and not name.endswith((lora.A, lora.B)):  # LoRA's matrices keep their initial values
            weights.fill(copies.get(name, name), local, shard_range_of(parameter))
    model.load_state_dict({}, strict=False)  # runs hooks, which refresh what is derived from the weights


def load_initial(
    model: nn.Module,
    initial: str,
    config: TransformerConfig,
    allow_changed: Sequence[str] = (),
    *,
    key: str = "checkpoint.initial",
) -> Weights:
    """Fills a model with the weights that a run starts from, or with those that another key of the recipe names, and returns them.
    All ranks call it; if one fails, all raise its error."""
    problem, weights = "", None
    try:
        weights = open_weights(Path(initial), verify_share=(process_group.rank(), process_group.world_size()))
        problems = config_problems(initial, weights.config, config, allow_changed, key=key)
        found, expected = weights.config.parameters(), config.parameters()
        wrong = [name for name in expected if name not in found or found[name].shape != expected[name].shape]
        if (stored := weights.config.num_mtp_layers) < config.num_mtp_layers:
            number = f"model.num_mtp_layers = {config.num_mtp_layers}"
            problems.append(
                f"{key} = {initial!r} has {stored} blocks of multi-token prediction, but {number}; set it to {stored}"
            )
        elif wrong and not problems:
            name = wrong[0]
            shape = f"{name} has shape {found[name].shape}" if name in found else f"there is no {_listed(wrong)}"
            problems.append(
                f"{key} = {initial!r}: {shape}, but the recipe's model has {expected[name].shape}; use other weights"
            )
        problem = "\n".join(problems)
    except UserError as error:
        problem = f"{key}: {error}"
    for each in process_group.all_gather_object(problem):
        if each:
            raise UserError(each)
    assert weights
    load_weights(model, weights)
    return weights


class HFWeights(Weights):
    """The weights of a Hugging Face folder."""

    path: Path

    def __init__(self, path: Path, verify_share: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        self.config = read_config(path, registered_configs())
        self.tokenizer = TokenizerSection(encoding=str(path), special="both" if _adds_bos(path) else "eos")
        self._found: dict[str, tuple[ReadableFile, Entry]] = {}
        for header in (read_header(LocalFile(file), whole=True) for file in tensor_files(path)):
            for stored, entry in header.entries.items():
                name = self.config.hf_name_of(stored)
                if name in self._found:
                    raise UserError(
                        f"{shown(name)} is in {self._found[name][0]} and in {header.file}; remove one of them"
                    )
                self._found[name] = header.file, entry
        self._found = with_quantized(self._found)
        self.config = self.config.with_stored(self._found)
        self._plan = hf_parameters(self.config)
        # Where a head that is tied, which need not be stored, would be.
        self._head = self.config.last_parameters()["output.weight"].hf_name or LM_HEAD
        self._check()
        if self.config.tied_head and self._head in self._found:
            self._check_tied_head(*verify_share)

    def fingerprint(self) -> str:
        files = [LocalFile(file) for file in tensor_files(self.path)]
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{Path(str(file)).name} {file.size()}\n".encode())
            num_samples = max(NUM_SAMPLES // len(files), 8)
            for start in np.linspace(0, max(file.size() - SAMPLE_SIZE, 0), num_samples).astype(int):
                digest.update(file.read(int(start), SAMPLE_SIZE).data)
        return digest.hexdigest()[:16]

    def _check(self) -> None:
        """Raises `UserError` unless the folder has exactly the tensors of the model."""
        # Folders of a base model lack the prefix of the model with a head.
        prefix = next((spec.hf_name.partition(".")[0] + "." for spec in self._plan.values()), "")
        if not any(name.startswith(prefix) for name in self._found):
            self._found = {name if name == self._head else prefix + name: place for name, place in self._found.items()}
        expected = {name: tensor.shape for name, tensor in stored_tensors(self.config).items()}
        ignored = (*COMPUTED, *self.config.hf_ignored, *[self._head] * self.config.tied_head)
        surplus = [
            name
            for name in self._found
            if name not in expected and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
        ]
        for kind, names in (("lacks", [name for name in expected if name not in self._found]), ("also has", surplus)):
            if names:
                raise UserError(
                    f"{self.path}: the checkpoint {kind} {_listed(names)}; it is not a {self.config.name} model"
                )
        for name, shape in expected.items():
            file, entry = self._found[name]
            if entry.shape != shape:
                raise UserError(f"{file}: {name} has shape {entry.shape}, but config.json describes {shape}")
            if entry.dtype not in FLOATS:
                raise UserError(f"{file}: {name} is {entry.dtype}; use weights in float32, float16 or bfloat16")

    def _check_tied_head(self, rank: int, num_ranks: int) -> None:
        """Raises `UserError` unless a rank's share of the LM head equals the embedding, which the model uses instead."""
        embedding = self._plan["tok_embeddings.weight"].hf_name
        (file, head), (other_file, other) = self._found[self._head], self._found[embedding]
        is_equal = head.shape == other.shape and head.dtype in FLOATS
        rows, columns = other.shape
        size = -(-CHUNK_SIZE // columns)
        for start in range(rank * size, rows if is_equal else 0, num_ranks * size):
            part = [slice(start, min(start + size, rows)), slice(0, columns)]
            is_equal &= bool((read_stored(file, head, part) == read_stored(other_file, other, part)).all())
        if not is_equal:
            raise UserError(
                f"{self.path}: {CONFIG} ties the LM head to the embedding, but {self._head} differs from {embedding}; set "
                f"tie_word_embeddings = false in {CONFIG}, or remove the tensor that is wrong"
            )

    def dtype(self, name: str) -> torch.dtype:
        return self._found[self._plan[name].at(0).hf_name][1].dtype

    def fill(self, name: str, target: Tensor, shard_range: ShardRange) -> None:
        spec = self._plan[name]
        if not spec.is_stacked:
            self._fill(spec, target, shard_range)
            return
        element_range = ShardRange(shard_range.global_shape[1:], shard_range.offset[1:], shard_range.shape[1:])
        for index in range(shard_range.shape[0]):
            self._fill(spec.at(shard_range.offset[0] + index), target[index], element_range)

    def _fill(self, spec: ParameterSpec, target: Tensor, shard_range: ShardRange) -> None:
        values = read_stored(*self._found[spec.hf_name], stored_part(spec, shard_range))
        target.copy_(select_part(spec, values))


class CheckpointWeights(Weights):
    """The weights of a checkpoint of this library, without its optimizer state."""

    def __init__(self, location: store.Store, step: int, verify_share: tuple[int, int]) -> None:
        self.path = f"{location}/{name_of(step)}"
        self._files = files = loader.read_manifest(location, step)
        rank, num_ranks = verify_share
        for name in sorted(files)[rank::num_ranks]:
            verify_file(location.open(step, name), files[name], content=True)
        self.metadata = loader.read_state(location, step)
        names = [name for name in sorted(files) if name != STATE]
        self._reader = TensorReader(read_header(location.open(step, name)) for name in names)
        self._entries = {name: entry for header in self._reader.headers for name, entry in header.entries.items()}
        end = f".{lora.A}"
        self.adapted_layers = {n.removeprefix("model.").removesuffix(end) for n in self._entries if n.endswith(end)}
        with corrupt_unless_read(f"{self.path}/{STATE}"):
            self.config = _config_of(self.metadata.recipe, self.path)
            self.tokenizer = validate(TokenizerSection, self.metadata.recipe["tokenizer"])
            self.lora = validate(Lora, self.metadata.recipe.get("lora", {}))
        for name, spec in self.config.parameters().items():
            entry = self._entries.get(f"model.{name}")
            if entry is None or entry.global_shape != spec.shape:
                raise UserError(f"{self.path} has no {name} of shape {spec.shape}, which its recipe describes")

    def dtype(self, name: str) -> torch.dtype:
        # The frozen weights may have a lower precision than LoRA's matrices, which are merged with them.
        matrix = next((f"{layer}.{lora.B}" for layer in self.adapted_layers), name)
        return self._entries[f"model.{matrix}"].dtype

    def fingerprint(self) -> str:
        hashes = [[name, digest.sha256] for name, digest in sorted(self._files.items()) if name != STATE]
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16]

    def fill(self, name: str, target: Tensor, shard_range: ShardRange) -> None:
        values = self._read(name, shard_range)
        layer = name.removesuffix(".weight")
        if layer in self.adapted_layers:  # merge the product of LoRA's matrices
            (rows, columns), (first_row, first_column) = shard_range.shape, shard_range.offset
            rank, inputs = self._entries[f"model.{layer}.{lora.A}"].global_shape
            a = self._read(f"{layer}.{lora.A}", ShardRange((rank, inputs), (0, first_column), (rank, columns)))
            outputs = shard_range.global_shape[0]
            b = self._read(f"{layer}.{lora.B}", ShardRange((outputs, rank), (first_row, 0), (rows, rank)))
            values = values.float() + self.lora.alpha / self.lora.rank * (b.float() @ a.float())
        target.copy_(values)

    def matrix(self, name: str) -> Tensor:
        """Returns one of LoRA's matrices."""
        shape = self._entries[f"model.{name}"].global_shape
        return self._read(name, whole(shape))

    def _read(self, name: str, shard_range: ShardRange) -> Tensor:
        values = torch.empty(shard_range.shape, dtype=self._entries[f"model.{name}"].dtype)
        self._reader.fill(f"model.{name}", values, shard_range)
        return values


def _find_checkpoint(path: Path, step: int) -> tuple[store.Store, int]:
    """Returns the store and the step of the checkpoint at a path, or of `step` (0: the newest) of the run at it."""
    resolved = path.resolve()  # of a link or "."
    if match := STEP.fullmatch(resolved.name):
        if step not in (0, int(match[1])):
            raise UserError(
                f"{path} is the checkpoint of step {int(match[1])}; omit --step, or give the run's directory"
            )
        return store.LocalStore(resolved.parent), int(match[1])
    locations: list[store.Store] = [store.LocalStore(path / "checkpoints"), store.LocalStore(path)]
    if elsewhere := _checkpoint_dir(path / "recipe.toml"):
        locations.append(store.open_store(f"{elsewhere.rstrip('/')}/{resolved.name}"))
    for location in locations:
        try:
            steps = location.steps()
        except Exception as error:  # noqa: BLE001  each file system has its own errors
            raise UserError(f"{location} cannot be read: {error!r}") from None
        if steps:
            if step and step not in steps:
                raise UserError(f"{location} has no step {step}; it contains steps {', '.join(map(str, steps))}")
            return location, step or steps[-1]
    raise UserError(
        f"{path} contains no checkpoint and no config.json; give a run directory, a checkpoint or a Hugging Face folder"
    )


def _checkpoint_dir(recipe: Path) -> str:
    """Returns `checkpoint.dir` in the recipe of a run directory, or ""."""
    with suppress(OSError, ValueError, AttributeError):
        return str(tomli.loads(recipe.read_text()).get("checkpoint", {}).get("dir", ""))
    return ""


def _adds_bos(folder: Path) -> bool:
    """Whether the tokenizer in a folder begins every text with a special token."""
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return adds_bos_and_eos(*[read_json(file) if file.exists() else {} for file in files])[0]


def _config_of(recipe: Mapping[str, object], path: str) -> TransformerConfig:
    """Returns the model config in the recipe of a checkpoint."""
    values = recipe.get("model")
    name = values.get("name") if isinstance(values, dict) else None
    known = {one.name: one for one in reversed(registered_configs())}  # a variant may have kept the name
    if name not in known:
        raise UserError(
            f"{path}: model.name = {shown(repr(name))} is not a registered architecture; choose a checkpoint of "
            f"{', '.join(sorted(known))}, or import the program that registers it"
        )
    return validate(known[name], values)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
