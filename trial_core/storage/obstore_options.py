"""Translates the settings of an s3fs client into those of obstore, so that both reach the same S3.

The settings are read from the client, not from the storage's options: they include what botocore
found in the environment, a profile or a role.
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

if TYPE_CHECKING:  # obstore defines them for type checkers only
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

RETRIES = 10
CREDENTIALS_SECONDS = 60
CREDENTIALS_VALID_FOR = timedelta(minutes=5)
REQUEST_TIMEOUT_FACTOR = 4
"""The time limit of a request, in read timeouts: it includes the time to send the body."""

_AMAZON = ".amazonaws.com"


class UntranslatableError(Exception):
    """obstore does not support a setting of s3fs. Never leaves `ObstoreS3Storage`."""


def s3_store(fs: Any, bucket: str, *, for_reading: bool) -> S3Store:
    """obstore's store for a bucket of `fs`, an s3fs file system.

    Raises:
        UntranslatableError: obstore does not support a setting; names it.
    """
    fs.connect()
    config = fs.s3.meta.config
    if setting := _unsupported_setting(fs, config, bucket):
        raise UntranslatableError(setting)
    endpoint, region = _location(fs, bucket)
    is_virtual = _AMAZON not in endpoint and _s3_setting(config, "addressing_style") == "virtual"
    if is_virtual:
        endpoint = endpoint.replace("://", f"://{bucket}.", 1)
    settings: S3Config = {
        "endpoint": endpoint,
        "region": region,
        "virtual_hosted_style_request": is_virtual,
        "unsigned_payload": _s3_setting(config, "payload_signing_enabled") is False,
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


def _unsupported_setting(fs: Any, config: Any, bucket: str) -> str | None:
    """The first setting that obstore does not support."""
    unsupported = {
        "an access point instead of a bucket": bucket.startswith("arn:"),
        "s3_additional_kwargs": bool(fs.s3_additional_kwargs),
        "proxies": bool(config.proxies),
        "client_cert": bool(config.client_cert),
        "use_accelerate_endpoint": bool(_s3_setting(config, "use_accelerate_endpoint")),
        "use_dualstack_endpoint": bool(config.use_dualstack_endpoint),
        "use_fips_endpoint": bool(config.use_fips_endpoint),
        "signature_version": config.signature_version not in ("s3v4", UNSIGNED),
    }
    return next((name for name, is_set in unsupported.items() if is_set), None)


def _location(fs: Any, bucket: str) -> tuple[str, str]:
    """Endpoint and region. s3fs follows Amazon's redirects; obstore needs the right region."""
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
    read_timeout = timedelta(seconds=config.read_timeout)
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=config.connect_timeout),
        "timeout": read_timeout * REQUEST_TIMEOUT_FACTOR,
    }
    if for_reading:
        options["read_timeout"] = read_timeout
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
    """A function that gives obstore the credentials of s3fs."""
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
            return {**given, "expires_at": None}  # type: ignore[typeddict-item]  # both are strings
        found = asyncio.run_coroutine_threadsafe(find(), fs.loop).result(CREDENTIALS_SECONDS)
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            # botocore renews the credentials of a role when it is asked before they expire.
            "expires_at": datetime.now(timezone.utc) + CREDENTIALS_VALID_FOR,
        }

    return provide


def _s3_setting(config: Any, name: str) -> Any:
    return (config.s3 or {}).get(name)
