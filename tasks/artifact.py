"""Prefect Markdown artifacts that are updated in place."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter

from trial_core.common.text_format import unique_slug
from trialflow.tasks.client_retries import client_retries
from trialflow.tasks.ui_page import ui_page


class MarkdownArtifact:
    """One artifact on this flow run's page, updated by all attempts of the run.

    The key is the same for all flow runs, so that Prefect shows the newest artifact under it.

    Args:
        name: a name; the artifact's key is its `unique_slug`.
    """

    def __init__(self, name: str, description: str) -> None:
        self.key = unique_slug(name)
        self._description = description
        self._flow_run_id = _this_flow_run()
        self._id: UUID | None = None

    @property
    def url(self) -> str | None:
        """The page of the newest artifact under this key, or None if no UI is known."""
        return ui_page(f"artifacts/key/{self.key}")

    @property
    def links(self) -> dict[str, str]:
        """The page of this flow run, for the report; empty if no UI is known."""
        page = ui_page(f"runs/flow-run/{self._flow_run_id}") if self._flow_run_id else None
        return {"Run in Prefect, while its server runs": page} if page else {}

    def write(self, text: str) -> None:
        """Create or update the artifact. One thread at a time; at most every few seconds.

        Asks the server once: repeated requests, with their pauses, would delay the run's end. The
        function `send_unsent` sends a refused text later.

        Raises:
            NO_ANSWER: the server does not answer, or refuses the request.
        """
        _unsent[self] = text
        with client_retries(0):
            self._send(text)
        _unsent.pop(self, None)

    def send_last(self) -> None:
        """Write the unsent text, if any, with Prefect's own retries. Raises as `write`."""
        text = _unsent.get(self)
        if text is not None:
            self._send(text)
            _unsent.pop(self, None)

    def belongs_to(self, flow_run_id: UUID | None) -> bool:
        """Return whether the artifact is on this flow run's page."""
        return self._flow_run_id == flow_run_id

    def _send(self, text: str) -> None:
        with get_client(sync_client=True) as client:
            self._id = self._id or self._existing(client)
            if self._id is not None:
                client.update_artifact(self._id, ArtifactUpdate(data=text))
                return
            artifact = ArtifactCreate(
                key=self.key,
                type="markdown",
                description=self._description,
                data=text,
                flow_run_id=self._flow_run_id,
            )
            self._id = client.create_artifact(artifact).id

    def _existing(self, client: Any) -> UUID | None:
        """Return the id of the artifact that an earlier attempt of this flow run created."""
        if self._flow_run_id is None:
            return None
        ours = {"key": {"any_": [self.key]}, "flow_run_id": {"any_": [self._flow_run_id]}}
        found = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(ours), limit=1)
        return found[0].id if found else None


_unsent: dict[MarkdownArtifact, str] = {}
"""Texts that the server has not accepted, of all flow runs of this process."""


def send_unsent() -> None:
    """Send this flow run's texts that the server has not accepted. Call when it answers again.

    Raises:
        NO_ANSWER: it does not answer, or refuses an artifact.
    """
    for artifact in _unsent_here():
        artifact.send_last()


def forget_unsent() -> None:
    """Drop texts that are still unsent at the flow run's end: a later attempt has newer ones."""
    for artifact in _unsent_here():
        _unsent.pop(artifact, None)


def _unsent_here() -> list[MarkdownArtifact]:
    here = _this_flow_run()
    # A copy: other flow runs of this process write in their own threads.
    return [each for each in list(_unsent) if each.belongs_to(here)]


class ReportArtifact(MarkdownArtifact):
    def __init__(self, trial: str) -> None:
        super().__init__(f"trial-{trial}", f"Trial {trial}")


def _this_flow_run() -> UUID | None:
    run = runtime.flow_run.id
    return UUID(str(run)) if run else None
