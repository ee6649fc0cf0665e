"""Manifests of a Kubernetes job: a JobSet, a Kubeflow TrainJob whose runtime has the same JobSet, or HyperPod's job."""

from dataclasses import dataclass
from typing import Any

from titanlike.distributed.environment import DEFAULT_PORT
from titanlike.tools.clusters.cluster_job import EXIT_MARGIN, STOPPED, USER_ERROR, ClusterJob

Manifest = dict[str, Any]

REPLICATED_JOB = "node"  # the name that Kubeflow's Trainer looks for
CONTAINER = "trainer"
RECIPE_FOLDER = "/etc/titanlike"
WORKING_DIRECTORY = "/workspace"
USER = 1000  # of the image that `titanlike launch docker` builds
MAX_RESTARTS = 3
WAIT_FOR_NAME = 'until getent hosts "$MASTER_ADDR"; do sleep 1; done'
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
LAUNCH = ["-m", "titanlike.run.launch", f"{RECIPE_FOLDER}/recipe.toml"]

AGENT_PORT = 8080  # on which HyperPod's agent listens for its operator
# Of HyperPod: in six hours, three restarts of the processes, then one of all pods. A fault of a node counts, too, so that a long
# job needs more than three.
RESTART_POLICY = {
    "numRestartBeforeFullJobRestart": MAX_RESTARTS,
    "maxFullJobRestarts": 1,
    "evalPeriodSeconds": 6 * 3600,
}
HYPERPOD_RESTARTS = 50


@dataclass(frozen=True)
class PodOptions:
    """What the pods of a job need of the cluster."""

    image: str
    """Container image with titanlike."""
    claim: str
    """Persistent volume claim for the working directory: data, run directories and checkpoints. "" for none."""
    secret: str
    """Secret whose entries are environment variables, such as credentials of an object store. "" for none."""


def job_set(job: ClusterJob, options: PodOptions) -> list[Manifest]:
    """Returns the manifests of a JobSet. The name of the job is a DNS label."""
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [_config_map(job), {**kind, "metadata": {"name": job.name}, "spec": _spec(job, options)}]


def train_job(job: ClusterJob, options: PodOptions) -> list[Manifest]:
    """Returns the manifests of a TrainJob with a training runtime of its own."""
    version = "trainer.kubeflow.org/v1alpha1"
    spec = _spec(job, options)
    spec["replicatedJobs"][0]["template"]["metadata"] = {"labels": STEP_LABEL}
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name},
        "spec": {"mlPolicy": {"numNodes": job.num_nodes}, "template": {"spec": spec}},
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    training = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": job.num_nodes, "image": options.image}},
    }
    return [_config_map(job), runtime, training]


def hyperpod_job(job: ClusterJob, options: PodOptions) -> list[Manifest]:
    """Returns the manifests of a job of SageMaker HyperPod's training operator, whose agent starts the processes of a pod."""
    # The agent is process 1 and receives SIGTERM before a pod is deleted.
    timeout = f"--shutdown-timeout={job.grace - EXIT_MARGIN}"
    agent = ["hyperpodrun", f"--nnodes={job.num_nodes}", f"--nproc-per-node={job.processes_per_node}", timeout]
    pod = _pod(job, options, [*agent, *LAUNCH], [])
    pod["containers"][0]["ports"] = [{"containerPort": AGENT_PORT}]
    if job.hardware.startswith("ml."):
        pod["nodeSelector"] = {"node.kubernetes.io/instance-type": job.hardware}
    training = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.processes_per_node),
            "replicaSpecs": [{"name": REPLICATED_JOB, "replicas": job.num_nodes, "template": {"spec": pod}}],
            "runPolicy": {"jobMaxRetryCount": HYPERPOD_RESTARTS, "restartPolicy": RESTART_POLICY},
        },
    }
    return [_config_map(job), training]


def _config_map(job: ClusterJob) -> Manifest:
    data = {"recipe.toml": job.resolved, f"{job.program.stem}.py": job.program.read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}, "data": data}


def _spec(job: ClusterJob, options: PodOptions) -> Manifest:
    """Returns the specification of the JobSet: one Job with a pod per node, under a headless service."""
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    address = {"name": "MASTER_ADDR", "value": f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}"}
    numbers = {"NNODES": job.num_nodes, "NPROC": job.processes_per_node, "MASTER_PORT": DEFAULT_PORT}
    variables = [{"name": name, "value": str(value)} for name, value in numbers.items()]
    # Not a shell: the launcher is process 1 and receives SIGTERM before a pod is deleted.
    pod = _pod(job, options, ["python", *LAUNCH], [*variables, {"name": "NODE_RANK", "valueFrom": index}, address])
    pod |= {"restartPolicy": "Never", "securityContext": {"fsGroup": USER}}
    if job.num_nodes > 1:
        # The launcher refuses a name that cannot be resolved.
        wait = {
            "name": "wait-for-node-0",
            "image": options.image,
            "command": ["sh", "-c", WAIT_FOR_NAME],
            "env": [address],
        }
        pod["initContainers"] = [wait]
    node = {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # if one pod ends, all have to start again
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exit_codes(USER_ERROR, *STOPPED.values())},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    return {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": MAX_RESTARTS,
            "rules": [
                {
                    "name": "userError",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [f"exit code {USER_ERROR} "],
                },
                {
                    "name": "stopped",  # by a signal, such as preemption: resumes, however often
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                },
            ],
        },
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": node}}],
    }


def _exit_codes(*values: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": list(values)}


def _pod(job: ClusterJob, options: PodOptions, command: list[str], variables: list[Manifest]) -> Manifest:
    """Returns the specification of a pod with one container, which runs a command with environment variables."""
    workspace = {"persistentVolumeClaim": {"claimName": options.claim}} if options.claim else {"emptyDir": {}}
    volumes = {
        RECIPE_FOLDER: {"name": "recipe", "configMap": {"name": job.name}},
        WORKING_DIRECTORY: {"name": "workspace", **workspace},
        "/dev/shm": {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # of NCCL; the default is 64 MiB
    }
    counts = {"nvidia.com/gpu": job.gpus_per_node, "vpc.amazonaws.com/efa": job.efa_interfaces}
    limits = {name: count for name, count in counts.items() if count}
    # Without it, if EFA is unavailable, NCCL falls back to sockets without an error.
    provider = [{"name": "FI_PROVIDER", "value": "efa"}] if job.efa_interfaces else []
    container = {
        "name": CONTAINER,
        "image": options.image,
        "command": command,
        "workingDir": WORKING_DIRECTORY,
        "env": [*variables, *provider],
        **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": [{"name": volume["name"], "mountPath": path} for path, volume in volumes.items()],
    }
    return {
        "terminationGracePeriodSeconds": job.grace,
        "containers": [container],
        "volumes": list(volumes.values()),
    }
