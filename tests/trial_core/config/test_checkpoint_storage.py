"""The section `checkpoint_storage`: URLs, Determined's forms, retention rules, hidden secrets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pydantic import ValidationError

from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.config import StorageConfig, error_lines
from trial_core.schedule.units import Batch, Epoch


def problems(given: Any) -> list[str]:
    with pytest.raises(ValidationError) as error:
        StorageConfig.model_validate(given)
    return error_lines(error.value)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("ckpt", "here/ckpt"),
        ("~/ckpt", "home/ckpt"),
        ("file://ckpt", "here/ckpt"),
        ("local://ckpt/", "here/ckpt"),
        ("a b%20#?c", "here/a b%20#?c"),
    ],
)
def test_a_folder_becomes_an_absolute_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, path: str
) -> None:
    """Relative to the current folder; fsspec resolves the URL to the same folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    url = StorageConfig.model_validate(given).url
    assert url == f"file://{tmp_path}/{path}"
    assert fsspec.core.url_to_fs(url)[1] == f"{tmp_path}/{path}"


@pytest.mark.parametrize(
    ("given", "url", "options"),
    [
        ("s3://bucket/prefix/", "s3://bucket/prefix", {}),
        ("S3://bucket", "s3://bucket", {}),
        ("memory://", "memory://", {}),
        ("abfs://box@me.dfs.core.windows.net/p", "abfs://box@me.dfs.core.windows.net/p", {}),
        (
            {"url": "s3://bucket", "options": {"client_kwargs": {"region_name": "x"}}},
            "s3://bucket",
            {"client_kwargs": {"region_name": "x"}},
        ),
        (
            {
                "type": "s3",
                "bucket": "bucket",
                "prefix": "/a/b/",
                "access_key": "k",
                "secret_key": "s",
                "endpoint_url": "http://gateway",
            },
            "s3://bucket/a/b",
            {"key": "k", "secret": "s", "endpoint_url": "http://gateway"},
        ),
        ({"type": "shared_fs", "host_path": "/mnt"}, "file:///mnt", {}),
        (
            {"type": "shared_fs", "host_path": "/mnt", "storage_path": "/mnt/a"},
            "file:///mnt/a",
            {},
        ),
        ({"type": "directory", "container_path": "/ckpt"}, "file:///ckpt", {}),
        ({"type": "gcs", "bucket": "b", "prefix": "p"}, "gs://b/p", {}),
        (
            {"type": "azure", "container": "c", "connection_string": "x=y"},
            "abfs://c",
            {"connection_string": "x=y"},
        ),
        (
            {
                "type": "azure",
                "container": "c",
                "account_url": "https://me.blob.core.windows.net",
                "credential": "z",
            },
            "abfs://c",
            {"account_name": "me", "account_host": "me.blob.core.windows.net", "credential": "z"},
        ),
    ],
)  # fmt: skip
def test_every_form_becomes_a_url_and_options(
    given: Any, url: str, options: dict[str, Any]
) -> None:
    """The options are those of the fsspec file system for that kind of URL."""
    storage = StorageConfig.model_validate(given)
    assert (storage.url, storage.options) == (url, options)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"type": "s3"}, "bucket: missing; for example bucket: my-bucket"),
        (
            {"type": "hdfs", "bucket": "b"},
            'type: expected one of "shared_fs", "directory", "s3", "gcs", "azure", got "hdfs"; '
            "or give a url",
        ),
        (
            {"type": "s3", "bucket": "b", "acces_key": "HUSH"},
            'acces_key: unknown field; did you mean "access_key"?',
        ),
        (
            {"type": "s3", "bucket": "b", "secret_key": 12345},
            "secret_key: expected text, got a number (text needs quotes here)",
        ),
        (
            {"type": "s3", "url": "s3://HUSH"},
            "expected either type with its fields, or url and options; got both",
        ),
        (
            {"type": "azure", "container": "c", "account_url": "HUSH"},
            "account_url: expected a URL such as https://NAME.blob.core.windows.net",
        ),
        (
            "s4://HUSH:HUSH@bucket/x?sig=HUSH",
            'url: unknown storage type "s4" in "s4://bucket/x"',
        ),
        ("gss://b", 'url: unknown storage type "gss" in "gss://b"; did you mean "gs"?'),
        ("s3://", 'url: expected a bucket after s3://, such as "s3://bucket/prefix"'),
        ("s3:/b", "url: expected a folder or a URL that begins with s3://"),
        ("", "url: expected text, got nothing"),
        (["HUSH"], "expected a mapping, got a list"),
        ({"options": "HUSH"}, "options: expected a mapping, got text"),
    ],
)
def test_an_invalid_storage_is_reported_without_its_secrets(given: Any, problem: str) -> None:
    """One line with the path and without values: some are credentials."""
    assert problems(given) == [problem]


