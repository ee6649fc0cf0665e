"""What reaches the service through an SDK is the request, key for key. Run where the SDK is installed, without torch:

python -m pytest --noconftest -o addopts= -o filterwarnings= tests/sdk
"""

import copy
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import submit
from moto.server import ThreadedMotoServer

ROLE = "arn:aws:iam::123456789012:role/training"
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
CODE = "s3://ours/titanlike/code/titanlike-run-20261122-101112/"


def s3(name: str, address: str, mode: str = "File") -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": address, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "InputMode": mode, "DataSource": {"S3DataSource": source}}


REQUEST: dict[str, Any] = {
    "TrainingJobName": "titanlike-run-20261122-101112",
    "AlgorithmSpecification": {
        "TrainingImage": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["python3", "/opt/ml/input/data/code/sagemaker/entry.py"],
        "ContainerArguments": ["recipe.toml", "--run.name=run", "--sample.prompt=it's a $HOME"],
        "MetricDefinitions": [{"Name": "loss", "Regex": r"step +\d+/\d+  loss ([0-9.e+-]+)"}],
    },
    "RoleArn": ROLE,
    "InputDataConfig": [s3("code", CODE), s3("data-path", "s3://tokens/c4/", "FastFile")],
    "OutputDataConfig": {"S3OutputPath": "s3://ours/titanlike/output"},
    "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4, "VolumeSizeInGB": 200},
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    "CheckpointConfig": {"S3Uri": "s3://ours/titanlike/runs/run/", "LocalPath": "/opt/ml/checkpoints/run"},
    "Environment": {"NCCL_DEBUG": "WARN", "FI_PROVIDER": "efa"},
    "Tags": [{"Key": "titanlike:run", "Value": "run"}],
}
FSX = {
    "ChannelName": "checkpoints",
    "DataSource": {
        "FileSystemDataSource": {
            "FileSystemId": "fs-0123456789abcdef0",
            "FileSystemType": "FSxLustre",
            "FileSystemAccessMode": "rw",
            "DirectoryPath": "/mount/kept",
        }
    },
}


def with_everything() -> dict[str, Any]:
    """What a plain job has not."""
    request = copy.deepcopy(REQUEST)
    request["ResourceConfig"] |= {"TrainingPlanArn": PLAN, "VolumeKmsKeyId": "key"}
    request["OutputDataConfig"]["KmsKeyId"] = "key"
    request["InputDataConfig"].append(FSX)
    request["VpcConfig"] = {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1", "subnet-2"]}
    request["RetryStrategy"] = {"MaximumRetryAttempts": 3}
    return request


def spot() -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    request["EnableManagedSpotTraining"] = True
    request["StoppingCondition"]["MaxWaitTimeInSeconds"] = 172800
    return request


def warm() -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = 1800
    return request


CASES = {"plain": REQUEST, "spot": spot(), "warm pool": warm(), "FSx, VPC, KMS, plan, retries": with_everything()}
SDKS = {"v3": "sagemaker.train", "v2": "sagemaker.pytorch"}


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def session(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[boto3.Session]:
    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
        "SAGEMAKER_VALIDATE_ROLE": "false",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    session = boto3.Session(region_name="us-east-1")
    session.client("s3").create_bucket(Bucket="ours")
    session.events.register(
        "provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: SENT.append(params)
    )
    SENT.clear()
    yield session


SENT: list[dict[str, Any]] = []


@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_boto3_sends_it_as_it_is(session: boto3.Session, request_: dict[str, Any]) -> None:
    assert submit.by_boto3(request_, session, "ours/titanlike") == "titanlike-run-20261122-101112"
    assert [request_] == SENT


@pytest.mark.skipif(not installed(SDKS["v3"]), reason="version 3 of the SageMaker SDK is not installed")
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_version_3_sends_it_with_its_own_way_in(session: boto3.Session, request_: dict[str, Any]) -> None:
    assert submit.sender()[1] is submit.by_model_trainer
    name = submit.by_model_trainer(request_, session, "ours/titanlike")
    (sent,) = SENT
    assert sent["TrainingJobName"] == name and name.startswith("titanlike-run-2")
    # Its script stands before ours, in a channel of its own, and hands over to our entry with the same words.
    channels = {channel["ChannelName"]: channel for channel in sent["InputDataConfig"]}
    drivers = channels["sm_drivers"]["DataSource"]["S3DataSource"]["S3Uri"]
    key = drivers.removeprefix("s3://ours/").rstrip("/")
    assert key.startswith("titanlike/code/")
    script = session.client("s3").get_object(Bucket="ours", Key=f"{key}/sm_train.sh")["Body"].read().decode()
    words = "recipe.toml --run.name=run '--sample.prompt=it'\"'\"'s a $HOME'"
    assert f"exec python3 /opt/ml/input/data/code/sagemaker/entry.py {words}\n" in script
    expected = copy.deepcopy(request_)
    for side in (sent, expected):
        side.pop("TrainingJobName")
        side["AlgorithmSpecification"].pop("ContainerEntrypoint")
        side["AlgorithmSpecification"].pop("ContainerArguments")
    sent["InputDataConfig"] = [channel for channel in sent["InputDataConfig"] if channel["ChannelName"] != "sm_drivers"]
    assert json.loads(json.dumps(sent)) == expected | ({"HyperParameters": {}} if "HyperParameters" in sent else {})


@pytest.mark.skipif(not installed(SDKS["v2"]), reason="version 2 of the SageMaker SDK is not installed")
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_version_2_sends_it_with_words_that_nobody_reads(session: boto3.Session, request_: dict[str, Any]) -> None:
    assert submit.sender()[1] is submit.by_estimator
    assert submit.by_estimator(request_, session, "ours/titanlike") == request_["TrainingJobName"]
    (sent,) = SENT
    assert all(key.startswith("sagemaker_") for key in sent.pop("HyperParameters"))
    assert sent.pop("ProfilerConfig") == {"DisableProfiler": True}
    assert json.loads(json.dumps(sent)) == request_


def test_without_an_sdk_boto3_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert submit.sender() == ("boto3", submit.by_boto3)
