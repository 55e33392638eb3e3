"""Storages behind fsspec, with the operations that checkpoints need. Knows no checkpoints.

`base` is the interface and works on every protocol of fsspec. `open_storage` chooses the class:

- ``file://`` and plain paths: `local`, on top of `local_files`. ``memory://``: `local` too.
- ``s3://``: `s3_storage`, which moves files with s3fs's client and the requests in `s3_requests`.
- All other protocols (``gs://``, ``az://``): `base` itself.

Every class translates its errors with `storage_errors`, and works on threads of `parallel`.
"""
