"""The work pools' job templates: Prefect's own, with additions for training."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any, get_args

import prefect
import pytest
from prefect.utilities.templating import apply_values

from tests.support.cli import write_experiment
from trial_core.config import load_config
from trial_core.config.resources_section import ResourcesConfig
from trial_core.config.sections import StoppingConfig
from trial_core.driver.placement import ENGINE_VARIABLE, choose_provider
from trial_core.processes.nodes.ray_provider import RayProvider
from trial_core.processes.slots.device_locks import LOCKS_VARIABLE
from trialflow.deployments.desired_state import PoolType, deployments, job_template

# Each test imports what it needs of the server, of workers and of the schemas, which takes seconds.
pytestmark = pytest.mark.xdist_group("schemas")
POOL_TYPES = get_args(PoolType)
WORKERS = "server/api/collections_data/views/aggregate-worker-metadata.json"


def prefects_own(pool_type: str) -> dict[str, Any]:
    """Prefect's own template for a work pool of that type."""
    known = json.loads(Path(prefect.__file__).parent.joinpath(WORKERS).read_text())
    (found,) = [
        types[pool_type]["default_base_job_configuration"]
        for types in known.values()
        if pool_type in types
    ]
    template: dict[str, Any] = found
    return template


def rendered(pool_type: PoolType, **variables: Any) -> dict[str, Any]:
    """The job configuration that a worker renders, with the template's defaults."""
    template = job_template(pool_type)
    properties = template["variables"]["properties"]
    defaults = {
        name: each["default"]
        for name, each in properties.items()
        if each.get("default") is not None
    }
    values: dict[str, Any] = apply_values(template["job_configuration"], {**defaults, **variables})
    return values


def environment(pool_type: PoolType, **variables: Any) -> dict[str, str]:
    """The environment of a run with these job variables, and with another one."""
    from prefect.workers.base import BaseJobConfiguration

    no_client: Any = object()  # no request is made
    making = BaseJobConfiguration.from_template_and_values(
        job_template(pool_type), {"env": {"MINE": "1"}, **variables}, client=no_client
    )
    return {name: value for name, value in asyncio.run(making).env.items() if value is not None}


def paths(nested: Any, before: str = "") -> set[str]:
    """The paths of all values in nested mappings and lists."""
    if isinstance(nested, dict):
        below = {f"{before}/{key}": value for key, value in nested.items()}
    elif isinstance(nested, list):
        below = {f"{before}/{index}": value for index, value in enumerate(nested)}
    else:
        return {before}
    return set().union(*(paths(value, path) for path, value in below.items())) or {before}


