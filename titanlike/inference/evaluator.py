"""Evaluation of a model on tasks and text, and samples: by `titanlike evaluate`, and during training.

What scores and generates is imported when it is due: most runs have no evaluation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from titanlike.config import UserError
from titanlike.config.sections import Data, Evaluation, Sample, Training, metrics_name
from titanlike.data.batches.sources import open_validation
from titanlike.data.tokens.shards import TEST, VALIDATION, Shards
from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.distributed import process_group
from titanlike.inference.generation import generate
from titanlike.inference.logits import recomputed_logits
from titanlike.inference.perplexity import perplexity
from titanlike.inference.sampling import Sampling
from titanlike.inference.scoring import Scorer, encode_pair
from titanlike.inference.tasks import read_task
from titanlike.models.common.config import TransformerConfig
from titanlike.parallelisms.mesh import Mesh

if TYPE_CHECKING:
    from titanlike.data.tokens.chat_template import ChatTemplate
    from titanlike.inference.scoring import Request, Score
    from titanlike.inference.tasks import Task

Metrics = dict[str, float]

SAMPLE_CONTEXT = (
    256  # tokens that a sample is computed from: without a cache, each token costs a forward pass of this length
)


class Evaluator:
    """The tasks and the text of an evaluation. Opens the files at once, so that a mistake is found before the training starts."""

    def __init__(
        self,
        section: Evaluation,
        sample: Sample,
        data: Data,
        training: Training,
        config: TransformerConfig,
        tokenizer: Tokenizer,
        seed: int,
        template: "ChatTemplate | None" = None,
    ) -> None:
        """Opens the files that the section names.

        Args:
            data: names the fields of records, and whether documents are masked from each other.
            training: has the length of the sequences into which text is cut, and the number of them in a forward pass of a rank.
            config: config of the model. The items of tasks are cut on the left to its context length.
            seed: seed of the samples.
            template: chat template of the conversations. A sample is then the answer to its prompt.
        """
        self.section, self.sample, self.data, self.training = section, sample, data, training
        self.config, self.tokenizer, self.seed, self.template = config, tokenizer, seed, template
        self.tasks = self._read_tasks()
        with process_group.waiting_for_all():  # as when the training data is opened
            self.texts = {metrics_name(path): self._open(path) for path in section.data}

    def is_due(self, step: int) -> bool:
        """Whether to evaluate or to sample after a step. The last step is always evaluated."""
        return self._evaluates(step) or self._samples(step)

    def __call__(self, step: int, model: nn.Module, mesh: Mesh) -> dict[str, float | str]:
        """Returns what is due after a step, by the names of the metrics. All ranks call it and get the same."""
        values: dict[str, float | str] = {}
        for name, metrics in (self.evaluate(model, mesh) if self._evaluates(step) else {}).items():
            values |= {f"evaluation/{name}/{metric}": value for metric, value in metrics.items()}
        return values | ({"sample": self.sample_text(model, mesh)} if self._samples(step) else {})

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        mesh: Mesh,
        on_result: Callable[[str, Metrics], object] = lambda *_: None,
        on_batch: Callable[[str, int, int], object] = lambda *_: None,
    ) -> dict[str, Metrics]:
        """Returns the metrics of each task and text by name. All ranks call it and get the same.

        `on_result` is called as soon as the metrics of one of them are known, `on_batch` after a number of all its batches."""
        batch_size = self.training.local_batch_size
        scorer = Scorer(
            model,
            mesh,
            device=torch.device(mesh.tensor.device_type),
            max_length=self.config.max_seq_len,
            batch_size=batch_size,
        )
        text_perplexity = partial(
            perplexity,
            model,
            mesh,
            tokenizer=self.tokenizer,
            seq_len=self.training.seq_len,
            batch_size=batch_size,
            device=torch.device(mesh.tensor.device_type),
            document_masks=self.data.document_masks,
            limit=self.section.limit,
        )
        results: dict[str, Metrics] = {}
        for name, one in (self.tasks | self.texts).items():
            done = partial(on_batch, name)
            score = partial(scorer, on_batch=done)
            results[name] = (
                text_perplexity(one, name=name, on_batch=done) if isinstance(one, Shards) else self._score(one, score)
            )
            on_result(name, results[name])
        return results

    def last_sample(self, model: nn.Module, mesh: Mesh) -> str | None:
        """Returns the sample at the end of a run with a heading, or None if there is none to make."""
        if not self.sample.tokens:
            return None
        return f"\nsample after {self.training.steps} steps:\n{self.sample_text(model, mesh)}\n"

    def sample_text(self, model: nn.Module, mesh: Mesh) -> str:
        """Returns the prompt of the samples and what the model continues it with, or its answer. All ranks call it and get the same
        text."""
        sample, prompt, stop_tokens = self.sample, self.tokenizer.opening(self.sample.prompt), frozenset[int]()
        if self.template:
            prompt = self.template.opening([{"role": "user", "content": sample.prompt}])
            end = self.template.end_of_turn()
            stop_tokens = frozenset() if end is None else frozenset({end})
        [text] = generate(
            recomputed_logits(
                model, mesh, min(self.training.seq_len, SAMPLE_CONTEXT), torch.device(mesh.tensor.device_type)
            ),
            [prompt],
            self.tokenizer,
            Sampling(sample.temperature),
            max_new_tokens=sample.tokens,
            seed=self.seed,
            stop_tokens=stop_tokens,
        )
        return f"user: {sample.prompt}\nassistant: {text}" if self.template else sample.prompt + text

    def _read_tasks(self) -> "dict[str, Task]":
        if not self.section.tasks:
            return {}
        return {metrics_name(file): read_task(file, self.section.limit) for file in self.section.tasks}

    def _score(self, task: "Task", scorer: "Callable[[list[Request]], list[Score]]") -> Metrics:
        requests = [
            [encode_pair(self.tokenizer, item.context, text) for text in item.continuations] for item in task.items
        ]
        scores = iter(scorer([request for group in requests for request in group]))
        return task.scores([[next(scores) for _ in group] for group in requests])

    def _open(self, path: str) -> Shards:
        tokens = open_validation(replace(self.data, validation_path=path), self.tokenizer, splits=(TEST, VALIDATION))
        if tokens.num_tokens < 2:
            raise UserError(f"{path} has {tokens.num_tokens} tokens, too few to predict one; give more text")
        return tokens

    def _evaluates(self, step: int) -> bool:
        interval = self.section.interval
        return interval > 0 and (step % interval == 0 or step == self.training.steps)

    def _samples(self, step: int) -> bool:
        return self.sample.tokens > 0 and self.sample.interval > 0 and step % self.sample.interval == 0
