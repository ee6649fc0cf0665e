"""Preference pairs as tokens; the tokens of the two answers are labels. No torch."""

import numpy as np

from titanlike.config.dpo import PreferenceData
from titanlike.data.documents.preference_pairs import PreferencePair, preference_pair_of, synthetic_pairs
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.arrays import Flags
from titanlike.data.tokens.chat_template import ChatTemplate
from titanlike.data.tokens.chats import Encoded, TokenizedChats, concatenate, open_dialogs
from titanlike.data.tokens.tokenizer import TokenIDs


def open_preferences(section: PreferenceData, path: str, template: ChatTemplate) -> TokenizedChats:
    """Returns the tokens of the pairs at one of the paths of a section: the chosen conversation of each, followed by the rejected
    one. They are tokenized unless the cache has them."""
    if path == "synthetic_preference":
        return concatenate(encode_pair(pair, template) for pair in synthetic_pairs())
    return open_dialogs(
        section, path, template, "preferences", lambda *each: encode_pair(preference_pair_of(*each), template)
    )


def encode_pair(pair: PreferencePair, template: ChatTemplate) -> list[Encoded]:
    """Returns the tokens and labels of both conversations. Answers that they share, before the one in which they differ, are not
    labels. Raises `BadRecord` if they do not differ in an answer, or differ in several that do not share a sequence."""
    *before, (chosen, labels) = template.encode(pair.chosen)
    *other_before, (rejected, other_labels) = template.encode(pair.rejected)
    if [tokens.tolist() for tokens, _ in before] != [tokens.tolist() for tokens, _ in other_before]:
        raise BadRecord(
            f"chosen and rejected differ in several answers, of which {template.name} renders earlier ones differently when others "
            "follow; give a pair for each of them"
        )
    start = _start_of_difference(chosen, labels, rejected)
    encoded = []
    for name, tokens, flags in (("chosen", chosen, labels), ("rejected", rejected, other_labels)):
        flags = flags & (np.arange(len(tokens)) >= start)
        if not flags.any():
            raise BadRecord(f"{name} has no answer where chosen and rejected differ")
        encoded.append((tokens, flags))
    return encoded


def _start_of_difference(chosen: TokenIDs, labels: Flags, rejected: TokenIDs) -> int:
    """Returns where the answer begins that contains the first token in which the conversations differ."""
    shorter = min(len(chosen), len(rejected))
    differs = chosen[:shorter] != rejected[:shorter]
    if not differs.any() and len(chosen) == len(rejected):
        raise BadRecord("chosen and rejected are the same")
    start = int(differs.argmax()) if differs.any() else shorter
    while start > 0 and labels[start - 1]:
        start -= 1
    return start
