"""How a transform replaces a layer of a model.

It builds a layer of a named class around the parameters of the old one, and `replace_modules` puts it in its place, so that
`print(model)` shows what each layer is, and the names of parameters stay. Old and new layer share their dict of parameters: what
refers to the old one, such as a tied LM head to its embedding, sees the parameters that later transforms register.

- `rebuild` makes a layer of another class with the state of the old one: `Float8Linear` of an `nn.Linear`.
- `ParameterOwner` combines a transform with a layer of any class: it owns the parameters, and the layer that it replaces computes
  with tensors made of them. `ColwiseLinear(Float8Linear(...))` owns DTensors, and the float8 layer computes with local shards.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from titanlike.config import UserError

M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class HasCopies(Protocol):
    """A model with copies of parameters of other ranks, as the last stage of a `Pipeline` has one of a tied embedding."""

    copies: Mapping[str, str]
    """The name of the original of each copy."""


def copies_of(model: nn.Module) -> Mapping[str, str]:
    """Returns the names of the parameters that are copies, each with the name of the original. Most models have none."""
    return model.copies if isinstance(model, HasCopies) else {}


def rebuild(module: nn.Module, new_class: type[M], **attributes: Any) -> M:
    """Returns a module of another class with the parameters, hooks and attributes of `module`, and with further attributes."""
    new = new_class.__new__(new_class)
    new.__dict__.update(module.__dict__)
    for name, value in attributes.items():
        setattr(new, name, value)
    return new


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replaces modules inside of a model."""
    if model in replacements:
        raise UserError(
            f"a {type(model).__name__} cannot be replaced in place; pass a module that contains it, such as nn.Sequential(module)"
        )
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


class ParameterOwner(nn.Module):
    """Owns the parameters, buffers and children of a module, and calls it with other tensors as its parameters.

    Attributes that it does not have are the module's.
    """

    module: nn.Module
    """What computes. It is no child, so that it adds nothing to the names of parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = module.training
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        computing = rebuild(module, type(module), _parameters={})
        computing.__dict__.update(dict.fromkeys(self._parameters))
        self.set_module(computing)

    def set_module(self, module: nn.Module) -> None:
        """Sets what computes."""
        self.__dict__["module"] = module

    def set_tensors(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Sets what the module computes with, by the names of its parameters."""
        self.module.__dict__.update(tensors)  # `nn.Module` would register what is a parameter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "ParameterOwner":
        """Sets the training mode."""
        self.module.train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{type(self.module).__name__}:" if self._modules else repr(self.module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet: a copy is being made
                raise
            return getattr(self.module, name)


def without_owner(module: nn.Module) -> nn.Module:
    """Returns what computes: the module of a `ParameterOwner`, or the module itself."""
    return module.module if isinstance(module, ParameterOwner) else module
