"""Random Hugging Face folders: a folder is accepted, and its model, tokenizer and chat template then work, or it is refused in a
sentence. Values are replaced, removed and contradicted in every file of a folder, and files are damaged."""

import contextlib
import copy
import dataclasses
import functools
import io
import json
import random
import re
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.fuzz import harness
from tests.fuzz.damage import JUNK, change_json, damage, refused_or
from tests.interop.models import CONFIGS, ENCODERS, T5, MemoryWeights, model_of
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.conversations import Conversation
from titanlike.data.tokens.chat_template import BUILT_IN, build_chat_template
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop.export import export
from titanlike.interop.generation_config import generation_config, stop_tokens
from titanlike.interop.tokenizer_files import tokenizer_files
from titanlike.interop.weights import load_weights, open_weights
from titanlike.models.common.config import TransformerConfig
from titanlike.models.registry import build_model
from titanlike.tools.migration.formats import import_recipe
from titanlike.tools.programs import load_known

CPU_LIMIT = 5.0  # seconds of a case: building the model and reading the weights takes most of it
# What Python says, and not a person.
RAW = re.compile(
    r"object is not|object has no|object can|unsupported operand|invalid literal|could not convert|indices must|NoneType|<class|"
    r"positional argument|not enough values|too many values|must be a (str|string|real)|unhashable|not supported between|"
    r"None: |modulo by zero|division by zero|not iterable|string_type|\[type="
)
CHAT = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])

SMALL: dict[str, Any] = dict(dim=16, num_layers=2, num_heads=2, vocab_size=320, max_seq_len=64)
VALUES: list[Any] = [
    *JUNK, 1, 2, 7, 8, 16, 64, 320, 2**31, -(2**63), 1e-300, 10**400, "silu", "16", "x\ny\x1b[31m", True, False, [0, 2], ["a", 1],
    {"rope_type": "llama3"}, {"rope_type": "linear", "factor": 0}, {"rope_type": [], "rope_theta": 1e4}, {"rope_theta": "x"},
    {"full_attention": {"rope_theta": 1e4}}, ["sliding_attention"] * 2, ["LlamaForCausalLM"], ["GPT2LMHeadModel"], [[]],
]  # fmt: skip
TEMPLATES = (
    "",
    "{{",
    "{{ 1/0 }}",
    "{{ messages[9].content }}",
    "{{ raise_exception('a\nb') }}",
    "{% for i in range(10**9) if false %}{% endfor %}",
    "{% for m in messages %}" * 30 + "{% endfor %}" * 30,
    "{{ " + "9" * 5000 + " }}",
    "{{" + "(" * 2000 + "1" + ")" * 2000 + "}}",
    "{% include 'a' %}",
    "{{ ''.__class__.__mro__ }}",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}",
    "\ufdd2",
    "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}",
    "{{ messages | tojson(indent='a') }}",
    "{{ bos_token + eos_token }}",
    "{{ messages }}",
    "{{ strftime_now(1) }}",
    "{% set messages = 3 %}{{ messages }}",
)


