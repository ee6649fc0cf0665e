"""The formats of chats that other programs read: a record of each, the conversation in it, and how TRL reads it."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **others: Any) -> Message:
    return {"role": "assistant", "content": content, **others}


@dataclass(frozen=True)
class Format:
    """A format of records."""

    name: str
    used_by: str
    fields: str
    record: dict[str, Any]
    messages: list[Message]
    trl: str = "no such format"  # what TRL makes of the record, compared with the tokens and labels here
    family: str = "Qwen3"  # whose tokenizer and template the comparison with TRL uses
    names: tuple[str, ...] = ()  # `data.fields`
    tools: list[Any] | None = None
    for_trl: dict[str, Any] = field(default_factory=dict)  # the record, where that of TRL differs


EQUAL = "equal"
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 5}}}
USES_TOOL = [
    user("What is 17 plus 5?"),
    assistant("", tool_calls=[CALL]),
    {"role": "tool", "content": "22"},
    assistant("It is 22."),
]
# Between calls, Qwen3's template keeps thoughts that are not empty, and TRL's keeps empty ones too.
THINKS = [message | ({"reasoning_content": "I add."} if "tool_calls" in message else {}) for message in USES_TOOL]

FORMATS = [
    Format(
        "messages", "OpenAI, TRL, axolotl `chat_template`", "`messages` with `role` and `content`",
        {"messages": [SYSTEM, user("Hello"), assistant("Hi! How are you?")]},
        [SYSTEM, user("Hello"), assistant("Hi! How are you?")], EQUAL,
    ),
    Format(
        "messages of several turns", "OpenAI, TRL, axolotl `chat_template`", "`messages`",
        {"messages": [user("Hello"), assistant("Hi!"), user("Bye"), assistant("See you.")]},
        [user("Hello"), assistant("Hi!"), user("Bye"), assistant("See you.")], EQUAL, "Llama 3.1",
    ),
    Format(
        "content as parts", "OpenAI, TRL", "`content` as a list of `{\"type\": \"text\", \"text\": \"...\"}`",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "Hi! How are you?"}]}]},
        [user("Hello"), assistant("Hi! How are you?")], EQUAL, "Gemma 3",
    ),
    Format(
        "calls of tools", "OpenAI, TRL", "`tools`, and messages with `tool_calls`",
        {"messages": THINKS, "tools": TOOLS}, THINKS, EQUAL, tools=TOOLS,
    ),
    Format(
        "thoughts", "Qwen, DeepSeek, TRL", "messages with `reasoning_content`",
        {"messages": [user("17 + 5?"), assistant("22", reasoning_content="17 + 3 = 20, + 2 = 22.")]},
        [user("17 + 5?"), assistant("22", reasoning_content="17 + 3 = 20, + 2 = 22.")], EQUAL,
    ),
    Format(
        "messages with weights", "OpenAI", "messages with `weight`, 0 or 1",
        {"messages": [user("Hello"), assistant("What?", weight=0), user("Hello!"), assistant("Hi!", weight=1)]},
        [user("Hello"), assistant("What?", weight=0), user("Hello!"), assistant("Hi!", weight=1)],
    ),
    Format(
        "messages that are not trained on", "axolotl `message_field_training`", "messages with `train`",
        {"messages": [user("Hello"), assistant("What?", train=False), user("Hello!"), assistant("Hi!", train=True)]},
        [user("Hello"), assistant("What?", weight=0), user("Hello!"), assistant("Hi!", weight=1)],
    ),
    Format(
        "ShareGPT", "ShareGPT, axolotl, TRL", "`conversations` with `from` (`human`, `gpt`, `system`) and `value`",
        {"id": "a1", "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hello"},
                                       {"from": "gpt", "value": "Hi!"}]},
        [SYSTEM, user("Hello"), assistant("Hi!")], "equal, with the roles `user` and `assistant`, which TRL does not rename",
        for_trl={"conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hello"},
                                   {"from": "assistant", "value": "Hi!"}]},
    ),
    Format(
        "ShareGPT with tools", "LLaMA-Factory", "`from` also `function_call` and `observation`; `tools` as JSON; `system`",
        {"conversations": [{"from": "human", "value": "What is 17 plus 5?"},
                           {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 17, "b": 5}}'},
                           {"from": "observation", "value": "22"}, {"from": "gpt", "value": "It is 22."}],
         "tools": '[{"name": "add"}]', "system": "Be brief."},
        [SYSTEM, *USES_TOOL], tools=[{"name": "add"}],
    ),
    Format(
        "prompt and completion as messages", "TRL", "`prompt` and `completion` as lists of messages",
        {"prompt": [user("Hello"), assistant("Hi!"), user("Bye")], "completion": [assistant("See you.")]},
        [user("Hello"), assistant("Hi!", weight=0), user("Bye"), assistant("See you.")], EQUAL,
    ),
    Format(
        "prompt and completion", "OpenAI, TRL, MLX", "`prompt` and `completion` as text",
        {"prompt": "Hello", "completion": "Hi!"}, [user("Hello"), assistant("Hi!")],
        "plain text without a template, as `source = \"text\"` with `prompt_field` reads it, with equal tokens and labels",
    ),
    Format(
        "Alpaca", "Stanford Alpaca, axolotl `alpaca`", "`instruction`, `input` and `output`",
        {"instruction": "Add.", "input": "17, 5", "output": "22"}, [user("Add.\n\n17, 5"), assistant("22")],
    ),
    Format(
        "Dolly", "databricks-dolly-15k", "`instruction`, `context` and `response`",
        {"instruction": "What is its color?", "context": "The sky is blue.", "response": "Blue.", "category": "closed_qa"},
        [user("What is its color?\n\nThe sky is blue."), assistant("Blue.")],
    ),
    Format(
        "question and answer", "GSM8K, axolotl `alpaca_chat.load_qa`", "`question` and `answer`",
        {"question": "17 + 5?", "answer": "22"}, [user("17 + 5?"), assistant("22")],
    ),
    Format(
        "OpenOrca", "OpenOrca, axolotl `alpaca_w_system.load_open_orca`", "`system_prompt`, `question` and `response`",
        {"id": "cot.1", "system_prompt": "Be brief.", "question": "17 + 5?", "response": "22"},
        [SYSTEM, user("17 + 5?"), assistant("22")],
    ),
    Format(
        "columns of two formats", "Parquet of several data sets", "the first pair that is not null",
        {"prompt": None, "completion": None, "instruction": "17 + 5?", "output": "22", "messages": None},
        [user("17 + 5?"), assistant("22")],
    ),
    Format(
        "other names", "axolotl `message_property_mappings`", "any, with `data.fields`",
        {"dialog": [{"speaker": "client", "text": "Hello"}, {"speaker": "agent", "text": "Hi!"}]},
        [user("Hello"), assistant("Hi!")],
        names=("messages=dialog", "role=speaker", "content=text", "user=client", "assistant=agent"),
    ),
]  # fmt: skip