def is_accepted(variables: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether the server takes a run's job variables."""
    from prefect.utilities.schema_tools.validation import ValidationError, validate

    try:
        validate(given, variables, raise_on_error=True)
    except ValidationError:
        return False
    return True


MISPLACED = {f"/job_manifest/spec/template/spec/{name}" for name in ("completions", "parallelism")}
"""Prefect's template has them in the pod, where Kubernetes knows no such fields; here the Job has
them."""


@pytest.mark.parametrize("pool_type", POOL_TYPES)
def test_a_template_extends_prefects(pool_type: PoolType) -> None:
    """Prefect accepts it, and it has all variables of Prefect's own template."""
    from prefect.server.schemas.actions import validate_base_job_template

    ours, theirs = job_template(pool_type), prefects_own(pool_type)
    validate_base_job_template(ours)
    missing = set(theirs["variables"]["properties"]) - set(ours["variables"]["properties"])
    assert missing == set()
    assert paths(theirs["job_configuration"]) - paths(ours["job_configuration"]) <= {
        "/env",  # here a mapping
        *MISPLACED,
    }


def test_a_process_pool_can_be_limited_to_some_gpus() -> None:
    """`cuda_visible_devices` is set in the runs' environment; unset, the worker's value stays."""
    limited = environment("process", cuda_visible_devices="2,3")
    assert limited == {"MINE": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert environment("process") == {"MINE": "1"}


@pytest.mark.parametrize("pool_type", POOL_TYPES)
def test_a_pool_names_the_engine_of_its_runs(tmp_path: Path, pool_type: PoolType) -> None:
    """`engine` places the runs whose experiment does not say where; unset, the worker's value
    stays."""
    config = load_config(write_experiment(tmp_path))
    assert isinstance(choose_provider(config, environment(pool_type, engine="ray")), RayProvider)
    assert ENGINE_VARIABLE not in environment(pool_type)
    names = set(job_template(pool_type)["variables"]["properties"]["engine"]["enum"])
    assert names < set(get_args(ResourcesConfig.model_fields["engine"].annotation))


def test_a_docker_run_has_gpus_and_shared_memory() -> None:
    """By default all GPUs and 8 GiB; the pool or the deployment can change both."""
    arguments = rendered("docker")["container_create_kwargs"]
    assert arguments["device_requests"] == [{"count": -1, "capabilities": [["gpu"]]}]
    assert arguments["shm_size"] == "8g"
    none = rendered("docker", device_requests=[])["container_create_kwargs"]
    assert none.get("device_requests", []) == []


def test_docker_runs_of_a_host_lock_gpus_in_one_place() -> None:
    """In a separate volume, whose path the runs know. Its permissions come from the image, whose
    user is not root."""
    template = rendered("docker")
    (mount,) = template["container_create_kwargs"]["mounts"]
    assert mount == {
        "Type": "volume", "Source": "trialflow-devices", "Target": template["env"][LOCKS_VARIABLE]
    }  # fmt: skip
    dockerfile = Path(__file__).parents[2].joinpath("Dockerfile").read_text()
    assert f"mkdir --mode=1777 {mount['Target']} " in dockerfile


AS_ROOT_OF_THE_HOST = {
    "privileged": True,
    "volumes": ["/:/host"],
    "network_mode": "host",
    "networks": ["host"],
}


def test_a_docker_run_cannot_take_the_host() -> None:
    """No job variable of a run gives its container more rights than the pool's."""
    configuration = rendered("docker", **AS_ROOT_OF_THE_HOST, device_locks="/var/run")
    assert configuration["privileged"] is False
    assert configuration["volumes"] == configuration["networks"] == []
    assert configuration["network_mode"] is None
    arguments = configuration["container_create_kwargs"]
    assert [mount["Source"] for mount in arguments["mounts"]] == ["trialflow-devices"]
    assert arguments["cap_drop"] == ["ALL"]
    assert arguments["security_opt"] == ["no-new-privileges"]


@pytest.mark.parametrize("name", AS_ROOT_OF_THE_HOST)
def test_the_server_refuses_a_docker_run_that_wants_the_host(name: str) -> None:
    """It validates a run's job variables: they are not ignored in silence."""
    variables = job_template("docker")["variables"]
    assert is_accepted(variables, {name: variables["properties"][name]["default"]})
    assert not is_accepted(variables, {name: AS_ROOT_OF_THE_HOST[name]})


def test_a_kubernetes_run_has_no_rights() -> None:
    """Not root, no capabilities, no access to the cluster: the pod meets Kubernetes' restricted
    security standard."""
    pod = rendered("kubernetes")["job_manifest"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {
        "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}
    }  # fmt: skip
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip


def test_the_server_refuses_a_kubernetes_run_that_names_a_cluster() -> None:
    """The worker would run the command that a kubectl config names for the log-in."""
    log_in = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh"}}
    cluster = {"config": {"users": [{"name": "u", "user": log_in}]}, "context_name": "c"}
    variables = job_template("kubernetes")["variables"]
    assert is_accepted(variables, {"cluster_config": None})
    assert not is_accepted(variables, {"cluster_config": cluster})
    assert rendered("kubernetes", cluster_config=cluster)["cluster_config"] is None


def test_the_variables_of_a_kubernetes_pool() -> None:
    """GPUs, shared memory, node, secrets and grace period reach the pod."""
    manifest = rendered(
        "kubernetes", gpus=8, shared_memory="64Gi", node_selector={"gpu": "h100"},
        grace_period_seconds=120, env_from=[{"secretRef": {"name": "s3"}}], image="mine:1",
    )["job_manifest"]  # fmt: skip
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["image"] == "mine:1"
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert container["volumeMounts"] == [
        {"name": pod["volumes"][0]["name"], "mountPath": "/dev/shm"}
    ]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert pod["terminationGracePeriodSeconds"] == 120


def test_a_kubernetes_run_fits_the_published_schema() -> None:
    """Every field of the Job is known where it stands. The worker itself writes the command and
    the environment as lists, and the namespace."""
    from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job_spec import IoK8sApiBatchV1JobSpec

    spec = rendered("kubernetes", image="mine:1", gpus=8)["job_manifest"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    container.update(args=["prefect"], env=[{"name": "A", "value": "b"}])
    known = IoK8sApiBatchV1JobSpec.from_dict(copy.deepcopy(spec))
    assert known is not None
    assert known.to_dict() == spec


def test_kubernetes_waits_until_a_run_has_saved() -> None:
    """By default, SIGKILL comes at least 15 s after an experiment's grace period."""
    pod = rendered("kubernetes")["job_manifest"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= StoppingConfig().grace_seconds + 15


@pytest.mark.parametrize("pool_type", ["docker", "kubernetes"])
def test_signals_reach_the_flow_in_a_container(pool_type: PoolType) -> None:
    """The flow's process is the command itself: Prefect's supervisor would kill a flow that handles
    SIGTERM."""
    assert rendered(pool_type)["command"] == "python -m prefect.engine"


def test_every_deployment_has_a_heartbeat() -> None:
    """The automation for silent runs expects it."""
    for deployment in deployments():
        assert int(deployment.environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) == 30
