"""A training job of four instances, with version 3 of SageMaker's SDK; docs/sagemaker.md has version 2, and explains the keys."""

from sagemaker.core.training.configs import CheckpointConfig, Compute, InputData, SourceCode
from sagemaker.train import ModelTrainer
from sagemaker.train.distributed import Torchrun

ModelTrainer(
    source_code=SourceCode(source_dir=".", entry_script="recipes/pretrain.py", requirements="requirements.txt"),
    training_image="763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
    compute=Compute(instance_type="ml.p5.48xlarge", instance_count=4),
    distributed=Torchrun(),
    hyperparameters={
        "recipe": "train_configs/llama3_8b.toml",
        "tokenizer__encoding": "gpt2",
        "checkpoint__dir": "s3://BUCKET/checkpoints",
    },
    environment={"FI_PROVIDER": "efa"},  # without EFA, an error instead of TCP
    checkpoint_config=CheckpointConfig(s3_uri="s3://BUCKET/runs/llama3_8b"),
    role="arn:aws:iam::123456789012:role/NAME",
).train(input_data_config=[InputData(channel_name="train", data_source="s3://BUCKET/tokens/llama3")])
