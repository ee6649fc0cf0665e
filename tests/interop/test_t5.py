"""T5 against transformers: greedy generation, and folders. test_transformers.py compares logits and gradients.

Pairs of texts in one sequence compute what transformers does for each pair.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.interop.models import T5, MemoryWeights, assert_equal_weights, changed_tensors, export_model, model_of
from tests.interop.reference import exported, inputs_of, load
from tests.launching import Cli
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.tokenizer import build_tokenizer, with_sentinels
from titanlike.interop.export import export
from titanlike.interop.tokenizer_files import tokenizer_files
from titanlike.tools.cli.generate import encoder_input

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours

# As many blocks in both stacks: transformers 5.24 does not generate with others.
GENERATING = dataclasses.replace(T5, num_layers=4)


def test_a_published_folder_has_other_names_of_the_embedding(tmp_path: Path) -> None:
    model = model_of(T5)
    folder = export_model(model, T5, tmp_path / "hf")

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        for stack in ("encoder", "decoder"):
            tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"].clone()
        tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(16, 4)

    changed_tensors(folder, as_published)
    (folder / "model.safetensors.index.json").unlink()
    [file] = folder.glob("*.safetensors")
    file.rename(folder / "model.safetensors")
    assert_equal_weights(folder, model, T5)


@torch.no_grad()
def test_pairs_in_one_sequence_are_computed_by_themselves(tmp_path: Path) -> None:
    model = model_of(T5)
    reference = exported(model, T5, tmp_path / "hf")
    tokens, _ = inputs_of(T5)
    lengths = [(50, 20), (60, 40)]  # and padding
    documents, decoder_documents = torch.full((1, 130), -1), torch.ones(1, 90, dtype=torch.long)
    documents[:, :50], documents[:, 50:110], decoder_documents[:, :20] = 0, 1, 0
    logits = model(
        tokens["tokens"][:1],
        tokens["decoder_tokens"][:1],
        document_ids=documents,
        decoder_document_ids=decoder_documents,
    )
    ends = [0, 0]
    for source, target in lengths:
        inputs = tokens["tokens"][:1, ends[0] : ends[0] + source]
        expected = reference(
            input_ids=torch.nn.functional.pad(inputs, (0, 7)),
            attention_mask=torch.nn.functional.pad(torch.ones_like(inputs), (0, 7)),
            decoder_input_ids=tokens["decoder_tokens"][:1, ends[1] : ends[1] + target],
        ).logits
        found = logits[:, ends[1] : ends[1] + target]
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
        ends = [ends[0] + source, ends[1] + target]


@pytest.mark.parametrize("kind", ["bytes", "BOS", "sentinels"])
def test_greedy_generation_equals_that_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The text is that of transformers for what AutoTokenizer makes of the prompt, which ends with EOS, as in the training."""
    section = Tokenizer()
    if kind != "bytes":
        names = ["<s>"] if kind == "BOS" else ["<extra_id_1>", "<extra_id_0>"]
        files = tokenizer_files(build_tokenizer(section), 256)
        content = json.loads(files["tokenizer.json"])
        [eos] = content["added_tokens"]
        content["added_tokens"] += [eos | {"id": 257 + index, "content": name} for index, name in enumerate(names)]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_bytes(files["tokenizer_config.json"])
        both: Any = dict(special="both", bos="<s>") if kind == "BOS" else {}
        section = Tokenizer(encoding=str(tmp_path / "tokenizer.json"), **both)
    model = model_of(GENERATING)
    # Of random bytes, only ASCII is text. Rows that are no token of a tokenizer are not generated.
    with torch.no_grad():
        model.get_submodule("output").weight[128:256] = 0.0
        model.get_submodule("output").weight[259 if kind == "sentinels" else 301 :] = 0.0
    folder = tmp_path / "hf"
    export(MemoryWeights(model, GENERATING, section), folder)
    prompts = ["a text", "another text, which is longer than the first one", "Words <extra_id_0> and <extra_id_1>."]
    monkeypatch.setenv("NPROC", "1")
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    printed = cli("generate", folder, *arguments, "--temperature", "0", "--tokens", "30", "--json").out
    texts = [json.loads(line)["text"] for line in printed.splitlines() if line.startswith("{")]
    reference, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    ours = with_sentinels(build_tokenizer(section), GENERATING.vocab_size)
    sentinels = (258, 257) if kind == "sentinels" else (300, 299)
    for prompt, text in zip(prompts, texts, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = inputs["input_ids"][0].tolist()
        assert tokens == encoder_input(ours, prompt) and tokens[-1] == 256
        assert tokens[0] == (257 if kind == "BOS" else ord(prompt[0]))
        assert [token for token in tokens if token > 256 and token != ours.bos] == (
            list(sentinels) if "<" in prompt else []
        )
        found = reference.generate(**inputs, do_sample=False, max_new_tokens=30)[0].tolist()
        assert found[0] == 0 and text == tokenizer.decode([token for token in found[1:] if token != 256])
        assert len(set(text)) > 3
    assert kind == "sentinels" or any("<extra_id_" in text for text in texts)
