"""Manifests of a Kubernetes job: a JobSet, or a Kubeflow TrainJob whose runtime has the same JobSet."""

from typing import Any

from titanlike.distributed.environment import DEFAULT_PORT
from titanlike.tools.clusters.cluster_job import STOPPED, USER_ERROR, ClusterJob

Manifest = dict[str, Any]

REPLICATED_JOB = "node"  # the name that Kubeflow's Trainer looks for
CONTAINER = "trainer"
RECIPE_FOLDER = "/etc/titanlike"
WORKING_DIRECTORY = "/workspace"
USER = 1000  # of the image that `titanlike launch docker` builds
MAX_RESTARTS = 3
WAIT_FOR_NAME = 'until getent hosts "$MASTER_ADDR"; do sleep 1; done'
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def job_set(job: ClusterJob, image: str, claim: str, secret: str) -> list[Manifest]:
    """Returns the manifests of a JobSet.

    Args:
        job: The job. Its name is a DNS label.
        image: Container image with titanlike.
        claim: Persistent volume claim for the working directory: data, run directories and checkpoints. "" for none.
        secret: Secret whose entries are environment variables, such as credentials of an object store. "" for none.
    """
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [_config_map(job), {**kind, "metadata": {"name": job.name}, "spec": _spec(job, image, claim, secret)}]


def train_job(job: ClusterJob, image: str, claim: str, secret: str) -> list[Manifest]:
    """Returns the manifests of a TrainJob with a training runtime of its own. The arguments are the same as for `job_set`."""
    version = "trainer.kubeflow.org/v1alpha1"
    spec = _spec(job, image, claim, secret)
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
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": job.num_nodes, "image": image}},
    }
    return [_config_map(job), runtime, training]


def _config_map(job: ClusterJob) -> Manifest:
    data = {"recipe.toml": job.resolved, f"{job.program.stem}.py": job.program.read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}, "data": data}


def _spec(job: ClusterJob, image: str, claim: str, secret: str) -> Manifest:
    """Returns the specification of the JobSet: one Job with a pod per node, under a headless service."""
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
        "template": {"spec": _pod(job, image, claim, secret)},
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


def _pod(job: ClusterJob, image: str, claim: str, secret: str) -> Manifest:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    address = {"name": "MASTER_ADDR", "value": f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}"}
    variables = {"NNODES": job.num_nodes, "NPROC": job.processes_per_node, "MASTER_PORT": DEFAULT_PORT}
    storage = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    gpus = {"nvidia.com/gpu": job.gpus_per_node}
    container = {
        "name": CONTAINER,
        "image": image,
        # Not a shell: the launcher is process 1 and receives SIGTERM before a pod is deleted.
        "command": ["python", "-m", "titanlike.run.launch", f"{RECIPE_FOLDER}/recipe.toml"],
        "workingDir": WORKING_DIRECTORY,
        "env": [
            *({"name": name, "value": str(value)} for name, value in variables.items()),
            {"name": "NODE_RANK", "valueFrom": index},
            address,
        ],
        **({"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}),
        **({"resources": {"limits": gpus}} if job.gpus_per_node else {}),
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE_FOLDER},
            {"name": "workspace", "mountPath": WORKING_DIRECTORY},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    # The launcher refuses a name that cannot be resolved.
    wait = {"name": "wait-for-node-0", "image": image, "command": ["sh", "-c", WAIT_FOR_NAME], "env": [address]}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "securityContext": {"fsGroup": USER},
        **({"initContainers": [wait]} if job.num_nodes > 1 else {}),
        "containers": [container],
        "volumes": [
            {"name": "recipe", "configMap": {"name": job.name}},
            {"name": "workspace", **storage},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # of NCCL; the default is 64 MiB
        ],
    }
