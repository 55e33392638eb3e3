"""`trialflow checkpoints`: the group of commands, except `verify` and `prune`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from trial_core.common import text_format
from trialflow.deployments.cli import console
from trialflow.deployments.cli.checkpoints import prune, verify
from trialflow.deployments.cli.experiment_options import (
    HERE,
    CheckpointOption,
    Checkpoints,
    StoragePlace,
)
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.tables import local_time, print_table, shortest_unique
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.manifest import Manifest
    from trial_core.checkpoint.retention.protections import Protection
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.models.registry import HeldVersion

app = App(
    name="checkpoints",
    help="List, show, verify, download, pin and prune checkpoints. The storage is that of --config "
    "or --storage; by default, of ./experiment.yaml, else ./trialflow-runs/checkpoints.",
)
app.command(verify.verify)
app.command(prune.prune)


@app.command(name="list")
def list_(*, trial: str | None = None, place: StoragePlace = HERE, json_: AsJson = False) -> None:
    """List checkpoints, oldest first. A trial's best one, by its searcher.metric, is marked.

    Args:
        trial: List only this trial, which its first characters may name. Default: all.
    """
    from trial_core.checkpoint.retention.protections import pins
    from trial_core.models.registry import Registry

    store = place.open_store()
    with waiting(f"reading {store.url}"):
        manifests = store.list(None if trial is None else store.trial(trial))
        pinned, held = pins(store), Registry(store).held()
    best = _best_of_trials(manifests)
    if json_:
        shown = [
            {
                **summary(store, manifest),
                "is_best": manifest.uuid in best,
                "is_pinned": manifest.uuid in pinned,
                "held_by": [asdict(each) for each in held.get(manifest.uuid, [])],
            }
            for manifest in manifests
        ]
        print_json("checkpoints list", {"checkpoints": shown})
    elif not manifests:
        of_trial = f" of trial {trial}" if trial else ""
        print(f"no checkpoints{of_trial} in {store.url}")
    else:
        kept = {uuid: ["pinned"] for uuid in pinned}
        for uuid, versions in held.items():
            kept.setdefault(uuid, []).extend(map(_short_name, versions))
        _print_table(manifests, kept, best)


@app.command
def show(
    checkpoint: CheckpointOption, /, *, place: StoragePlace = HERE, json_: AsJson = False
) -> None:
    """Show a checkpoint in full; with --json, its manifest."""
    from trial_core.checkpoint.retention.protections import protections
    from trial_core.models.checkpoint_reference import open_checkpoint
    from trial_core.models.registry import Registry

    store = place.open_store()
    with waiting(f"reading {store.url}"):
        manifest = open_checkpoint(store, checkpoint)
        pinned = protections(store, manifest.uuid, "pin").get(manifest.uuid, [])
        held = Registry(store).held().get(manifest.uuid, [])
    if json_:
        print_json("checkpoints show", {"manifest": json.loads(manifest.to_json())})
    else:
        why = [str(each) for each in (*pinned, *held)]
        print("\n".join(text_format.clean(line) for line in description(store, manifest, why)))


@app.command
def download(
    checkpoint: CheckpointOption, /, *, to: Path, place: StoragePlace = HERE, json_: AsJson = False
) -> None:
    """Download a checkpoint's files and manifest, and verify every file.

    Args:
        to: A new or empty folder, or one with an incomplete download.
    """
    from trial_core.checkpoint.transfer.fetch import download as fetch
    from trial_core.models.checkpoint_reference import referenced_uuid

    store = place.open_store()
    with waiting(f"downloading {checkpoint}") as wait:
        manifest = fetch(store, referenced_uuid(store, checkpoint), to, wait.bytes_read)
    if json_:
        result = {**summary(store, manifest), "folder": str(to.absolute())}
        print_json("checkpoints download", result)
    else:
        files = text_format.plural(len(manifest.all_files), "file")
        size = text_format.size(manifest.total_bytes)
        print(f"checkpoint {manifest.uuid}: {files}, {size}, in {to}")


@app.command
def pin(
    *checkpoints: Checkpoints, reason: str = "", place: StoragePlace = HERE, json_: AsJson = False
) -> None:
    """Protect checkpoints from pruning until they are unpinned.

    Args:
        reason: Why the checkpoints are pinned; shown with the pin. Default: none.
    """
    from trial_core.checkpoint.retention import protections

    store, uuids = _named(checkpoints, place)
    with waiting(f"writing to {store.url}"):
        pinned = [protections.pin(store, uuid, reason) for uuid in uuids]
    _say_pins(pinned, "pin", json_)


@app.command
def unpin(*checkpoints: Checkpoints, place: StoragePlace = HERE, json_: AsJson = False) -> None:
    """Remove the pins of checkpoints. Checkpoints held by the registry stay protected."""
    from trial_core.checkpoint.retention import protections

    store, uuids = _named(checkpoints, place)
    released = protections.WHEN_RELEASED
    with waiting(f"writing to {store.url}"):
        gone = [protections.unpin(store, uuid) for uuid in uuids]
    _say_pins(gone, "unpin", json_)
    for each in gone:
        if why := protections.protected(store, each.uuid).get(each.uuid):
            console.note(f"{each.uuid} is still kept, {text_format.one_line(why)}: {released}")


def _named(checkpoints: tuple[str, ...], place: StoragePlace) -> tuple[CheckpointStore, list[str]]:
    """Return the storage, and the uuids of the checkpoints that begin as given."""
    from trial_core.models.checkpoint_reference import referenced_uuid

    store = place.open_store()
    with waiting(f"reading {store.url}"):
        return store, [referenced_uuid(store, checkpoint) for checkpoint in checkpoints]


def _say_pins(pins: list[Protection], verb: str, as_json: bool) -> None:
    if as_json:
        shown = [{"uuid": p.uuid, "reason": p.reason, "by": p.by, "at": p.at} for p in pins]
        print_json(f"checkpoints {verb}", {"pins": shown})
        return
    for each in pins:
        reason = f" ({text_format.one_line(each.reason)})" if each.reason else ""
        print(f"{verb}ned {each.uuid}{reason}")


def summary(store: CheckpointStore, manifest: Manifest) -> dict[str, Any]:
    """A checkpoint's entry in `list --json`."""
    stored = json.loads(manifest.to_json())
    copied = ("uuid", "trial", "experiment", "created_at", "metrics", "earlier_validation")
    return {
        **{name: stored[name] for name in copied},
        "batches_trained": manifest.progress.batches_trained,
        "validated_at": manifest.validated_at,
        "total_bytes": manifest.total_bytes,
        "own_bytes": manifest.own_bytes,
        "url": store.files_url(manifest.uuid),
    }


