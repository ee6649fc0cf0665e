"""Offloads activations on a null GPU, and prints the calls in their order: which stream computes, copies, and waits for which."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlike.parallelisms.activation_offload import apply_activation_offload

MIB = 2**20


class Block(nn.Module):
    """Two matrices, whose input the backward pass reads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first, self.second = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(f"forward {self.name}")
        out = self.first(x) + self.second(x)
        out.register_hook(lambda gradient: print(f"backward {self.name}"))
        return out


sides: dict[int, str] = {}  # names of the streams that copy
copied: dict[int, str] = {}  # and of their events
wait_event, record_event = torch.cuda.Stream.wait_event, torch.cuda.Stream.record_event


def name(stream: torch.cuda.Stream) -> str:
    """Returns the name of a stream: streams that copy are numbered as they appear."""
    if stream == torch.cuda.default_stream():
        return "compute"
    return sides.setdefault(stream.stream_id, f"side {len(sides)}")


class Copies(TorchDispatchMode):
    """Prints copies between the host and the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            host = args[0] if args[0].device.type == "cpu" else args[1]
            memory = "pinned" if host.is_pinned() else "pageable"
            print(f"{name(torch.cuda.current_stream())}: to {args[0].device.type}, {memory}")
        if func is torch.ops.aten._to_copy.default:
            print("another copy")
        return out


def wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Prints that computation waits."""
    if name(stream) == "compute":
        print(f"wait for {copied[id(event)]}")
    wait_event(stream, event)


def record(stream: torch.cuda.Stream, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
    """Names the event."""
    found = record_event(stream, event)
    copied[id(found)] = name(stream)
    events.append(found)
    return found


events: list[torch.cuda.Event] = []  # so that none has the number of another

if __name__ == "__main__":
    with torch.device("cuda"):
        model = nn.Sequential(*(Block(letter) for letter in "abcd"))
        x = torch.ones(1024, 512, requires_grad=True)
    model(x).sum().backward()  # allocates workspaces and gradients
    apply_activation_offload(list(model))
    torch.cuda.Stream.wait_event, torch.cuda.Stream.record_event = wait, record  # type: ignore[method-assign]
    before = torch.cuda.memory_allocated()
    print("offload")
    with Copies():
        loss = model(x).sum()
        print(f"{(torch.cuda.memory_allocated() - before) // MIB} MiB")
        loss.backward()
