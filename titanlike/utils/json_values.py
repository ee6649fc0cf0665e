"""Python values and small tensors as JSON, so that a checkpoint needs no pickle."""

import base64
from typing import Any

import torch


def to_json(value: Any) -> Any:
    """Converts a value to what JSON can hold. Raises `TypeError` if it contains an object of another type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [to_json(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {
            "tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(content).decode()]
        }
    raise TypeError(type(value).__name__)


def from_json(value: Any) -> Any:
    """Converts the result of `to_json` back."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tuple":
        return tuple(from_json(each) for each in content)
    if kind == "dict":
        return {from_json(key): from_json(each) for key, each in content}
    if kind == "bytes":
        return base64.b64decode(content)
    dtype, shape, text = content
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=getattr(torch, dtype)).reshape(shape)
