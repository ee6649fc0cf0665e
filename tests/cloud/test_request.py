"""What SageMaker would be sent, key by key, and what is refused before anything is."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from entry import exception, fail, install, lacking, place
from validation import job_errors, request_errors
from instances import INSTANCE_TYPES
from request import METRICS, Channel, Job, request_for

from titanlike.metrics.terminal import Screen

ROLE = "arn:aws:iam::123456789012:role/training"
JOB = Job(
    run="llama3_8b", timestamp="20261122-101112", arguments=("recipe.toml", "--training.steps=50"), instance_type=INSTANCE_TYPES["ml.p5.48xlarge"],
    num_instances=4, region="us-east-1", role=ROLE, bucket="ours", image="763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13",
)  # fmt: skip
FSX = Channel("data.path", "fsx://fs-0123456789abcdef0/mount/tokens")
VPC: dict[str, Any] = dict(subnets=("subnet-1",), security_groups=("sg-1",))
NAME = "titanlike-llama3-8b-20261122-101112"
PLAIN: dict[str, Any] = {
    "TrainingJobName": NAME,
    "AlgorithmSpecification": {
        "TrainingImage": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["python3", "/opt/ml/input/data/code/sagemaker/entry.py"],
        "ContainerArguments": [
            "recipe.toml", "--run.dir=/opt/ml/checkpoints", "--run.name=llama3_8b", "--checkpoint.dir=s3://ours/titanlike/checkpoints",
            "--run.shutdown_timeout=100", "--training.steps=50",
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
                    "S3DataType": "S3Prefix", "S3Uri": f"s3://ours/titanlike/code/{NAME}/",
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
        }
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://ours/titanlike/output"},
    "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4, "VolumeSizeInGB": 200},
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    "CheckpointConfig": {"S3Uri": "s3://ours/titanlike/runs/llama3_8b/", "LocalPath": "/opt/ml/checkpoints/llama3_8b"},
    "Environment": {"NCCL_DEBUG": "WARN", "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
    "Tags": [{"Key": "titanlike:run", "Value": "llama3_8b"}],
}  # fmt: skip


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The keys of the first that the second has otherwise or not at all, and None for those that only the second has."""
    return {key: found.get(key) for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}


def test_a_plain_job() -> None:
    request = request_for(JOB)
    assert request == PLAIN
    assert request_errors(request) == []


def test_spot() -> None:
    request = request_for(replace(JOB, spot=True, wait_hours=12))
    assert differences(request, PLAIN) == {
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 129600},
    }
    assert request_errors(request) == []


def test_a_warm_pool() -> None:
    request = request_for(replace(JOB, keep_alive_minutes=30))
    assert differences(request, PLAIN) == {
        "ResourceConfig": PLAIN["ResourceConfig"] | {"KeepAlivePeriodInSeconds": 1800}
    }
    assert request_errors(request) == []


def test_data_and_checkpoints_on_fsx() -> None:
    kept = Channel("checkpoints", "fsx://fs-0123456789abcdef0/mount/kept", writable=True)
    request = request_for(replace(JOB, channels=(FSX,), checkpoints=kept, **VPC))
    changed = differences(request, PLAIN)
    assert changed.pop("VpcConfig") == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
    code, *mounted = changed.pop("InputDataConfig")
    assert code == PLAIN["InputDataConfig"][0]
    where = {"FileSystemId": "fs-0123456789abcdef0", "FileSystemType": "FSxLustre"}
    assert mounted == [
        {
            "ChannelName": name,
            "DataSource": {"FileSystemDataSource": where | {"FileSystemAccessMode": mode, "DirectoryPath": path}},
        }
        for name, mode, path in (("data-path", "ro", "/mount/tokens"), ("checkpoints", "rw", "/mount/kept"))
    ]
    words = changed.pop("AlgorithmSpecification")["ContainerArguments"]
    assert "--checkpoint.dir=/opt/ml/input/data/checkpoints" in words
    assert "--data.path=/opt/ml/input/data/data-path" in words
    assert changed == {}
    assert request_errors(request) == []


