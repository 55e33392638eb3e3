"""`trialflow jobset --nodes N`: the JobSet of a run on several nodes.

The file is compared with the published schemas of JobSet and Kubernetes, and its containers'
commands run on this machine. No cluster has run it.
"""

from __future__ import annotations

import copy
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.support.cli import TRIALFLOW, environment_in, trialflow_here, write_experiment
from tests.support.prefect import PrefectServer
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import load_config
from trial_core.config.sections import StoppingConfig
from trial_core.errors import ConfigError
from trial_core.processes.nodes.join_token import new_token
from trialflow.deployments.cli import console
from trialflow.deployments.cli.jobset import jobset as print_jobset, jobset_name, render_jobset
from trialflow.deployments.cli.main import app

pytestmark = pytest.mark.xdist_group("schemas")  # one process imports them
END_SECONDS = 120.0
RUN = "toy-x7k2f"
"""The name of a JobSet, as Kubernetes completes it."""


def experiment_in(folder: Path, **fields: Any) -> Path:
    """An experiment for two slots, stored where pods see it."""
    return write_experiment(
        folder, **{"resources": {"slots_per_trial": 2}, "checkpoint_storage": "s3://b/c", **fields}
    )


def jobset(folder: Path, nodes: int = 2, **fields: Any) -> dict[str, Any]:
    """The rendered JobSet."""
    path = experiment_in(folder, **fields)
    rendered = render_jobset(load_config(path), Path("trial/experiment.yaml"), nodes, "mine:1")
    parsed: dict[str, Any] = yaml.safe_load(rendered)
    return parsed


