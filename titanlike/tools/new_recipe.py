"""A recipe for given data and GPUs: model, batch and layout chosen with the planner, and a comment on each key."""

import re
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import divisors, nearest, validate
from titanlike.config.schema import describe
from titanlike.config.shipped import RECIPES
from titanlike.data.tokens.shards import MANIFEST, TRAIN, read_manifest
from titanlike.data.tokens.token_files import is_token_file
from titanlike.hardware.files import file_of_device
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import all_configs
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.load import dump, read
from titanlike.run.checks import check_recipe
from titanlike.tools.planning.hardware import Hardware, load_hardware
from titanlike.tools.planning.search import Candidate, search

AUTOMATIC = ("debug", "124M", "3.2-1B", "3.2-3B", "3-8B", "3-70B")  # sizes to choose from, ascending
TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022)
MAX_EPOCHS = 4  # more passes over the same text teach little (Muennighoff et al. 2023)
MAX_DAYS = 7
MAX_CPU_STEPS = 1000
SAVE_SECONDS = 1800  # planned training time between checkpoints, which a run that is killed repeats at most
MEASURED = RECIPES / "debug.toml"
"""The recipe of the model of its name whose optimizer, schedule and batch have been compared with others (benchmarks/LOG.md)."""
MEMORY = 0.9  # fraction of a GPU to plan with
WIDTH = 118  # characters of a comment
ASSUMED_MFU = 0.4  # before there is a plan
BYTES_PER_TOKEN = 4  # of English text in GPT-2's encoding
LEARNING_RATES = ((1e7, 3e-3), (2e9, 6e-4), (2e10, 3e-4), (float("inf"), 1.5e-4))  # up to this many parameters
BATCH_TOKENS = ((1e7, 2**12), (1e9, 2**19), (float("inf"), 2**20))
VOCAB_SIZES = {"bytes": 257, "gpt2": 50257}
CONTEXT = ((1e7, 256), (float("inf"), 8192))
# With up to eight GPUs, shards alone are the fastest or close to it, and the search is short.
FIXED = ("float8.scaling", "float8.all_gather", "parallelism.context", "parallelism.pipeline")


@dataclass(frozen=True)
class Source:
    """The data of a new recipe."""

    path: str
    num_tokens: float  # infinite if unknown
    tokenizer: Mapping[str, Any]  # section of the recipe; empty for text, which any tokenizer reads
    vocab_size: int = 0  # of the tokenizer


def find_source(path: str) -> Source:
    """Returns what is known of the data. An empty path is Python's standard library, or text that is prepared later."""
    folder = Path(path)
    if not path or "://" in path:
        return Source(path, float("inf"), {})
    if is_token_file(path):
        raise UserError(
            f"--data {path}: token files do not name their tokenizer; leave out --data, and set data.source = 'shards', data.path "
            "and tokenizer.encoding in the recipe"
        )
    if not folder.exists():
        raise UserError(f"--data {path}: not found; give a folder or file of text, or a folder of token shards")
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(path)
        found = manifest.tokenizer
        section = {key: found[key] for key in ("encoding", "special", "eos", "bos") if found.get(key)}
        num_tokens = sum(shard.tokens for shard in manifest.splits.get(TRAIN, []))
        return Source(path, num_tokens, section, found.get("vocab_size", 0))
    try:
        files = [file for file in (folder.rglob("*") if folder.is_dir() else [folder]) if file.is_file()]
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise UserError(
            f"--data {path}: {error.filename} cannot be read: {error.strerror}; give a folder of text"
        ) from None
    if not size:
        raise UserError(f"--data {path} has no text; give a folder or file with text")
    return Source(path, size / BYTES_PER_TOKEN, {})


def find_model(size: str, **changes: int) -> TransformerConfig:
    """Returns the config of a published size, with changed fields. Raises `UserError` if there is none."""
    for config in all_configs():
        if size in config.sizes:
            return validate(config, {"name": config.name, "size": size, **config.sizes[size], **changes})
    sizes = [size for config in all_configs() for size in config.sizes]
    near = nearest(size, sizes)
    hint = f"did you mean {near}? " if near else ""
    raise UserError(f"--model {size}: unknown size; {hint}choose from {', '.join(dict.fromkeys(sizes))}")


