"""Pairs of an input and a target text as tokens; the tokens of the target are labels. No torch."""

from typing import Any

import numpy as np

from titanlike.config.base import shown
from titanlike.config.sections import Data
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.chats import Encoded, TokenizedChats, open_records
from titanlike.data.tokens.tokenizer import Tokenizer


def open_text_pairs(section: Data, path: str, tokenizer: Tokenizer, prefix: str = "") -> TokenizedChats:
    """Returns the tokens of the pairs in the records of files, each an input and a target, which end with EOS. They are tokenized
    unless the cache has them."""
    fields = section.prompt_field, section.text_field

    def encode(record: dict[str, Any]) -> list[Encoded]:
        texts = []
        for field in fields:
            text = record.get(field)
            if not isinstance(text, str) or not text:
                found = ", ".join(map(shown, map(str, record))) or "none"
                raise BadRecord(f"no text in the field {field!r}; its fields are {found}")
            texts.append(text)
        source, target = (tokenizer.document(text)[0] for text in (prefix + texts[0], texts[1]))
        return [(np.concatenate([source, target]), np.arange(len(source) + len(target)) >= len(source))]

    return open_records(section, path, repr((fields, prefix)), tokenizer, "text_pairs", encode)
