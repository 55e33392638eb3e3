"""Credentials that another program has rewritten since the client read them.

botocore renews credentials that say when they end (a role, SSO, ``credential_process``). Those of a
file or of environment variables it reads once, though a program may rewrite ``~/.aws/credentials``
every hour.
"""

from __future__ import annotations

import logging
from typing import Any

from aiobotocore.session import AioSession
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError

from trial_core.checkpoint.storage.storage_errors import service_code, statuses

_logger = logging.getLogger(__name__)

_ENDED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId"}
    | {"InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired", "UserSuspended"}
)
_FORBIDDEN = (401, 403)
"""Ceph answers an ended session token with AccessDenied, as it does a missing right."""


def credentials_of(client: Any) -> Any:
    """The credentials with which the client signs its next request; None if it signs none."""
    return client._request_signer._credentials


async def has_other_credentials(fs: Any, client: Any, refused: Any, error: OSError) -> bool:
    """Look for credentials where the client's came from; if there are others, let it use them.

    Args:
        refused: the client's credentials before its request.
        error: the failure of the request.

    Returns:
        Whether the request should be sent again.
    """
    code = service_code(error)
    if refused is None or refused.method == "explicit":  # of the options: they do not change
        return False
    if code not in _ENDED:
        # What is renewed by its end was refused for its rights: do not ask its source each time.
        is_forbidden = any(status in _FORBIDDEN for status in statuses(error))
        if not is_forbidden or isinstance(refused, RefreshableCredentials):
            return False
    if credentials_of(client) is not refused:
        return True  # another request has found them
    try:
        found = await AioSession(**fs.kwargs).get_credentials()
    except (BotoCoreError, ClientError, OSError):
        return False  # the file is being written; the caller has `error`
    if found is None or _are_equal(found, refused):
        return False
    client._request_signer._credentials = found
    _logger.info(
        "the storage refused the credentials (%s); new ones of %s count", code, found.method
    )
    return True


def _are_equal(found: Any, refused: Any) -> bool:
    if isinstance(found, RefreshableCredentials) or isinstance(refused, RefreshableCredentials):
        return False  # to compare them would ask their source
    names = ("access_key", "secret_key", "token")
    return all(getattr(found, name) == getattr(refused, name) for name in names)