def choose_model(num_gpus: int, hardware: Hardware, source: Source) -> TransformerConfig:
    """Returns the largest model that these GPUs train on enough tokens within a week, and for which there is enough data."""
    flops = num_gpus * hardware.bf16_tflops * 1e12 * ASSUMED_MFU * MAX_DAYS * 86_400
    chosen = find_model(AUTOMATIC[0])
    for size in AUTOMATIC[1:] if num_gpus else ():
        model = find_model(size)
        tokens = TOKENS_PER_PARAMETER * model.num_parameters()
        if tokens <= MAX_EPOCHS * source.num_tokens and 6 * tokens * model.num_parameters() <= flops:
            chosen = model
    return chosen


def new_recipe(source: Source, num_gpus: int, hardware: Hardware, size: str) -> dict[str, Any]:
    """Returns the values of a valid recipe. Raises `UserError` if no layout of the model fits.

    Args:
        source: The data.
        num_gpus: Number of GPUs. 0 trains on the CPU.
        hardware: Description of the GPUs.
        size: Published size of the model, or "" to choose one.
    """
    model = find_model(size) if size else choose_model(num_gpus, hardware, source)
    values = _values(source, num_gpus, model)
    if not num_gpus:
        values["run"] = {"device": "cpu"}
        values["training"]["compute_dtype"] = "float32"
        values["compile"] = {"mode": "none"}
        return _checked(values, 1)
    if not hardware.bfloat16:
        values["training"]["compute_dtype"] = "float16"
    best = _search(_recipe(values), num_gpus, hardware)
    if best is None:
        raise UserError(
            f"no layout of {model.label()} fits on {num_gpus} x {hardware.name}; give a smaller --model, or more --gpus"
        )
    planned = best.plan.job.recipe
    values["training"]["local_batch_size"] = planned.training.local_batch_size
    values["parallelism"] = {
        key: value
        for key, value in planned.parallelism.dimensions().items()
        if value != 1 or key in ("shard", "replicate")
    }
    if planned.parallelism.pipeline > 1:
        values["parallelism"]["pipeline_schedule"] = planned.parallelism.pipeline_schedule
    # One digit, such as 100 or 20.
    steps = int(float(f"{max(1.0, SAVE_SECONDS / best.plan.time.seconds):.1g}"))
    values["checkpoint"]["interval"] = min(values["checkpoint"]["interval"], steps)
    values["compile"] = {"mode": "block"}
    values["activation_checkpoint"] = {"mode": planned.activation_checkpoint.mode}
    return _checked(values, num_gpus)


