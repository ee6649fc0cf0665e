"""A training job and a tuning job of SageMaker, with each version of its Python SDK. docs/sagemaker.md explains them.

    pip install "sagemaker>=2.250,<3"        # or "sagemaker-train>=1.10", which is version 3
    python examples/sagemaker_estimator.py --role arn:aws:iam::123456789012:role/NAME --bucket BUCKET
    python examples/sagemaker_estimator.py --role arn:aws:iam::123456789012:role/NAME --bucket BUCKET --tune

`titanlike launch sagemaker` is the convenient way: it checks the recipe before the upload, and plans the price.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"
INSTANCE = "ml.p5.48xlarge"
RECIPE = "train_configs/llama3_8b.toml"
METRICS = {  # of the log lines, such as "step    10/2000  loss 7.1234" and "step    10/2000  val 7.2345"
    "loss": r"step +\d+/\d+  loss ([0-9.e+-]+)",
    "validation_loss": r"step +\d+/\d+  val ([0-9.e+-]+)",
}


def estimator(role: str, bucket: str, session: Any = None) -> Any:
    """Returns an estimator of SDK v2. A hyperparameter is a key of the recipe."""
    from sagemaker.debugger import TensorBoardOutputConfig
    from sagemaker.pytorch import PyTorch

    return PyTorch(
        entry_point="recipes/pretrain.py",
        source_dir=str(ROOT),
        image_uri=IMAGE,
        instance_type=INSTANCE,
        instance_count=1,
        distribution={"torch_distributed": {"enabled": True}},
        hyperparameters={
            "recipe": RECIPE,
            "training.steps": 2000,
            "optimizer.lr": 3e-4,
            "run.deterministic": False,
            "checkpoint.export": "bfloat16",  # to SM_MODEL_DIR
            "tokenizer.encoding": "/opt/ml/input/data/tokenizer/tokenizer.model",
        },
        metric_definitions=[{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
        checkpoint_s3_uri=f"s3://{bucket}/checkpoints/llama3_8b",  # the next job with this location resumes the run
        tensorboard_output_config=TensorBoardOutputConfig(s3_output_path=f"s3://{bucket}/tensorboard"),
        use_spot_instances=True,
        max_run=24 * 3600,
        max_wait=48 * 3600,
        role=role,
        sagemaker_session=session,
    )


def tuner(role: str, bucket: str, session: Any = None) -> Any:
    """Returns a tuner of SDK v2."""
    from sagemaker.tuner import CategoricalParameter, ContinuousParameter, HyperparameterTuner

    return HyperparameterTuner(
        estimator(role, bucket, session),
        objective_metric_name="validation_loss",
        objective_type="Minimize",
        metric_definitions=[{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
        hyperparameter_ranges={
            "optimizer.lr": ContinuousParameter(1e-4, 1e-3, scaling_type="Logarithmic"),
            "schedule.decay": CategoricalParameter(["cosine", "linear"]),
        },
        max_jobs=8,
        max_parallel_jobs=2,
    )


def trainer(role: str, bucket: str, session: Any = None) -> Any:
    """Returns a trainer of SDK v3. Its start script exports each hyperparameter to the shell, so `__` stands for the point."""
    from sagemaker.core.training.configs import (
        CheckpointConfig,
        Compute,
        MetricDefinition,
        SourceCode,
        StoppingCondition,
        TensorBoardOutputConfig,
    )
    from sagemaker.train import ModelTrainer
    from sagemaker.train.distributed import Torchrun

    return (
        ModelTrainer(
            source_code=SourceCode(
                source_dir=str(ROOT), entry_script="recipes/pretrain.py", requirements="requirements.txt"
            ),
            training_image=IMAGE,
            compute=Compute(instance_type=INSTANCE, instance_count=1, enable_managed_spot_training=True),
            stopping_condition=StoppingCondition(max_runtime_in_seconds=24 * 3600, max_wait_time_in_seconds=48 * 3600),
            distributed=Torchrun(),
            hyperparameters={
                "recipe": RECIPE,
                "training__steps": 2000,
                "optimizer__lr": 3e-4,
                "run__deterministic": False,
                "checkpoint__export": "bfloat16",
                "tokenizer__encoding": "/opt/ml/input/data/tokenizer/tokenizer.model",
            },
            checkpoint_config=CheckpointConfig(s3_uri=f"s3://{bucket}/checkpoints/llama3_8b"),
            base_job_name="llama3-8b",
            role=role,
            sagemaker_session=session,
        )
        .with_metric_definitions([MetricDefinition(name=name, regex=regex) for name, regex in METRICS.items()])
        .with_tensorboard_output_config(TensorBoardOutputConfig(s3_output_path=f"s3://{bucket}/tensorboard"))
    )


def trainer_tuner(role: str, bucket: str, session: Any = None) -> Any:
    """Returns a tuner of SDK v3. As with SDK v2, the image's toolkit starts its jobs; these hyperparameters tell it to use
    torchrun."""
    from sagemaker.core.parameter import CategoricalParameter, ContinuousParameter
    from sagemaker.train.tuner import HyperparameterTuner

    model_trainer = trainer(role, bucket, session)
    model_trainer.hyperparameters |= {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_instance_type": INSTANCE,
    }
    return HyperparameterTuner(
        model_trainer,
        objective_metric_name="validation_loss",
        objective_type="Minimize",
        metric_definitions=[{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
        hyperparameter_ranges={
            "optimizer__lr": ContinuousParameter(1e-4, 1e-3, scaling_type="Logarithmic"),
            "schedule__decay": CategoricalParameter(["cosine", "linear"]),
        },
        max_jobs=8,
        max_parallel_jobs=2,
    )


def channels(bucket: str) -> dict[str, str]:
    """Returns the inputs: `train` is `data.path`, and any other one is below /opt/ml/input/data."""
    return {"train": f"s3://{bucket}/tokens", "tokenizer": f"s3://{bucket}/llama3"}


def main() -> None:
    """Starts the job with the version of the SDK that is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--tune", action="store_true", help="start a tuning job")
    options = parser.parse_args()
    inputs = channels(options.bucket)
    if importlib.util.find_spec("sagemaker.train"):
        if options.tune:
            trainer_tuner(options.role, options.bucket).tune(inputs)
        else:
            from sagemaker.core.training.configs import InputData

            data = [InputData(channel_name=name, data_source=uri) for name, uri in inputs.items()]
            trainer(options.role, options.bucket).train(input_data_config=data)
    elif options.tune:
        tuner(options.role, options.bucket).fit(inputs)
    else:
        estimator(options.role, options.bucket).fit(inputs)


if __name__ == "__main__":
    main()
