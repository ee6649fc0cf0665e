"""Two ranks that call the same collectives in another order, by which NCCL hangs."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    small, large = torch.ones(1024, device="cuda"), torch.ones(2**20, device="cuda")
    for tensor in (small, large) if dist.get_rank() == 0 else (large, small):
        dist.all_reduce(tensor)
    dist.destroy_process_group()
