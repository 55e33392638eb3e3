"""Makes a checkpoint from a folder or file that another program has written.

The files are copied as they are, under names that tell their kind; no file is unpickled here.
DeepSpeed's own files become files of engine 0, so that ranks restore them as any checkpoint. Files
with weights alone lie in `layout.IMPORTED`; `rank.state_files.read_imported_weights` reads them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

import fsspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Manifest, Topology, utc_now
from trial_core.checkpoint.storage.local_files import local_digest
from trial_core.checkpoint.storage.parallel import CancelSignal, in_parallel
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import UPLOAD_THREADS
from trial_core.common.text_format import first_few
from trial_core.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, StorageError
from trial_core.schedule.sequencer import Progress

EXPERIMENT = "imported"
_ENGINE = "model0"

_MODEL_STATES = re.compile(
    r"(zero_pp_rank_(?P<data>\d{1,6})_)?mp_rank_(?P<part>\d{1,6})_model_states\.pt"
)
_SHARD = re.compile(
    r"(bf16_)?zero_pp_rank_(?P<data>\d{1,6})_mp_rank_(?P<part>\d{1,6})_optim_states\.pt"
)
_LAYER = re.compile(r"layer_\d+-model_states\.pt")
_UNIVERSAL = re.compile(r"zero/.+/fp32\.pt")
_WEIGHTS = re.compile(r".+\.(safetensors|pt|pth|bin|ckpt)")
_STEP = re.compile(r"global_step(\d{1,15})(?!\d)")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_LATEST = "latest"
_STAMPS = (
    "etag", "mtime", "lastmodified", "last_modified", "last-modified", "last_commit", "blob_id",
)  # fmt: skip
"""File details that change with the content, as file systems name them, besides the size."""
_MAX_FILES, _MAX_TEXT = 100_000, 64 * 2**20
"""More files, or longer lists of files, are no checkpoint that anybody has written."""
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file of torch.save begins if it is no archive: with the pickle of a number."""
_ONE_RANK = Topology(world_size=1, data_parallel_size=1)
_BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)
"""The errors of zipfile for damaged headers and content; RuntimeError if it seems encrypted."""
_KINDS = (
    "a folder that DeepSpeed's save_checkpoint has written (or its global_stepN, or a universal "
    "one), a folder of Hugging Face's save_pretrained, or a file with a state_dict (.safetensors, "
    ".pt, .pth, .bin, .ckpt)"
)

_logger = logging.getLogger(__name__)


def import_checkpoint(
    store: CheckpointStore, url: str, options: Mapping[str, Any] | None = None
) -> Manifest:
    """The checkpoint with the files at `url`, a folder or a file; imported now, unless that was
    done before. `options` are for the fsspec file system of `url`.

    The files are recognised by their names, sizes and times: the trial's id is a digest of them.
    Each import has a uuid of its own. The commit of one ends the uploads below its uuid.

    Raises:
        CheckpointNotFound: no files are there.
        CheckpointDamaged: a file is incomplete.
        CheckpointError: the files are of no known kind.
        StorageError: they cannot be read, or stored.
    """
    source = _Source(url, options or {})
    found = _recognised(source)
    before = {path: source.stamp(path) for path in found.files}
    stamps = sorted((path, name, before[path]) for path, name in found.files.items())
    digest = uuid5(NAMESPACE_URL, json.dumps([source.shown, stamps])).hex
    trial, uuid = f"{EXPERIMENT}-{digest[:12]}", str(uuid4())
    if (imported := store.newest(trial)) is not None:
        return imported
    _logger.info("importing %s files of %s into %s", len(found.files), source.shown, store.url)
    store.announce_upload(trial, uuid, EXPERIMENT)

    def copy(path: str, stop: CancelSignal) -> FileEntry:
        stop.check()
        name = found.files[path]
        with source.local(path) as file:
            shown = f"{source.shown}: {path}"
            try:
                _check_file(file, PurePosixPath(path).suffix, shown)
            except OSError as error:
                raise CheckpointError(f"{shown} cannot be read: {error}") from error
            size, digest = store.storage.upload(file, layout.file_key(uuid, name), stop)
        rank = found.rank_of(PurePosixPath(name).name)
        return FileEntry(path=layout.StoredPath(name), size_bytes=size, digest=digest, rank=rank)

    try:
        files = sorted(in_parallel(copy, found.files, UPLOAD_THREADS), key=lambda each: each.path)
        now = _Source(url, options or {})
        if any(path not in now.names or now.stamp(path) != before[path] for path in found.files):
            raise CheckpointDamaged(f"{source.shown} changed while it was copied; start again")
        manifest = Manifest(
            uuid=uuid,
            trial=trial,
            experiment=EXPERIMENT,
            writer=EXPERIMENT,
            created_at=utc_now(),
            progress=Progress(found.batches),
            metrics={},
            topology=found.topology,
            versions={},
            config_digest="",
            files=files,
            entrypoint=source.shown,
            hyperparameters={},
        )
        Manifest.from_json(manifest.to_json())  # what the commit would refuse
    except BaseException:
        with contextlib.suppress(StorageError):
            _discard(store, trial, uuid)
        raise
    if (imported := store.newest(trial)) is not None:  # by another run, meanwhile
        _discard(store, trial, uuid)
        return imported
    store.commit(manifest)
    return manifest


