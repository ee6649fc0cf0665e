"""Time of a training step from FLOPs, bytes and a hardware description. Does not import torch.

A rank computes the operators that `operators` counts, at the speed of `kernels`. Tensor- and context-parallel collectives are on
the critical path. FSDP's overlap with the computation of other blocks. Pipeline ranks wait for each other as `schedules` simulates.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from titanlike.config.layout import blocks_of
from titanlike.config.optimizer import MUON_STEPS
from titanlike.config.sections import DTYPE_BYTES
from titanlike.tools.planning.activations import block_activations
from titanlike.tools.planning.collectives import Collective, Links
from titanlike.tools.planning.hardware import Hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.kernels import Kernels
from titanlike.tools.planning.muon import Matrix, rounds
from titanlike.tools.planning.operators import Counts
from titanlike.tools.planning.parameters import stage_of
from titanlike.tools.planning.schedules import Action, Kind, actions, simulate_time
from titanlike.tools.planning.workload import Matmul, Passes

Parts = dict[str, float]  # seconds, by what they are spent on

# Async tensor parallelism computes a part of each matmul while it transfers another. One of as many parts as there are ranks is not
# overlapped, and transfers slow the smaller matmuls: published gains are about half of the collectives' time.
ASYNC_TENSOR_SHARE = 0.5

# Collectives occupy multiprocessors, memory bandwidth and power: computation beside them is slower by this fraction. Studies of
# overlap on H100 and MI250 report 19% on average and up to 40%; FSDP's collectives are large.
OVERLAP_SLOWDOWN = 0.3

# With expert parallelism, the host reads how many tokens a rank receives, once per block and micro-batch, and then launches again.
HOST_WAIT = 1e-4  # seconds

# What FSDP and replicas run beside the computation.
OVERLAPPED = ("weights", "gradients")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank. `parts` add up to `seconds`."""

    seconds: float
    parts: dict[str, float]  # matmul, attention, elementwise, recomputation, optimizer, pipeline bubble, exposed <axis>
    hidden: dict[str, float]  # seconds of communication behind computation, by mesh axis


def step_time(job: Job, hardware: Hardware, traffic: Sequence[Sequence[Collective]]) -> StepTime:
    """Returns the time of a step, given the collectives of each pipeline rank."""
    ranks = [Rank(job, hardware, each, index) for index, each in enumerate(traffic)]
    rank, bubble = ranks[0], 0.0
    if job.layout.pipeline > 1:
        durations = {key: seconds for rank in ranks for key, seconds in rank.durations.items()}

        def duration(action: Action) -> float:
            return durations[action.stage, action.kind]

        times = simulate_time(actions(job), duration, cache(rank.p2p))
        rank = min(ranks, key=lambda each: times.idle[each.index])
        bubble = times.idle[rank.index]
    exposed, hidden = rank.overlap
    parts: Parts = {}
    waits, hidden_copies = rank.offload
    for found in (rank.computation, {"pipeline bubble": bubble}, exposed, rank.once, {"exposed offload": waits}):
        _add(parts, found)
    parts["overlap slowdown"] = OVERLAP_SLOWDOWN * sum(hidden.values())
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0.0}
    hidden = {"tensor": rank.hidden_tensor} | hidden | {"offload": hidden_copies}
    return StepTime(sum(parts.values()), parts, {axis: seconds for axis, seconds in hidden.items() if seconds > 0.0})


def _add(total: Parts, parts: Mapping[str, float], factor: float = 1.0) -> None:
    for name, seconds in parts.items():
        total[name] = total.get(name, 0.0) + seconds * factor


