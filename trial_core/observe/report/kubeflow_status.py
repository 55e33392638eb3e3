"""Reports a run's progress to Kubeflow Trainer, which shows it in the status of the TrainJob.

This needs Kubeflow Trainer 2.2 or newer with the feature gate TrainJobStatus. Its controller gives
each pod of a TrainJob the address of its status server, a token and a CA certificate:
https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress
"""

from __future__ import annotations

import os
import ssl
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from trial_core.observe.report.run_updates import Place, RunUpdate

URL = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"

# For each step of a request: connecting, sending, waiting for the answer.
TIMEOUT_SECONDS = 5.0
# Limits of the TrainJob's schema.
MAX_METRICS = 256
MAX_CHARACTERS = 64
MAX_INT32 = 2**31 - 1
SHOWN_CHARACTERS = 200


def kubeflow_status() -> Place | None:
    """The status server that the environment names; None outside a pod of such a TrainJob."""
    url = os.environ.get(URL)
    if not url:
        return None
    return Place("the status of the TrainJob", lambda progress: post(url, trainer_status(progress)))


def trainer_status(progress: RunUpdate) -> dict[str, Any]:
    """The body of a request, without unknown values. The percentage is 100 only for a completed
    run, because a TrainJob's status has no other field for that."""
    known: dict[str, Any] = {"lastUpdatedTime": progress.updated_at}
    if progress.percent is not None:
        most = 100 if progress.status == "completed" else 99
        known["progressPercentage"] = min(most, int(progress.percent))
    if progress.seconds_left is not None:
        known["estimatedRemainingSeconds"] = min(MAX_INT32, progress.seconds_left)
    numbers: dict[str, float] = {"batches": progress.batches}
    if progress.total_batches is not None:
        numbers["total_batches"] = progress.total_batches
    numbers |= {f"validation_{k}": value for k, value in progress.metrics["validation"].items()}
    numbers = {**progress.metrics["training"], **numbers}
    shown = [{"name": name, "value": str(value)} for name, value in numbers.items()]
    fitting = [each for each in shown if max(map(len, each.values())) <= MAX_CHARACTERS]
    known["metrics"] = fitting[-MAX_METRICS:]
    return {"trainerStatus": known}


def post(url: str, body: dict[str, Any]) -> None:
    """Send a status to the server at `url`, which must be https.

    Neither proxies nor redirects are followed: the server is in the cluster, and the token is for
    it alone. The token and the certificate are read each time, because they are replaced.

    Raises:
        OSError, HTTPException, ValueError: it was not sent, or the server has refused it.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise ValueError(f"{URL}: expected https://HOST…, got {url}")
    token = Path(os.environ.get(TOKEN, "")).read_text().strip()
    trusted = ssl.create_default_context(cafile=os.environ.get(CA_CERT) or None)
    server = HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS, context=trusted)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    try:
        server.request("POST", path, msgspec.json.encode(body), headers)
        answer = server.getresponse()
        if answer.status >= 300:
            text = answer.read(SHOWN_CHARACTERS).decode(errors="replace")
            raise OSError(f"{url} answered {answer.status} {answer.reason}: {text}")
    finally:
        server.close()
