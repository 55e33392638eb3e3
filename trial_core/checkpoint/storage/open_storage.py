"""Opens a storage: chooses the class for a URL and its options.

For ``gs://``, ``az://`` and all others that have no class here, it is `Storage` itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations, registry

from trial_core.checkpoint.storage.base import Storage, StorageSpec, protocols_of
from trial_core.checkpoint.storage.credentials import BLOCK, without_credentials
from trial_core.checkpoint.storage.local import LocalStorage, MemoryStorage
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.errors import StorageError

_CHECKSUMS = "request_checksum_calculation"
_S3_PROTOCOLS = ("s3", "s3a")
_PACKAGES = {
    **dict.fromkeys(_S3_PROTOCOLS, "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}


def open_storage(url: str, options: dict[str, Any] | None = None) -> Storage:
    """The storage at an fsspec URL or a plain path. Sends no request yet. Raises StorageError if
    the URL is not valid, its package is not installed, or its credentials are in a block that
    nothing has read."""
    options = dict(options or {})
    if BLOCK in options:
        raise StorageError(
            f"{without_credentials(url)}: its credentials are the block {options[BLOCK]} on a "
            "Prefect server, which only a flow reads (trialflow train, evaluate, retrain, prune, "
            "or a flow of your own). Here, leave checkpoint_storage.credentials out, and give the "
            "credentials by environment variables, the machine's role or checkpoint_storage.options"
        )
    fs, root = _connect(url, options)
    if isinstance(fs, LocalFileSystem):
        return LocalStorage(StorageSpec(f"file://{root}", options), fs, root)
    spec = StorageSpec(url, options)
    if isinstance(fs, MemoryFileSystem):
        return MemoryStorage(spec, fs, root)
    if _is_s3(fs):
        # s3fs takes a second to import.
        from trial_core.checkpoint.storage.s3_storage import S3Storage

        return S3Storage(spec, fs, root)
    return Storage(spec, fs, root)


def packages_of(url: str) -> tuple[str, ...]:
    """The installed packages that the storage at a URL needs besides fsspec; slow to import."""
    package = _PACKAGES.get(fsspec.core.split_protocol(url)[0] or "file")
    return () if package is None or find_spec(package) is None else (package,)


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the root within it."""
    errors = ErrorTranslator(url, options)
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    if "://" not in url and "::" not in url:
        with errors.translated("use", ValueError):  # a NUL character
            url = os.path.abspath(os.path.expanduser(url))
    if "::" not in protocol and protocol not in {*known_implementations, *registry}:
        near = get_close_matches(protocol, ["file", "memory", *_PACKAGES], n=1)
        hint = f"did you mean {near[0]}://? " if near else ""
        raise StorageError(
            f"{errors.url}: unknown protocol {protocol}://; {hint}use file://, memory://, s3://, "
            "gs://, az:// or another protocol of fsspec"
        )
    try:
        with errors.translated("use", TypeError, ValueError, KeyError):
            if protocol in _S3_PROTOCOLS:
                options = _s3_options(options)
            fs, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f"pip install {package}" if package else known_implementations[protocol]["err"]
        raise StorageError(
            f"{errors.url}: {protocol}:// needs a package that is not installed: {advice}"
        ) from error
    if _is_s3(fs) and not root:
        raise StorageError(f"{errors.url} names no bucket: write s3://bucket/folder")
    return fs, root


def _s3_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of an S3 storage: the given ones over our defaults.

    Listings are not cached, because other processes write. botocore neither signs nor sums
    payloads, because it would do so on the event loop: TLS and our own checksums protect them in
    transit, the manifest's digests afterwards.
    """
    from botocore.config import Config  # slow to import

    config = dict(_mapping(given, "config_kwargs"))
    if _CHECKSUMS in Config.OPTION_DEFAULTS:  # older releases compute none
        config.setdefault(_CHECKSUMS, "when_required")
    config["s3"] = {"payload_signing_enabled": False, **_mapping(config, "s3")}
    return {"use_listings_cache": False, "max_concurrency": 1, **given, "config_kwargs": config}


def _mapping(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    given = options.get(name) or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"the option {name} must be a mapping, not a {type(given).__name__}")
    return given


def _is_s3(fs: Any) -> bool:
    return not set(_S3_PROTOCOLS).isdisjoint(protocols_of(fs))
