"""Checks of parameter groups. Does not import torch."""

from titanlike.config import PretrainRecipe
from titanlike.config.sections import Optimizer


def optimizer_group_problems(recipe: PretrainRecipe, optimizer: Optimizer) -> list[str]:
    """Groups that match nothing, and what Muon does not support."""
    if not optimizer.groups:
        return []
    problems = []
    model = recipe.model
    parameters = {
        **model.parameters(),
        **model.last_parameters(),
    }  # the LM head is a parameter of a pipeline even if it is tied
    used = {
        optimizer.group_of(name, is_matrix=len(spec.shape) > 1)
        for name, spec in parameters.items()
        if not name.endswith("expert_bias")
    }
    for group in dict.fromkeys(optimizer.groups):
        if group not in used:
            problems.append(
                f"optimizer.groups: no parameter is left for pattern = {group.pattern!r} with optimizer = {group.optimizer!r}; a "
                "pattern consists of parts of a name such as layers.0.attention.wq.weight, and the first group that matches applies"
            )
    if any(group.optimizer == "muon" for group in optimizer.groups):
        unsupported = {
            f"lora.rank = {recipe.lora.rank}, whose matrices are products; set lora.rank = 0": recipe.lora.rank > 0,
            "parallelism.cpu_offload = true, where the host would orthogonalize; set it to false": recipe.parallelism.cpu_offload,
            "optimizer.stochastic_rounding = true; set it to false": optimizer.stochastic_rounding,
        }
        stacks = [optimizer.group_of(f"layers.0.{name}", is_matrix=True) for name in model.expert_parameters()]
        if any(group is not None and group.optimizer == "muon" for group in stacks):
            tensor = recipe.parallelism.tensor
            unsupported[
                f"parallelism.tensor = {tensor} for experts, whose matrices it would divide; use parallelism.expert, or a pattern "
                "that does not match experts"
            ] = tensor > 1
        problems += [f"optimizer = 'muon' does not support {name}" for name, holds in unsupported.items() if holds]
    return problems
