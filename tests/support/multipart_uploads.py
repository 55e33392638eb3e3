"""Multipart uploads that nobody completes."""

from __future__ import annotations

from typing import Any

from trial_core.checkpoint.store import CheckpointStore


def leave_open(store: CheckpointStore, key: str) -> None:
    """Begin a multipart upload and send a part, like a client that is killed then."""
    storage: Any = store.storage
    where = {"Bucket": storage._bucket, "Key": storage._key(key)}
    upload_id = storage._fs.call_s3("create_multipart_upload", **where)["UploadId"]
    storage._fs.call_s3("upload_part", **where, UploadId=upload_id, PartNumber=1, Body=b"1")


def left_open(store: CheckpointStore) -> set[str]:
    """The keys with a multipart upload in progress."""
    storage: Any = store.storage
    found = storage._fs.call_s3("list_multipart_uploads", Bucket=storage._bucket)
    return {each["Key"].removeprefix("some/folder/") for each in found.get("Uploads", [])}
