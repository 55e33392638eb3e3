"""Whether the Prefect server that the user has configured answers."""

from __future__ import annotations

ANSWER_SECONDS = 10.0


def server_problem(api_url: str) -> str | None:
    """Why the Prefect API of the current settings cannot be used, and what to do; None if it can.

    Args:
        api_url: as the settings say it, for the message.
    """
    import httpx
    from prefect.client.orchestration import get_client

    timeout = httpx.Timeout(ANSWER_SECONDS)
    with get_client(sync_client=True, httpx_settings={"timeout": timeout}) as client:
        failure = client.api_healthcheck()
    if failure is None:
        return None
    advice = (
        "start it (prefect server start), correct PREFECT_API_URL, or unset it (also: prefect "
        "config unset PREFECT_API_URL) to use an embedded server"
    )
    what = f"does not answer ({type(failure).__name__}: {failure})"
    if isinstance(failure, httpx.HTTPStatusError):
        status = failure.response.status_code
        what = f"answers with status {status}"
        if status in (401, 403):
            advice = "check PREFECT_API_KEY or PREFECT_API_AUTH_STRING"
    return f"the Prefect server at {api_url} {what}: {advice}"