def test_everything_else() -> None:
    plan = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
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
        "VolumeKmsKeyId": "key",
    }  # fmt: skip
    assert request["OutputDataConfig"] == {"S3OutputPath": "s3://ours/lab/output", "KmsKeyId": "key"}
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 5400}
    assert request["Environment"] == {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    assert request["Tags"][1:] == [{"Key": "team", "Value": "us"}]
    sources = {
        c["ChannelName"]: (c["DataSource"]["S3DataSource"]["S3Uri"], c["InputMode"]) for c in request["InputDataConfig"]
    }
    assert sources["data-mixture-1"] == ("s3://tokens/c4/", "FastFile")
    assert sources["data-mixture-2"] == ("s3://tokens/code/", "File")
    assert sources["tokenizer-encoding"] == ("s3://tokens/llama3/tokenizer.model", "File")
    words = request["AlgorithmSpecification"]["ContainerArguments"]
    assert "--data.mixture=['/opt/ml/input/data/data-mixture-1', '/opt/ml/input/data/data-mixture-2']" in words
    assert "--tokenizer.encoding=/opt/ml/input/data/tokenizer-encoding/tokenizer.model" in words
    assert request_errors(request) == []


def test_one_machine_needs_no_efa_and_a_smoke_job_looks_for_it() -> None:
    assert "FI_PROVIDER" not in request_for(replace(JOB, num_instances=1))["Environment"]
    smoke = request_for(replace(JOB, num_instances=1, smoke=True))
    assert smoke["AlgorithmSpecification"]["ContainerArguments"][0] == "--smoke"
    assert smoke["Environment"] == {"NCCL_DEBUG": "WARN", "SMOKE_GPUS": "8", "SMOKE_EFA": "1"}


def test_a_channel_stands_in_place_of_what_the_key_names() -> None:
    job = replace(JOB, arguments=("recipe.toml", "--data.path=here", "--training.steps=5"), channels=(FSX,), **VPC)
    words = request_for(job)["AlgorithmSpecification"]["ContainerArguments"]
    assert [word for word in words if "data.path" in word] == ["--data.path=/opt/ml/input/data/data-path"]
    assert words[-1] == "--training.steps=5"


def test_a_folder_may_have_a_point_in_its_name() -> None:
    folder, file = (Channel("data.path", f"s3://tokens/{name}") for name in ("c4-v1.5", "c4-v1.5.jsonl.gz"))
    assert (folder.path, file.path) == ("/opt/ml/input/data/data-path", "/opt/ml/input/data/data-path/c4-v1.5.jsonl.gz")
    sources = [
        one["DataSource"]["S3DataSource"]["S3Uri"]
        for one in request_for(replace(JOB, channels=(folder,)))["InputDataConfig"]
    ]
    assert sources[1] == "s3://tokens/c4-v1.5/"


def test_the_user_wins_over_what_a_job_sets() -> None:
    words = request_for(replace(JOB, arguments=("recipe.toml", "--run.shutdown_timeout=60")))["AlgorithmSpecification"][
        "ContainerArguments"
    ]
    assert [word for word in words if "shutdown_timeout" in word] == ["--run.shutdown_timeout=60"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(role="training"), "--role training: give the ARN of a role, such as arn:aws:iam::123456789012:role/NAME"),
        (dict(bucket="Our_Bucket"), "--bucket Our_Bucket: give the name of a bucket: 3 to 63 small letters, digits, dots, dashes"),
        (dict(region="frankfurt"), "--region frankfurt: give a region, such as us-east-1"),
        (dict(prefix="a_b"), "--prefix a_b: give letters, digits and dashes"),
        (dict(training_plan="mine"), "--training-plan mine: give the ARN of a training plan"),
        (
            dict(run="a_run_with_a_name_that_is_far_too_long_for_it"),
            "--run a_run_with_a_name_that_is_far_too_long_for_it: SageMaker takes 63 characters, and "
            "titanlike-a-run-with-a-name-that-is-far-too-long-for-it-20261122-101112 has 71; use 37 or fewer",
        ),
        (
            dict(spot=True, keep_alive_minutes=5),
            "--spot and --keep-alive: SageMaker keeps no spot machines warm; leave one of them out",
        ),
        (dict(keep_alive_minutes=400), "--keep-alive 400: SageMaker keeps machines for 360 minutes at most"),
        (dict(subnets=("subnet-1",)), "--subnet and --security-group go together: give both, or neither"),
        (
            dict(channels=(FSX,)),
            "fsx://fs-0123456789abcdef0/mount/tokens: FSx lies in a VPC; give --subnet and --security-group of it",
        ),
        (
            dict(channels=(Channel("data.path", "fsx://mine/tokens"),), **VPC),
            "fsx://mine/tokens: give fsx://fs-0123456789abcdef0/MOUNT/FOLDER, with the file system's mount name first",
        ),
        (
            dict(arguments=("recipe.toml", f"--sample.prompt={'x' * 250}")),
            f"--sample.prompt={'x' * 24}...: an argument of a job has 256 characters at most; put it into the recipe",
        ),
        (dict(environment={"A": "x" * 513}), "--env A: SageMaker takes values of 512 characters at most, and this has 513"),
    ],
)  # fmt: skip
def test_what_the_service_would_refuse_is_said_here(changes: dict[str, Any], problem: str) -> None:
    assert list(job_errors(replace(JOB, **changes))) == [problem]
    assert list(job_errors(JOB)) == []


