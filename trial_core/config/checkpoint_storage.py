"""The section `checkpoint_storage`: where checkpoints are stored, and which are kept.

The place is a fsspec URL with options, or one of Determined's forms. The retention rules are
Determined's, plus `keep_every`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_serializer

from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.storage.credentials import BLOCK, without_credentials
from trial_core.config.error_text import did_you_mean, format_value, validation_error
from trial_core.config.lengths import Period
from trial_core.config.section_base import Section
from trial_core.config.values import Count, PlainMapping, Text
from trial_core.processes.machine.run_dirs import home_folder

# The values of the other rules if at least one is set: Determined's defaults.
_DEFAULT_RULES = RetentionPolicy()
_RETENTION = ("save_trial_best", "save_trial_latest", "save_experiment_best", "keep_every")


def _default_url() -> str:
    return f"file://{home_folder() / 'checkpoints'}"


def _absolute_url(text: str) -> str:
    """A URL; a plain path becomes an absolute ``file://`` URL, relative to the current folder."""
    scheme, separator, rest = text.partition("://")
    scheme = scheme.lower()
    if not separator:
        _check_is_path(text)
        scheme, rest = "file", text
    _check_protocol(scheme, text)
    if scheme in ("file", "local"):
        # Not `Path.as_uri`: it quotes characters, but fsspec does not unquote them.
        return f"file://{os.path.abspath(os.path.expanduser(rest))}"
    if not rest.strip("/") and scheme != "memory":
        raise validation_error(
            f'expected a bucket after {scheme}://, such as "{scheme}://bucket/prefix"'
        )
    return f"{scheme}://{rest.rstrip('/')}"


def _protocols() -> list[str]:
    from fsspec.registry import available_protocols  # late: only some users of config need it

    return list(available_protocols())


def _check_is_path(path: str) -> None:
    scheme, colon, _ = path.partition(":")
    if colon and scheme in _protocols():
        raise validation_error(f"expected a folder or a URL that begins with {scheme}://")


def _check_protocol(scheme: str, url: str) -> None:
    if scheme not in _protocols():
        raise validation_error(
            f"unknown storage type {format_value(scheme)} in "
            f"{format_value(without_credentials(url))}" + did_you_mean(scheme, _protocols())
        )


def _block(text: str) -> str:
    slug, separator, name = text.partition("/")
    if not (slug and separator and name) or "/" in name:
        raise validation_error("expected the type and the name of a block: aws-credentials/prod")
    return text


