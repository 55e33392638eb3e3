"""The commands of the documents run, in an empty folder and in the order of the page.

What only a reader knows is replaced (`PLACEHOLDERS`). Some commands are not run here (`NOT_RUN`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.support.prefect import PrefectServer, running_server
from tests.support.snippets import ROOT, SNIPPETS, Snippet, merged
from trial_core.checkpoint.store import CheckpointStore

PLACEHOLDERS = {
    "s3://my-bucket/runs": "a storage of the reader's; replaced by the default storage",
    "4f0c21aa": "a checkpoint's uuid; replaced by that of the oldest checkpoint",
    "/srv/trialflow": "a folder of the reader's machine; replaced by the test's folder",
}
SHORTER = {
    "trialflow train examples/hf_causal_lm/": "--set searcher.max_length.batches=20",
}
"""How commands begin that train for many minutes, and what makes them shorter."""
INIT = "trialflow init"
TRAIN = "trialflow train experiment.yaml --set searcher.max_length.batches=200"
DEPLOY = "trialflow deploy"
BEFORE: Mapping[str, tuple[str, ...]] = {
    "README.md": (),
    "CONTRIBUTING.md": (),
    "docs/index.md": (),
    "docs/quickstart.md": (),
    "docs/guides/automations.md": (),
    "docs/guides/checkpoint-code.md": (INIT, TRAIN),
    "docs/guides/checkpoints.md": (INIT, TRAIN, DEPLOY),
    "docs/guides/compose.md": (INIT,),
    "docs/guides/cookbook.md": (),
    "docs/guides/core-api.md": (),
    "docs/guides/deepspeed.md": (),
    "docs/guides/deploying.md": (INIT, TRAIN, DEPLOY),
    "docs/guides/huggingface.md": (),
    "docs/guides/kubernetes.md": (),
    "docs/guides/mcp.md": (),
    "docs/guides/move-from-determined.md": (),
    "docs/guides/opentelemetry.md": (),
    "docs/guides/pytorch.md": (),
    "docs/guides/resuming.md": (INIT, TRAIN),
    "docs/guides/retraining.md": (INIT, TRAIN),
    "docs/guides/scripts.md": (INIT, TRAIN),
    "docs/guides/several-machines.md": (INIT,),
    "docs/guides/search.md": (INIT,),
    "docs/guides/slurm.md": (),
    "docs/guides/stages.md": (INIT,),
    "docs/guides/stopping.md": (INIT, TRAIN, DEPLOY),
    "docs/guides/trackers.md": (INIT,),
    "docs/reference/json.md": (INIT, TRAIN),
    "examples/digits/README.md": (),
    "examples/gan/README.md": (),
    # What `trialflow up` of that page sets up.
    "examples/gpt_stdlib/README.md": ("trialflow deploy examples/gpt_stdlib/daily.yaml",),
    "examples/hf_causal_lm/README.md": (),
    "examples/hf_trainer/README.md": (),
    "examples/nightly/README.md": (),
    "examples/pipeline/README.md": (),
    "examples/roc_auc/README.md": (),
}
"""The documents with commands or programs, and what their reader has done before."""

NOT_RUN = {
    "make": "installs into .venv of the repository; another test checks the target's name",
    ". .venv/bin/activate": "the tests' environment is active",
    "pip install": "the tests' environment has the packages",
    "pre-commit install": "changes the repository's hooks",
    "export PREFECT_API_": "the tests' server has another address, and no password",
    "read -rs": "the same",
    "export OTEL_": "there is no collector: tests/trial_core/observe/telemetry",
    "python examples/nightly/nightly.py --serve": "serves until Ctrl-C",
    "trialflow up": "serves until Ctrl-C: tests/deployments/test_up.py",
    "trialflow logs mine-": "needs a run: tests/deployments/cli/test_logs.py",
    "trialflow train experiment.yaml --start-from": (
        "tests/trial_core/checkpoint/transfer/test_import_checkpoint.py"
    ),
    "trialflow train experiment.yaml --set name=calmer": (
        "the page's checkpoint is of another model: docs/guides/cookbook.md has the same"
    ),
    "trialflow models promote gpt --search": "needs a search: tests/deployments/cli/test_models.py",
    "trialflow runs sync": "tests/trial_core/observe/trackers/test_tracked_runs.py",
    "trialflow jobset": "tests/deployments/cli/test_jobset.py",
    "trialflow deploy --type": "tests/deployments/test_deploy_templates.py",
    "prefect worker start": "works until Ctrl-C: tests/deployments/test_deploy.py",
    "prefect api POST /flow_runs/ID": "needs a lost run: tests/deployments/test_killed_run.py",
    "sudo": "needs root: tests/deployments/test_deploy_postgresql.py",
    "echo": "the same",
    "install -m 600": "makes a file for secrets, which `echo` fills",
    "docker compose": "needs Docker: tests/deployments/test_compose.py",
    "docker build": "needs Docker: tests/deployments/test_deploy_image.py",
    "helm": "needs Kubernetes",
    "kubectl": "the same",
    "openssl": "the same",
    "trialflow train experiment.yaml --engine join": "tests/deployments/cli/test_join.py",
    "trialflow doctor --config experiment.yaml --engine": (
        "tests/deployments/cli/test_node_checks.py"
    ),
    "export RAY_": "needs a Ray cluster: tests/flows/test_node_providers.py",
    "ray ": "the same",
    "trialflow train examples/gpt_stdlib/experiment.yaml --engine ray": "the same",
    "trialflow train experiment.yaml --set resources.slots_per_trial=16 --engine ray": "the same",
    "cp /path/to/trialflow": "the clone is wherever the user has it",
    "sbatch": "needs Slurm: tests/trial_core/processes/nodes/test_slurm_provider.py",
    "salloc": "the same",
    "squeue": "the same",
    "scancel": "the same",
}
"""How commands begin that are not run here, and why. Those of `trialflow` are parsed even so."""

OUR_WARNING = re.compile(r"^warning: |trial_core\S* \w*Warning: ", re.MULTILINE)

TESTED_ELSEWHERE = {"docs/guides/deploying.md": "tests/deployments/test_deploy_notifications.py"}
"""Documents whose Python program has a test of its own."""


class Reader:
    """Does in a folder what a document says.

    Attributes:
        folder: the working folder; `cd` changes it.
    """

    def __init__(self, folder: Path, server: PrefectServer) -> None:
        self.folder = folder
        inherited = {key: value for key, value in os.environ.items() if key != "TRIALFLOW_HOME"}
        self.environment = {
            **inherited,
            **server.environment,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, command: str) -> None:
        """Run a shell command as given, but for the placeholders."""
        if command.startswith("cd "):
            self.folder = self.folder / shlex.split(command)[1]
            return
        done = subprocess.run(
            ["bash", "-c", self.replaced(command)],
            cwd=self.folder, env=self.environment, check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert not OUR_WARNING.search(done.stdout), f"{command}\n{done.stdout}"

    def copy(self, snippet: Snippet) -> None:
        """Write the file of a snippet, or merge a part of an experiment into the experiment."""
        text = self.replaced(snippet.program())
        if snippet.title:
            (self.folder / snippet.title).write_text(text)
            return
        experiment = self.folder / "experiment.yaml"
        whole = merged(yaml.safe_load(experiment.read_text()), yaml.safe_load(text))
        experiment.write_text(yaml.safe_dump(whole))

    def replaced(self, text: str) -> str:
        """`text` without `PLACEHOLDERS`."""
        storage = f"file://{self.folder}/trialflow-runs/checkpoints"
        text = text.replace("s3://my-bucket/runs", storage)
        text = text.replace("/srv/trialflow", str(self.folder))
        if "4f0c21aa" in text:
            text = text.replace("4f0c21aa", CheckpointStore(storage).list()[0].uuid)
        options = [option for begin, option in SHORTER.items() if text.startswith(begin)]
        return " ".join([text, *options])


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.server
@pytest.mark.timeout(2400)  # each is several runs
@pytest.mark.parametrize("document", BEFORE)
def test_the_commands_of_a_document_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    """In an empty folder, after what its reader has done before: its files and parts of files are
    copied, then its commands and programs run one after the other. None fails or gives a warning
    of ours."""
    found = [snippet for snippet in SNIPPETS if snippet.document == document]
    # As docs/guides/deploying.md sets it; `trialflow deploy` warns of a server without it.
    leases = "prefect.server.concurrency.lease_storage.filesystem"
    monkeypatch.setenv("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", leases)
    with running_server(tmp_path / "prefect") as server:
        reader = Reader(tmp_path / "reader", server)
        reader.folder.mkdir()
        if document.startswith("examples"):
            shutil.copytree(ROOT / "examples", reader.folder / "examples")
        for command in BEFORE[document]:
            reader.run(command)
        begin = [s for s in found if s.language == "sh" and INIT in s.text]
        for snippet in begin:
            run(reader, snippet)
        for snippet in found:
            if is_file(snippet):
                reader.copy(snippet)
        for snippet in found:
            if snippet not in begin and not is_file(snippet):
                run(reader, snippet)


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


def is_file(snippet: Snippet) -> bool:
    """Whether a snippet is copied into the folder: a file, or a part of the experiment."""
    if snippet.title:
        return "/" not in snippet.title and " " not in snippet.title
    return snippet.language == "yaml"


def run(reader: Reader, snippet: Snippet) -> None:
    """Run the commands or the program of a snippet."""
    if snippet.language == "sh":
        for command in filter(is_run, snippet.commands()):
            reader.run(command)
    elif snippet.language in ("python", "diff") and snippet.document not in TESTED_ELSEWHERE:
        reader.run(f"python -c {shlex.quote(snippet.program())}")
