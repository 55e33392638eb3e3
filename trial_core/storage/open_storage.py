"""Opening a storage: from a URL and its options to the class that keeps its promises."""

from __future__ import annotations

import importlib.util
import os
from difflib import get_close_matches
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations, registry

from trial_core.errors import StorageError
from trial_core.storage.base import Storage, StorageSpec
from trial_core.storage.local import LocalStorage, MemoryStorage
from trial_core.storage.storage_errors import Explainer

ENGINE_VARIABLE = "TRIALFLOW_STORAGE_ENGINE"
"""Environment variable that says what moves the bytes of files to and from S3."""

ENGINES = ("auto", "s3fs", "obstore")
"""auto: obstore where it is installed and can be told what s3fs was, else s3fs."""

_CHECKSUMS = "request_checksum_calculation"
_S3_PROTOCOLS = ("s3", "s3a")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


def open_storage(url: str, options: dict[str, Any] | None = None) -> Storage:
    """The storage under a fsspec URL, or a plain path. Sends no request yet.

    Raises:
        StorageError: the URL is none, or a package for it is not installed.
    """
    options = dict(options or {})
    fs, root = _connect(url, options)
    if isinstance(fs, LocalFileSystem):
        return LocalStorage(StorageSpec(f"file://{root}", options), fs, root)
    if is_s3(fs):
        return _s3_storage(StorageSpec(url, options), fs, root)
    storage = Storage(StorageSpec(url, options), fs, root)
    return MemoryStorage(storage.spec, fs, root) if storage.is_process_local else storage


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the root within it. No request is sent yet.

    Raises:
        StorageError: the URL is none, or a package for it is not installed.
    """
    explainer = Explainer(url, options)
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    if protocol in _S3_PROTOCOLS:
        options = _s3_options(options)
    elif "://" not in url and "::" not in url:
        url = os.path.abspath(os.path.expanduser(url))
    if "::" not in protocol and protocol not in {*known_implementations, *registry}:
        near = get_close_matches(protocol, ["file", "memory", *_PACKAGES], n=1)
        hint = f"; did you mean {near[0]}://?" if near else ""
        raise StorageError(
            f"{explainer.url}: no kind of storage is called {protocol}://{hint} "
            "(file://, memory://, s3://, gs://, az:// and what else fsspec knows)"
        )
    try:
        with explainer.explaining("use", TypeError, ValueError, KeyError):
            fs, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f"pip install {package}" if package else known_implementations[protocol]["err"]
        raise StorageError(
            f"{explainer.url}: {protocol}:// needs a package that is not installed: {advice}"
        ) from error
    if is_s3(fs) and not root:
        raise StorageError(f"{explainer.url} names no bucket: write s3://bucket/folder")
    return fs, root


def _s3_storage(spec: StorageSpec, fs: Any, root: str) -> Storage:
    """S3, its bytes by the engine that is asked for, or that there is. Imported late: s3fs takes a
    second to import, and obstore need not be there."""
    engine = os.environ.get(ENGINE_VARIABLE) or "auto"
    if engine not in ENGINES:
        raise StorageError(f"{ENGINE_VARIABLE} is one of {', '.join(ENGINES)}, got {engine!r}")
    has_obstore = importlib.util.find_spec("obstore") is not None
    if engine == "obstore" and not has_obstore:
        raise StorageError(f"{ENGINE_VARIABLE} asks for obstore: pip install 'trialflow[obstore]'")
    with Explainer(spec.url, spec.options).explaining("use"):
        uses_checksums = _uses_checksums(spec.options)
    if engine == "s3fs" or not has_obstore:
        from trial_core.storage.s3 import S3Storage

        return S3Storage(spec, fs, root, uses_checksums)
    from trial_core.storage.obstore_s3 import ObstoreS3Storage

    return ObstoreS3Storage(spec, fs, root, uses_checksums, is_required=engine == "obstore")


def _s3_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of an S3 storage, with defaults of ours under what was given.

    Listings and sizes are never remembered, because other processes write. What is sent is neither
    signed nor summed by botocore, which does both on the event loop: requests are signed, TLS and
    sums of our own protect what they carry, and the manifest's digests all of it.
    """
    from botocore.config import Config  # late, as s3fs

    config = dict(given.get("config_kwargs") or {})
    if _CHECKSUMS in Config.OPTION_DEFAULTS:  # since botocore computes any by itself
        config.setdefault(_CHECKSUMS, "when_required")
    config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
    return {
        "use_listings_cache": False,
        "max_concurrency": 1,
        **given,
        "config_kwargs": config,
    }


def _uses_checksums(options: dict[str, Any]) -> bool:
    """Whether the user has not forbidden them, for a server that stumbles over them."""
    said = (options.get("config_kwargs") or {}).get(_CHECKSUMS)
    if said is None:
        import botocore.session  # late, as s3fs

        session = botocore.session.Session(profile=options.get("profile"))
        said = session.get_config_variable(_CHECKSUMS)
    return bool(str(said).lower() != "when_required")


def is_s3(fs: Any) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not set(_S3_PROTOCOLS).isdisjoint(protocols)
