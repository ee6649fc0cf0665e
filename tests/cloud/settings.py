"""Settings of jobs."""

from titanlike.tools.clusters.sagemaker.request import TrainingJob
from titanlike.tools.planning.hardware import load_hardware

ROLE = "arn:aws:iam::123456789012:role/training"


JOB = TrainingJob(
    run="llama3_8b", timestamp="20261122-101112", arguments=("recipe.toml", "--training.steps=50"),
    instance_type="ml.p5.48xlarge", hardware=load_hardware("ml.p5.48xlarge"), nodes=4,
    region="us-east-1", role=ROLE, bucket="example",
    image="763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13",
)  # fmt: skip


STEPS = 60


TINY = {
    "model.dim": 64, "model.num_layers": 2, "model.num_heads": 2, "model.num_kv_heads": 1, "model.ffn_dim": 96,
    "data.source": "synthetic", "training.seq_len": 32, "training.global_batch_size": 4, "training.local_batch_size": 2,
    "schedule.warmup_steps": 2, "validation.interval": 0, "sample.tokens": 0, "metrics.interval": 1, "checkpoint.interval": 25,
    "training.steps": STEPS,
}  # fmt: skip
