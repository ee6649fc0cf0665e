"""The SDKs send the request of a job unchanged, and those of the example. Requires one of the SDKs, but not torch:

python -m pytest --noconftest -o addopts= -o filterwarnings= tests/sdk
"""

import copy
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import sagemaker_estimator as example
from moto.server import ThreadedMotoServer

from titanlike.tools.clusters.sagemaker import submit
from titanlike.tools.clusters.sagemaker.request import ENTRY, Channel, TrainingJob, request_for
from titanlike.tools.planning.hardware import load_hardware

ROLE = "arn:aws:iam::123456789012:role/training"
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/example"


JOB = TrainingJob(
    run="run", timestamp="20261122-101112", arguments=("recipe.toml", "--sample.prompt=it's a $HOME"),
    instance_type="ml.p5.48xlarge", hardware=load_hardware("ml.p5.48xlarge"), nodes=4,
    region="us-east-1", role=ROLE, bucket="example",
    image="763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
    channels=(Channel("data.path", "s3://tokens/c4", "FastFile"),),
)  # fmt: skip
# With all optional settings that can be combined.
EVERYTHING = replace(
    JOB, checkpoints=Channel("checkpoints", "fsx://fs-0123456789abcdef0/mount/checkpoints", writable=True), kms_key="key",
    subnets=("subnet-1", "subnet-2"), security_groups=("sg-1",), retries=3, training_plan=PLAN,
)  # fmt: skip
CASES = {
    "plain": request_for(JOB),
    "spot": request_for(replace(JOB, spot=True)),
    "warm pool": request_for(replace(JOB, keep_alive=30)),
    "FSx, VPC, KMS, plan, retries": request_for(EVERYTHING),
}
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
    session.client("s3").create_bucket(Bucket="example")
    for operation in ("CreateTrainingJob", "CreateHyperParameterTuningJob"):
        session.events.register(
            f"provide-client-params.sagemaker.{operation}", lambda params, **_: REQUESTS.append(params)
        )
    REQUESTS.clear()
    yield session


REQUESTS: list[dict[str, Any]] = []


@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_boto3_sends_the_request(session: boto3.Session, request_: dict[str, Any]) -> None:
    assert submit.submit("boto3", request_, session, "example/titanlike") == "titanlike-run-20261122-101112"
    assert [request_] == REQUESTS


@pytest.mark.skipif(not installed(SDKS["v3"]), reason="version 3 of the SageMaker SDK is not installed")
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_model_trainer_sends_the_request_with_its_own_script(session: boto3.Session, request_: dict[str, Any]) -> None:
    assert submit.select_sender() == submit.select_sender("modeltrainer") == "modeltrainer"
    name = submit.submit("modeltrainer", request_, session, "example/titanlike")
    (submitted,) = REQUESTS
    assert submitted["TrainingJobName"] == name and name.startswith("titanlike-run-2")
    # Its script, in an additional channel, executes our entry point with the same arguments.
    channels = {channel["ChannelName"]: channel for channel in submitted["InputDataConfig"]}
    drivers = channels["sm_drivers"]["DataSource"]["S3DataSource"]["S3Uri"]
    key = drivers.removeprefix("s3://example/").rstrip("/")
    assert key.startswith("titanlike/code/")
    script = session.client("s3").get_object(Bucket="example", Key=f"{key}/sm_train.sh")["Body"].read().decode()
    arguments = shlex.join(request_["AlgorithmSpecification"]["ContainerArguments"])
    assert f"exec {shlex.join(ENTRY)} {arguments}\n" in script
    expected = copy.deepcopy(request_)
    for side in (submitted, expected):
        side.pop("TrainingJobName")
        side["AlgorithmSpecification"].pop("ContainerEntrypoint")
        side["AlgorithmSpecification"].pop("ContainerArguments")
    submitted["InputDataConfig"] = [
        channel for channel in submitted["InputDataConfig"] if channel["ChannelName"] != "sm_drivers"
    ]
    assert json.loads(json.dumps(submitted)) == expected | (
        {"HyperParameters": {}} if "HyperParameters" in submitted else {}
    )


@pytest.mark.skipif(not installed(SDKS["v2"]), reason="version 2 of the SageMaker SDK is not installed")
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_estimator_sends_the_request_with_unused_hyperparameters(
    session: boto3.Session, request_: dict[str, Any]
) -> None:
    assert submit.select_sender() == submit.select_sender("estimator") == "estimator"
    assert submit.submit("estimator", request_, session, "example/titanlike") == request_["TrainingJobName"]
    (submitted,) = REQUESTS
    assert all(key.startswith("sagemaker_") for key in submitted.pop("HyperParameters"))
    assert submitted.pop("ProfilerConfig") == {"DisableProfiler": True}
    assert json.loads(json.dumps(submitted)) == request_


