"""Arguments that the transforms share: the blocks of a model, and choices by name."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from titanlike.config import UserError
from titanlike.config.base import nearest

Blocks = nn.ModuleDict | nn.ModuleList | Sequence[nn.Module]


def list_blocks(blocks: Blocks) -> list[nn.Module]:
    """Returns the blocks as a list. Raises `UserError` if one is not a module."""
    found = list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)
    for block in found:
        if not isinstance(block, nn.Module):
            raise UserError(
                f"blocks: {block!r} is not a module; pass a ModuleDict, a ModuleList or a sequence of modules"
            )
    return found


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a model: the entries of its outermost `ModuleList`s, and of its outermost `ModuleDict`s whose entries
    are all of one class."""
    return list(dict.fromkeys(_blocks_below(model)))


def _blocks_below(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    repeats = isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and len({type(child) for child in children}) == 1
    )
    for child in children:
        if repeats and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _blocks_below(child)


def check_choice(argument: str, value: str, choices: Iterable[str]) -> None:
    """Raises `UserError` if the value of an argument is not one of the choices."""
    names = list(choices)
    if value not in names:
        near = nearest(str(value), names)
        raise UserError(
            f"{argument} = {value!r}; use one of {', '.join(names)}" + (f"; did you mean {near}?" if near else "")
        )
