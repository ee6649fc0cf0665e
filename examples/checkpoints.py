"""Exact checkpoints in a loop of one's own: killed at any time and started again, it ends with the same weights.

torchrun --nproc-per-node=2 examples/checkpoints.py checkpoints/ --kill-at 4     # dies at step 4
torchrun --nproc-per-node=2 examples/checkpoints.py checkpoints/                 # resumes, and prints the same result
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_tensor import Transformer, batch_of

from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.config.sections import Checkpoint
from titanlike.distributed.process_group import session
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.utils.dtensor import local_tensor

STEPS = 8


def main(folder: Path, kill_at: int = 0, stop_at: int = STEPS) -> tuple[int, str]:
    """Trains up to a step, with a checkpoint every second step. Returns the first step, and a hash of this rank's weights."""
    mesh = build_mesh("cpu", shard=dist.get_world_size())
    torch.manual_seed(dist.get_rank())  # of dropout; a checkpoint holds the state of each rank's generator
    model = Transformer()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    apply_fsdp(model, mesh.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder.mkdir(parents=True, exist_ok=True)
    with CheckpointManager(str(folder), Checkpoint(keep=2)) as checkpoints:
        saved = checkpoints.find()  # the newest valid one
        first = saved.step + 1 if saved else 1
        if saved:
            checkpoints.load(model, optimizer, saved)
        for step in range(first, stop_at + 1):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - step / (STEPS + 1))  # a function of the step: only tensors are saved
            tokens = batch_of(step).chunk(mesh.num_data_ranks)[mesh.data_rank]
            logits = F.dropout(model(tokens[:, :-1]), 0.1)
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 2 == 0:
                checkpoints.save(model, optimizer, CheckpointMetadata(step))  # returns after the copy; a thread writes
        checkpoints.wait(last=True)
    weights = b"".join(local_tensor(parameter.detach()).numpy().tobytes() for parameter in model.parameters())
    return first, hashlib.sha256(weights).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int, default=0)
    arguments = parser.parse_args()
    with session("cpu"):
        first_step, weights_hash = main(arguments.folder, arguments.kill_at)
        print(f"rank {dist.get_rank()}: started at step {first_step}, weights {weights_hash}", flush=True)
