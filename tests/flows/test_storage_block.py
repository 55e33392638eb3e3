"""Credentials of a storage from a block on a real server, with a real S3 gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.blocks.core import Block
from pydantic import SecretStr, ValidationError
from s3fs import S3FileSystem

from tests.support.flow import one_slot, train
from tests.support.prefect import PrefectServer
from tests.support.s3 import S3Server
from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError, StorageError
from trialflow.flows.evaluate import evaluate
from trialflow.flows.server.embedded_server import flush
from trialflow.tasks.checkpoint_use import export, fetch
from trialflow.tasks.storage_block import _azure, _gcp, with_credentials

pytestmark = [pytest.mark.server]

AwsCredentials: Any
try:
    from prefect_aws import AwsCredentials  # type: ignore[no-redef,import-not-found,unused-ignore]
except ImportError:  # its fields, and its name

    class _AwsCredentials(Block):
        _block_type_name = "AWS Credentials"
        _block_type_slug = "aws-credentials"
        aws_access_key_id: str | None = None
        aws_secret_access_key: SecretStr | None = None
        region_name: str | None = None
        assume_role_arn: str | None = None
        aws_client_parameters: dict[str, Any] | None = None

    AwsCredentials = _AwsCredentials


def files_with(secret: str, folder: Path) -> list[Path]:
    """The files below a folder that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.gateway
@pytest.mark.slots
def test_a_block_opens_the_storage_and_its_secret_is_nowhere_else(
    here: Path,
    prefect_server: PrefectServer,
    ceph_s3: S3Server,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A training, and a flow that uses its result. The server's database, the machine's files, the
    bucket, the logs and the result do not hold it."""
    AwsCredentials(
        aws_access_key_id=ceph_s3.access_key,
        aws_secret_access_key=SecretStr(ceph_s3.secret_key),
        aws_client_parameters={"endpoint_url": ceph_s3.endpoint_url},
    ).save("gateway", overwrite=True)
    place = {"url": ceph_s3.new_bucket(), "credentials": "aws-credentials/gateway"}
    config = one_slot(here, 4, checkpoint_storage=place)

    @flow
    def own() -> tuple[Any, Any]:
        result = train(config)
        export(result, here / "weights.pt")
        fetch(result, here / "fetched")
        return result, evaluate(result)

    result, evaluated = own()
    flush()
    assert evaluated.checkpoint_uuid == result.checkpoint_uuid
    for each in (result, evaluated):
        storage = each.config.checkpoint_storage
        assert (storage.credentials, storage.model_dump()["options"]) == (place["credentials"], {})
    secret = ceph_s3.secret_key
    run = prefect_server.query(f"flow_runs/{result.flow_run_id}")
    assert run["parameters"]["config"]["checkpoint_storage"]["credentials"] == place["credentials"]
    assert secret not in repr((run, result, evaluated, caplog.text))
    assert files_with(secret, prefect_server.home) == []
    assert files_with(secret, here) == []
    bucket = S3FileSystem(**ceph_s3.options)
    keys = bucket.find(place["url"])
    assert len(keys) > 5
    assert [key for key in keys if secret.encode() in bucket.cat_file(key)] == []


def test_mistakes(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """Each says what to do. A script refuses the block when it opens the storage."""

    def of(url: str, block: str) -> ExperimentConfig:
        return toy_config(tmp_path, checkpoint_storage={"url": url, "credentials": block})

    with prefect_server.configured():
        with pytest.raises(ConfigError, match=r"no block aws-credentials/absent.*pip install pref"):
            with_credentials(of("s3://bucket", "aws-credentials/absent"))
        with pytest.raises(ConfigError, match="another type than gs:// needs, which is gcp-cred"):
            with_credentials(of("gs://bucket", "aws-credentials/prod"))
        AwsCredentials(assume_role_arn="arn:aws:iam::1:role/r").save("role", overwrite=True)
        with pytest.raises(ConfigError, match="assume_role_arn gives credentials that end"):
            with_credentials(of("s3://bucket", "aws-credentials/role"))
    with pytest.raises(ValidationError, match="expected the type and the name of a block"):
        of("s3://bucket", "prod")
    config = of("s3://bucket", "aws-credentials/prod")
    again = ExperimentConfig.from_mapping(config.model_dump(mode="json"))
    for place in (config.checkpoint_storage, again.checkpoint_storage):
        with pytest.raises(StorageError, match=r"block aws-credentials/prod.*which only a flow"):
            CheckpointStore(place.url, place.options)


def test_other_clouds() -> None:
    """Their blocks become the options of gcsfs and adlfs."""
    token = {"private_key": "text"}
    assert _gcp({"service_account_info": token, "project": "p"}) == {"token": token, "project": "p"}
    found = _azure({"account_url": "https://me.blob.core.windows.net", "client_id": "id"})
    assert found["account_name"] == "me"
    assert (found["account_host"], found["client_id"]) == ("me.blob.core.windows.net", "id")
