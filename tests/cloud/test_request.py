"""The request of a job, key by key, the checks of its settings, and the entry point."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sagemaker_estimator

from tests.cloud.settings import JOB, ROLE
from titanlike.metrics.terminal import Console
from titanlike.tools.clusters.sagemaker.entry import fail, first_exception
from titanlike.tools.clusters.sagemaker.request import METRICS, Channel, request_for
from titanlike.tools.clusters.sagemaker.validation import job_errors, request_errors

FSX = Channel("data.path", "fsx://fs-0123456789abcdef0/mount/tokens")
VPC: dict[str, Any] = dict(subnets=("subnet-1",), security_groups=("sg-1",))
NAME = "titanlike-llama3-8b-20261122-101112"
PLAIN: dict[str, Any] = {
    "TrainingJobName": NAME,
    "AlgorithmSpecification": {
        "TrainingImage": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["python3", "/opt/ml/input/data/code/titanlike/tools/clusters/sagemaker/entry.py"],
        "ContainerArguments": [
            "recipe.toml", "--run.name=llama3_8b", "--run.dir=/opt/ml/checkpoints",
            "--checkpoint.dir=s3://example/titanlike/checkpoints", "--run.shutdown_timeout=100", "--training.steps=50",
        ],
        "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
    },
    "RoleArn": ROLE,
    "InputDataConfig": [
        {
            "ChannelName": "code",
            "InputMode": "File",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix", "S3Uri": f"s3://example/titanlike/code/{NAME}/",
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
        }
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://example/titanlike/output"},
    "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4, "VolumeSizeInGB": 200},
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    "CheckpointConfig": {"S3Uri": "s3://example/titanlike/runs/llama3_8b/", "LocalPath": "/opt/ml/checkpoints/llama3_8b"},
    "Environment": {"NCCL_DEBUG": "WARN", "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
    "Tags": [{"Key": "titanlike:run", "Value": "llama3_8b"}],
}  # fmt: skip


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys whose values differ, with the values of `found`, or None if it lacks the key."""
    return {key: found.get(key) for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}


def test_a_plain_job() -> None:
    request = request_for(JOB)
    assert request == PLAIN
    assert request_errors(request) == []


def test_spot_instances_and_a_warm_pool() -> None:
    spot = request_for(replace(JOB, spot=True, wait_hours=12))
    assert differences(spot, PLAIN) == {
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 129600},
    }
    warm = request_for(replace(JOB, keep_alive=30))
    pool = PLAIN["ResourceConfig"] | {"KeepAlivePeriodInSeconds": 1800}
    assert differences(warm, PLAIN) == {"ResourceConfig": pool}
    assert request_errors(spot) == request_errors(warm) == []


def test_data_and_checkpoints_on_fsx() -> None:
    checkpoints = Channel("checkpoints", "fsx://fs-0123456789abcdef0/mount/checkpoints", writable=True)
    request = request_for(replace(JOB, channels=(FSX,), checkpoints=checkpoints, **VPC))
    changed = differences(request, PLAIN)
    assert changed.pop("VpcConfig") == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
    code, *mounted = changed.pop("InputDataConfig")
    assert code == PLAIN["InputDataConfig"][0]
    file_system = {"FileSystemId": "fs-0123456789abcdef0", "FileSystemType": "FSxLustre"}
    assert mounted == [
        {
            "ChannelName": name,
            "DataSource": {"FileSystemDataSource": file_system | {"FileSystemAccessMode": mode, "DirectoryPath": path}},
        }
        for name, mode, path in (("data_path", "ro", "/mount/tokens"), ("checkpoints", "rw", "/mount/checkpoints"))
    ]
    arguments = changed.pop("AlgorithmSpecification")["ContainerArguments"]
    assert "--checkpoint.dir=/opt/ml/input/data/checkpoints" in arguments
    assert "--data.path=/opt/ml/input/data/data_path" in arguments
    assert changed == {}
    assert request_errors(request) == []


