"""Storages behind fsspec, with the operations that checkpoints need. Knows no checkpoints.

`base` is the interface and works on every protocol of fsspec. `open_storage` chooses the class:

- ``file://`` and plain paths: `local`, on top of `local_files`. ``memory://``: `local` too.
- ``s3://``: `obstore_storage` if obstore is installed, else `s3fs_storage`.
- All other protocols (``gs://``, ``az://``): `base` itself.

The classes for S3 are layers. `s3fs_storage` moves files with s3fs's client; `s3_requests` has the
requests that s3fs lacks, and `s3_multipart` the uploads in parts. `obstore_storage` extends
`s3fs_storage`: obstore moves the contents, s3fs sends all other requests. If obstore does not
support a setting (`obstore_options`), s3fs moves the contents too.

Every class translates its errors with `storage_errors`, and works on threads of `parallel`.
"""
