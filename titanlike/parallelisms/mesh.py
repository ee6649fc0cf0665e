"""The ranks as a named grid: which of them share which part of the work."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# From the outermost to the innermost: neighbours in the last dimension talk most, so they sit on one machine.
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")


def build_mesh(
    device_type: str, *, replicate: int = 1, shard: int = 1, context: int = 1, tensor: int = 1, pipeline: int = 1
) -> DeviceMesh:
    """A mesh with all five dimensions, in one order always; those of size 1 cost nothing."""
    return init_device_mesh(device_type, (pipeline, replicate, shard, context, tensor), mesh_dim_names=DIMENSIONS)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that see different data: what FSDP shards over, and replicates over where `replicate` is above 1."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


def data_coordinate(mesh: DeviceMesh) -> tuple[int, int]:
    """Which of how many parts of the data this rank reads."""
    shards = mesh["shard"].size()
    rank = mesh["replicate"].get_local_rank() * shards + mesh["shard"].get_local_rank()
    return rank, mesh["replicate"].size() * shards
