"""What each key of the schema is where the core has a set of names: for a resume, for caches and for the weights to start from."""

import base64
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from titanlike.checkpoint import CheckpointMetadata, optimizer_values
from titanlike.config import UserError
from titanlike.config.base import validate
from titanlike.config.finetune import ChatData
from titanlike.config.sections import Tokenizer
from titanlike.data.documents.data_files import File
from titanlike.data.tokens import cache as token_cache
from titanlike.data.tokens import chats
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.shards import Manifest, Shard
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop import generation_config
from titanlike.interop.hf_folder import config_problems
from titanlike.models.families import all_configs
from titanlike.models.llama.config import LlamaConfig
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.run import changes, likeliest_tokens, reference
from titanlike.run.run_dir import recipe_as_json
from titanlike.run.start import Arguments
from titanlike.tools.programs import recipe_types

# exact: may change. inexact: may change, and the resumed run is not bit-exact. refused: changes training. tensors: refused, and
# nothing allows it, because a checkpoint has other tensors then. later: may change before the change has an effect.
ON_RESUME = """
run                    exact    name dir deterministic device hang_timeout shutdown_timeout
run                    refused  seed
tokenizer              exact    encoding
tokenizer              refused  special eos bos
data                   exact    source path mixture cache prefetch workers bad_records chat_template fields
data                   refused  weights text_field prompt_field document_masks packing holdout_every validation_path long_chats
training               exact    non_finite skip_limit
training               inexact  local_batch_size attention loss_chunk
training               later    steps global_batch_size batch_ramp
training               refused  seq_len max_norm z_loss compute_dtype master_dtype reduce_dtype matmul_precision
optimizer              tensors  state_dtype
optimizer              refused  lr beta1 beta2 eps weight_decay stochastic_rounding groups
optimizer              refused  muon_momentum muon_lr_scaling muon_qk_clip
schedule               later    decay decay_ratio min_ratio
schedule               refused  warmup_steps
parallelism            exact    replicate shard context tensor pipeline reshard_after_forward
parallelism            inexact  async_tensor_parallel expert gradient_sync cpu_offload
parallelism            inexact  pipeline_schedule pipeline_stages pipeline_split
float8                 inexact  all_gather emulate
float8                 refused  scaling layers skip head
compile                inexact  mode backend
activation_checkpoint  inexact  mode memory_budget offload
checkpoint             exact    enabled interval mode keep keep_every dir max_failures verify export resume_from allow_changed
checkpoint             refused  initial
validation             exact    interval batches
evaluation             exact    interval tasks data limit
sample                 exact    tokens interval prompt temperature
metrics                exact    interval trackers project tensorboard_dir prometheus hardware layer_interval
profiling              exact    steps num_steps ranks memory
mlm                    refused  mask_probability mask_token
seq2seq                refused  noise_density mean_noise_span_length target_len source_prefix
lora                   tensors  rank layers
lora                   refused  alpha
preference             refused  loss beta label_smoothing simpo_gamma reference
distillation           refused  teacher loss temperature label_weight top_k
"""
# Values to try, as JSON; those that the type of a key refuses are left out.
VALUES = (
    False, True, 0, 7000, 1, 0.25, "x", ["x"], [1], [[300, 8], [1, 1]], [{"optimizer": "muon"}], ["wandb"],
)  # fmt: skip


FILES = [File("a.jsonl", 1, "one"), File("b.jsonl", 1, "one"), File("a.jsonl", 2, "one"), File("a.jsonl", 1, "two")]


def base(recipe_type: type[PretrainRecipe]) -> PretrainRecipe:
    """Returns a recipe whose last batch size begins with step 301."""
    recipe = recipe_type()
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, batch_ramp=((300, 8),)))


def _changed(section: Any, name: str, annotation: Any) -> Any:
    for value in (*filter(lambda each: isinstance(each, str), get_args(annotation)), *VALUES):
        try:
            found = validate(type(section), dataclasses.asdict(section) | {name: value})
        except ValueError:
            continue
        if getattr(found, name) != getattr(section, name):
            return found
    raise AssertionError(f"no other value of {name}")


def changed(recipe: PretrainRecipe) -> Iterator[tuple[str, PretrainRecipe]]:
    """Yields the keys of a program, each with the recipe that has another value of it."""
    for section in dataclasses.fields(recipe):
        values = getattr(recipe, section.name)
        for name, info in getattr(type(values), "__pydantic_fields__", {}).items():
            if section.name not in ("model", "teacher"):
                yield (
                    f"{section.name}.{name}",
                    dataclasses.replace(recipe, **{section.name: _changed(values, name, info.annotation)}),
                )


