"""Pipeline parallelism: ranks hold different blocks, and hand on what comes out of them, one micro-batch after the other."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config.layout import SCHEDULES, blocks_of, rank_of, stages_of
from titanlike.models.layers import LMHead, TiedLMHead
from titanlike.utils.dtensor import local_tensor

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"

Finish = Callable[[Tensor], Tensor]  # what is done with the loss that a micro-batch's labels add up to


class MicroBatch(Protocol):
    """What a pipeline reads of a micro-batch."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model is called with, each (B, ...): `tokens`, and more that every stage gets."""

    @property
    def labels(self) -> Tensor:
        """What the last stage is called with besides."""


class Pipeline(nn.Module):
    """This rank's blocks and ends, under the names that they have in the whole model, and the schedule that runs them."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        schedule: str,
        split: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        tensor: int = 1,
    ) -> None:
        """Keep of the model what this rank of `mesh` holds. `split` has the number of blocks of each stage; activations are
        handed on in `dtype`, and each of `tensor` ranks hands on its share of the tokens."""
        super().__init__()
        self.init_parameter = model.init_parameter
        self.mesh = mesh
        self.kind = SCHEDULES[schedule]
        self.num_stages = len(split)
        self.dtype = dtype
        self.tensor = tensor
        embedding = model.get_parameter("tok_embeddings.weight")
        self.vocab_size, self.dim = embedding.shape
        # In a dictionary, which torch does not look into: each parameter has one name, that of the whole model.
        self.parts = {
            stage: _part(model, stage, split)
            for stage in stages_of(mesh.get_local_rank(), mesh.size(), self.num_stages, v_shaped=self.kind.v_shaped)
        }
        self.layers = nn.ModuleDict()
        for part in self.parts.values():
            for name, child in part.named_children():
                if name == "layers":
                    self.layers.update(dict(child.named_children()))
                else:
                    self.add_module(name, child)
        # A head that is the embedding becomes a parameter of its own, which has to stay equal to the embedding.
        self.tied = isinstance(model.output, TiedLMHead)
        self.copies = {HEAD: EMBEDDING} if self.tied and self.has_last else {}
        self.schedule: Any = None
        self.finish: Finish | None = None

    @property
    def has_last(self) -> bool:
        """Whether the loss is computed on this rank."""
        return self.num_stages - 1 in self.parts

    def forward_backward(self, microbatches: Sequence[MicroBatch], finish: Finish) -> Tensor:
        """Gradients of the sum of what `finish` makes of the micro-batches' losses. Returns that sum where the last stage is,
        0 elsewhere."""
        # The schedule cuts the batch into micro-batches again, by itself.
        inputs = {name: torch.cat([batch.inputs[name] for batch in microbatches]) for name in microbatches[0].inputs}
        labels = torch.cat([batch.labels for batch in microbatches])
        tokens = inputs.pop("tokens")
        if self.schedule is None:
            self.schedule = self._build_schedule(microbatches[0].labels, len(microbatches))
        self.finish = finish
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if 0 in self.parts else []),
            target=labels if self.has_last else None,
            losses=losses,
            return_outputs=False,
            labels=labels,
            **inputs,
        )
        if self.tied:
            self._add_tied_gradients()
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=labels.device)

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """The sum of the micro-batches' losses where the last stage is, 0 elsewhere."""
        loss = torch.zeros((), device=microbatches[0].labels.device)
        # As many at once as keep all ranks busy: the activations of all of them are kept.
        for start in range(0, len(microbatches), self.mesh.size()):
            some = microbatches[start : start + self.mesh.size()]

            self._forward_only(
                [batch.inputs | {"labels": batch.labels} for batch in some], lambda found, index: loss.add_(found)
            )
        return loss

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits on every rank: for a sample, not for training."""
        logits = self._like(inputs["tokens"], self.vocab_size // self.tensor, inputs["tokens"].shape[1])
        self._forward_only([inputs], lambda found, index: logits.copy_(found))
        group = self.mesh.get_group()
        dist.broadcast(logits, src=dist.get_global_rank(group, self._rank_of(self.num_stages - 1)), group=group)
        return logits

    @torch.no_grad()
    def _forward_only(self, inputs: Sequence[dict[str, Tensor]], take: Callable[[Tensor, int], object]) -> None:
        """Send micro-batches through all stages. `take` is given what comes out, one after the other, where the last one is.

        Stage by stage, and all that a stage receives before all that it sends: so two ranks that exchange in both
        directions do so in the same order, and never wait for each other.
        """
        group, sent = self.mesh.get_group(), []
        handed_on: list[Tensor] = []  # from a stage to the next one, where that is on the same rank
        for stage, part in self.parts.items():
            received: list[tuple[Tensor, dist.Work | None]] = [(batch["tokens"], None) for batch in inputs]
            if stage > 0 and stage - 1 in self.parts:
                received = [(h, None) for h in handed_on]
            elif stage > 0:
                source = dist.get_global_rank(group, self._rank_of(stage - 1))
                for index, batch in enumerate(inputs):
                    h = self._like(batch["tokens"], self.dim, batch["tokens"].shape[1] // self.tensor)
                    received[index] = h, dist.irecv(h, source, group)
            handed_on = []
            for index, (h, arrival) in enumerate(received):
                if arrival is not None:
                    arrival.wait()
                out = part(h, **{name: value for name, value in inputs[index].items() if name != "tokens"})
                if stage == self.num_stages - 1:
                    take(out, index)
                elif stage + 1 in self.parts:
                    handed_on.append(out)
                else:
                    target = dist.get_global_rank(group, self._rank_of(stage + 1))
                    sent.append((dist.isend(out.contiguous(), target, group), out))
        for work, _ in sent:
            if work is not None:
                work.wait()

    def _like(self, tokens: Tensor, width: int, length: int) -> Tensor:
        return torch.empty(tokens.shape[0], length, width, dtype=self.dtype, device=tokens.device)

    def _build_schedule(self, labels: Tensor, num_microbatches: int) -> Any:
        from torch.distributed import pipelining  # imports the compiler, which takes a second

        if self.kind.splits_backward:
            # Parts of the graph are walked twice, so compiled code may not reuse the memory of what it has read.
            torch._functorch.config.donated_buffer = False
        batch, length = labels.shape
        # Saying what is handed on spares torch a trial run on made-up values.
        tokens = torch.empty(batch, length, dtype=labels.dtype, device="meta")
        hidden = self._like(tokens, self.dim, length // self.tensor).requires_grad_()
        loss = torch.empty((), device="meta").requires_grad_()
        stages = [
            pipelining.PipelineStage(
                part,
                stage,
                self.num_stages,
                labels.device,
                input_args=hidden if stage else tokens,
                output_args=hidden if stage < self.num_stages - 1 else loss,
                group=self.mesh.get_group(),
            )
            for stage, part in self.parts.items()
        ]
        if labels.device.type == "cpu":
            for stage in stages:
                # torch 2.11 greets the neighbouring stage first, even on the same rank, which gloo cannot.
                stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        kind = getattr(pipelining, self.kind.torch_class)

        def finish(loss: Tensor, _: Tensor) -> Tensor:
            assert self.finish is not None
            return self.finish(loss)

        # Each loss is already divided by the tokens of the whole batch: micro-batches add up.
        several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
        return kind(stages if several else stages[0], num_microbatches, loss_fn=finish, scale_grads=False)

    def _add_tied_gradients(self) -> None:
        """Give the embedding and the head that is its copy the sum of their gradients, wherever each of them is."""
        found = {name: parameter for name, parameter in self.named_parameters() if name in (EMBEDDING, HEAD)}
        gradients = [local_tensor(cast(Tensor, parameter.grad)) for parameter in found.values()]
        if len(gradients) == 2:
            total = gradients[0] + gradients[1]
        elif len(gradients) == 1:
            group, other = self.mesh.get_group(), self._rank_of(self.num_stages - 1) if EMBEDDING in found else 0
            theirs = torch.empty_like(gradients[0])
            peer = dist.get_global_rank(group, other)
            exchange = [
                dist.P2POp(dist.isend, gradients[0], peer, group),
                dist.P2POp(dist.irecv, theirs, peer, group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            total = gradients[0] + theirs
        for gradient in gradients:
            gradient.copy_(total)

    def _rank_of(self, stage: int) -> int:
        return rank_of(stage, self.mesh.size(), v_shaped=self.kind.v_shaped)


def _part(model: nn.Module, stage: int, split: Sequence[int]) -> nn.Module:
    """The model with the blocks and the ends of one stage only."""
    part: Any = copy.deepcopy(model)  # on the meta device this copies no weights
    mine = {str(number) for number in blocks_of(stage, split)}
    part.layers = nn.ModuleDict({name: block for name, block in part.layers.items() if name in mine})
    if stage > 0:
        part.tok_embeddings = None
        if hasattr(part, "pos_embeddings"):
            part.pos_embeddings = None
    if stage < len(split) - 1:
        part.norm = part.output = None
    elif isinstance(part.output, TiedLMHead):
        embedding = model.get_parameter(EMBEDDING)
        vocab_size, dim = embedding.shape
        part.output = LMHead(dim, vocab_size, bias=False, device="meta", dtype=embedding.dtype)
    return part
