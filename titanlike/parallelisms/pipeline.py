"""Pipeline parallelism: ranks hold different blocks and exchange the activations of micro-batches."""

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

NormalizeLoss = Callable[[Tensor], Tensor]  # divides a micro-batch's summed loss by the number of tokens


class MicroBatch(Protocol):
    """A micro-batch: keyword arguments of the model, each (B, ...), and the labels of the last stage."""

    @property
    def inputs(self) -> dict[str, Tensor]: ...
    @property
    def labels(self) -> Tensor: ...


class Pipeline(nn.Module):
    """This rank's stages of a model, under the full model's parameter names, and the schedule that runs them."""

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
        """Keeps the stages of `model` that this rank of `mesh` holds.

        `split` is the number of blocks in each stage. Stages exchange activations in `dtype`, sharded along the sequence over
        `tensor` ranks.
        """
        super().__init__()
        self.init_parameter = model.init_parameter
        self.mesh = mesh
        self.schedule_spec = SCHEDULES[schedule]
        self.num_stages = len(split)
        self.dtype = dtype
        self.tensor = tensor
        self.vocab_size, self.dim = model.get_parameter(EMBEDDING).shape
        # A plain dict, whose modules are not registered: each parameter is registered once, under its full-model name.
        stages = stages_of(mesh.get_local_rank(), mesh.size(), self.num_stages, v_shaped=self.schedule_spec.v_shaped)
        self.parts = {stage: _stage_module(model, stage, split) for stage in stages}
        self.layers = nn.ModuleDict()
        for part in self.parts.values():
            for name, child in part.named_children():
                if name == "layers":
                    self.layers.update(dict(child.named_children()))
                else:
                    self.add_module(name, child)
        # The last stage gets its own copy of a tied embedding weight, which is kept equal by summing both gradients.
        self.tied = isinstance(model.output, TiedLMHead)
        self.copies = {HEAD: EMBEDDING} if self.tied and self.has_last_stage else {}
        self.schedule: Any = None
        self.normalize_loss: NormalizeLoss | None = None

    @property
    def has_last_stage(self) -> bool:
        """Whether the loss is computed on this rank."""
        return self.num_stages - 1 in self.parts

    def forward_backward(self, microbatches: Sequence[MicroBatch], normalize_loss: NormalizeLoss) -> Tensor:
        """Computes gradients of the sum of the normalized losses. Returns that sum on the last stage's rank, 0 elsewhere."""
        # The schedule splits the batch into micro-batches by itself.
        inputs = {name: torch.cat([batch.inputs[name] for batch in microbatches]) for name in microbatches[0].inputs}
        labels = torch.cat([batch.labels for batch in microbatches])
        tokens = inputs.pop("tokens")
        if self.schedule is None:
            self.schedule = self._build_schedule(microbatches[0].labels, len(microbatches))
        self.normalize_loss = normalize_loss
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if 0 in self.parts else []),
            target=labels if self.has_last_stage else None,
            losses=losses,
            return_outputs=False,
            labels=labels,
            **inputs,
        )
        if self.tied:
            self._sum_tied_gradients()
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=labels.device)

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Returns the sum of the micro-batches' losses on the last stage's rank, 0 elsewhere."""
        loss = torch.zeros((), device=microbatches[0].labels.device)
        # One micro-batch per rank keeps all ranks busy; more would only take memory for their activations.
        for start in range(0, len(microbatches), self.mesh.size()):
            inputs = [
                batch.inputs | {"labels": batch.labels} for batch in microbatches[start : start + self.mesh.size()]
            ]
            self._forward_only(inputs, lambda out: loss.add_(out))
        return loss

    def forward(self, **inputs: Tensor) -> Tensor:
        """Returns logits on every rank, for generation."""
        logits = self._empty(inputs["tokens"], self.vocab_size // self.tensor, inputs["tokens"].shape[1])
        self._forward_only([inputs], lambda out: logits.copy_(out))
        group = self.mesh.get_group()
        dist.broadcast(logits, src=dist.get_global_rank(group, self._rank_of(self.num_stages - 1)), group=group)
        return logits

    @torch.no_grad()
    def _forward_only(self, inputs: Sequence[dict[str, Tensor]], consume: Callable[[Tensor], object]) -> None:
        """Runs micro-batches through all stages and calls `consume` on each output of the last stage, in order.

        Each stage posts all its receives before its sends. Two ranks that exchange in both directions then do so in the same
        order, which avoids a deadlock.
        """
        group = self.mesh.get_group()
        sends: list[tuple[dist.Work | None, Tensor]] = []
        local_outputs: list[Tensor] = []  # of the previous stage, where this rank holds it
        for stage, part in self.parts.items():
            received: list[tuple[Tensor, dist.Work | None]] = [(batch["tokens"], None) for batch in inputs]
            if stage > 0 and stage - 1 in self.parts:
                received = [(h, None) for h in local_outputs]
            elif stage > 0:
                source = dist.get_global_rank(group, self._rank_of(stage - 1))
                for index, batch in enumerate(inputs):
                    h = self._empty(batch["tokens"], self.dim, batch["tokens"].shape[1] // self.tensor)
                    received[index] = h, dist.irecv(h, source, group)
            local_outputs = []
            for batch, (h, receive) in zip(inputs, received, strict=True):
                if receive is not None:
                    receive.wait()
                out = part(h, **{name: value for name, value in batch.items() if name != "tokens"})
                if stage == self.num_stages - 1:
                    consume(out)
                elif stage + 1 in self.parts:
                    local_outputs.append(out)
                else:
                    target = dist.get_global_rank(group, self._rank_of(stage + 1))
                    out = out.contiguous()
                    sends.append((dist.isend(out, target, group), out))
        for send, _ in sends:
            if send is not None:
                send.wait()

    def _empty(self, tokens: Tensor, width: int, length: int) -> Tensor:
        return torch.empty(tokens.shape[0], length, width, dtype=self.dtype, device=tokens.device)

    def _build_schedule(self, labels: Tensor, num_microbatches: int) -> Any:
        from torch.distributed import pipelining  # imports the compiler, which takes a second

        if self.schedule_spec.splits_backward:
            # The backward pass runs over parts of the graph twice, so compiled code must not reuse its saved tensors' memory.
            torch._functorch.config.donated_buffer = False
        batch, length = labels.shape
        # With example inputs and outputs, torch infers no shapes by a trial run.
        tokens = torch.empty(batch, length, dtype=labels.dtype, device="meta")
        hidden = self._empty(tokens, self.dim, length // self.tensor).requires_grad_()
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
                # torch 2.11 opens connections to neighbouring stages in advance, even on the same rank, which gloo cannot.
                stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        schedule_class = getattr(pipelining, self.schedule_spec.torch_class)

        def loss_fn(loss: Tensor, _: Tensor) -> Tensor:
            assert self.normalize_loss is not None
            return self.normalize_loss(loss)

        multi = issubclass(schedule_class, pipelining.schedules.PipelineScheduleMulti)
        # Losses are already divided by the tokens of the global batch, so gradients of micro-batches are summed.
        return schedule_class(stages if multi else stages[0], num_microbatches, loss_fn=loss_fn, scale_grads=False)

    def _sum_tied_gradients(self) -> None:
        """Sets the gradients of the embedding and of the tied head to their sum, across the first and last stage."""
        tied = {name: parameter for name, parameter in self.named_parameters() if name in (EMBEDDING, HEAD)}
        gradients = [local_tensor(cast(Tensor, parameter.grad)) for parameter in tied.values()]
        if len(gradients) == 1:
            group, other_rank = self.mesh.get_group(), self._rank_of(self.num_stages - 1) if EMBEDDING in tied else 0
            peer = dist.get_global_rank(group, other_rank)
            remote = torch.empty_like(gradients[0])
            exchange = [dist.P2POp(dist.isend, gradients[0], peer, group), dist.P2POp(dist.irecv, remote, peer, group)]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradients[0] += remote
        elif gradients:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])

    def _rank_of(self, stage: int) -> int:
        return rank_of(stage, self.mesh.size(), v_shaped=self.schedule_spec.v_shaped)


def _stage_module(model: nn.Module, stage: int, split: Sequence[int]) -> nn.Module:
    """Returns a copy of the model with the blocks of one stage, and the first or last modules if the stage has them."""
    part: Any = copy.deepcopy(model)  # on the meta device, so no weights are copied
    numbers = {str(number) for number in blocks_of(stage, split)}
    part.layers = nn.ModuleDict({name: block for name, block in part.layers.items() if name in numbers})
    if stage > 0:
        for name in part.first_stage_modules:
            setattr(part, name, None)
    if stage < len(split) - 1:
        for name in part.last_stage_modules:
            setattr(part, name, None)
    elif isinstance(part.output, TiedLMHead):
        embedding = model.get_parameter(EMBEDDING)
        vocab_size, dim = embedding.shape
        part.output = LMHead(dim, vocab_size, bias=False, device="meta", dtype=embedding.dtype)
    return part
