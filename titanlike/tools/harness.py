"""The model class of lm-evaluation-harness. Importing this module registers it as `titanlike`; `titanlike lm_eval` does."""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import lm_eval.models  # noqa: F401  otherwise the harness registers its own models only if there is no other
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from titanlike.config import UserError
from titanlike.config.sections import DType
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.distributed import environment, process_group
from titanlike.inference.generation import generate
from titanlike.inference.sampling import Sampling
from titanlike.inference.scoring import Request, Scorer, encode_pair, prefix_token
from titanlike.interop.generation_config import stop_tokens
from titanlike.interop.weights import open_weights
from titanlike.parallelisms.mesh import build_mesh
from titanlike.tools.inference.cached_logits import CachedLogits
from titanlike.tools.inference.load import default_dtype, load_for_generation


@register_model("titanlike")
class TitanlikeLM(LM):
    """A run, a checkpoint or a Hugging Face folder, in one process."""

    def __init__(
        self,
        path: str,
        step: int = 0,
        dtype: str = "",
        device: str = "auto",
        batch_size: int | str = 8,
        max_length: int = 0,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        """Loads the model. The arguments come from `--model_args`; the harness adds its options `--device` and `--batch_size`.

        Args:
            path: as for `titanlike evaluate`.
            dtype: `float32` or `bfloat16`. Default: bfloat16 on a GPU.
            max_length: context length. Default: the model's.
            max_gen_toks: number of tokens to generate, for tasks that do not set it.
        """
        super().__init__()
        if environment.rank_info().world_size > 1:
            raise UserError("--model titanlike runs in one process; for several, use `titanlike evaluate`")
        if dtype not in ("", "float32", "bfloat16"):
            raise UserError(f"--model_args dtype={dtype}: use float32 or bfloat16")
        if not str(batch_size).isdecimal():
            raise UserError(f"--batch_size {batch_size}: give a number")
        kind, _, index = device.partition(":")
        if index not in ("", "0"):
            raise UserError(
                f"--device {device}: the model is on the first GPU; set CUDA_VISIBLE_DEVICES={index}, and omit it"
            )
        # Without the option, the harness passes cuda:0, and its own models are on the CPU if there is no GPU.
        name = cast(Any, "auto" if device in ("", "cuda:0") else kind)
        if dist.is_initialized():
            self._device = process_group.select_device(name, "--device")
        else:
            session = ExitStack()
            self._device = session.enter_context(process_group.session(name, option="--device"))
            atexit.register(session.close)
        self.mesh = build_mesh(self._device.type)
        weights = open_weights(Path(path), step=step)
        self.tokenizer = build_tokenizer(weights.tokenizer, weights.config.vocab_size, str(weights.path))
        self.max_length = max_length or weights.config.max_seq_len
        self.max_gen_toks, self.seed, self.batch_size = max_gen_toks, seed, int(batch_size)
        self.stop_tokens = stop_tokens(weights, self.tokenizer)
        dtype = dtype or default_dtype(self._device)
        self.model = load_for_generation(weights, self.mesh, self._device, cast(DType, dtype))
        self.scorer = Scorer(
            self.model, self.mesh, device=self._device, max_length=self.max_length, batch_size=self.batch_size
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether greedy decoding would produce it."""
        return self.scorer([encode_pair(self.tokenizer, *request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, each of its tokens predicted once with as much context as fits."""
        pieces = [list(self._pieces(request.args[0])) for request in requests]
        scores = iter(self.scorer([piece for group in pieces for piece in group]))
        return [sum(next(scores)[0] for _ in group) for group in pieces]

    def _pieces(self, text: str) -> Iterator[Request]:
        """Yields the parts of a text, each with its context."""
        tokens = [prefix_token(self.tokenizer), *self._encode(text)]
        for first in range(1, len(tokens), self.max_length):
            end = min(first + self.max_length, len(tokens))
            yield tokens[max(0, end - self.max_length - 1) : first], tokens[first:end]

    def _encode(self, text: str) -> list[int]:
        tokenizer = self.tokenizer
        return tokenizer.encode(text).tolist() if tokenizer.bos is None else tokenizer.opening(text)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that follows each context, up to a stop string."""
        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}  # of requests with the same options
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for group in groups.values():
            group.sort(key=lambda index: len(requests[index].args[0]))
            for first in range(0, len(group), self.batch_size):
                batch = group[first : first + self.batch_size]
                contexts = [requests[index].args[0] for index in batch]
                for index, text in zip(batch, self._generate(contexts, requests[batch[0]].args[1], batch), strict=True):
                    texts[index] = text
        return texts

    def _generate(self, contexts: Sequence[str], options: dict[str, Any], ids: Sequence[int]) -> list[str]:
        max_new_tokens = int(options.get("max_gen_toks", self.max_gen_toks))
        room = self.max_length - max_new_tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks = {max_new_tokens} leaves no room for a prompt in the context of {self.max_length} tokens; use a "
                "smaller number"
            )
        until = options.get("until") or []
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        sampling = Sampling(temperature, int(options.get("top_k", 0)), float(options.get("top_p", 1.0)))
        with CachedLogits(
            self.model, self.mesh, max_new_tokens=max_new_tokens, max_length=self.max_length, device=self._device
        ) as next_logits:
            return generate(
                next_logits,
                [self.tokenizer.opening(context)[-room:] for context in contexts],
                self.tokenizer,
                sampling,
                max_new_tokens=max_new_tokens,
                max_length=self.max_length,
                seed=self.seed,
                sequence_ids=ids,
                stop=[until] if isinstance(until, str) else [text for text in until if text],
                stop_tokens=self.stop_tokens,
            )