def _discard(store: CheckpointStore, trial: str, uuid: str) -> None:
    """Delete the uploaded files, and their intent last."""
    store.storage.clear(layout.files_folder(uuid))
    store.storage.remove(layout.intent_key(trial, uuid))


class _Source:
    """The files at a URL. `shown`: that without credentials; `names`: the files' paths below it."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._errors = ErrorTranslator(url, dict(options))
        self.shown = self._errors.url
        with self._errors.translated("read", ValueError, ImportError):
            self._fs, root = fsspec.core.url_to_fs(url, **options)
            found = self._fs.find(root, detail=True)
        if not found:
            raise CheckpointNotFound(f"there is no checkpoint at {self.shown}; expected {_KINDS}")
        if len(found) > _MAX_FILES:
            raise CheckpointNotFound(
                f"there are {len(found):,} files at {self.shown}; expected the folder of one "
                f"checkpoint, {_KINDS}"
            )
        is_file = list(found) == [root]
        self._root = root.rpartition("/")[0] if is_file else root.rstrip("/")
        self._details = {
            str(path).removeprefix(f"{self._root}/"): details for path, details in found.items()
        }
        self.names = self._details.keys()
        self._is_local = "file" in self._fs.protocol
        if odd := [path for path in self.names if {"..", "."} & {*PurePosixPath(path).parts}]:
            raise CheckpointDamaged(f"{self.shown} holds {odd[0]!r}, which leads out of it")

    def stamp(self, path: str) -> list[str]:
        """What changes with a file's content: its size and time, or what the file system says of
        it; if it says nothing, its digest."""
        if self._is_local:
            # Of a link's target: where it leads stays the same when that is written again.
            seen = self._regular(path)
            return [f"size={seen.st_size}", f"mtime={seen.st_mtime_ns}"]
        details = self._details[path]
        signs = [f"{key}={details[key]}" for key in sorted(details) if key.lower() in _STAMPS]
        if not signs:
            with self.local(path) as file:
                signs = [local_digest(file, file.stat().st_size, CancelSignal())]
        return [f"size={details.get('size')}", *signs]

    def text(self, path: str) -> bytes:
        """The content of a list of files."""
        if self._is_local:
            self._regular(path)
        name = f"{self._root}/{path}"
        with self._errors.translated(f"read {path} of"), self._fs.open(name, "rb") as file:
            content: bytes = file.read(_MAX_TEXT + 1)  # a server need not tell the size
        if len(content) > _MAX_TEXT:
            raise CheckpointDamaged(f"{self.shown}: {path} has more than {_MAX_TEXT:,} bytes")
        return content

    @contextlib.contextmanager
    def local(self, path: str) -> Iterator[Path]:
        """The file on this machine: itself, or a copy that is deleted at the end of the block."""
        if self._is_local:
            self._regular(path)
            yield Path(self._root) / path
            return
        with tempfile.TemporaryDirectory(prefix="trialflow-import-") as folder:
            file = Path(folder) / "file"
            with self._errors.translated(f"read {path} of"):
                self._fs.get_file(f"{self._root}/{path}", str(file))
            yield file

    def _regular(self, path: str) -> os.stat_result:
        """The details of a file, or of a link's target. Raises CheckpointDamaged for a pipe."""
        with self._errors.translated(f"read {path} of"):
            seen = os.stat(Path(self._root) / path)
        if not stat.S_ISREG(seen.st_mode):
            raise CheckpointDamaged(f"{self.shown}: {path} is no regular file; expected {_KINDS}")
        return seen


@dataclass(frozen=True)
class _Found:
    """The recognised files: for each path below the source, the path in the checkpoint."""

    files: Mapping[str, str]
    topology: Topology = _ONE_RANK
    batches: int = 0

    def rank_of(self, name: str) -> int:
        """The rank that has probably written a file: DeepSpeed's order of ranks."""
        match = _SHARD.fullmatch(name) or _MODEL_STATES.fullmatch(name)
        if match is None:
            return 0
        now, data, part = self.topology, int(match["data"] or 0), int(match["part"])
        if now.pipeline_parallel_size > 1:
            return part * now.data_parallel_size + data
        return data * now.model_parallel_size + part


