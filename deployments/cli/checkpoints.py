"""`trialflow checkpoints`: list, show and download what is stored."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from deployments.cli import words
from deployments.cli.experiment import ConfigFile, Storage, open_store
from deployments.cli.terminal import is_interactive

if TYPE_CHECKING:
    from trial_core.checkpoint.manifest import Manifest
    from trial_core.checkpoint.store import CheckpointStore

app = App(
    name="checkpoints",
    help="List, show and download checkpoints. They are looked for where --config or --storage "
    "says, else in the folder of runs.",
)

SHORT_UUID = 8
# Output that is piped has no width: lines must not be cut for a terminal that is not there.
PIPED_WIDTH = 1000

AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON, for programs.")]


@app.command(name="list")
def list_(
    *,
    trial: Annotated[str | None, Parameter(help="Only this trial's.")] = None,
    config: ConfigFile = None,
    storage: Storage = None,
    json_: AsJson = False,
) -> int:
    """List checkpoints, oldest first."""
    store = open_store(config, storage)
    manifests = store.list(trial)
    if json_:
        print(json.dumps([summary(store, manifest) for manifest in manifests], indent=2))
    elif not manifests:
        of_trial = f" of trial {trial}" if trial else ""
        print(f"no checkpoints{of_trial} in {store.url}")
    else:
        _print_table(manifests)
    return 0


@app.command
def show(
    uuid: str, /, *, config: ConfigFile = None, storage: Storage = None, json_: AsJson = False
) -> int:
    """Show all about a checkpoint; as JSON, its manifest as it is stored.

    Parameters
    ----------
    uuid
        The checkpoint's uuid, or its beginning.
    """
    store = open_store(config, storage)
    manifest = store.open(uuid)
    if json_:
        print(manifest.to_json().decode(), end="")
    else:
        print("\n".join(words.clean(line) for line in description(store, manifest)))
    return 0


@app.command
def download(
    uuid: str,
    /,
    *,
    to: Annotated[Path, Parameter(help="A new or empty folder, or a download to complete.")],
    config: ConfigFile = None,
    storage: Storage = None,
    json_: AsJson = False,
) -> int:
    """Bring a checkpoint's files and its manifest into a folder, every file verified.

    Parameters
    ----------
    uuid
        The checkpoint's uuid, or its beginning.
    """
    from trial_core.checkpoint.transfer import download as fetch

    store = open_store(config, storage)
    if is_interactive(sys.stderr):
        from rich.console import Console

        with Console(stderr=True).status(f"downloading {uuid}"):
            manifest = fetch(store, uuid, to)
    else:
        manifest = fetch(store, uuid, to)
    if json_:
        print(json.dumps({**summary(store, manifest), "folder": str(to.absolute())}, indent=2))
    else:
        files = words.plural(len(manifest.files), "file")
        print(f"checkpoint {manifest.uuid}: {files}, {words.size(manifest.total_bytes)}, in {to}")
    return 0


def summary(store: CheckpointStore, manifest: Manifest) -> dict[str, Any]:
    """What a program wants of a checkpoint in a list."""
    stored = json.loads(manifest.to_json())
    copied = ("uuid", "trial", "experiment", "created_at", "metrics")
    return {
        **{name: stored[name] for name in copied},
        "batches_trained": manifest.progress.batches_trained,
        "total_bytes": manifest.total_bytes,
        "url": store.files_url(manifest.uuid),
    }


def description(store: CheckpointStore, manifest: Manifest) -> list[str]:
    """All about a checkpoint, as lines."""
    topology = manifest.topology
    facts = {
        "checkpoint": manifest.uuid,
        "trial": f"{manifest.trial} (experiment {manifest.experiment}, {manifest.entrypoint})",
        "batches": str(manifest.progress.batches_trained),
        "saved": local_time(manifest.created_at),
        "training": words.metrics_line(manifest.metrics.get("training", {})),
        "validation": words.metrics_line(manifest.metrics.get("validation", {})),
        "ranks": f"{topology.world_size} (data {topology.data_parallel_size}, pipeline "
        f"{topology.pipeline_parallel_size}, model {topology.model_parallel_size}), "
        f"ZeRO stage {topology.zero_stage}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "hyperparameters": json.dumps(manifest.hyperparameters, ensure_ascii=False),
        "files": f"{len(manifest.files)}, {words.size(manifest.total_bytes)}, in "
        f"{store.files_url(manifest.uuid)}",
    }
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {fact}" for name, fact in facts.items() if fact]
    sizes = [words.size(file.size_bytes) for file in manifest.files]
    margin = max(map(len, sizes), default=0)
    files = zip(sizes, manifest.files, strict=True)
    return lines + [f"  {size:>{margin}}  rank {file.rank}  {file.path}" for size, file in files]


def local_time(created_at: str) -> str:
    """A manifest's time as the user's clock shows it."""
    # Python 3.10 does not read the Z.
    moment = datetime.fromisoformat(created_at.replace("Z", "+00:00"))
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def shortest_unique(uuids: Sequence[str]) -> int:
    """How many characters of these uuids tell them apart; at least `SHORT_UUID`."""
    length = SHORT_UUID
    while len({uuid[:length] for uuid in uuids}) < len(set(uuids)):
        length += 1
    return length


def _print_table(manifests: list[Manifest]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("uuid", "trial", "batches", "saved", "size"):
        right = name in ("batches", "size")
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    table.add_column("validation")
    length = shortest_unique([manifest.uuid for manifest in manifests])
    for manifest in manifests:
        cells = (
            manifest.uuid[:length],
            manifest.trial,
            str(manifest.progress.batches_trained),
            local_time(manifest.created_at),
            words.size(manifest.total_bytes),
            words.metrics_line(manifest.metrics.get("validation", {})),
        )
        table.add_row(*(Text(words.clean(cell)) for cell in cells))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