class StorageConfig(Section):
    """Where checkpoints are stored, and which are kept: all, unless a rule is set."""

    yaml_path: ClassVar[str] = "checkpoint_storage"
    holds_secrets: ClassVar[bool] = True

    url: Annotated[Text, AfterValidator(_absolute_url)] = Field(
        default_factory=_default_url,
        title="URL",
        description="A folder, or a fsspec URL such as s3://bucket/prefix. "
        "Default: checkpoints, in the folder of runs.",
        examples=["s3://bucket/prefix"],
    )
    options: PlainMapping = Field(
        default={},
        description="Options of the fsspec file system; for S3, endpoint_url, key and secret.",
    )

    credentials: Annotated[Text, AfterValidator(_block)] | None = Field(
        default=None,
        title="Block of credentials",
        description="A block of Prefect's in place of secrets in options: aws-credentials/NAME, "
        "minio-credentials/NAME, gcp-credentials/NAME or azure-blob-storage-credentials/NAME. "
        "Flows read it when they begin; scripts cannot.",
        examples=["aws-credentials/prod"],
    )

    save_trial_best: Count | None = Field(
        default=None,
        title="Keep the best of a trial",
        description="Keep the N best checkpoints of each trial. Default: "
        f"{_DEFAULT_RULES.save_trial_best} if any rule is set, else all.",
    )
    save_trial_latest: Count | None = Field(
        default=None,
        title="Keep the latest of a trial",
        description="Keep the N latest checkpoints of each trial. Default: "
        f"{_DEFAULT_RULES.save_trial_latest} if any rule is set, else all.",
    )
    save_experiment_best: Count | None = Field(
        default=None,
        title="Keep the best of the experiment",
        description="Keep the N best checkpoints of all trials together. Default: "
        f"{_DEFAULT_RULES.save_experiment_best} if any rule is set, else all.",
    )
    keep_every: Period = Field(
        default=None,
        title="Keep one per period",
        description="Keep each trial's first checkpoint at or after every multiple of this period.",
    )

    def retention(
        self, metric: str | None, smaller_is_better: bool, is_continuous: bool = False
    ) -> RetentionPolicy | None:
        """The rules that keep checkpoints; None keeps all. `metric` decides which is best.

        If one rule is set, the others have Determined's defaults.

        Args:
            is_continuous: True if a run saves all the time. Then at least the two latest are kept,
                and without a rule all validated ones.
        """
        given = {name: value for name in _RETENTION if (value := getattr(self, name)) is not None}
        if is_continuous:
            metric = metric if given else None  # without a metric all validated ones are kept
            given["save_trial_latest"] = max(2, given.get("save_trial_latest", 0))
        if not given:
            return None
        return RetentionPolicy(**given, metric=metric, smaller_is_better=smaller_is_better)

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Text is a URL; Determined's forms, which have a `type`, become URL and options."""
        if isinstance(data, (str, Path)):
            return {"url": str(data)}
        given = super().prepare(data)
        rules = {name: given.pop(name) for name in _RETENTION if name in given}
        block = given.pop("credentials", None)
        prepared = {**cls._url_and_options(given), **rules}
        options = prepared.get("options", {})
        if isinstance(options, Mapping):  # validation refuses anything else
            # A storage that is opened with this option refuses: only a flow can read the block.
            named = {} if block is None else {BLOCK: block}
            kept = {name: value for name, value in options.items() if name != BLOCK}
            prepared["options"] = {**kept, **named}
        return prepared if block is None else {**prepared, "credentials": block}

    @field_serializer("options")
    def _without_block(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name != BLOCK}

    @classmethod
    def _url_and_options(cls, given: dict[str, Any]) -> dict[str, Any]:
        type_ = given.pop("type", None)
        if type_ is None:
            return given
        if "url" in given or "options" in given:
            raise validation_error(
                "expected either type with its fields, or url and options; got both"
            )
        form = _FORMS.get(str(type_))
        if form is None:
            known = ", ".join(f'"{name}"' for name in _FORMS)
            raise validation_error(
                f"expected one of {known}, got {format_value(type_)}; or give a url", "type"
            )
        return form.model_validate(given).as_url_and_options()

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Names of options without values: some are credentials."""
        fields = dict(super().__repr_args__())
        hidden = dict.fromkeys(self.options, "***")
        return [*{**fields, "url": without_credentials(self.url), "options": hidden}.items()]


class _Form(Section):
    """One of Determined's storage types."""

    yaml_path: ClassVar[str] = StorageConfig.yaml_path
    holds_secrets: ClassVar[bool] = True

    def as_url_and_options(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def hint(cls, unknown: str) -> str:
        """Also suggests retention rules, which are fields of the same mapping."""
        return did_you_mean(unknown, [*cls.model_fields, *_RETENTION])


class _SharedFs(_Form):
    ignored: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("container_path", "propagation", "checkpoint_path", "tensorboard_path"),
        "host_path and storage_path decide where checkpoints are stored",
    )
    host_path: Text = Field(examples=["/mnt/shared"])
    storage_path: Text = "."

    def as_url_and_options(self) -> dict[str, Any]:
        return {"url": os.path.join(self.host_path, self.storage_path)}


class _Directory(_Form):
    container_path: Text = Field(examples=["/mnt/checkpoints"])

    def as_url_and_options(self) -> dict[str, Any]:
        return {"url": self.container_path}


class _InBucket(_Form):
    bucket: Text = Field(examples=["my-bucket"])
    prefix: str = ""

    def _url(self, scheme: str) -> str:
        return f"{scheme}://{self.bucket}/{self.prefix.strip('/')}"


class _S3(_InBucket):
    access_key: Text | None = None
    secret_key: Text | None = None
    endpoint_url: Text | None = None

    def as_url_and_options(self) -> dict[str, Any]:
        named = {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
        }
        return {"url": self._url("s3"), "options": _given(named)}


class _Gcs(_InBucket):
    def as_url_and_options(self) -> dict[str, Any]:
        return {"url": self._url("gs")}


class _Azure(_Form):
    container: Text = Field(examples=["my-container"])
    prefix: str = ""
    connection_string: Text | None = None
    account_url: Text | None = None
    credential: Text | None = None

    def as_url_and_options(self) -> dict[str, Any]:
        options = _given(
            {"connection_string": self.connection_string, "credential": self.credential}
        )
        if self.account_url is not None:
            options.update(_azure_account(self.account_url))
        return {"url": f"abfs://{self.container}/{self.prefix.strip('/')}", "options": options}


def _azure_account(account_url: str) -> dict[str, str]:
    try:
        host = urlsplit(account_url).hostname or ""
    except ValueError:  # its message may show a password
        host = ""
    name, _, domain = host.partition(".")
    if not domain:
        raise validation_error(
            "expected a URL such as https://NAME.blob.core.windows.net", "account_url"
        )
    return {"account_name": name, "account_host": host}


def _given(options: Mapping[str, str | None]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


_FORMS: dict[str, type[_Form]] = {
    "shared_fs": _SharedFs,
    "directory": _Directory,
    "s3": _S3,
    "gcs": _Gcs,
    "azure": _Azure,
}
