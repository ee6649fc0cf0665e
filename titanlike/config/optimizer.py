"""Sections of the optimizer and the learning rate."""

from collections.abc import Iterator
from typing import Annotated, Literal

from titanlike.config.base import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    PositiveFloat,
    Share,
    matches,
    only_if,
    only_with,
    section,
)

MUON_STEPS = 5  # Newton-Schulz steps with which Muon orthogonalizes


@section
class OptimizerGroup:
    """Parameters with an optimizer, a learning rate or a weight decay of their own. A parameter belongs to the first group that
    matches it; those that no group matches follow `[optimizer]`."""

    pattern: str = "*"
    """Names of the parameters, such as `layers`, `attention.wq` or `layers.*.feed_forward`: dotted parts of the name."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` matches the matrices of blocks only, and orthogonalizes their momentum: embeddings, the LM head, norms and biases
    remain with AdamW."""
    lr_scale: PositiveFloat = 1.0
    """Factor of the learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay coefficient. Default: `optimizer.weight_decay` for matrices, 0 for norms and biases."""


HAS_MUON = only_if(
    lambda groups: any(group.optimizer == "muon" for group in groups),
    "groups", remedy="add a table [[{0}]] with optimizer = \"muon\"",
)  # fmt: skip
DECAYS = only_with("decay", "cosine", "linear", "sqrt")


@section
class Optimizer:
    """AdamW, or Muon for the matrices of blocks. Weight decay is not applied to norms and biases."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    beta1: Share = 0.9
    """Decay rate of the first moment (the mean of the gradient)."""
    beta2: Share = 0.95
    """Decay rate of the second moment (the mean of the squared gradient). 0.95 recovers from a loss spike sooner than Adam's
    default of 0.999."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator for numerical stability."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay coefficient. 0 disables it."""
    state_dtype: Literal["full", "bfloat16", "8bit"] = "full"
    """Precision of Adam's moments. `full`: as the weights, 8 bytes per parameter in float32. `bfloat16`: 4 bytes. `8bit`:
    2 bytes, quantized in blocks that share a scale, of matrices whose rows are a multiple of 64 elements; 8 bytes of others."""
    stochastic_rounding: Annotated[bool, only_with("training.master_dtype", "bfloat16")] = False
    """Round updated weights stochastically, so that updates smaller than the precision accumulate. For
    `master_dtype = "bfloat16"`."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Groups of parameters, each in a table `[[optimizer.groups]]`."""
    muon_momentum: Annotated[Share, HAS_MUON] = 0.95
    """Decay rate of Muon's momentum."""
    muon_lr_scaling: Annotated[Literal["rms", "spectral"], HAS_MUON] = "rms"
    """How the size of Muon's update depends on the shape of a matrix. `rms`: its root mean square is about 0.2, as with AdamW,
    so that both share a learning rate. `spectral`: its spectral norm is about sqrt(outputs / inputs), at least 1."""

    muon_qk_clip: Annotated[NonNegativeFloat, HAS_MUON] = 0.0
    """QK-clip: after each step, scales the weights of queries and keys of heads whose largest attention logit in the step was above
    this. Kimi K2 has 100. It computes the logits again, in blocks, which slows long sequences down: compare plans with and without
    it. For decoders without QK-norm. 0 disables it."""

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each contradiction among the keys."""
        if self.stochastic_rounding and any(group.optimizer == "muon" for group in self.groups):
            yield "optimizer = 'muon' does not support optimizer.stochastic_rounding = true; set it to false"

    def group_of(self, name: str, *, is_matrix: bool) -> OptimizerGroup | None:
        """Returns the first group that matches a parameter, or None."""
        for group in self.groups:
            in_reach = group.optimizer == "adamw" or (is_matrix and name.startswith("layers."))
            if in_reach and matches(group.pattern, name):
                return group
        return None


@section
class Schedule:
    """Learning rate schedule: warmup, stable, decay."""

    warmup_steps: NonNegative = 100
    """Steps of linear warmup from 0 to the peak, at most `training.steps`. 0 disables it."""
    decay: Literal["linear", "cosine", "sqrt", "none"] = "cosine"
    """Shape of the decay. `sqrt` (1 - sqrt) falls fast at first and is common after a long stable phase."""
    decay_ratio: Annotated[Fraction, DECAYS] = 0.0
    """Length of the decay, which ends at the last step, as a fraction of `training.steps`. A run that is resumed from its stable
    phase may change this section and `training.steps`. 0: all steps after the warmup, without a stable phase."""
    min_ratio: Annotated[Fraction, DECAYS] = 0.1
    """Final learning rate as a fraction of the peak."""

    def num_decay_steps(self, num_steps: int) -> int:
        """Returns the length of the decay of a run with this number of steps."""
        if self.decay_ratio:
            return max(1, round(self.decay_ratio * num_steps))
        return num_steps - self.warmup_steps
