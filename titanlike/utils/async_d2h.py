"""Asynchronous device-to-host copies of scalars: an immediate read would stall the host, and then the device."""

import torch
from torch import Tensor


class AsyncD2H:
    """Starts copying the values of some tensors to the host. On a GPU, the device continues with queued work meanwhile."""

    def __init__(self, *tensors: Tensor) -> None:
        # With CPU offloading, gradient norms are on the host and the loss is on the GPU.
        device = tensors[0].device
        values = torch.cat([tensor.detach().flatten().float().to(device) for tensor in tensors])
        self.values = values
        self.copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self.values = torch.empty_like(values, device="cpu", pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    @property
    def is_on_host(self) -> bool:
        """Whether the tensors were on the host, so that `read` never waits."""
        return self.copied is None

    @property
    def is_complete(self) -> bool:
        """Whether the copy, and so all that the device had to do before it, is complete."""
        return self.copied is None or self.copied.query()

    def read(self, *, deferred: bool = False) -> list[float]:
        """Returns the values, after waiting for the copy if necessary.

        Args:
            deferred: the device has since been given a step of work. Then the copy usually is complete, which is asked first.
        """
        if self.copied is not None and not (deferred and self.is_complete):
            self.copied.synchronize()
        return self.values.tolist()
