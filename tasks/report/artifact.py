"""Prefect Markdown artifacts that are updated in place."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import prefect
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.settings import get_current_settings

from trial_core.text_format import unique_slug


class MarkdownArtifact:
    """One artifact on this flow run's page, updated by all attempts of the run.

    The key is the same for all flow runs, so that Prefect shows the newest artifact under it.

    Args:
        name: the key is `unique_slug` of it.
    """

    def __init__(self, name: str, description: str) -> None:
        self.key = unique_slug(name)
        self._description = description
        self._flow_run_id = _this_flow_run()
        self._id: UUID | None = None

    @property
    def url(self) -> str | None:
        """The page of the newest artifact under this key; None if no UI is known."""
        ui_url = get_current_settings().ui_url
        return f"{newer_ui(ui_url)}/artifacts/key/{self.key}" if ui_url else None

    def write(self, text: str) -> None:
        """Create or update the artifact. One thread at a time; at most every few seconds.

        Raises:
            httpx.HTTPError, PrefectException: the server does not answer, or refuses the request.
        """
        with get_client(sync_client=True) as client:
            self._id = self._id or self._existing(client)
            if self._id is not None:
                client.update_artifact(self._id, ArtifactUpdate(data=text))
                return
            created = client.create_artifact(
                ArtifactCreate(
                    key=self.key,
                    type="markdown",
                    description=self._description,
                    data=text,
                    flow_run_id=self._flow_run_id,
                )
            )
            self._id = created.id

    def _existing(self, client: Any) -> UUID | None:
        """The id of the artifact that an earlier attempt of this flow run created."""
        if self._flow_run_id is None:
            return None
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=[self.key]),
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]),
            ),
            limit=1,
        )
        return found[0].id if found else None


class ReportArtifact(MarkdownArtifact):
    """The artifact of a trial's report."""

    def __init__(self, trial: str) -> None:
        super().__init__(f"trial-{trial}", f"Trial {trial}")


def newer_ui(ui_url: str) -> str:
    """The UI that draws a report's curves, if this installation of Prefect has it."""
    ui_url = ui_url.rstrip("/")
    return f"{ui_url}/v2" if hasattr(prefect, "__ui_v2_static_path__") else ui_url


def _this_flow_run() -> UUID | None:
    run = runtime.flow_run.id
    return UUID(str(run)) if run else None
