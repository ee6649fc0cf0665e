"""A conversation with a model: its chat template, the turns so far, and a KV cache that is kept between them."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from titanlike.config import UserError
from titanlike.data.documents.conversations import Message
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.chat_template import ChatTemplate
from titanlike.distributed import process_group
from titanlike.inference.generation import generate
from titanlike.inference.sampling import Sampling
from titanlike.tools.inference.cached_logits import CachedLogits, check_prompts


class _InterruptedError(Exception):
    pass


class Chat:
    """Answers the messages of a user. Forgets the oldest turns if the conversation no longer fits in the context of the model."""

    def __init__(
        self,
        cached: CachedLogits,
        template: ChatTemplate,
        sampling: Sampling,
        *,
        seed: int,
        system: str = "",
        stop: Sequence[str] = (),
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            cached: of the model; its numbers of tokens limit an answer and the conversation.
            system: the system message, which precedes all turns; "" is none.
            stop: texts before which an answer ends.
            stop_tokens: tokens that end an answer.
        """
        self.cached, self.template, self.sampling, self.seed = cached, template, sampling, seed
        self.stop, self.stop_tokens = stop, stop_tokens
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.turns: list[Message] = []  # by turns the user's and the assistant's
        self._num_answers = 0

    def reset(self) -> None:
        """Forgets the conversation. The system message stays."""
        self.turns = []

    def answer(
        self, message: str, on_text: Callable[[str], object], is_interrupted: Callable[[], bool] = lambda: False
    ) -> str:
        """Returns the answer to a message of the user, and adds both to the conversation. Raises `UserError` if the message alone
        is too long, or if the template does not render it; the conversation is then as before.

        Args:
            on_text: called with pieces of the answer as soon as they are final.
            is_interrupted: called before each token; True ends the answer there.
        """
        turns = [*self.turns, {"role": "user", "content": message}]
        prompt, turns = self._fit(turns)
        self.cached.resume(prompt)
        pieces: list[str] = []

        def next_logits(sequences: Sequence[Sequence[int]]) -> Tensor:
            if is_interrupted():
                raise _InterruptedError
            return self.cached(sequences)

        def emit(_: int, text: str) -> None:
            pieces.append(text)
            on_text(text)

        with suppress(_InterruptedError):
            generate(
                next_logits,
                [prompt],
                self.template.tokenizer,
                self.sampling,
                max_new_tokens=self.cached.max_new_tokens,
                seed=self.seed,
                sequence_ids=[self._num_answers],  # a question that is repeated may get another answer
                max_length=self.cached.max_length,
                stop=self.stop,
                stop_tokens=self.stop_tokens,
                on_text=emit,
            )
        self._num_answers += 1
        answer = "".join(pieces)
        self.turns = [*turns, {"role": "assistant", "content": answer}]
        return answer

    def _fit(self, turns: list[Message]) -> tuple[list[int], list[Message]]:
        """Returns the tokens before the answer, and the turns without those that leave no room for it."""
        max_length = self.cached.max_length
        room = min(self.cached.max_new_tokens, max_length // 2)
        kept = turns
        while len(prompt := self._encode(kept)) + room > max_length and len(kept) > 1:
            kept = kept[2:]
        check_prompts([prompt], max_length)
        if dropped := (len(turns) - len(kept)) // 2:
            process_group.warn(
                f"the conversation exceeds the context of the model, {max_length} tokens (model.max_seq_len); "
                f"forgetting the oldest {f'{dropped} turns' if dropped > 1 else 'turn'}"
            )
        return prompt, kept

    def _encode(self, turns: list[Message]) -> list[int]:
        try:
            return self.template.opening([*self.system, *turns])
        except BadRecord as error:
            raise UserError(
                f"{error}; the template may not support system messages" if self.system else str(error)
            ) from None