@functools.cache
def originals() -> list[Path]:
    """Writes valid folders of every architecture."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    tokenizer = build_tokenizer(Section())
    (root / "tokenizer").mkdir()
    for name, content in tokenizer_files(tokenizer, 64).items():
        (root / "tokenizer" / name).write_bytes(content)
    folders = []
    for name, config in (CONFIGS | ENCODERS | {"T5": T5}).items():
        small: TransformerConfig = dataclasses.replace(config, **SMALL)  # type: ignore[type-var]
        fields = {field.name for field in dataclasses.fields(small)}  # type: ignore[arg-type]
        others = {"num_kv_heads": 1, "ffn_dim": 16, "num_experts": 3, "experts_per_token": 2, "head_dim": 8}
        others |= {"num_dense_layers": 1, "num_encoder_layers": 1, "num_expert_groups": 1, "groups_per_token": 1}
        small = dataclasses.replace(small, **{key: value for key, value in others.items() if key in fields})  # type: ignore[type-var]
        folder = root / name
        weights = MemoryWeights(model_of(small), small, Section(encoding=str(root / "tokenizer")))
        export(weights, folder, shard_size=10**4 if len(folders) % 2 else 10**9)
        (folder / "chat_template.jinja").write_text(build_chat_template("", tokenizer).source)
        folders.append(folder)
    return folders


@functools.cache
def known_keys() -> list[str]:
    """Returns the keys of all architectures, and those that are read and not exported."""
    keys = {"added_tokens_decoder", "chat_template", "quantization_config"}
    for folder in originals():
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            keys |= json.loads((folder / name).read_text()).keys()
    return sorted(keys)


def change_keys(file: Path, rng: random.Random) -> None:
    """Sets, removes or moves some keys of a JSON file, also those that its program knows and the file lacks."""
    values = json.loads(file.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice((*values, *known_keys()))
        match rng.randrange(8):
            case 0:
                values.pop(key, None)
            case 1:
                values[key] = copy.deepcopy(values.get(rng.choice(list(values) or [""])))
            case _:
                values[key] = rng.choice(VALUES)
    file.write_text(json.dumps(values))


def change_header(file: Path, rng: random.Random) -> None:
    """Changes an entry in the header of a safetensors file, and keeps its values."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name, other = rng.choice(list(header)), rng.choice(list(header))
    match rng.randrange(6):
        case 0:
            header[other] = copy.deepcopy(header.pop(name))
        case 1:
            header["lm_head.weight"] = copy.deepcopy(header[name])
        case 2:
            header[name], header[other] = header[other], header[name]
        case 3:
            header[rng.choice(["\0", "x" * 300, "a\nb"])] = header.pop(name)
        case _:
            header[name][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(
                [*VALUES, "F16", "I8", [0, 8], [-1, 0], [16, 320], [320, 16], [16]]
            )
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def change_values(file: Path, rng: random.Random) -> None:
    """Overwrites some values of the weights, with NaN and infinity among them."""
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    for _ in range(3):
        position = rng.randrange(8 + length, len(content) - 4)
        content[position : position + 4] = rng.choice([b"\0\0\xc0\x7f", b"\xff" * 4, rng.randbytes(4)])
    file.write_bytes(content)


def change_template(file: Path, rng: random.Random) -> None:
    """Replaces the chat template, or a part of the built-in one."""
    source = rng.choice(TEMPLATES)
    if rng.random() < 0.5:
        lines = BUILT_IN.replace("<start>", "'<'").replace("<end>", "'>'").replace("<after>", "''").splitlines()
        lines.insert(rng.randrange(len(lines)), source)
        source = "\n".join(rng.sample(lines, len(lines)) if rng.random() < 0.2 else lines)
    file.write_text(source)


def regular(file: Path) -> Path:
    """Returns a file. Raises OSError if damage has replaced it: a link names another file."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise OSError(f"{file} is not a regular file")
    return file


def mutate(folder: Path, rng: random.Random) -> None:
    """Changes one to three things in a folder."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            match rng.randrange(12):
                case 0 | 1 | 2 | 3:
                    change_keys(regular(folder / "config.json"), rng)
                case 4:
                    change_keys(regular(folder / "generation_config.json"), rng)
                case 5:
                    change_keys(regular(folder / "tokenizer_config.json"), rng)
                case 6:
                    change_json(regular(folder / "tokenizer.json"), rng)
                case 7:
                    change_template(regular(folder / "chat_template.jinja"), rng)
                case 8:
                    change_header(regular(rng.choice(sorted(folder.glob("*.safetensors")))), rng)
                case 9:
                    change_values(regular(rng.choice(sorted(folder.glob("*.safetensors")))), rng)
                case 10:
                    change_json(regular(folder / "model.safetensors.index.json"), rng)
                case 11:
                    damage(folder, rng)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, struct.error):
            pass  # what it would change has been damaged before


def use(folder: Path) -> None:
    """Does with a folder what the commands do: reads weights, tokenizer and template, imports a recipe, exports."""
    weights = open_weights(folder)
    import_recipe(folder, folder.with_name("recipe.toml"), None, {}, trust=False)
    recipe = load_known(folder.with_name("recipe.toml"), {"data.source": "synthetic"})
    assert recipe.model == weights.config
    model = build_model(weights.config)
    load_weights(model, weights)
    tokenizer = build_tokenizer(weights.tokenizer, weights.config.vocab_size)
    tokens = tokenizer.opening("some text")
    assert max(tokens) < weights.config.vocab_size and isinstance(tokenizer.decode(tokens), str)
    assert all(isinstance(token, int) for token in stop_tokens(weights, tokenizer))
    export(weights, folder.with_name("again"))
    again = open_weights(folder.with_name("again"))
    assert again.config == weights.config
    assert generation_config(again, build_tokenizer(again.tokenizer)) == generation_config(weights, tokenizer)
    template = build_chat_template("", tokenizer)
    template.encode(CHAT)
    with torch.no_grad():
        inputs = torch.tensor([tokens[: weights.config.max_seq_len]])
        targets = {"decoder_tokens": inputs} if weights.config.is_encoder_decoder else {}
        logits = model(tokens=inputs, **targets)
    assert logits.shape[-1] == weights.config.vocab_size


def model_folder(rng: random.Random, root: Path) -> str:
    """Uses a damaged folder. Returns whether it was accepted."""
    folder = root / "hf"
    shutil.copytree(rng.choice(originals()), folder)
    mutate(folder, rng)
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        message = refused_or(lambda: use(folder))
    used = time.process_time() - start
    assert used < CPU_LIMIT, f"{used:.1f} s of CPU time: {message}"
    if message is not None:
        assert message.isprintable() and len(message.split()) > 3, ascii(message)
        # What a template raises is its own, and named.
        assert " raises " in message or not RAW.search(message.replace(str(folder), "")), message
    return "accepted" if message is None else "refused"


@harness.tiers
def test_random_folders_are_accepted_or_refused_in_a_sentence(further: bool) -> None:
    found = harness.run_cases(model_folder, 40, further)
    assert found.keys() == {"accepted", "refused"}


def test_every_unchanged_folder_is_accepted(tmp_path: Path) -> None:
    for original in originals():
        shutil.copytree(original, tmp_path / original.name / "hf")
        use(tmp_path / original.name / "hf")


main = functools.partial(harness.main, {model_folder: 1})

if __name__ == "__main__":
    main()
