"""Autoregressive generation: prompts to text, in batches, with stop strings."""

from collections.abc import Callable, Sequence

from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.distributed import process_group
from titanlike.inference.logits import NextLogits
from titanlike.inference.sampling import Sampler, Sampling

CONTEXT_TOKENS = (
    16  # of a prompt, decoded with what follows: a tokenizer may drop the space before the first token of a text
)
MAX_INCOMPLETE = 3  # bytes of an unfinished UTF-8 character
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

OnText = Callable[
    [int, str], None
]  # called with the index of a prompt, and the text that follows what was passed before


class TextStream:
    """Turns the tokens that follow a prompt into text. Holds back half characters, and what may be the start of a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""  # final
        self.is_stopped = False  # a stop string has appeared; it is not part of the text
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._prompt_size = len(tokenizer.decode(self._tokens))

    def add(self, token: int) -> str:
        """Appends a token. Returns the text that is final with it."""
        self._tokens.append(token)
        return self._advance(last=False)

    def finish(self) -> str:
        """Returns the rest of the text."""
        return "" if self.is_stopped else self._advance(last=True)

    def _advance(self, *, last: bool) -> str:
        text = self.tokenizer.decode(self._tokens)[self._prompt_size :]
        found = [index for index in (text.find(stop) for stop in self.stop) if index >= 0]
        if found:
            self.is_stopped, final = True, text[: min(found)]
        else:
            final = text if last else text[: len(text) - self._num_held_back(text)]
        new, self.text = final[len(self.text) :], final
        return new

    def _num_held_back(self, text: str) -> int:
        """Returns the number of characters at the end that later tokens may change, or that may begin a stop string."""
        incomplete = len(text) - len(text.rstrip(REPLACEMENT))
        starts = [size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return max(min(incomplete, MAX_INCOMPLETE), *starts, 0)


def generate(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    sequence_ids: Sequence[int] | None = None,
    max_length: int | None = None,
    stop: Sequence[str] = (),
    stop_tokens: frozenset[int] = frozenset(),
    on_text: OnText | None = None,
) -> list[str]:
    """Returns the text that follows each prompt. All ranks call it and get the same text.

    A sequence ends after `max_new_tokens` tokens, at a length of `max_length`, before a stop string, or at the token that separates
    documents or another of `stop_tokens`.

    Args:
        prompts: at least one token each; see `Tokenizer.opening`.
        sequence_ids: seed the random numbers of each sequence. Default: 0, 1, ...
        on_text: called with pieces of text as soon as they are final.
    """
    ids = range(len(prompts)) if sequence_ids is None else sequence_ids
    sampler = Sampler(sampling, seed, ids)
    sequences = [list(prompt) for prompt in prompts]
    streams = [TextStream(tokenizer, prompt, stop) for prompt in prompts]
    active = {i for i, tokens in enumerate(sequences) if max_length is None or len(tokens) < max_length}
    ends = stop_tokens | {tokenizer.separator.token}

    def emit(index: int, text: str) -> None:
        if text and on_text is not None:
            on_text(index, text)

    for _ in range(max_new_tokens):
        if not active:
            break
        logits = next_logits(sequences)[:, : tokenizer.vocab_size]
        # Ranks that disagree, after rounding differently for example, would wait for each other for ever.
        tokens = process_group.broadcast_object(sampler(logits))
        for index, token in enumerate(tokens):
            sequences[index].append(token)
            if index not in active:
                continue
            if token in ends:
                active.remove(index)
                continue
            emit(index, streams[index].add(token))
            if streams[index].is_stopped or len(sequences[index]) == max_length:
                active.remove(index)
    for index, stream in enumerate(streams):
        emit(index, stream.finish())
    return [stream.text for stream in streams]