def description(store: CheckpointStore, manifest: Manifest, kept: list[str]) -> list[str]:
    """A checkpoint in full, as lines; `kept`: the reasons why no rule deletes it."""
    topology = manifest.topology
    facts = {
        "checkpoint": manifest.uuid,
        "trial": f"{manifest.trial} (experiment {manifest.experiment}, {manifest.entrypoint})",
        "batches": str(manifest.progress.batches_trained),
        "saved": local_time(manifest.created_at),
        "kept": "; ".join(map(text_format.one_line, kept)),
        "training": text_format.metrics_line(manifest.metrics.get("training", {})),
        "validation": _validation(manifest),
        "last validation": _earlier_validation(manifest),
        "ranks": f"{topology.world_size} (data {topology.data_parallel_size}, pipeline "
        f"{topology.pipeline_parallel_size}, model {topology.model_parallel_size}, "
        f"sequence {topology.sequence_parallel_size}), "
        f"{topology.state_division}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "hyperparameters": json.dumps(manifest.hyperparameters, ensure_ascii=False),
        "files": f"{len(manifest.all_files)}, {sizes_line(manifest)}, in "
        f"{store.files_url(manifest.uuid)}",
    }
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {fact}" for name, fact in facts.items() if fact]
    lines += [f"{'resumed from':<{width}}  {text_format.one_line(x)}" for x in manifest.changes]
    sizes = [text_format.size(file.size_bytes) for file in manifest.all_files]
    margin = max(map(len, sizes), default=0)
    files = zip(sizes, manifest.all_files, strict=True)
    return lines + [
        f"  {size:>{margin}}  rank {file.rank}  {file.path}"
        + (f"  (stored at {file.stored_at})" if file.stored_at else "")
        for size, file in files
    ]


def sizes_line(manifest: Manifest) -> str:
    """Describe a checkpoint's size, and its own part of that if it refers to other files."""
    whole = text_format.size(manifest.total_bytes)
    if not any(file.stored_at for file in manifest.all_files):
        return whole
    return f"{whole} (own {text_format.size(manifest.own_bytes)})"


def _validation(manifest: Manifest) -> str:
    """The metrics of the checkpoint's own batch, or that it was not validated."""
    if manifest.is_validated:
        return text_format.metrics_line(manifest.metrics.get("validation", {}))
    at = manifest.validated_at
    return "not validated" if at is None else f"not validated (last at batch {at})"


def _earlier_validation(manifest: Manifest) -> str:
    """The metrics of the last validation, with its batch, if that is an earlier one."""
    if not manifest.earlier_validation:
        return ""
    metrics = text_format.metrics_line(manifest.earlier_validation)
    return f"{metrics} (at batch {manifest.validated_at})"


def _short_name(held: HeldVersion) -> str:
    alias = f" ({held.alias})" if held.alias else ""
    return f"{held.model} v{held.version}{alias}"


def _best_of_trials(manifests: list[Manifest]) -> set[str]:
    """The uuids of the best checkpoints, one of each trial that has one."""
    from trial_core.checkpoint.retention_policy import best_of_trial

    trials: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        trials.setdefault(manifest.trial, []).append(manifest)
    return {best.uuid for each in trials.values() if (best := best_of_trial(each)) is not None}


def _print_table(manifests: list[Manifest], kept: dict[str, list[str]], best: set[str]) -> None:
    length = shortest_unique([manifest.uuid for manifest in manifests])
    has_kept = any(manifest.uuid in kept for manifest in manifests)
    columns = ["uuid", "trial", "batches", "saved", "size", *(["best"] if best else [])]
    rows = []
    for manifest in manifests:
        cells = [
            manifest.uuid[:length],
            manifest.trial,
            str(manifest.progress.batches_trained),
            local_time(manifest.created_at),
            sizes_line(manifest),
        ]
        if best:
            cells.append("best" if manifest.uuid in best else "")
        if has_kept:
            cells.append(", ".join(kept.get(manifest.uuid, [])))
        rows.append([*cells, _validation(manifest)])
    print_table([*columns, *(["kept"] if has_kept else []), "validation"], rows)
