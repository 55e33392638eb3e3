"""Credentials of a storage from a block of Prefect's: `checkpoint_storage.credentials`.

A flow reads the block when it begins, in its own process. Its parameters and results name the block
only. The block's document is read from the server, so Prefect's packages for clouds are needed
where a block is created, and not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectException

from trial_core.checkpoint.storage.credentials import BLOCK
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError

FIELD = "checkpoint_storage.credentials"


def with_credentials(config: ExperimentConfig) -> ExperimentConfig:
    """The experiment with the credentials of its storage as options. Do not store or return it.

    Raises:
        ConfigError: the block does not exist, or is of another type than the storage needs.
    """
    place = config.checkpoint_storage
    if place.credentials is None:
        return config
    from_block = _options(place.credentials, place.url.partition("://")[0])
    given = {name: value for name, value in place.options.items() if name != BLOCK}
    client = {**from_block.get("client_kwargs", {}), **given.get("client_kwargs", {})}
    options = {**from_block, **given, **({"client_kwargs": client} if client else {})}
    resolved = place.model_copy(update={"credentials": None, "options": options})
    return config.model_copy(update={"checkpoint_storage": resolved})


def _options(reference: str, protocol: str) -> dict[str, Any]:
    """Return the options of fsspec's file system that a block stands for."""
    slug, _, name = reference.partition("/")
    kinds = [kind for kind, (protocols, _, _) in _KINDS.items() if protocol in protocols]
    if slug not in kinds:
        known = " or ".join(f"{kind}/NAME" for kind in kinds) or "none: give options instead"
        raise ConfigError(
            f"{FIELD}: {reference} is of another type than {protocol}:// needs, which is {known}"
        )
    _, package, read = _KINDS[slug]
    try:
        with get_client(sync_client=True) as client:
            found = client.read_block_document_by_name(name, slug, include_secrets=True)
    except ObjectNotFound:
        raise ConfigError(
            f"{FIELD}: the Prefect server has no block {reference}. Create it in the UI (Blocks), "
            f"or in Python with .save({name!r}) of its class. A server that does not know the type "
            f"{slug} learns it by: pip install {package}; prefect block register -m "
            f"{package.replace('-', '_')}"
        ) from None
    except (httpx.HTTPError, PrefectException) as error:
        raise ConfigError(
            f"{FIELD}: the block {reference} was not read from the Prefect server: "
            f"{type(error).__name__}"
        ) from None
    return {name: value for name, value in read(found.data).items() if value not in (None, {})}


def _aws(block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("assume_role_arn"):
        raise ConfigError(
            f"{FIELD}: assume_role_arn gives credentials that end after an hour, and a training "
            "may take longer: give the machine that role, or name a profile that assumes it"
        )
    return {
        "key": block.get("aws_access_key_id"),
        "secret": block.get("aws_secret_access_key"),
        "token": block.get("aws_session_token"),
        "profile": block.get("profile_name"),
        **_client(block),
    }


def _minio(block: Mapping[str, Any]) -> dict[str, Any]:
    user, password = block.get("minio_root_user"), block.get("minio_root_password")
    return {"key": user, "secret": password, **_client(block)}


def _client(block: Mapping[str, Any]) -> dict[str, Any]:
    more = block.get("aws_client_parameters") or {}
    named = {"region_name": block.get("region_name"), "verify": more.get("verify_cert_path")}
    if more.get("verify") is False:
        named["verify"] = False
    return {
        "endpoint_url": more.get("endpoint_url"),
        "client_kwargs": {name: value for name, value in named.items() if value is not None},
    }


def _gcp(block: Mapping[str, Any]) -> dict[str, Any]:
    token = block.get("service_account_info") or block.get("service_account_file")
    return {"token": token, "project": block.get("project")}


def _azure(block: Mapping[str, Any]) -> dict[str, Any]:
    named = ("connection_string", "tenant_id", "client_id", "client_secret")
    options = {name: block.get(name) for name in named}
    if host := urlsplit(block.get("account_url") or "").hostname:
        options |= {"account_name": host.partition(".")[0], "account_host": host}
    return options


_S3, _GS = ("s3", "s3a"), ("gs", "gcs")
_AZURE = ("az", "abfs", "abfss")
_KINDS: dict[str, tuple[tuple[str, ...], str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "aws-credentials": (_S3, "prefect-aws", _aws),
    "minio-credentials": (_S3, "prefect-aws", _minio),
    "gcp-credentials": (_GS, "prefect-gcp", _gcp),
    "azure-blob-storage-credentials": (_AZURE, "prefect-azure", _azure),
}
"""Types of blocks, each with its storages, their package, and the function that reads it."""