def _values(source: Source, num_gpus: int, model: TransformerConfig) -> dict[str, Any]:
    """Returns the recipe without its layout."""
    parameters, ranks = model.num_parameters(), max(num_gpus, 1)
    is_small = parameters < 1e7
    measured = read(MEASURED)[0] if not num_gpus and model.size == MEASURED.stem else {}
    batch = measured.get("training", {})
    seq_len = batch.get("seq_len") or min(model.max_seq_len, _of(CONTEXT, parameters))
    sequences = batch.get("global_batch_size") or max(1, _of(BATCH_TOKENS, parameters) // seq_len)
    sequences = -(-sequences // ranks) * ranks
    tokenizer = source.tokenizer or {"encoding": "bytes" if is_small else "gpt2"}
    vocabulary = _vocabulary(model, source.vocab_size or VOCAB_SIZES[tokenizer["encoding"]])
    trained = find_model(model.size, **vocabulary).num_parameters()
    tokens = min(TOKENS_PER_PARAMETER * trained, MAX_EPOCHS * source.num_tokens)
    steps = max(20, round(tokens / (sequences * seq_len)))
    if not num_gpus:
        steps = min(steps, MAX_CPU_STEPS)
    interval = max(1, min(500, steps // 10))
    return {
        "program": "pretrain",
        "model": {"name": model.name, "size": model.size} | vocabulary,
        "tokenizer": dict(tokenizer),
        "data": _data(source, is_small),
        "training": {
            "steps": steps,
            "seq_len": seq_len,
            "global_batch_size": sequences,
            "local_batch_size": divisors(sequences // ranks)[-1] if ranks > 1 else min(sequences, 8),
            **{key: value for key, value in batch.items() if key == "max_norm"},
        },
        "optimizer": measured.get("optimizer") or {"lr": _of(LEARNING_RATES, parameters)},
        "schedule": measured.get("schedule") or {"warmup_steps": min(steps // 10, 1000), "decay": "cosine"},
        "checkpoint": {"interval": interval},
        "validation": {"interval": interval},
        "sample": {"tokens": 100},
        "metrics": {"interval": 10},
    }


def _vocabulary(model: TransformerConfig, needed: int) -> dict[str, int]:
    """Returns a vocabulary size if the model's own is too small, or more than twice as large as the tokenizer's."""
    if needed <= model.vocab_size <= 2 * needed:
        return {}
    return {"vocab_size": -(-needed // 128) * 128}  # a multiple for fast kernels and tensor parallelism


def _data(source: Source, is_small: bool) -> dict[str, Any]:
    if source.tokenizer:
        return {"source": "shards", "path": source.path}
    if is_small:
        return {"source": "text", "path": source.path} if source.path else {"source": "python_stdlib"}
    return {"source": "shards", "path": shards_path(source)}


def shards_path(source: Source) -> str:
    """Returns the folder of token shards that are prepared from text."""
    return f"data/{Path(source.path).name.partition('.')[0] or 'train'}"


def _of(table: tuple[tuple[float, Any], ...], parameters: int) -> Any:
    return next(value for limit, value in table if parameters <= limit)


def _search(recipe: PretrainRecipe, num_gpus: int, hardware: Hardware) -> Candidate | None:
    """Returns the fastest layout that fits with some memory to spare, without pipeline and tensor parallelism if there is one."""
    hardware = replace(hardware, memory_gib=hardware.memory_gib * MEMORY)
    tensor = ("parallelism.tensor",) if num_gpus <= hardware.gpus_per_node else ()
    for fixed in ((*FIXED, *tensor), FIXED[:2]):
        found = search(recipe, num_gpus, hardware, check_recipe, fixed=fixed)
        if found.best:
            return found.best[0]
    return None


def _recipe(values: Mapping[str, Any]) -> PretrainRecipe:
    model = find_model(values["model"]["size"])
    return validate(PretrainRecipe, {**values, "model": {**model.sizes[model.size], **values["model"]}})


def _checked(values: dict[str, Any], num_processes: int) -> dict[str, Any]:
    check_recipe(_recipe(values), num_processes)
    return values


def commented(values: Mapping[str, Any], heading: str) -> str:
    """Returns a recipe as TOML, with a sentence of its documentation above each key."""
    keys = {(key.name, key.variant): key.doc for key in describe(PretrainRecipe)}
    ordered = {name: values[name] for name in PretrainRecipe.__dataclass_fields__ if name in values}
    lines = [f"# {line}" for paragraph in heading.splitlines() for line in textwrap.wrap(paragraph, WIDTH - 2)]
    section = ""
    for line in dump(ordered).splitlines():
        key, _, value = line.partition(" = ")
        if line.startswith("["):
            section = f"{line.strip('[]')}."
        elif line:
            name = f"{section}{key}"
            doc = keys.get((name, "")) or keys[name, values["model"]["name"]]
            mentioned = values["data"]["source"] if name == "data.path" else value.strip('"')
            if not lines[-1].startswith("["):
                lines.append("")
            lines.append(f"# {_sentence(doc, mentioned)}")
        if len(line) > WIDTH:  # a list of tables
            line = line.replace("[{", "[\n    {").replace("}, {", "},\n    {").replace("}]", "},\n]")
        lines.append(line)
    return "\n".join(line for line, after in zip(lines, [*lines[1:], "."], strict=True) if line or after) + "\n"


def _sentence(doc: str, value: str) -> str:
    """Returns the sentence about a value, or the first one, short enough for a line."""
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", doc)
    sentence = next((each for each in sentences if f"`{value}`" in each), sentences[0])
    if len(sentence) > WIDTH:
        sentence = f"{re.split('[:;] ', sentence)[0].rstrip('.')}."
    return textwrap.shorten(sentence, WIDTH, placeholder=" ...")


def hardware_here() -> Hardware | None:
    """Returns the description of this machine's GPUs, or None without a GPU or for an unknown one."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return None
    file = file_of_device(done.stdout.partition("\n")[0])
    return load_hardware(file) if file else None