@dataclass(frozen=True)
class Rank:
    """The time that a pipeline rank spends in a step, apart from waiting for other ranks."""

    job: Job
    hardware: Hardware
    collectives: Sequence[Collective]
    index: int

    @cached_property
    def counts(self) -> Counts:
        """Numbers of operators."""
        return Counts(self.job)

    @cached_property
    def kernels(self) -> Kernels:
        """Speed of kernels."""
        return Kernels(self.counts, self.hardware)

    @cached_property
    def second(self) -> "Rank | None":
        """The forward passes of a second model."""
        second = self.job.second
        return None if second is None else Rank(second, self.hardware, (), self.index)

    @cached_property
    def modules(self) -> dict[int, list[tuple[Passes, int]]]:
        """The modules of each stage, each kind with their number."""
        counts, found = self.counts, dict[int, list[tuple[Passes, int]]]()
        for stage in self.job.stages(self.index):
            model = self.job.recipe.model
            blocks = Counter(
                (counts.float8_layers(i), model.is_local(i), model.kind_of_block(i))
                for i in blocks_of(stage, self.job.split)
            )
            found[stage] = [(counts.block(*kind), number) for kind, number in blocks.items()]
            found[stage] += [(counts.embedding(), 1)] * (stage == 0)
            found[stage] += [(counts.loss(), 1)] * (stage == len(self.job.split) - 1)
        return found

    @property
    def launches(self) -> float:
        """Kernels that the host launches for the blocks and both ends in a step, without kernels of FSDP and the optimizer."""
        works = [
            (number, work.kernels)
            for modules in self.modules.values()
            for passes, number in modules
            for work in (
                *[passes.forward] * (1 + self.job.frozen_forwards),
                *(
                    []
                    if self.job.forward_only
                    else [passes.recomputation, passes.backward_input, passes.backward_weight]
                ),
            )
        ]
        second_launches = self.second.launches if self.second else 0.0
        return self.job.num_microbatches * sum(number * kernels for number, kernels in works) + second_launches

    @cached_property
    def phases(self) -> dict[tuple[int, Kind], Parts]:
        """Seconds of a micro-batch in each stage: computation, and collectives that it waits for."""
        found: dict[tuple[int, Kind], Parts] = {}
        num_blocks = sum(self.job.split[stage] for stage in self.modules)
        for stage, modules in self.modules.items():
            forward, inputs, weights = dict[str, float](), dict[str, float](), dict[str, float]()
            for module, number in modules:
                _add(forward, self.kernels.seconds(module.forward), number)
                frozen = self.job.frozen_forwards * sum(self.kernels.seconds(module.forward).values())
                _add(forward, {self.job.second_name: frozen}, number)
                _add(inputs, self.kernels.seconds(module.backward_input), number)
                _add(weights, self.kernels.seconds(module.backward_weight), number)
                recomputation = sum(self.kernels.seconds(module.recomputation).values())
                _add(inputs, {"recomputation": recomputation}, number)
            for module, number in self.second.modules[stage] if self.second else []:
                frozen = sum(self.second.kernels.seconds(module.forward).values()) if self.second else 0.0
                _add(forward, {self.job.second_name: frozen}, number)
            share = self.job.split[stage] / num_blocks / self.job.num_microbatches
            for axis, (in_forward, in_backward) in self.critical.items():
                _add(forward, {f"exposed {axis}": in_forward * share})
                _add(inputs, {f"exposed {axis}": in_backward * share})
            found |= {
                (stage, "forward"): forward,
                (stage, "backward_input"): inputs,
                (stage, "backward_weight"): weights,
            }
        return found

    @cached_property
    def durations(self) -> dict[tuple[int, Kind], float]:
        """Seconds of each computation of the pipeline schedules, by stage and kind."""
        found = {key: sum(parts.values()) for key, parts in self.phases.items()}
        for stage in self.modules:
            found[stage, "backward"] = found[stage, "backward_input"] + found[stage, "backward_weight"]
        return found

    @cached_property
    def computation(self) -> Parts:
        """Seconds of all micro-batches of a step."""
        total: Parts = {}
        for parts in self.phases.values():
            _add(total, parts, self.job.num_microbatches)
        return total

    def _seconds(self, axis: str, *purposes: str) -> float:
        links = Links(self.job, self.hardware)
        return sum(links.seconds(each) for each in self.collectives if each.axis == axis and each.purpose in purposes)

    @cached_property
    def hidden_tensor(self) -> float:
        """Seconds of tensor-parallel collectives that async tensor parallelism overlaps with matmuls."""
        share = self.job.program.async_tensor_share or ASYNC_TENSOR_SHARE * self.job.layout.async_tensor_parallel
        return share * self._seconds("tensor", "activations")

    @cached_property
    def critical(self) -> dict[str, tuple[float, float]]:
        """Seconds of a step that computation waits for collectives of an axis, in the forward and in the backward pass."""
        tensor = self._seconds("tensor", "activations", "replicated gradients", "loss", "float8 maxima")
        if (
            self.job.sequences > 1
        ):  # NCCL gathers along the first dimension, and the sequence is the second: a copy puts it in order
            moved = sum(
                each.bytes for each in self.collectives if (each.axis, each.purpose) == ("tensor", "activations")
            )
            tensor += 2 * moved / self.kernels.memory_speed
        if self.job.program.regathers and self.job.recipe.activation_checkpoint.mode == "selective":
            tensor *= 5 / 4  # two of eight collectives of a block
        context = self._seconds("context", "keys and values", "document ids", "loss", "float8 maxima", "expert counts")
        # A block has as many collectives in the backward pass; with full checkpointing, three of four again.
        share = 4 / 11 if self.job.recipe.activation_checkpoint.mode == "full" else 1 / 2
        exposed = {"tensor": tensor - self.hidden_tensor, "context": context}
        found = {axis: (seconds * share, seconds * (1 - share)) for axis, seconds in exposed.items()}
        if self.job.layout.expert > 1:
            expert = (
                self._seconds("expert", "routed tokens") * self.counts.load * (1 - self.job.program.hidden_exchange)
            )
            blocks = sum(self.job.split[stage] for stage in self.modules)
            expert += self._seconds("expert", "expert counts") + blocks * self.job.num_microbatches * HOST_WAIT
            share = 1 / 3 if self.job.recipe.activation_checkpoint.mode == "full" else 1 / 2
            found["expert"] = expert * share, expert * (1 - share)
        return found

    def p2p(self, sender: int, receiver: int) -> float:
        """Seconds of one transfer of activations between two pipeline ranks."""
        sends = [each for each in self.collectives if (each.kind, each.purpose) == ("send", "activations")]
        size = sum(each.bytes for each in sends) / max(1, sum(each.calls for each in sends))
        return Links(self.job, self.hardware).transfer_seconds(size, sender, receiver)

    @cached_property
    def overlap(self) -> tuple[Parts, Parts]:
        """Seconds of a step that computation waits for FSDP and for replicas, and seconds of them that it hides, by axis.

        Each unit is gathered while the one before it computes, and its gradients are reduced while the next one does. Exposed are
        what takes longer than the computation, the first gathers and the last reductions.
        """
        job, links = self.job, Links(self.job, self.hardware)
        forward = sum(seconds for (_, kind), seconds in self.durations.items() if kind == "forward")
        backward = sum(seconds for (_, kind), seconds in self.durations.items() if kind == "backward")
        num_units = sum(job.split[stage] + (stage == 0) + (stage == len(job.split) - 1) for stage in self.modules)
        num_blocks = sum(job.split[stage] for stage in self.modules)
        calls = sum(
            each.calls for each in self.collectives if each.purpose == "weights" and each.axis != "expert_shard"
        )
        # A pipeline gathers before the first micro-batch, or as often as it frees a stage, and reduces after the last one.
        passes = (
            job.num_microbatches if job.layout.pipeline == 1 else max(1, min(calls // num_units, job.num_microbatches))
        )
        backwards = job.num_microbatches if job.layout.pipeline == 1 else 1
        free = {"forward": forward * passes, "backward": backward * backwards, "last backward": backward}
        if not job.program.overlaps:
            free = dict.fromkeys(free, 0.0)
        exposed, hidden = dict[str, float](), dict[str, float]()
        for each in self.collectives:
            if each.purpose not in OVERLAPPED:
                continue
            seconds = links.seconds(each)
            # Nothing computes while the first two units, the embedding and a block, are gathered, nor while they are reduced.
            starts = job.num_microbatches if job.layout.pipeline == 1 and each.purpose == "weights" else 1
            ends = min(seconds, 2 * seconds / each.calls * starts)
            wanted = {"backward": seconds - ends}
            if each.purpose == "weights":
                units = num_blocks if each.axis == "expert_shard" else num_units
                in_forward = (seconds - ends) * min(1.0, units * passes / each.calls)
                wanted = {"forward": in_forward, "backward": seconds - ends - in_forward}
            once = each.axis == "replicate" or job.layout.gradient_sync == "last_microbatch"
            for phase, rest in wanted.items():
                phases = [phase, *(["last backward"] if once and each.purpose == "gradients" else [])]
                hides = min(rest, *(free[name] for name in phases))
                for name in phases:
                    free[name] -= hides
                _add(hidden, {each.axis: hides})
                _add(exposed, {f"exposed {each.axis}": rest - hides})
            _add(exposed, {f"exposed {each.axis}": ends})
        return exposed, hidden

    @cached_property
    def offload(self) -> tuple[float, float]:
        """Seconds of a step that computation waits for the copies of activations, and seconds of them that it hides: those to the
        host are beside the forward pass, and those back beside the backward pass. Copies occupy no multiprocessors."""
        job = self.job
        if not job.recipe.activation_checkpoint.offload:
            return 0.0, 0.0
        num_blocks = sum(job.split[stage] for stage in self.modules)
        moved = block_activations(job).saved * job.tokens * (num_blocks - 1)
        seconds = moved / (self.hardware.host_gb_per_second * 1e9)
        hidden = 0.0
        for phase in ("forward", "backward"):
            hidden += min(seconds, sum(time for (_, kind), time in self.durations.items() if kind == phase))
        return (2 * seconds - hidden) * job.num_microbatches, hidden * job.num_microbatches

    @cached_property
    def once(self) -> Parts:
        """Seconds of what a step runs once: the optimizer, FSDP's copies into and out of buffers, and small reductions."""
        job, training = self.job, self.job.recipe.training
        compute, reduced = DTYPE_BYTES[training.compute_dtype], DTYPE_BYTES[training.reduce_dtype]
        parameters = [parameter for stage in self.modules for parameter in stage_of(job, stage).parameters]
        gathered = sum(parameter.size for parameter in parameters)
        local = [each.size * (job.layout.expert if each.expert else 1) for each in parameters if each.trainable]
        trained = sum(local) / job.num_shards  # FSDP shards the experts of a rank over fewer ranks
        copied = 0.0
        for each in self.collectives:
            if each.purpose == "weights":
                copied += 2.0 * each.bytes
            elif each.purpose == "gradients" and each.kind == "reduce-scatter":
                copied += each.bytes * (1 + compute / reduced)
        if (
            not job.uses_fsdp()
        ):  # the forward and the backward pass cast each weight that is not frozen, and its gradient
            copied = sum(local) * job.num_microbatches * 3.0 * (DTYPE_BYTES[training.master_dtype] + compute)
        parts = {"weight copies": copied / self.kernels.memory_speed}
        updated = self.counts.optimizer_bytes(trained)
        if job.layout.cpu_offload:
            # The link moves weights to the GPU, and gradients to the host, whose update is bound by a memory of about this speed.
            moved = gathered / job.num_shards * 2 * job.weight_bytes + trained * reduced
            parts["optimizer"] = (updated + moved) / (self.hardware.host_gb_per_second * 1e9)
        else:
            parts["optimizer"] = updated / self.kernels.memory_speed
        if rounds_of_muon := rounds(job, list(self.modules)):
            parts["orthogonalization"] = sum(self._orthogonalization(matrices[0]) for matrices in rounds_of_muon)
        for axis in {each.axis for each in self.collectives}:
            maxima = ("float8 maxima",) if axis in ("shard", "replicate") else ()
            others = ("scalars", "attention logits", "tied gradients", "whole matrices")
            parts[f"exposed {axis}"] = self._seconds(axis, *others, *maxima)
        return parts

    def _orthogonalization(self, matrix: Matrix) -> float:
        """Seconds in which a rank orthogonalizes a matrix."""
        small, large = sorted((matrix.outputs, matrix.inputs))
        products = (
            Matmul(small, small, large, False, MUON_STEPS),
            Matmul(small, small, small, False, MUON_STEPS),
            Matmul(small, large, small, False, MUON_STEPS),
        )
        return sum(self.kernels.matmul(product) for product in products)
