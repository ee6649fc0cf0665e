"""The shipped program with two variants of Muon that the library does not have, in one process.

    ./run_train.sh train_configs/debug.toml --program=benchmarks/muon_variants.py --variant.second_moment=0.95

The speedrun measures them.
"""

import sys
from pathlib import Path
from typing import Any

from titanlike.config import section
from titanlike.config.base import Share
from titanlike.recipe import PretrainRecipe
from titanlike.run.start import start


@section
class Variant:
    """What differs from Muon."""

    polar_express: bool = False
    """Orthogonalize with the coefficients of Polar Express (arXiv 2505.16932), which differ from step to step."""
    second_moment: Share = 0.0
    """Decay rate of the second moment of each row of the update. NorMuon (arXiv 2510.05491) divides the row by its root. 0
    disables it."""


@section
class VariantRecipe(PretrainRecipe):
    """The recipe of this program."""

    variant: Variant = Variant()


if __name__ == "__main__":
    recipe = start(VariantRecipe)  # before torch is imported: sets how its threads wait on a busy machine

import torch
from torch import Tensor

from titanlike.optim import muon, optimizer

SAFETY = 1.01  # rounding may leave singular values above 1, for which the coefficients are not made
STEPS = [
    (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
]


def polar_express(matrix: Tensor, num_steps: int = len(STEPS)) -> Tensor:
    """Replaces `titanlike.optim.muon.orthogonalize`."""
    assert num_steps == len(STEPS)
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).mul(SAFETY).clamp(min=muon.EPS)
    if x.shape[1] >= 2 * x.shape[0]:
        product, gram = x, x @ x.mT
        for step, (a, b, c) in enumerate(STEPS):
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal().add_(a)
            product = factor @ product if step else factor
            gram = factor @ gram @ factor
        x = product @ x
    else:
        for a, b, c in STEPS:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class NorMuon(muon.Muon):
    """Divides each row of the update by the root of its second moment. The norm of the update remains."""

    beta2: float

    def _update(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        moment = self.state[parameter].setdefault("second_moment", torch.zeros_like(update[:, :1]))
        moment.lerp_(update.square().mean(-1, keepdim=True), 1 - self.beta2)
        rows = update / moment.sqrt().add(1e-10)
        super()._update(parameter, rows * (update.norm() / rows.norm().clamp(min=1e-10)), group)


if __name__ == "__main__":
    if recipe.variant.polar_express:
        setattr(muon, "orthogonalize", polar_express)  # noqa: B010  a function of one file
    if recipe.variant.second_moment:
        NorMuon.beta2 = recipe.variant.second_moment
        setattr(optimizer, "Muon", NorMuon)  # noqa: B010
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
    import pretrain

    pretrain.main(recipe)
