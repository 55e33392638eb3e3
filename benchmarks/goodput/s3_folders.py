"""Copies folders to S3 and back with boto3, for contestants that only write to a disk."""

from __future__ import annotations

from pathlib import Path

import boto3

LATEST = "latest"


def upload(folder: Path, bucket: str, batch: int) -> None:
    """Store the files of a checkpoint, then its number as the latest one."""
    client, name = boto3.client("s3"), bucket.removeprefix("s3://")
    for path in filter(Path.is_file, folder.rglob("*")):
        client.upload_file(str(path), name, f"{batch}/{path.relative_to(folder)}")
    client.put_object(Bucket=name, Key=LATEST, Body=str(batch).encode())


def download(folder: Path, bucket: str) -> int:
    """Fetch the latest checkpoint. Return its batch, or 0 without one."""
    client, name = boto3.client("s3"), bucket.removeprefix("s3://")
    try:
        batch = int(client.get_object(Bucket=name, Key=LATEST)["Body"].read())
    except client.exceptions.NoSuchKey:
        return 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=f"{batch}/"):
        for found in page["Contents"]:
            path = folder / found["Key"].partition("/")[2]
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(name, found["Key"], str(path))
    return batch