@pytest.mark.parametrize(
    "place", [{"url": "/x"}, {"type": "directory", "container_path": "/x"}, {}]
)
@pytest.mark.parametrize(
    ("rules", "policy"),
    [
        ({}, None),
        ({"save_trial_best": None, "keep_every": {"batches": 0}}, None),
        ({"save_trial_best": 3}, RetentionPolicy(3, 1, 0)),
        ({"save_trial_latest": 0}, RetentionPolicy(1, 0, 0)),
        ({"save_experiment_best": 2}, RetentionPolicy(1, 1, 2)),
        ({"keep_every": {"epochs": 7}}, RetentionPolicy(1, 1, 0, Epoch(7))),
        ({"keep_every": 100}, RetentionPolicy(1, 1, 0, Batch(100))),
    ],
)
def test_retention_rules(
    place: dict[str, Any], rules: dict[str, Any], policy: RetentionPolicy | None
) -> None:
    """In every form of storage. No rule keeps all; after one, the others have defaults."""
    storage = StorageConfig.model_validate({**place, **rules})
    if policy is not None:
        policy = replace(policy, metric="accuracy", smaller_is_better=False)
    assert storage.retention("accuracy", smaller_is_better=False) == policy
    decoded = StorageConfig.model_validate(storage.model_dump(mode="json"))
    assert decoded.retention("accuracy", smaller_is_better=False) == policy


@pytest.mark.parametrize(
    ("rules", "policy"),
    [
        ({}, RetentionPolicy(1, 2, 0, metric=None)),  # keeps all that are validated
        ({"save_trial_best": 3}, RetentionPolicy(3, 2, 0, metric="loss")),
        ({"save_trial_latest": 5}, RetentionPolicy(1, 5, 0, metric="loss")),
        ({"save_trial_latest": 0}, RetentionPolicy(1, 2, 0, metric="loss")),
    ],
)
def test_a_run_that_saves_all_the_time_keeps_two(
    rules: dict[str, Any], policy: RetentionPolicy
) -> None:
    """And what rules keep; without a rule, what is validated."""
    storage = StorageConfig.model_validate({"url": "memory://a", **rules})
    assert storage.retention("loss", True, is_continuous=True) == policy


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"save_trial_best": -1}, "save_trial_best: expected an integer of at least 0, got -1"),
        ({"save_trial_bst": 1}, 'save_trial_bst: unknown field; did you mean "save_trial_best"?'),
        (
            {"keep_every": {"batches": -1}},
            "keep_every.batches: expected a positive integer, got -1",
        ),
    ],
)
def test_an_invalid_rule_is_reported(given: Any, problem: str) -> None:
    """One line with the path, in every form of storage."""
    assert problems(given) == [problem]
    assert problems({"type": "directory", "container_path": "/x", **given}) == [problem]


@pytest.mark.parametrize(
    "given",
    [
        {"type": "s3", "bucket": "b", "access_key": "HUSH", "secret_key": "HUSH"},
        {"url": "s3://HUSH:HUSH@bucket/x", "options": {"client_kwargs": {"a": "HUSH"}}},
        {"url": "https://host/container?sig=HUSH"},
    ],
)
def test_credentials_are_not_shown(given: dict[str, Any]) -> None:
    """Neither by `str` nor by `repr`; the config keeps them."""
    storage = StorageConfig.model_validate(given)
    assert "HUSH" not in repr(storage) + str(storage) + f"{storage}"
    assert "HUSH" in str(storage.model_dump())


def test_a_container_is_not_mistaken_for_a_credential() -> None:
    """Azure's URLs have container@account where others have user@host."""
    storage = StorageConfig.model_validate("abfs://box@me.dfs.core.windows.net/p")
    assert "box@me" in repr(storage)