def resumed(before: PretrainRecipe, recipe: PretrainRecipe, key: str, step: int, *allow: str) -> str:
    """Returns what a resume from this step does with a change of a key."""
    recipe = dataclasses.replace(recipe, checkpoint=dataclasses.replace(recipe.checkpoint, allow_changed=allow))
    try:
        reasons = changes.check_resume(
            CheckpointMetadata(step, recipe_as_json(before)), CheckpointMetadata(step, recipe_as_json(recipe)), recipe
        )
    except UserError as error:
        assert f"{key} was " in str(error)
        return "refused" if "allow_changed" in str(error) else "tensors"
    assert [reason.partition(" was ")[0] for reason in reasons] in ([], [key])
    return "inexact" if reasons else "exact"


def test_a_resume_allows_or_refuses_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_keys_without_effect", lambda *_: set())  # most keys have none by themselves
    found: dict[str, str] = {}
    for recipe_type in recipe_types().values():
        recipe = base(recipe_type)
        for key, before in changed(recipe):
            first, later = (resumed(before, recipe, key, step) for step in (1, 600))
            outcome = (
                first if first == later else "later" if (first, later) == ("exact", "refused") else f"{first} {later}"
            )
            if outcome in ("refused", "tensors"):
                assert resumed(before, recipe, key, 600, key) == "inexact"
            assert found.setdefault(key, outcome) == outcome, key
    lines = [line.split() for line in ON_RESUME.strip().splitlines()]
    assert found == {f"{section}.{name}": outcome for section, outcome, *names in lines for name in names}


def test_a_resume_refuses_every_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_keys_without_effect", lambda *_: set())
    for config in all_configs():
        recipe = PretrainRecipe(model=config())
        for field in dataclasses.fields(config):
            before = recipe_as_json(recipe)
            before["model"][field.name] = "another"
            with pytest.raises(UserError, match=f'model.{field.name} was "another"'):
                changes.check_resume(
                    CheckpointMetadata(1, before), CheckpointMetadata(1, recipe_as_json(recipe)), recipe
                )


def test_the_weights_to_start_from_agree_with_the_model_but_for_its_training() -> None:
    ignored = set()
    for config_type in all_configs():
        config = config_type()
        for field in dataclasses.fields(config_type):
            other = copy.copy(config)
            object.__setattr__(other, field.name, "another")
            found = config_problems("folder", other, config)
            assert found == [] or f"folder' has {field.name} = 'another', but model.{field.name} = " in found[0]
            ignored |= {field.name} if not found else set()
    assert ignored == {
        "name", "size", "dropout", "max_seq_len", "balance_loss", "num_mtp_layers", "mtp_loss_weight",
    }  # fmt: skip


PRECISION = {
    *("training.compute_dtype", "training.matmul_precision", "training.master_dtype"),
    *(f"float8.{name}" for name in ("scaling", "all_gather", "layers", "skip", "head", "emulate")),
}
SEQUENCES = {"training.seq_len", "data.long_chats", "run.seed"}  # the seed is that of random weights


@pytest.mark.parametrize(
    ("recipe", "file_of", "expected"),
    [
        (
            DpoRecipe(), reference._cache_file,
            {"checkpoint.initial", "model", "fingerprint", "first_pair", "held_out", "holdout_every"},
        ),
        (
            DistillRecipe(data=ChatData(source="text")),
            lambda recipe, datasets: likeliest_tokens._folder(recipe, datasets, "", recipe.run.seed),
            {
                *("data.holdout_every", "data.validation_path", "data.source", "data.document_masks"),
                *("distillation.top_k", "distillation.temperature", "teacher", "fingerprint", "num_sequences"),
            },
        ),
    ],
    ids=["reference", "teacher"],
)  # fmt: skip
def test_what_a_second_model_computes_is_kept_for_the_same_recipe_and_data(
    recipe: PretrainRecipe, file_of: Callable[..., Path], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reference, likeliest_tokens):
        monkeypatch.setattr(module, "version_of_weights", lambda *of: of)
    recipe = dataclasses.replace(recipe, float8=dataclasses.replace(recipe.float8, all_gather=True))
    data = dict(fingerprint="a", first_pair=0, held_out=0, holdout_every=2, num_sequences=9)
    names = {
        **{key: file_of(other, [SimpleNamespace(**data)]).name for key, other in changed(recipe)},
        **{key: file_of(recipe, [SimpleNamespace(**data | {key: 7})]).name for key in data},
        **{
            key: file_of(dataclasses.replace(recipe, **{key: LlamaConfig(dim=64)}), [SimpleNamespace(**data)]).name
            for key in ("model", "teacher") if hasattr(recipe, key)
        },
    }  # fmt: skip
    same = file_of(recipe, [SimpleNamespace(**data)]).name
    assert {key for key, name in names.items() if name != same} == PRECISION | SEQUENCES | expected


