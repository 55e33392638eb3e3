"""`trialflow checkpoints verify`: compares stored checkpoints with their manifests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.common import text_format
from trial_core.errors import CheckpointError, CheckpointNotFound, ConfigError, StorageError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import CHECKPOINT, HERE, StoragePlace
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.tables import print_table, shortest_unique
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.layout import ManifestName
    from trial_core.checkpoint.manifest import Manifest
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.checkpoint.verified_read import Damage


@dataclass(frozen=True)
class Verified:
    """The result for one checkpoint.

    Attributes:
        manifest: the checkpoint's manifest, or None if it cannot be read.
        problem: why the manifest cannot be read.
        damage: files that differ from the manifest, without the repaired ones.
        repaired: files that were stored again, from intact copies.
    """

    name: ManifestName
    manifest: Manifest | None
    problem: str | None = None
    damage: tuple[Damage, ...] = ()
    repaired: tuple[Damage, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.problem is None and not self.damage


def verify(
    *checkpoints: Annotated[
        str, Parameter(help=f"{CHECKPOINT} Required unless --trial or --all is given.")
    ],
    trial: str | None = None,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    repair: bool = False,
    place: StoragePlace = HERE,
    json_: AsJson = False,
) -> int:
    """Read every file of checkpoints; compare sizes and digests with the manifest.

    Exits with 0 if all are intact, 1 if any is damaged (every damaged file is named). A checkpoint
    that is deleted meanwhile is not damaged; if it was named, the exit code is 2.

    Give either checkpoints, or --trial or --all.

    Args:
        trial: Verify all checkpoints of this trial, which its first characters may name. Default:
            of all trials, with --all.
        all_: Verify all checkpoints, or all of --trial.
        repair: Store each damaged or missing file again, from an intact copy that another
            checkpoint of the trial lists.
    """
    if bool(checkpoints) == (all_ or trial is not None):
        raise ConfigError("give either checkpoints, or --trial or --all")
    from trial_core.models.checkpoint_reference import open_checkpoint

    store = place.open_store()
    with waiting(f"reading {store.url}"):
        if checkpoints:
            names = [*dict.fromkeys(open_checkpoint(store, each).name for each in checkpoints)]
        else:
            names = _all(store, None if trial is None else store.trial(trial))
    found = [*_verify(store, names, repair)]
    if json_:
        print_json("checkpoints verify", {"checkpoints": [summary(each) for each in found]})
    else:
        _print(store, found)
    if not all(each.is_whole for each in found):
        return console.FAILED
    if checkpoints and (gone := {name.uuid for name in names} - {each.name.uuid for each in found}):
        raise CheckpointNotFound(f"{', '.join(sorted(gone))} was deleted meanwhile")
    return 0


def summary(found: Verified) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "uuid": found.name.uuid,
        "trial": found.name.trial,
        "batches_trained": found.name.batches,
        "is_whole": found.is_whole,
        "files": None if manifest is None else len(manifest.all_files),
        "total_bytes": None if manifest is None else manifest.total_bytes,
        "problem": found.problem,
        "repaired": [damage.entry.path for damage in found.repaired],
        "damage": [
            {
                "path": damage.entry.path,
                "rank": damage.entry.rank,
                "expected_bytes": damage.entry.size_bytes,
                "expected_digest": damage.entry.digest,
                "seen_bytes": damage.seen_bytes,
                "seen_digest": damage.seen_digest,
            }
            for damage in found.damage
        ],
    }


def _all(store: CheckpointStore, trial: str | None) -> list[ManifestName]:
    """All committed checkpoints, including those whose manifest cannot be read.

    Raises:
        CheckpointNotFound: the trial has no checkpoint.
    """
    from trial_core.checkpoint import layout

    keys = sorted(store.storage.sizes(layout.MANIFESTS))
    names = [name for key in keys if (name := layout.parse_manifest_key(key)) is not None]
    found = [name for name in names if trial is None or name.trial == trial]
    if trial is not None and not found:
        raise CheckpointNotFound(f"trial {trial!r} has no checkpoint in {store.url}")
    return found


def _verify(
    store: CheckpointStore, names: list[ManifestName], is_repaired: bool
) -> Iterator[Verified]:
    from trial_core.checkpoint.retention.shared_files import repair

    for count, name in enumerate(names, start=1):
        try:
            with waiting(f"verifying {name.uuid} ({count} of {len(names)})") as wait:
                manifest = store.open(name.uuid)
                files = manifest.all_files
                damage = store.find_damage(manifest.uuid, files, wait.bytes_read)
                if damage:
                    store.raise_if_deleted(manifest.uuid)
                left = repair(store, manifest, damage) if damage and is_repaired else damage
        except StorageError:
            raise
        except CheckpointNotFound:
            continue  # deleted after it was listed
        except CheckpointError as error:
            yield Verified(name, None, str(error))
        else:
            repaired = tuple(each for each in damage if each not in left)
            yield Verified(name, manifest, damage=tuple(left), repaired=repaired)


def _print(store: CheckpointStore, found: list[Verified]) -> None:
    if not found:
        print(f"no checkpoints in {store.url}")
        return
    length = shortest_unique([each.name.uuid for each in found])
    columns = ("state", "uuid", "trial", "batches", "files", "size")
    print_table(columns, (_cells(each, length) for each in found))
    damaged = [each for each in found if not each.is_whole]
    for each in found:
        for repaired in each.repaired:
            print(f"\nrepaired, in {each.name.uuid}: {text_format.clean(str(repaired))}")
    for each in damaged:
        problems = [each.problem] if each.problem else map(str, each.damage)
        print(f"\n{each.name.uuid} of {each.name.trial} is damaged:")
        print("\n".join(f"  {text_format.clean(problem)}" for problem in problems))
    if damaged:
        print(f"\n{len(damaged)} of {text_format.plural(len(found), 'checkpoint')} damaged")


def _cells(found: Verified, length: int) -> tuple[str, ...]:
    manifest = found.manifest
    return (
        "whole" if found.is_whole else "damaged",
        found.name.uuid[:length],
        found.name.trial,
        str(found.name.batches),
        "?" if manifest is None else str(len(manifest.all_files)),
        "?" if manifest is None else text_format.size(manifest.total_bytes),
    )