# What examples/sagemaker_estimator.py asks for, as the service names it. A version of the SDK adds its own keys.
KEYS = {
    "training.steps": "2000", "optimizer.lr": "0.0003", "run.deterministic": "false", "checkpoint.export": "bfloat16",
    "tokenizer.encoding": "/opt/ml/input/data/tokenizer/tokenizer.model",
}  # fmt: skip
METRICS = [
    {"Name": "loss", "Regex": r"step +\d+/\d+  loss ([0-9.e+-]+)"},
    {"Name": "validation_loss", "Regex": r"step +\d+/\d+  val ([0-9.e+-]+)"},
]
EXAMPLE = {
    "RoleArn": ROLE,
    "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 172800},
    "EnableManagedSpotTraining": True,
    "CheckpointConfig": {"S3Uri": "s3://example/checkpoints/llama3_8b"},
}
TUNING = {
    "Strategy": "Bayesian",
    "ResourceLimits": {"MaxNumberOfTrainingJobs": 8, "MaxParallelTrainingJobs": 2},
    "TrainingJobEarlyStoppingType": "Off",
    "HyperParameterTuningJobObjective": {"Type": "Minimize", "MetricName": "validation_loss"},
}


def ranges(separator: str, values: list[str]) -> dict[str, Any]:
    rate = {"MinValue": "0.0001", "MaxValue": "0.001", "ScalingType": "Logarithmic"}
    return {
        "ContinuousParameterRanges": [{"Name": f"optimizer{separator}lr", **rate}],
        "CategoricalParameterRanges": [{"Name": f"schedule{separator}decay", "Values": values}],
    }


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Sets the source directory to one with a few files, and returns their names."""
    names = ("recipes/pretrain.py", example.RECIPE, "requirements.txt", "pyproject.toml", "titanlike/__init__.py")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(example.ROOT / name, tmp_path / name)
    monkeypatch.setattr(example, "ROOT", tmp_path)
    return names


def channels_of(job: dict[str, Any]) -> dict[str, str]:
    return {one["ChannelName"]: one["DataSource"]["S3DataSource"]["S3Uri"] for one in job["InputDataConfig"]}


def sourcedir(session: boto3.Session, uri: str) -> set[str]:
    """Returns the names of the files in an uploaded archive."""
    body = session.client("s3").get_object(Bucket="example", Key=uri.removeprefix("s3://example/"))["Body"]
    listed = subprocess.run(["tar", "-tz"], input=body.read(), capture_output=True, check=True).stdout.decode()
    return {name.removeprefix("./") for name in listed.splitlines()}


@pytest.mark.skipif(not installed(SDKS["v2"]), reason="version 2 of the SageMaker SDK is not installed")
def test_requests_of_an_estimator_and_its_tuner(session: boto3.Session, clone: tuple[str, ...]) -> None:
    from sagemaker import Session

    sdk_session = Session(boto_session=session, default_bucket="example")
    sdk_session.sagemaker_config = submit.NO_TELEMETRY
    example.estimator(ROLE, "example", sdk_session).fit(example.channels("example"), wait=False)
    example.tuner(ROLE, "example", sdk_session).fit(example.channels("example"), wait=False)
    job, tuning = json.loads(json.dumps(REQUESTS))
    values = {
        key: json.dumps(value) if value[0].isalpha() and value != "false" else value for key, value in KEYS.items()
    }
    values |= {"tokenizer.encoding": json.dumps(KEYS["tokenizer.encoding"]), "recipe": '"train_configs/llama3_8b.toml"'}
    added = {
        "sagemaker_program": '"recipes/pretrain.py"', "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_instance_type": '"ml.p5.48xlarge"',
    }  # fmt: skip
    found = job["HyperParameters"]
    assert {key: value for key, value in found.items() if not key.startswith("sagemaker_")} == values
    assert found.items() >= added.items()
    assert sourcedir(session, json.loads(found["sagemaker_submit_directory"])) >= {*clone}
    assert job.items() >= EXAMPLE.items()
    assert job["TensorBoardOutputConfig"] == {"S3OutputPath": "s3://example/tensorboard"}
    assert job["AlgorithmSpecification"] == {
        "TrainingImage": example.IMAGE, "TrainingInputMode": "File", "MetricDefinitions": METRICS,
    }  # fmt: skip
    assert channels_of(job) == {"train": "s3://example/tokens", "tokenizer": "s3://example/llama3"}

    definition = tuning["TrainingJobDefinition"]
    found = definition["StaticHyperParameters"]
    values.pop("optimizer.lr")
    assert {key: value for key, value in found.items() if not key.startswith("sagemaker_")} == values
    assert found.items() >= added.items()
    assert tuning["HyperParameterTuningJobConfig"] == TUNING | {
        "ParameterRanges": ranges(".", ['"cosine"', '"linear"']) | {"IntegerParameterRanges": []}
    }
    same = {**EXAMPLE, "HyperParameterTuningResourceConfig": EXAMPLE["ResourceConfig"]}
    del same["ResourceConfig"]
    assert definition.items() >= same.items()
    assert definition["AlgorithmSpecification"] == job["AlgorithmSpecification"]
    assert channels_of(definition) == channels_of(job)


@pytest.mark.skipif(not installed(SDKS["v3"]), reason="version 3 of the SageMaker SDK is not installed")
def test_requests_of_a_model_trainer_and_its_tuner(
    session: boto3.Session, clone: tuple[str, ...], tmp_path: Path
) -> None:
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.training.configs import InputData

    sdk_session = Session(boto_session=session, default_bucket="example")
    sdk_session.sagemaker_config = submit.NO_TELEMETRY
    inputs = [InputData(channel_name=name, data_source=uri) for name, uri in example.channels("example").items()]
    example.trainer(ROLE, "example", sdk_session).train(input_data_config=inputs, wait=False, logs=False)
    example.trainer_tuner(ROLE, "example", sdk_session).tune(example.channels("example"), wait=False)
    job, tuning = json.loads(json.dumps(REQUESTS))
    values = {key.replace(".", "__"): value for key, value in KEYS.items()} | {"recipe": example.RECIPE}
    same = copy.deepcopy(EXAMPLE)
    same["CheckpointConfig"]["LocalPath"] = "/opt/ml/checkpoints"
    algorithm = {"TrainingImage": example.IMAGE, "TrainingInputMode": "File", "MetricDefinitions": METRICS}
    assert job["HyperParameters"] == values
    assert job.items() >= same.items()
    assert job["AlgorithmSpecification"].items() >= algorithm.items()
    assert job["TensorBoardOutputConfig"] == {
        "S3OutputPath": "s3://example/tensorboard", "LocalPath": "/opt/ml/output/tensorboard",
    }  # fmt: skip
    channels = channels_of(job)
    assert channels.items() >= {"train": "s3://example/tokens", "tokenizer": "s3://example/llama3"}.items()
    code = channels["code"].removeprefix("s3://example/")
    for name in clone:
        session.client("s3").head_object(Bucket="example", Key=f"{code}/{name}")

    definition = tuning["TrainingJobDefinition"]
    found = definition["StaticHyperParameters"]
    assert sourcedir(session, found.pop("sagemaker_submit_directory")) >= {*clone}
    values.pop("optimizer__lr")
    assert found == values | {
        "run__deterministic": "False", "sagemaker_program": "recipes/pretrain.py",
        "sagemaker_torch_distributed_enabled": "true", "sagemaker_instance_type": "ml.p5.48xlarge",
    }  # fmt: skip
    assert tuning["HyperParameterTuningJobConfig"] == TUNING | {"ParameterRanges": ranges("__", ["cosine", "linear"])}
    assert definition.items() >= same.items()
    assert definition["AlgorithmSpecification"] == algorithm
    assert (
        channels_of(definition).items() >= {"train": "s3://example/tokens", "tokenizer": "s3://example/llama3"}.items()
    )
    check_shell_variables(job, tmp_path)


@pytest.mark.skipif(not installed(SDKS["v3"]), reason="version 3 of the SageMaker SDK is not installed")
def test_channels_are_shell_variables(tmp_path: Path) -> None:
    keys = ("data.path", "data.validation_path", "tokenizer.encoding")
    channels = [*(Channel(key, "s3://tokens/c4") for key in keys), Channel("data.mixture", "s3://tokens/c4", number=1)]
    check_shell_variables({"InputDataConfig": [channel.request() for channel in channels]}, tmp_path)


def check_shell_variables(request: dict[str, Any], folder: Path) -> None:
    """Runs the part of the container's start script that exports hyperparameters and channels."""
    import sagemaker.train

    scripts = Path(sagemaker.train.__file__).parent / "container_drivers/scripts"
    host = {
        "current_host": "algo-1", "hosts": ["algo-1"], "current_instance_type": "x", "network_interface_name": "eth0",
    }  # fmt: skip
    config = {one["ChannelName"]: {} for one in request["InputDataConfig"]}
    file = folder / "sm_training.env"
    code = f"import environment; environment.set_env({host}, {config}, {request.get('HyperParameters', {})}, {str(file)!r})"
    variables = os.environ | {"TRAINING_JOB_NAME": "job", "PYTHONPATH": str(scripts)}
    subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
    done = subprocess.run(
        ["bash", "-ec", f"source {file}; env"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "SM_MODEL_DIR=/opt/ml/model\n" in done.stdout
    for name in config:
        assert re.search(rf"^SM_CHANNEL_{name.upper()}=/opt/ml/input/data/{name}$", done.stdout, re.MULTILINE)
    assert (
        json.loads(re.search("^SM_HPS=(.*)$", done.stdout, re.MULTILINE)[1]).keys()
        == request.get(  # type: ignore[index]
            "HyperParameters", {}
        ).keys()
    )
