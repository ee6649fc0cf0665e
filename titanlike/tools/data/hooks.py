"""What the data adds to `--check` (`titanlike.run.hooks`). No torch."""

from titanlike.config import UserError
from titanlike.config.finetune import ChatData
from titanlike.data.documents.conversations import Conversation, Message
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.recipe import PretrainRecipe

TURNS: list[Message] = [
    {"role": role, "content": content} for content in ("one", "two") for role in ("user", "assistant")
]


def checked(recipe: PretrainRecipe, num_processes: int) -> str | None:
    """Returns a line if the chat template renders an answer differently when others follow. None if it does not, or if this machine
    lacks the template."""
    data = recipe.data
    if not isinstance(data, ChatData) or not data.has_chats:
        return None
    try:
        template = build_chat_template(data.chat_template, build_tokenizer(recipe.tokenizer, recipe.model.vocab_size))
        num_documents = len(template.encode(Conversation(TURNS)))
    except (UserError, BadRecord):
        return None  # a start on the machine that trains says what is wrong
    if num_documents == 1:
        return None
    return (
        f"chats   {template.name} renders an answer differently when others follow: a conversation becomes up to one document for "
        "each answer, rendered as at inference; `titanlike data inspect` counts them"
    )
