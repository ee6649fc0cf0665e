"""The generation config of a model: which tokens end a text."""

import json
import sys
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.config.sections import is_chat_source
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.chat_template import BUILT_IN_NAME, ChatTemplate, build_chat_template
from titanlike.data.tokens.tokenizer import Tokenizer, files_of
from titanlike.distributed import process_group
from titanlike.interop.hf_folder import CONFIG, read_json
from titanlike.interop.weights import CheckpointWeights, Weights

GENERATION_CONFIG = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_config(weights: Weights, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> dict[str, Any]:
    """Returns the content of `generation_config.json`, from the file beside the tokenizer, if there is one. `eos_token_id` also has
    the token that separates documents and, with a template, the one that ends a turn. The default `template` is the run's, if it
    trained on conversations."""
    config, ends = _source(tokenizer)
    end_of_turn = _end_of_turn(template or trained_template(weights, tokenizer))
    added = {tokenizer.separator.token, end_of_turn} - {None, *ends}
    ends += sorted(token for token in added if token is not None)
    # transformers reads them here, and not in config.json.
    config |= {
        key: value for key, value in getattr(weights.config, "generation_tokens", {}).items() if config.get(key) is None
    }
    return config | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if added else {})


def stop_tokens(weights: Weights, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> frozenset[int]:
    """Returns the tokens that end a text, or an answer in a chat with this template."""
    found = generation_config(weights, tokenizer, template)["eos_token_id"]
    return frozenset(found if isinstance(found, list) else [found])


def trained_template(weights: Weights, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the chat template that a model was fine-tuned with, or None if it was not trained on conversations."""
    data = weights.metadata.recipe.get("data", {}) if isinstance(weights, CheckpointWeights) else {}
    if not is_chat_source(data.get("source", "")):
        return None
    return build_chat_template(data.get("chat_template", ""), tokenizer)


def chat_template(weights: Weights, tokenizer: Tokenizer) -> tuple[ChatTemplate, bool]:
    """Returns the template for a chat with a model, and whether the model is known to be fine-tuned on chats: in this run, or,
    of a Hugging Face folder, because it has a template."""
    if trained := trained_template(weights, tokenizer):
        return trained, True
    template = build_chat_template("", tokenizer)
    return template, template.name != BUILT_IN_NAME and not isinstance(weights, CheckpointWeights)


def _source(tokenizer: Tokenizer) -> tuple[dict[str, Any], list[int]]:
    """Returns the generation config of the folder that the tokenizer is from, and the tokens in it that end a text."""
    files = files_of(tokenizer.section.encoding)
    folder = files[0].parent if files and files[0].suffix == ".json" else None
    if folder and (file := folder / GENERATION_CONFIG).exists():
        config = read_json(file)
    elif folder and (file := folder / CONFIG).exists():  # where transformers looks next
        values = read_json(file)
        config = {key: values[key] for key in IDS if key in values} | {"do_sample": True}
    else:
        bos = {} if tokenizer.bos is None else {"bos_token_id": tokenizer.bos}
        return bos | {"eos_token_id": None, "do_sample": True}, []
    found = config.get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ends):
        raise UserError(
            f"{file}: eos_token_id = {shown(json.dumps(found))} is neither the number of a token nor a list of them; correct it"
        )
    return config, list(ends)


def _end_of_turn(template: ChatTemplate | None) -> int | None:
    try:
        return template.end_of_turn() if template else None
    except BadRecord as error:
        if process_group.is_main():
            print(
                f"warning: the token that ends a turn is not known: {error}; add it to eos_token_id in {GENERATION_CONFIG}",
                file=sys.stderr,
                flush=True,
            )
        return None
