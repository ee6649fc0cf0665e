"""Numbers on their way from a device to the host. Asking for one at once would make the host wait, and then the device."""

import torch
from torch import Tensor


class AsyncD2H:
    """Numbers of some tensors, asked for now and read later: on a GPU, while it works on what comes next."""

    def __init__(self, *tensors: Tensor) -> None:
        # All to the first one's device: with offloading, norms are on the host and the loss is not.
        device = tensors[0].device
        numbers = torch.cat([tensor.detach().flatten().float().to(device) for tensor in tensors])
        self.numbers = numbers
        self.arrival: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.arrival = torch.cuda.Event()
            self.arrival.record()

    @property
    def here(self) -> bool:
        """Whether reading them needs no waiting on this kind of device."""
        return self.arrival is None

    def read(self) -> list[float]:
        """The numbers, waited for if need be."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.numbers.tolist()
