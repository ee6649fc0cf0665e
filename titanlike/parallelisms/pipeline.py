"""Pipeline parallelism: ranks hold different blocks and exchange the activations of micro-batches."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from titanlike.config import UserError
from titanlike.config.layout import SCHEDULES, blocks_of, rank_of, stages_of
from titanlike.distributed import process_group
from titanlike.models.common.layers import LMHead, TiedLMHead
from titanlike.parallelisms.blocks import check_choice
from titanlike.utils import compat
from titanlike.utils.dtensor import local_tensor

GRADIENT_GROUP = "pipeline_gradients"  # name of the second communicator
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

        Args:
            model: has the blocks in a `ModuleDict` named `layers` with the keys "0", "1", ..., the token embedding and the output
                projection as `tok_embeddings` and `output`, and the names of the children of only the first and the last stage as
                `first_stage_modules` and `last_stage_modules`. These are set to None elsewhere, and `forward` skips them. Its
                first argument is the tokens (B, T) or the activations (B, T, D) of the previous stage; given `labels`, the last
                stage returns a loss, others ignore them. `models.registry.LanguageModel` is such a model. If it has a
                `balance_loss`, a stage also returns `counts` in training, and takes the previous stage's.
            schedule: one of `config.layout.SCHEDULES`.
            split: number of blocks in each stage.
            dtype: of the activations that stages exchange.
            tensor: number of tensor-parallel ranks over which these are sharded along the sequence.
        """
        super().__init__()
        _check_arguments(model, mesh, schedule, split)
        self.init_parameter = getattr(model, "init_parameter", None)
        self.mesh = mesh
        self.schedule_spec = SCHEDULES[schedule]
        self.num_stages = len(split)
        self.dtype = dtype
        self.tensor = tensor
        self.vocab_size, self.dim = model.get_parameter(EMBEDDING).shape
        balance_loss: Any = getattr(model, "balance_loss", None)
        self.num_counted = 0 if balance_loss is None else balance_loss.config.num_experts
        # A plain dict, whose modules are not registered: each parameter is registered once, under its full-model name.
        stages = stages_of(mesh.get_local_rank(), mesh.size(), self.num_stages, v_shaped=self.schedule_spec.v_shaped)
        self.parts = {stage: _stage_module(model, stage, split) for stage in stages}
        for part in self.parts.values() if self.num_counted else ():
            part.register_forward_pre_hook(_name_counts, with_kwargs=True)
        self.register_parts()
        # The last stage gets its own copy of a tied embedding weight, which is kept equal by summing both gradients.
        self.tied = model.get_submodule("output").weight is model.get_parameter(EMBEDDING)
        self.trains_embedding = model.get_parameter(EMBEDDING).requires_grad
        self.copies = {HEAD: EMBEDDING} if self.tied and self.has_last_stage else {}
        self.gradient_group: dist.ProcessGroup | None = None  # to exchange gradients in, where torch can separate them
        self.schedule: Any = None
        self.schedule_key: object = None  # the shapes that the schedule is built for
        self.normalize_loss: NormalizeLoss | None = None

    def register_parts(self) -> None:
        """Registers the children of the stages under their names in the full model. Call it again after a transform has replaced
        modules of `parts`."""
        self.layers = nn.ModuleDict()
        for part in self.parts.values():
            for name, child in part.named_children():
                if name == "layers":
                    self.layers.update(dict(child.named_children()))
                else:
                    self.add_module(name, child)

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
        key = len(microbatches), microbatches[0].labels.shape
        if self.schedule is None:
            self._connect_peers(labels.device)
        if self.schedule_key != key:
            self.schedule, self.schedule_key = self._build_schedule(microbatches[0].labels, len(microbatches)), key
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
        if self.tied and self.trains_embedding:
            self._sum_tied_gradients()
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=labels.device)

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Returns the sum of the micro-batches' losses on the last stage's rank, 0 elsewhere."""
        losses = [torch.zeros((), device=microbatches[0].labels.device)]
        # One micro-batch per rank keeps all ranks busy; more would only take memory for their activations.
        for start in range(0, len(microbatches), self.mesh.size()):
            inputs = [
                batch.inputs | {"labels": batch.labels} for batch in microbatches[start : start + self.mesh.size()]
            ]
            self._forward_only(inputs, losses.append)
        return sum(losses[1:], losses[0])

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

        Each stage posts all its receives before its sends. NCCL runs the operations of a rank in the order in which they are
        issued, so two ranks that exchange in both directions must do so in the same order.
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

    def _connect_peers(self, device: torch.device) -> None:
        """Exchanges one element with each rank that this one communicates with, in both directions and on each communicator.

        NCCL connects two ranks at their first operation, for which each waits on the host for the other. Here all do so at once;
        a network that does not connect them fails before the schedule starts, and no rank waits in the middle of it.
        """
        groups = [self.mesh.get_group()]
        if compat.has_gradient_group():
            # NCCL runs the operations of a communicator in order: an activation does not have to wait for a gradient.
            self.gradient_group = process_group.copy_of(self.mesh.get_group(), GRADIENT_GROUP)
            groups.append(self.gradient_group)
        ends = {0, self.num_stages - 1} if self.tied else set[int]()  # which exchange gradients
        stages = {stage + step for stage in self.parts for step in (-1, 1)} & set(range(self.num_stages))
        if ends & self.parts.keys():
            stages |= ends
        peers = {self._rank_of(stage) for stage in stages} - {self.mesh.get_local_rank()}
        for group in groups:
            exchange = []
            for peer in (dist.get_global_rank(group, rank) for rank in sorted(peers)):
                exchange.append(dist.P2POp(dist.isend, torch.zeros(1, device=device), peer, group))
                exchange.append(dist.P2POp(dist.irecv, torch.empty(1, device=device), peer, group))
            for work in dist.batch_isend_irecv(exchange) if exchange else []:
                work.wait()

    def _build_schedule(self, labels: Tensor, num_microbatches: int) -> Any:
        if self.schedule_spec.splits_backward:
            compat.disable_donated_buffers()
        batch, length = labels.shape
        # With example inputs and outputs, torch infers no shapes by a trial run.
        tokens = torch.empty(batch, length, dtype=labels.dtype, device="meta")
        hidden = self._empty(tokens, self.dim, length // self.tensor).requires_grad_()
        loss = torch.empty((), device="meta").requires_grad_()
        between = [hidden]  # what a stage passes to the next one
        if self.num_counted:
            between.append(torch.empty(batch, 2, self.num_counted, device="meta", requires_grad=True))
        stages = [
            pipelining.PipelineStage(
                part,
                stage,
                self.num_stages,
                labels.device,
                input_args=tuple(between) if stage else tokens,
                output_args=tuple(between) if stage < self.num_stages - 1 else loss,
                group=self.mesh.get_group(),
            )
            for stage, part in self.parts.items()
        ]
        for stage in stages:
            compat.skip_connections_to_neighbours(stage)
            if self.gradient_group is not None:
                compat.set_gradient_group(stage, self.gradient_group)
            if self.schedule_spec.splits_backward:
                compat.keep_graph_for_weights(stage)
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


def _check_arguments(model: nn.Module, mesh: DeviceMesh, schedule: str, split: Sequence[int]) -> None:
    """Raises `UserError` if the model cannot be split, or not in this way."""
    check_choice("schedule", schedule, SCHEDULES)
    required = ("layers", "tok_embeddings", "output", "first_stage_modules", "last_stage_modules")
    layers, missing = getattr(model, "layers", None), [name for name in required if not hasattr(model, name)]
    if missing or not isinstance(layers, nn.ModuleDict) or list(layers) != [str(i) for i in range(len(layers))]:
        lacks = f"has no {', '.join(missing)}" if missing else "has no ModuleDict `layers` with the keys '0', '1', ..."
        raise UserError(
            f"{type(model).__name__} cannot be split into pipeline stages: it {lacks}; see examples/pipeline.py"
        )
    per_rank, rest = divmod(len(split), mesh.size())
    spec = SCHEDULES[schedule]
    if sum(split) != len(layers) or rest or (spec.fixed and per_rank != spec.stages_per_rank):
        stages = f"{spec.stages_per_rank * mesh.size()} stages" + (
            "" if spec.fixed else " or another multiple of the ranks"
        )
        raise UserError(
            f"split = {list(split)} has {len(split)} stages and {sum(split)} blocks, but the schedule {schedule} over "
            f"{mesh.size()} ranks takes {stages}, and the model has {len(layers)} blocks"
        )


def _name_counts(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Passes the counts of the previous stage, which the schedule passes by position, by name."""
    return args[:1], kwargs | {"counts": args[1]} if len(args) > 1 else kwargs


def _stage_module(model: nn.Module, stage: int, split: Sequence[int]) -> nn.Module:
    """Returns a copy of the model with the blocks of one stage, and the first or last modules if the stage has them."""
    part: Any = copy.deepcopy(model)  # on the meta device, no weights are copied
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
        options: Any = dict(device=embedding.device, dtype=embedding.dtype)
        bias = part.output.bias
        part.output = LMHead(dim, vocab_size, bias=bias is not None, soft_cap=part.output.soft_cap, **options)
        with torch.no_grad():
            part.output.weight.copy_(embedding)
            if bias is not None:
                part.output.bias.copy_(bias)
        part.output.requires_grad_(embedding.requires_grad)
    return part