def _recognised(source: _Source) -> _Found:
    """Recognise the files of a source. Raises CheckpointNotFound if they are of no known kind."""
    names = set(source.names)
    if _LATEST in names:
        tag = source.text(_LATEST).decode(errors="replace").strip()
        inside = {
            name: name.removeprefix(f"{tag}/") for name in names if name.startswith(f"{tag}/")
        }
        if found := _of_deepspeed(inside, source.shown, tag):
            return found
    if found := _of_deepspeed({name: name for name in names}, source.shown, source.shown):
        return found
    for index in filter(names.__contains__, _INDEXES):
        return _Found(_as_weights(_listed(source, index)))
    for whole in filter(names.__contains__, _WHOLE):
        return _Found(_as_weights([whole]))
    if len(names) == 1 and _WEIGHTS.fullmatch(only := next(iter(names))):
        return _Found(_as_weights([only]))
    raise CheckpointNotFound(
        f"there is no checkpoint of a known kind at {source.shown}: its files are "
        f"{first_few(sorted(names), 5)}; expected {_KINDS}"
    )


def _of_deepspeed(files: Mapping[str, str], shown: str, tag: str) -> _Found | None:
    """Recognise DeepSpeed's files; None for others. `files`: for each path, the path below the
    folder of the tag."""
    models = [match for name in files.values() if (match := _MODEL_STATES.fullmatch(name))]
    if not models:
        return None
    batches = int(step[1]) if (step := _STEP.search(tag)) else 0
    if any(map(_UNIVERSAL.fullmatch, files.values())):
        # Of the model states: frozen weights and buffers.
        kinds = (_UNIVERSAL, _MODEL_STATES)
        read = [path for path, name in files.items() if any(k.fullmatch(name) for k in kinds)]
        return _Found({path: f"{layout.IMPORTED}/{files[path]}" for path in read})
    shards = [match for name in files.values() if (match := _SHARD.fullmatch(name))]
    parts = 1 + max(int(match["part"]) for match in models)
    ranks = 1 + max((int(match["data"]) for match in shards), default=0)
    seen = {(int(match["data"]), int(match["part"])) for match in shards}
    of_models = {(int(match["data"]), int(match["part"])) for match in models if match["data"]}
    # Each has a place in the grid of ranks and parts, which names may say to be huge.
    if any(places and len(places) != ranks * parts for places in (seen, of_models)):
        raise CheckpointDamaged(
            f"{shown} has {len(shards)} of the files *_optim_states.pt; expected {parts * ranks}, "
            f"of {ranks} data-parallel and {parts} model-parallel ranks: copy those of all nodes"
        )
    is_pipeline = any(map(_LAYER.fullmatch, files.values()))
    is_zero3 = any(match["data"] for match in models)
    topology = Topology(
        world_size=parts * ranks,
        data_parallel_size=ranks,
        pipeline_parallel_size=parts if is_pipeline else 1,
        model_parallel_size=1 if is_pipeline else parts,
        zero_stage=3 if is_zero3 else int(bool(shards)),  # 2 has the files of 1
    )
    own = {path: name for path, name in files.items() if name.endswith(".pt") and "/" not in name}
    named = {path: f"{_ENGINE}/{name}" for path, name in own.items()}
    return _Found(named, topology, batches)


def _listed(source: _Source, index: str) -> list[str]:
    """The files that an index of Hugging Face lists. Raises CheckpointDamaged if one is missing."""
    try:
        listed = sorted(set(json.loads(source.text(index))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{source.shown}: {index} is no index of weights: {error}"
        ) from None
    if missing := [name for name in listed if name not in source.names]:
        raise CheckpointDamaged(f"{source.shown}: {index} lists {missing[0]}, which is not there")
    return listed


def _as_weights(paths: Iterable[str]) -> dict[str, str]:
    return {path: f"{layout.IMPORTED}/{path}" for path in paths}


def _check_file(file: Path, suffix: str, shown: str) -> None:
    """Check that a file is one of torch.save, by its checksums, or of safetensors: a stranger's
    folder may have links to anything on this machine. Raises CheckpointDamaged if it is not."""
    with file.open("rb") as content:
        start = content.read(len(_LEGACY))
    is_archive = suffix != ".safetensors" and zipfile.is_zipfile(file)
    if suffix == ".safetensors":
        header_bytes = int.from_bytes(start[:8], "little")
        is_known = start[8:9] == b"{" and header_bytes + 8 <= file.stat().st_size
    else:
        is_known = is_archive or start == _LEGACY
    if not is_known:
        raise CheckpointDamaged(
            f"{shown} is no file of {'safetensors' if suffix == '.safetensors' else 'torch.save'}: "
            "copy it once more"
        )
    if not is_archive:
        return
    try:
        with zipfile.ZipFile(file) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                raise ValueError("it is an archive without data.pkl, so not of torch.save")
            # torch can leave checksums out; all of them are 0 then.
            has_checksums = any(member.CRC for member in archive.infolist())
            damaged = archive.testzip() if has_checksums else None
    except _BAD_ARCHIVE as error:
        damaged = str(error)
    if damaged is not None:
        raise CheckpointDamaged(f"{shown} is damaged: {damaged}; copy it once more")