def test_everything_else() -> None:
    plan = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/example"
    job = replace(
        JOB, training_plan=plan, retries=3, kms_key="key", tags={"team": "us"}, environment={"NCCL_DEBUG": "INFO"}, max_hours=1.5,
        volume_gb=500, prefix="lab",
        channels=(
            Channel("data.mixture", "s3://tokens/c4", "FastFile", 1), Channel("data.mixture", "s3://tokens/code/", "File", 2),
            Channel("tokenizer.encoding", "s3://tokens/llama3/tokenizer.model"),
        ),
    )  # fmt: skip
    request = request_for(job)
    assert request["TrainingJobName"] == "lab-llama3-8b-20261122-101112"
    assert request["ResourceConfig"] == {
        "InstanceType": "ml.p5.48xlarge", "InstanceCount": 4, "VolumeSizeInGB": 500, "TrainingPlanArn": plan,
    }  # fmt: skip
    assert request["OutputDataConfig"] == {"S3OutputPath": "s3://example/lab/output", "KmsKeyId": "key"}
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 5400}
    assert request["Environment"] == {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    assert request["Tags"][1:] == [{"Key": "team", "Value": "us"}]
    sources = {
        c["ChannelName"]: (c["DataSource"]["S3DataSource"]["S3Uri"], c["InputMode"]) for c in request["InputDataConfig"]
    }
    assert sources["data_mixture_1"] == ("s3://tokens/c4/", "FastFile")
    assert sources["data_mixture_2"] == ("s3://tokens/code/", "File")
    assert sources["tokenizer_encoding"] == ("s3://tokens/llama3/tokenizer.model", "File")
    arguments = request["AlgorithmSpecification"]["ContainerArguments"]
    assert "--data.mixture=['/opt/ml/input/data/data_mixture_1', '/opt/ml/input/data/data_mixture_2']" in arguments
    assert "--tokenizer.encoding=/opt/ml/input/data/tokenizer_encoding/tokenizer.model" in arguments
    assert request_errors(request) == []


def test_arguments_of_the_program() -> None:
    def arguments(**changes: Any) -> list[str]:
        found: list[str] = request_for(replace(JOB, **changes))["AlgorithmSpecification"]["ContainerArguments"]
        return found

    assert "FI_PROVIDER" not in request_for(replace(JOB, nodes=1))["Environment"]  # one instance needs no EFA
    assert arguments(doctor=True) == ["--doctor", "ml.p5.48xlarge"]
    # A channel replaces the value of its key. The user's value of another key replaces that of the job.
    given = ("recipe.toml", "--data.path=here", "--run.shutdown_timeout=60")
    found = arguments(arguments=given, channels=(FSX,), **VPC)
    assert [one for one in found if "data.path" in one] == ["--data.path=/opt/ml/input/data/data_path"]
    assert [one for one in found if "shutdown_timeout" in one] == ["--run.shutdown_timeout=60"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(role="training"), "--role training: expected the ARN of an IAM role, such as arn:aws:iam::123456789012:role/NAME"),
        (dict(bucket="Our_Bucket"), "--bucket Our_Bucket: expected 3 to 63 lowercase letters, digits, dots and dashes"),
        (
            dict(run="a_run_with_a_name_that_is_far_too_long_for_it"),
            "--run a_run_with_a_name_that_is_far_too_long_for_it: the job name "
            "titanlike-a-run-with-a-name-that-is-far-too-long-for-it-20261122-101112 has 71 characters, SageMaker's limit is 63; "
            "use a run name of at most 37",
        ),
        (
            dict(spot=True, keep_alive=5),
            "--spot and --keep-alive exclude each other: SageMaker has no warm pools of spot instances; remove one",
        ),
        (
            dict(arguments=("recipe.toml", f"--sample.prompt={'x' * 250}")),
            f"--sample.prompt={'x' * 24}...: SageMaker's limit is 256 characters per argument; put the value into the recipe",
        ),
        (dict(environment={"A": "x" * 513}), "--env A: the value has 513 characters, SageMaker's limit is 512"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(changes: dict[str, Any], error: str) -> None:
    assert list(job_errors(replace(JOB, **changes))) == [error]
    assert list(job_errors(JOB)) == []


def test_metric_definitions_match_the_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, float | None] = dict(
        loss=2.5, grad_norm=0.5, learning_rate=1e-4, tokens_per_second=71000.4, tflops_per_device=412.3, mfu=0.417,
        memory_gib=71.25, data_wait=0.0, elapsed_seconds=1.5,
    )  # fmt: skip
    console = Console(20000, 1)
    console.log(12, values)
    console.log(12, dict(validation_loss=2.75))
    console.log(12, dict(save_seconds=12.5, save_stall_seconds=0.5, save_bytes=5e9))
    lines = capsys.readouterr().out.splitlines()
    found = {name: [m[1] for line in lines if (m := re.search(regex, line))] for name, regex in METRICS.items()}
    assert found == {
        "loss": ["2.5000"], "validation_loss": ["2.7500"], "tokens_per_second": ["71000"], "grad_norm": ["0.50"],
        "learning_rate": ["1.0e-04"], "tflops_per_device": ["412"], "mfu_percent": ["41.7"], "memory_gib": ["71.25"],
        "save_seconds": ["12.50"],
    }  # fmt: skip
    assert sagemaker_estimator.METRICS.items() <= METRICS.items()


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["error: step 5: the loss is nan on rank 0"], "step 5: the loss is nan on rank 0"),
        (["warning: slow", "Traceback (most recent call last):", '  File "x.py"', "ValueError: no"], "ValueError: no"),
        (
            ["[rank3]: Traceback (most recent call last):", '[rank3]:   File "x.py"', "[rank3]: ValueError: no",
             "error: process 3 ended with exit code 1"],
            "ValueError: no; process 3 ended with exit code 1",
        ),
        ([], "the training exited with code 7"),
    ],
)  # fmt: skip
def test_the_failure_file_begins_with_the_cause(
    lines: list[str], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlike.tools.clusters.sagemaker.entry.ROOT", tmp_path)
    assert fail("algo-1", lines, 7) == 7
    text = (tmp_path / "output/failure").read_text()
    assert text.splitlines()[0] == f"algo-1: {cause}"
    assert text.rstrip().endswith(lines[-1] if lines else cause)
    assert first_exception([]) == ""