def test_the_services_own_model_is_asked() -> None:
    request = request_for(JOB)
    request["ResourceConfig"] |= {"InstanceType": "ml.p5.96xlarge", "KeepAlivePeriodInSeconds": 99999, "Colour": "red"}
    request["RoleArn"] = "x" * 25
    del request["OutputDataConfig"]
    found = "\n".join(request_errors(request))
    for words in (
        'Missing required parameter in input: "OutputDataConfig"', 'Unknown parameter in ResourceConfig: "Colour"',
        "ResourceConfig.InstanceType = ml.p5.96xlarge: not one of those", "KeepAlivePeriodInSeconds = 99999: more than 21600",
        "RoleArn = xxxxxxxxxxxxxxxxxxxxxxxxx: does not match arn",
    ):  # fmt: skip
        assert words in found


def test_metrics_are_read_off_the_lines_that_a_log_has(capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, float | None] = dict(
        loss=2.5, grad_norm=0.5, learning_rate=1e-4, tokens_per_second=71000.4, tflops_per_device=412.3, mfu=0.417,
        memory_gib=71.25, step_seconds=1.5,
    )  # fmt: skip
    screen = Screen(20000, 1)
    screen.show(12, values)
    screen.show(12, dict(validation_loss=2.75))
    screen.show(12, dict(save_seconds=12.5, save_stall_seconds=0.5, save_bytes=5e9))
    lines = capsys.readouterr().out.splitlines()
    found = {name: [m[1] for line in lines if (m := re.search(regex, line))] for name, regex in METRICS.items()}
    assert found == {
        "loss": ["2.5000"], "validation_loss": ["2.7500"], "tokens_per_second": ["71000"], "grad_norm": ["0.50"],
        "learning_rate": ["1.0e-04"], "tflops_per_device": ["412"], "mfu_percent": ["41.7"], "memory_gib": ["71.25"],
        "save_seconds": ["12.50"],
    }  # fmt: skip


def test_a_host_finds_its_place() -> None:
    config = {"current_host": "algo-2", "hosts": ["algo-2", "algo-1", "algo-3"], "network_interface_name": "ens5"}
    assert place(config) == (
        "algo-2",
        {
            "NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "algo-1", "NCCL_SOCKET_IFNAME": "ens5", "GLOO_SOCKET_IFNAME": "ens5",
        },
    )  # fmt: skip


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
        (
            ["Traceback (most recent call last):", "  File", "RuntimeError: Connection closed by peer [10.0.0.2]:1"],
            "lost another host, whose own failure file says why: RuntimeError: Connection closed by peer [10.0.0.2]:1",
        ),
        ([], "the training ended with exit code 7"),
    ],
)  # fmt: skip
def test_the_failure_file_begins_with_the_cause(
    lines: list[str], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entry.ROOT", tmp_path)
    assert fail("algo-1", lines, 7) == 7
    text = (tmp_path / "output/failure").read_text()
    assert text.splitlines()[0] == f"algo-1: {cause}"
    assert text.rstrip().endswith(lines[-1] if lines else cause)
    assert exception([]) == ""


def test_what_an_image_lacks_is_seen(tmp_path: Path) -> None:
    assert lacking(["pytest", "pytest>=1", "torch>=2.11,<2.14"]) == []
    assert lacking(["pytest<1", "no-such-thing>=1", "pytest>=1"]) == ["pytest<1", "no-such-thing>=1"]
    (tmp_path / "wanted.txt").write_text("pytest>=1\ntorch>=99\n")
    assert install(tmp_path / "wanted.txt") == "the image has no torch>=99; choose another --image"


def test_what_cannot_be_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entry.ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "input").mkdir()
    (tmp_path / "wanted.txt").write_text("no-such-thing>=1\n")
    problem = install(tmp_path / "wanted.txt")
    assert problem.startswith(
        "the image lacks no-such-thing>=1, and they cannot be installed here; give an --image that has them: "
    )
    assert "No matching distribution found" in problem
