"""The same S3 for obstore as for s3fs: what s3fs's client has been set up with, in obstore's words.

The client is asked, not the options that it came from; so what botocore has found in the
environment, a profile or a role counts as well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore import UNSIGNED
from botocore.exceptions import NoCredentialsError
from obstore.store import S3Store

if TYPE_CHECKING:  # obstore has them for type checkers alone
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

RETRIES = 10
CREDENTIALS_SECONDS = 60
CREDENTIALS_FOR = timedelta(minutes=5)
SENDING_TAKES = 4
"""Times the read timeout, which is for the server's silence: sending a piece first takes a while,
and the client's limit is on both together."""

_AMAZON = ".amazonaws.com"


class UntranslatableError(Exception):
    """s3fs was told something that obstore cannot be told. Never leaves `ObstoreS3Storage`."""


def s3_store(fs: Any, bucket: str, *, for_reading: bool) -> S3Store:
    """obstore's view of a bucket that `fs`, a s3fs file system, sees.

    Raises:
        UntranslatableError: there is none; says why.
    """
    fs.connect()
    config = fs.s3.meta.config
    if reason := _untranslatable(fs, config, bucket):
        raise UntranslatableError(reason)
    endpoint, region = _place(fs, bucket)
    is_virtual = _AMAZON not in endpoint and _s3(config, "addressing_style") == "virtual"
    if is_virtual:
        endpoint = endpoint.replace("://", f"://{bucket}.", 1)
    settings: S3Config = {
        "endpoint": endpoint,
        "region": region,
        "virtual_hosted_style_request": is_virtual,
        "unsigned_payload": _s3(config, "payload_signing_enabled") is False,
        "skip_signature": config.signature_version is UNSIGNED,
    }
    if fs.req_kw:
        settings["request_payer"] = True
    retries: RetryConfig = {"max_retries": _retries(config)}
    return S3Store(
        bucket,
        config=settings,
        client_options=_client_options(fs, config, endpoint, for_reading),
        retry_config=retries,
        credential_provider=None if settings["skip_signature"] else _credentials(fs),
    )


def _untranslatable(fs: Any, config: Any, bucket: str) -> str | None:
    """What obstore has no word for, if something."""
    refused = {
        "an access point instead of a bucket": bucket.startswith("arn:"),
        "s3_additional_kwargs": bool(fs.s3_additional_kwargs),
        "proxies": bool(config.proxies),
        "client_cert": bool(config.client_cert),
        "use_accelerate_endpoint": bool(_s3(config, "use_accelerate_endpoint")),
        "use_dualstack_endpoint": bool(config.use_dualstack_endpoint),
        "use_fips_endpoint": bool(config.use_fips_endpoint),
        "signature_version": config.signature_version not in ("s3v4", UNSIGNED),
    }
    return next((name for name, is_set in refused.items() if is_set), None)


def _place(fs: Any, bucket: str) -> tuple[str, str]:
    """Endpoint and region. s3fs goes where Amazon sends it; obstore must know beforehand."""
    meta = fs.s3.meta
    if _AMAZON not in meta.endpoint_url:
        return meta.endpoint_url, meta.region_name or "us-east-1"
    try:
        region = fs.call_s3("head_bucket", Bucket=bucket).get("BucketRegion")
    except OSError as error:
        raise UntranslatableError(f"the bucket's region is not known ({error})") from error
    region = region or meta.region_name or "us-east-1"
    china = ".cn" if meta.endpoint_url.endswith(".cn") else ""
    return f"https://s3.{region}{_AMAZON}{china}", region


def _client_options(fs: Any, config: Any, endpoint: str, for_reading: bool) -> ClientConfig:
    silence = timedelta(seconds=config.read_timeout)
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=config.connect_timeout),
        "timeout": silence * SENDING_TAKES,
    }
    if for_reading:
        options["read_timeout"] = silence
    verify = fs.client_kwargs.get("verify")
    if verify is False:
        options["allow_invalid_certificates"] = True
    bundle = verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE")
    if bundle:
        options["root_certificate"] = Path(bundle).read_bytes()
    return options


def _retries(config: Any) -> int:
    attempts = (config.retries or {}).get("total_max_attempts")
    return RETRIES if attempts is None else int(attempts) - 1


def _credentials(fs: Any) -> Callable[[], S3Credential]:
    """Where obstore gets credentials: where s3fs does."""
    given = {
        "access_key_id": fs.key or fs.client_kwargs.get("aws_access_key_id"),
        "secret_access_key": fs.secret or fs.client_kwargs.get("aws_secret_access_key"),
        "token": fs.token or fs.client_kwargs.get("aws_session_token"),
    }

    async def find() -> Any:
        found = await fs.session.get_credentials()
        if found is None:
            raise NoCredentialsError
        return await found.get_frozen_credentials()

    def provide() -> S3Credential:
        if given["access_key_id"] and given["secret_access_key"]:
            return {**given, "expires_at": None}  # type: ignore[typeddict-item]  # both are texts
        found = asyncio.run_coroutine_threadsafe(find(), fs.loop).result(CREDENTIALS_SECONDS)
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            # Those of a role are renewed by botocore, when it is asked in time.
            "expires_at": datetime.now(timezone.utc) + CREDENTIALS_FOR,
        }

    return provide


def _s3(config: Any, name: str) -> Any:
    return (config.s3 or {}).get(name)