def jobs(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The specifications of its Jobs, by name."""
    return {each["name"]: each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]}


def container(job: dict[str, Any]) -> dict[str, Any]:
    """The one container of a Job's pods."""
    (only,) = job["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def check(jobset: dict[str, Any]) -> None:
    """Compare with the published schema. The models drop unknown fields, so what they return is
    compared with what they got."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    known = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(jobset))
    assert known is not None
    assert known.to_dict() == jobset


@pytest.mark.parametrize("accelerator", ["auto", pytest.param("cpu", marks=pytest.mark.long)])
def test_the_file_fits_the_published_schemas(tmp_path: Path, accelerator: str) -> None:
    """Every field is known, and has its type."""
    check(jobset(tmp_path, resources={"slots_per_trial": 16, "accelerator": accelerator}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "succesPolicy"), {}),
        (("spec", "failurePolicy", "maxRestarts"), "10"),
        (("spec", "replicatedJobs", 0, "template", "spec", "backofLimit"), 0),
        (("spec", "replicatedJobs", 1, "template", "spec", "template", "spec", "volume"), []),
        (("spec", "replicatedJobs", 1, "template", "spec", "parallelism"), "2"),
    ],
)
def test_a_mistake_in_the_file_is_found(
    tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    """A misspelt field, or a value of another type, at any depth."""
    wrong = jobset(tmp_path)
    *parents, last = path
    place: Any = wrong
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises((AssertionError, ValidationError)):
        check(wrong)


def test_each_node_has_its_share_of_the_slots(tmp_path: Path) -> None:
    """As GPUs of its pod, and for its agent."""
    nodes = jobs(jobset(tmp_path, nodes=4, resources={"slots_per_trial": 32}))["nodes"]
    assert (nodes["parallelism"], nodes["completions"]) == (4, 4)
    assert container(nodes)["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert "--slots=8" in container(nodes)["args"]


def test_a_node_more_than_needed_is_a_spare(tmp_path: Path) -> None:
    """If the experiment says how many slots a node has."""
    resources = {"slots_per_trial": 16, "slots_per_node": 8}
    nodes = jobs(jobset(tmp_path, nodes=3, resources=resources))["nodes"]
    assert nodes["parallelism"] == 3
    assert "--slots=8" in container(nodes)["args"]


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"slots_per_trial": "auto"}, "say how many slots the run needs on all nodes"),
        ({"slots_per_trial": 16}, "16 slots (resources.slots_per_trial) cannot be divided"),
        ({"slots_per_trial": 16, "slots_per_node": 4}, "fewer than the 16 slots"),
    ],
)
def test_slots_that_do_not_fit_the_nodes_are_refused(
    tmp_path: Path, resources: dict[str, Any], message: str
) -> None:
    """Before anything waits for a node on the cluster."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        jobset(tmp_path, nodes=3, resources=resources)


def test_only_a_driver_that_did_not_end_for_good_starts_again(tmp_path: Path) -> None:
    """Not after a failure, a refusal, a bug or Ctrl-C; but after SIGTERM and SIGKILL."""
    file = jobset(tmp_path)
    driver = jobs(file)["driver"]
    (rule,) = driver["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container(driver)["name"],
        "operator": "In",
        "values": [console.FAILED, console.REFUSED, console.BUG, console.INTERRUPTED],
    }
    assert driver["backoffLimit"] == 0
    assert driver["template"]["spec"]["restartPolicy"] == "Never"  # as podFailurePolicy demands
    (of_the_set,) = file["spec"]["failurePolicy"]["rules"]
    assert of_the_set["action"] == "FailJobSet"
    assert of_the_set["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert of_the_set["targetReplicatedJobs"] == ["driver"]


@pytest.mark.parametrize("job", ["driver", "nodes"])
def test_the_commands_of_the_containers_are_ours(tmp_path: Path, job: str) -> None:
    """The image's entrypoint runs them, and every option exists."""
    found = container(jobs(jobset(tmp_path))[job])
    assert "command" not in found  # tini, which forwards signals, stays
    program, *arguments = found["args"]
    assert program == "trialflow"
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_pods_have_no_rights_and_time_to_save(tmp_path: Path) -> None:
    """As those of the work pool: Kubernetes' restricted security standard."""
    own = StoppingConfig().grace_seconds
    for grace, at_least in ((own, own + 15), (600, 615)):
        for job in jobs(jobset(tmp_path, stopping={"grace_seconds": grace})).values():
            pod = job["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] >= at_least
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"] == {
                "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}
            }  # fmt: skip
            assert container(job)["securityContext"] == {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
            }  # fmt: skip


def test_only_the_driver_has_the_password_of_prefect(tmp_path: Path) -> None:
    """Both pods have the storage's credentials."""
    secrets = {
        name: [each["secretRef"]["name"] for each in container(job)["envFrom"]]
        for name, job in jobs(jobset(tmp_path)).items()
    }
    assert secrets == {
        "driver": ["trialflow-storage", "trialflow-prefect"], "nodes": ["trialflow-storage"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt_stdlib", "gpt-stdlib"),
        ("GPT (small)", "gpt-small"),
        ("7b", "run-7b"),
        ("模型", "run"),
        ("a" * 80, "a" * 36),
    ],
)
def test_the_name_is_one_that_kubernetes_accepts(name: str, expected: str) -> None:
    """Also with what Kubernetes and JobSet append for a pod: 63 characters."""
    assert jobset_name(name) == expected
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", expected)
    assert len(f"{expected}-x7k2f-nodes-0-1023-abcde") <= 63


def test_the_command_prints_the_file(tmp_path: Path) -> None:
    """It needs no server, and names the experiment as in the image."""
    folder = tmp_path / "my_trial"
    folder.mkdir()
    experiment_in(folder)
    done = trialflow_here(
        tmp_path, "jobset", "--nodes", "2", "--image", "mine:1", "my_trial/experiment.yaml",
        variables={"PREFECT_API_URL": "http://127.0.0.1:9/api"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    file = yaml.safe_load(done.stdout)
    check(file)
    assert "my_trial/experiment.yaml" in container(jobs(file)["driver"])["args"]
    assert {container(job)["image"] for job in jobs(file).values()} == {"mine:1"}


def test_a_storage_that_pods_may_not_see_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder has to be mounted in the pods."""
    path = experiment_in(tmp_path, checkpoint_storage=f"file://{tmp_path}/checkpoints")
    print_jobset(path, nodes=2)
    assert "all pods must see it" in capsys.readouterr().err


Start = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def pods(tmp_path: Path, prefect_server: PrefectServer) -> Iterator[Start]:
    """Starts the container of a Job as a process of this machine, in a separate folder.

    Only what a cluster gives is replaced: the pods' name service, the secret's folder, and the
    port, which another test may have.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "token").write_text(new_token())
    of_a_cluster = {
        "$(JOBSET_NAME)": RUN,
        f"{RUN}-driver-0-0.{RUN}:": "127.0.0.1:",
        "7600": str(port),
        "/etc/trialflow/": f"{tmp_path}/secret/",
        "trial/experiment.yaml": str(tmp_path / "experiment.yaml"),
    }
    file = jobs(jobset(tmp_path))
    started: list[subprocess.Popen[str]] = []

    def start(job: str, name: str) -> subprocess.Popen[str]:
        program, *arguments = container(file[job])["args"]
        assert program == "trialflow"
        for text, here in of_a_cluster.items():
            arguments = [each.replace(text, here) for each in arguments]
        folder = tmp_path / name
        folder.mkdir()
        server = prefect_server.environment if job == "driver" else {}
        process = subprocess.Popen(
            [*TRIALFLOW, *arguments],
            cwd=folder, env=environment_in(folder, {"DS_ACCELERATOR": "cpu", **server}),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.server
def test_an_evicted_driver_continues_its_trial(tmp_path: Path, pods: Start) -> None:
    """The commands of the file's containers train on two nodes. A driver that gets SIGTERM saves
    and ends with an exit code after which JobSet starts all pods again; they end the trial."""
    storage = f"file://{tmp_path}/checkpoints"
    experiment_in(
        tmp_path, checkpoint_storage=storage,
        searcher={"metric": "loss", "max_length": {"batches": 1_000_000}},
    )  # fmt: skip
    nodes = [pods("nodes", f"node-{number}") for number in range(2)]
    driver = pods("driver", "driver")
    said = read_until(driver, "train-workload")
    driver.send_signal(signal.SIGTERM)
    said += driver.communicate(timeout=END_SECONDS)[0]
    assert driver.returncode == console.TERMINATED, said
    assert ends_of(nodes) == [0, 0]
    (saved,) = CheckpointStore(storage).list()
    assert saved.trial.startswith(RUN)

    end = saved.progress.batches_trained + 4
    experiment_in(
        tmp_path, checkpoint_storage=storage,
        searcher={"metric": "loss", "max_length": {"batches": end}},
    )  # fmt: skip
    nodes = [pods("nodes", f"new-node-{number}") for number in range(2)]
    driver = pods("driver", "new-driver")
    said = driver.communicate(timeout=END_SECONDS)[0]
    assert (driver.returncode, ends_of(nodes)) == (0, [0, 0]), said
    last = CheckpointStore(storage).newest(saved.trial)
    assert last is not None
    assert last.progress.batches_trained == end


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What a process says, up to a line with that text."""
    assert process.stdout is not None
    said = ""
    while text not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return said


def ends_of(processes: list[subprocess.Popen[str]]) -> list[int]:
    """The exit codes of processes that end."""
    for process in processes:
        process.communicate(timeout=END_SECONDS)
    return [process.returncode for process in processes]
