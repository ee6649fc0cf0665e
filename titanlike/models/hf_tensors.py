"""Names and forms of a model's tensors in Hugging Face's checkpoints, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class HFTensor:
    """Where the values of a parameter are in a Hugging Face checkpoint."""

    name: str
    part: int = 0
    """Which of several parameters that are stored as one tensor, in order along the output dimension."""
    num_parts: int = 1
    transposed: bool = False
    """Whether the matrix is stored as (inputs, outputs)."""
    stacked: bool = False
    """Whether the parameter is a stack of stored tensors, as the matrices of experts are: the last `*` of the name stands for the
    index in the first dimension."""

    def element(self, index: int) -> "HFTensor":
        """Returns where one element of a stack is."""
        return replace(self, name=self.name.replace("*", str(index)), stacked=False)


def hf_tensor(plan: Mapping[str, HFTensor], name: str) -> HFTensor | None:
    """Returns the entry of a parameter in a plan, in which `*` stands for the index of a block."""
    parts = name.split(".")
    index = parts[1] if parts[0] == "layers" else ""
    found = plan.get(".".join(["layers", "*", *parts[2:]]) if index else name)
    return found and replace(found, name=found.name.replace("*", index, 1))