def test_tokens_are_kept_for_the_same_recipe_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (token_cache, chats):
        monkeypatch.setattr(module, "cached", lambda out, *_: out)
    (tmp_path / "x").write_text("{{ messages }}")  # a template
    for name, order in (("ranks", range(256)), ("reversed", range(255, -1, -1))):
        lines = [f"{base64.b64encode(bytes([byte])).decode()} {rank}\n" for rank, byte in enumerate(order)]
        (tmp_path / name).write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    recipe = dataclasses.replace(FinetuneRecipe(), tokenizer=Tokenizer(encoding="ranks", special="both"))

    def files(recipe: FinetuneRecipe, file: File = FILES[0]) -> tuple[str, str]:
        tokenizer = build_tokenizer(recipe.tokenizer)
        monkeypatch.setattr(chats, "list_files", lambda _: [file])
        template = build_chat_template(recipe.data.chat_template, tokenizer)
        text: Any = token_cache.tokenized([file], recipe.data, tokenizer, "path")
        dialogs: Any = chats.open_chats(recipe.data, "path", template)
        return text.name, dialogs.name

    expected, found = files(recipe), (set[str](), set[str]())
    for key, other in changed(recipe):
        if key not in (
            "tokenizer.encoding",
            "tokenizer.eos",
            "tokenizer.bos",
        ):  # which name what the test does not have
            for keys, one, two in zip(found, files(other), expected, strict=True):
                keys |= {key} if one != two else set()
    of_both = {"tokenizer.special", "data.bad_records"}
    assert found == (
        of_both | {"data.text_field", "data.prompt_field"}, of_both | {"data.chat_template", "data.fields"},
    )  # fmt: skip
    for file in FILES[1:]:
        assert not set(files(recipe, file)) & set(expected), file
    other = dataclasses.replace(recipe, tokenizer=Tokenizer(encoding="reversed", special="both"))
    assert not set(files(other)) & set(expected)


def test_the_fingerprint_of_token_shards_is_that_of_what_they_hold() -> None:
    manifest = Manifest("uint16", {"fingerprint": "a"}, {"train": [Shard("x", 1, 1, "tokens", "documents")]}, {})
    others = [
        dataclasses.replace(manifest, dtype="uint32"),
        dataclasses.replace(manifest, tokenizer={"fingerprint": "b"}),
        dataclasses.replace(manifest, splits={"train": [Shard("x", 1, 1, "others", "documents")]}),
        dataclasses.replace(manifest, splits={"train": [Shard("x", 1, 1, "tokens", "others")]}),
    ]
    assert len({each.fingerprint for each in (manifest, *others)}) == 5
    same = dataclasses.replace(
        manifest, source={"first": "a.txt"}, skipped=3, tokenizer={"fingerprint": "a", "eos": "b"}
    )
    assert same.fingerprint == manifest.fingerprint


def test_each_option_that_is_no_key_needs_a_value() -> None:
    for name in ("recipe", "program", "check", "preflight"):
        with pytest.raises(UserError, match=f"--{name} needs a value"):
            Arguments([f"--{name}"])
    assert Arguments(["--another"]).overrides == {"another": ""}  # reported as unknown


def test_the_ids_of_a_config_are_those_of_a_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}
    (tmp_path / "config.json").write_text(json.dumps({**ids, "hidden_size": 5}))
    monkeypatch.setattr(generation_config, "files_of", lambda _: [tmp_path / "tokenizer.json"])
    tokenizer: Any = SimpleNamespace(section=Tokenizer())
    assert generation_config._source(tokenizer) == ({**ids, "do_sample": True}, [2, 3])


def test_the_options_of_a_parameter_group_that_are_saved() -> None:
    """The learning rate is that of the recipe and the step."""
    options = dict.fromkeys(("params", "lr", "initial_lr", "betas", "weight_decay"), 1.0)
    assert optimizer_values._fingerprints(options).keys() == {"betas", "weight_decay"}
