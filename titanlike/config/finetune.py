"""Sections of fine-tuning: chats and LoRA. Does not import torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from titanlike.config.base import FilePath, NonNegative, OnlyWith, PositiveFloat, matches, only_from, section, shown
from titanlike.config.sections import CACHES, HAS_SEQUENCES, HOLDS_OUT, READS_RECORDS, Data, is_chat_source

PLAIN = ("text", "shards", "stream", "python_stdlib", "synthetic")  # sources of text without turns
CHATS = OnlyWith(("source",), lambda source: source not in PLAIN, values=("chat",))
FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question"),
    "completion": ("completion", "output", "answer", "response"),
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "role": ("role", "from"),
    "content": ("content", "value"),
    "weight": ("weight", "train"),
}
"""The fields of conversations and of their messages, and the names that they have in common data."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@section
class ChatData(Data):
    """Training and validation data."""

    source: Literal["chat", "synthetic_chat", "python_stdlib", "text", "shards", "stream", "synthetic"] = "chat"  # type: ignore[assignment]
    """`chat`: conversations or instructions, of which the assistant's tokens are the labels. `synthetic_chat`: generated
    conversations about sums. The others are plain text: `shards`: token shards from `titanlike data prepare`. `text`: text
    files, tokenized at the first start and cached. `stream`: text files, tokenized during training. `python_stdlib`: the source
    code of Python's standard library, available on every machine. `synthetic`: random tokens, for benchmarks."""
    holdout_every: Annotated[NonNegative, HOLDS_OUT, HAS_SEQUENCES] = 50
    """Hold out one of every `holdout_every` conversations, pairs or sequences, evenly spaced, for validation. 0 holds out none and
    requires `validation.interval = 0`. Not used for shards that have a validation split."""
    validation_path: FilePath = ""
    """Conversations or pairs for validation, or, if `source` is plain text, shards or text. If set, no training data is held
    out."""
    cache: Annotated[FilePath, CACHES] = ""
    """Directory that caches the tokens of `chat`, `preference` and `text`. Default: `~/.cache/titanlike`."""
    chat_template: Annotated[FilePath, CHATS] = ""
    """Jinja file that renders the conversations of `chat` and `preference`. Default: the tokenizer's template or, if it has
    none, ChatML for a tokenizer with its tokens, and else a plain template."""
    fields: Annotated[tuple[str, ...], CHATS, READS_RECORDS] = ()
    """Names of fields that are not the common ones, such as `["messages=dialog", "content=text"]`: of a record, `messages`,
    `prompt`, `completion`, `input`, `system`, `tools`, `chosen` and `rejected`; of a message, `role`, `content` and `weight`. A
    role gets a further name in the same way: `"assistant=agent"`. Default: the common names, which docs/post_training.md lists."""
    long_chats: Annotated[Literal["truncate", "skip"], CHATS] = "truncate"
    """How to handle a conversation of more than `training.seq_len` + 1 tokens: `truncate` its end, or `skip` it. Of a preference
    pair, this is the length of both conversations, of which the longer one is truncated first."""

    @property
    def has_chats(self) -> bool:
        """Whether the data are conversations."""
        return is_chat_source(self.source)

    @property
    def masks_documents(self) -> str:
        """The key that masks attention between documents, with its value; "" if none does."""
        return f"data.source = '{self.source}'" if self.has_chats else super().masks_documents

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        yield from super().problems()
        for name, equals, other in (each.partition("=") for each in self.fields):
            if name not in (*FIELDS, *ROLES) or not other:
                known = ", ".join(dict.fromkeys((*FIELDS, *ROLES)))
                yield f"data.fields: {shown(name + equals + other)!r} is not NAME=FIELD with one of the names {known}"

    def missing_files(self) -> Iterator[str]:
        """Yields a sentence for each file that the section names and that this machine lacks, besides the data."""
        if self.chat_template and not Path(self.chat_template).is_file():
            yield f"data.chat_template = {self.chat_template!r} is not a file; give a Jinja template"


@section
class Lora:
    """LoRA: trains two small matrices beside each selected linear layer, and nothing else."""

    rank: NonNegative = 0
    """Inner dimension of the two matrices. 0 disables LoRA."""
    alpha: Annotated[PositiveFloat, only_from("rank", 1)] = 16.0
    """Their product is multiplied by `alpha / rank`."""
    layers: Annotated[tuple[str, ...], only_from("rank", 1)] = ()
    """Linear layers of the blocks, by parts of their names: `attention`, `wq`, `layers.0`, `layers.*.feed_forward`. Default:
    all linear layers of the blocks."""

    def selects(self, name: str) -> bool:
        """Whether a linear layer of a block has these matrices."""
        return self.rank > 0 and (not self.layers or any(matches(pattern, name) for pattern in self.layers))
