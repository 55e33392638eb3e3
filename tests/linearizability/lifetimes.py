"""Whole lives of checkpoints: runs that save, retry and are taken over, prunes, sweeps, readers.

Not a model of single operations as the other subjects, but what must hold whatever happens:

- A checkpoint whose commit returned is restorable byte for byte until a prune or a person has begun
  to delete it, or the storage has lost or altered its manifest or a file that it lists; and a run
  never resumes from an older one than that.
- A commit does not return if a later attempt had swept before the manifest was written.
- No file is deleted that a stored manifest refers to.
- Once nothing fails any more, and a person has done what warnings of unreadable objects ask for,
  sweeps and prunes delete all that belongs to no checkpoint.

A commit that is superseded and killed, whose write comes twice, or that is repeated while a person
deletes its checkpoint, may leave a manifest without files (see `checkpoint.commit`): then it is no
checkpoint that must be restorable.
"""

from __future__ import annotations

import logging
import random
import uuid as uuids
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import msgspec

from tests.linearizability.protections import KEEP_NONE
from tests.linearizability.simulation import MOST_BYTES, SimulatedStorage
from tests.support.manifests import entry, new_manifest
from trial_core.checkpoint import layout
from trial_core.checkpoint.fencing import Fence, newest_attempts
from trial_core.checkpoint.intents import SweptUpload, intents
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import FileEntry, Manifest, is_tombstone, utc_now
from trial_core.checkpoint.retention.deletion_markers import protect
from trial_core.checkpoint.retention.leftovers import Leftover, find_leftovers, sweep_leftovers
from trial_core.checkpoint.retention.protections import Protection, pin, protected, unpin
from trial_core.checkpoint.retention.pruning import (
    PruningPlan,
    delete_checkpoint,
    describe,
    plan_pruning,
    prune,
    prune_trial,
)
from trial_core.checkpoint.retention.shared_files import announce_shared_upload
from trial_core.checkpoint.retention.trial_owner import own_trial
from trial_core.checkpoint.retention_policy import RetentionPolicy
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    StorageError,
    TrialflowError,
)

if TYPE_CHECKING:
    from tests.linearizability.simulation import Simulation

DAY = 86_400.0
NIGHTS = 10 * DAY
"""Between the sweeps that several machines begin at the same time."""
_SILENT = logging.getLogger("simulated")
TRIALS = ("gpt-1", "gpt-2")
POLICY = RetentionPolicy(save_trial_best=0, save_trial_latest=2)
BEST = RetentionPolicy(
    metric="loss", save_trial_best=0, save_trial_latest=1, save_experiment_best=1
)
SPOILED = (
    *(layout.MANIFESTS, layout.CHECKPOINTS, layout.DELETIONS) * 2, layout.DELETIONS,
    layout.UPLOADS, layout.ATTEMPTS, layout.CLAIMS, layout.PINS, layout.MARK, layout.MARK,
)  # fmt: skip
COMMON = {f"layer-{number}": b"frozen" * number for number in (1, 2)}
"""Files that all checkpoints have with the same content, so that later ones refer to earlier."""


class _Store(CheckpointStore):
    """A client that tells the judge what has returned."""

    judge: Judge

    def sweep(self, trial: str, fence: Fence | None = None) -> list[SweptUpload]:
        wipes = self.judge.wipes
        swept = super().sweep(trial, fence)
        if fence is not None and wipes == self.judge.wipes:
            self.judge.has_swept(trial, fence.number)
        return swept

    def commit(self, manifest: Manifest, fence: Fence | None = None, base: str = "") -> None:
        wipes = self.judge.wipes
        super().commit(manifest, fence, base)
        if wipes == self.judge.wipes:
            self.judge.has_committed(manifest, fence)


class Judge:
    """Sees all effects in the storage, and what has returned to its clients.

    Attributes:
        committed: the checkpoints that must be restorable, by uuid.
        doomed: uuids of checkpoints whose deletion has begun, or whose manifest was altered.
        spoiled: the keys of checkpoints' files that the storage has lost or altered.
        altered: other objects that it has altered, and what they were; None for a foreign one.
        marks: the mark of the storage that each attempt has seen.
        wipes: how often everything, or all records of attempts, were deleted.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.committed: dict[str, Manifest] = {}
        self.doomed: set[str] = set()
        self.spoiled: set[str] = set()
        self.altered: dict[str, tuple[bytes, float] | None] = {}
        self.marks: dict[str, str] = {}
        self.wipes = 0
        self._swept: dict[str, int] = {}
        self._swept_before: dict[str, int] = {}
        self._stored: dict[str, Manifest] = {}
        simulation.on_write, simulation.on_delete = self._on_write, self._on_delete
        simulation.on_request = self._on_request
        self._choose = random.Random(f"judge {simulation.seed}")
        self._share = self._choose.choice((0.0, 0.0, 0.003, 0.01))

    def store(self) -> CheckpointStore:
        """A client of a process."""
        made = self.simulation.store(_Store)
        assert isinstance(made, _Store)
        made.judge = self
        return made

    def has_swept(self, trial: str, number: int) -> None:
        """A sweep has returned."""
        self._swept[trial] = max(self._swept.get(trial, 0), number)

    def has_committed(self, manifest: Manifest, fence: Fence | None) -> None:
        """A commit has returned."""
        swept = self._swept_before.get(manifest.uuid, 0)
        assert fence is None or swept <= fence.number or manifest.uuid in self.doomed, (
            f"checkpoint {manifest.uuid} of attempt {fence and fence.number} was committed after "
            f"the sweep of attempt {swept} had returned"
        )
        self.simulation.counts["committed"] += 1
        self.committed[manifest.uuid] = manifest

    def newest(self, trial: str) -> Manifest | None:
        """The checkpoint that a run which begins now may not fall behind."""
        found = [
            each
            for each in self.committed.values()
            if each.trial == trial and not self.may_be_lost(each)
        ]
        return max(found, key=lambda each: each.resume_order, default=None)

    def may_be_lost(self, manifest: Manifest) -> bool:
        """Whether a checkpoint need not be restorable any more."""
        keys = {file.key(manifest.uuid) for file in manifest.all_files}
        return manifest.uuid in self.doomed or not keys.isdisjoint(self.spoiled)

    def spoil(self, choose: random.Random, requested: str) -> None:
        """The storage loses or alters an object, or a person stores a foreign one.

        Args:
            requested: the key of the request that comes next: a disk fails while it is used.
        """
        objects, seconds = self.simulation.objects, self.simulation.seconds
        there = {key.partition("/")[0] for key in objects}
        family = choose.choice([each for each in SPOILED if each in there] or [layout.MARK])
        if requested in objects and choose.random() < 0.3:
            family = requested.partition("/")[0]
        keys = sorted(key for key in objects if key.startswith(f"{family}/") or key == family)
        key = requested if requested in keys else choose.choice(keys or [family])
        if choose.random() < 0.15:
            folder = choose.choice((key.rpartition("/")[0] or family, f"{family}/notes"))
            key = f"{folder}/of a person"
            self.altered[key] = None
            objects[key] = b"remember the milk", seconds
        elif family == layout.MARK and choose.random() < 0.5:
            objects.pop(family, None)
        elif family == layout.CHECKPOINTS and keys:
            self.spoiled.add(key)
            data, at = objects.pop(key)
            if choose.random() < 0.5:
                objects[key] = b"?" * len(data), at
            manifests = [each for each in objects if each.startswith(f"{layout.MANIFESTS}/")]
            its = [each for each in manifests if key.split("/")[1] in each]
            if its and choose.random() < 0.5:  # all of a checkpoint at once
                self._alter(choose, its[0], manifests)
        elif keys and family in SPOILED:
            self._alter(choose, key, keys)

    def _alter(self, choose: random.Random, key: str, alike: Sequence[str]) -> None:
        """The storage alters an object, maybe to what another of these objects is."""
        objects = self.simulation.objects
        data, at = self.altered.setdefault(key, objects[key]) or objects[key]
        kinds = [b"{", b"{" * (MOST_BYTES + 1), data.replace(b"progress", b"regress")]
        if key.startswith((layout.MANIFESTS, layout.DELETIONS)):
            kinds += [objects[choose.choice(alike)][0]] * 3
        objects[key] = choose.choice(kinds), at
        if name := layout.parse_manifest_key(key):
            self.doomed.add(name.uuid)
            self._stored.pop(key, None)

    def mend(self) -> None:
        """A person deletes unreadable objects, or restores them where only that helps."""
        objects = self.simulation.objects
        for key, before in self.altered.items():
            objects.pop(key, None)
            if before is not None and key.startswith((layout.ATTEMPTS, layout.MARK)):
                objects[key] = before
            if name := layout.parse_manifest_key(key):
                self._unprotect(name.uuid)
            if intent := layout.parse_intent_key(key):  # no sweep finds its upload any more
                self.doomed.add(intent.uuid)
        self.altered.clear()

    def _unprotect(self, uuid: str) -> None:
        """A person unpins, and the registry releases."""
        objects, folder = self.simulation.objects, layout.protections_folder(uuid)
        for key in [each for each in objects if each.startswith(f"{folder}/")]:
            del objects[key]

    def wipe(self) -> None:
        """A person deletes everything, or the storage forgets."""
        self.forget_attempts()
        simulation = self.simulation
        for state in (
            self.committed, self._stored, self.altered, simulation.objects, simulation.unfinished,
        ):  # fmt: skip
            state.clear()

    def forget_attempts(self) -> None:
        """A person deletes who has run: numbers begin again, and say nothing of earlier ones."""
        self.wipes += 1
        self._swept.clear()
        self._swept_before = dict.fromkeys(self._swept_before, 0)
        objects = self.simulation.objects
        for key in [each for each in objects if each.startswith(layout.ATTEMPTS)]:
            del objects[key]
            self.altered.pop(key, None)

    def _on_request(self, key: str) -> None:
        if self._choose.random() < self._share:
            self.spoil(self._choose, key)
        if self._choose.random() < self._share / 2:
            self.mend()

    def _on_write(self, key: str, data: bytes) -> None:
        family, _, rest = key.partition("/")
        if family == layout.DELETIONS:
            self.doomed.add(rest.split("/")[0])
        if family == layout.MANIFESTS and not is_tombstone(data):
            made = Manifest.from_json(data)
            self._swept_before.setdefault(made.uuid, self._swept.get(made.trial, 0))
            if made.uuid not in self.doomed:
                self._stored[key] = made

    def _on_delete(self, key: str) -> None:
        self._stored.pop(key, None)
        if key.startswith(f"{layout.CHECKPOINTS}/"):
            for each in self._stored.values():
                refers = any(file.key(each.uuid) == key for file in each.copies)
                assert not refers, f"{key} is deleted, to which {each.name.key} refers"

    def check_end(self) -> None:
        """Nothing fails any more, and time passes: what is left?"""
        store = self.store()
        self.mend()
        names = map(layout.parse_manifest_key, self.simulation.objects)
        stored = {name.uuid for name in names if name is not None}
        for uuid in sorted({*protected(store)} - stored):  # its pin came late
            self._unprotect(uuid)
        for each in self.committed.values():
            if self.may_be_lost(each):
                continue
            assert store.verify(each.uuid) == each, f"{each.uuid} is not restorable"
        # Intents of attempts whose records are deleted have higher numbers than a sweep has first.
        # Until a sweep finds them, a person may not delete a checkpoint that they refer to.
        numbers = [each.number for each in intents(store.storage, None)]
        for left in reversed(range(max(numbers, default=0) + 2 if self.wipes else 2)):
            self.simulation.seconds += 40 * DAY
            sweep_leftovers(store, find_leftovers(store))
            for manifest in store.list():
                try:
                    store.verify(manifest.uuid)
                except CheckpointDamaged:
                    self.simulation.counts["without files"] += 1
                    self.doomed.add(manifest.uuid)
                    self._unprotect(manifest.uuid)
                    try:
                        delete_checkpoint(store, manifest)
                    except CheckpointError:
                        if not left or not _has_later_upload(store, manifest):
                            raise
                        self.simulation.counts["not deleted yet"] += 1
            for experiment in ("gpt", "import"):
                prune(store, plan_pruning(store, POLICY, experiment))
        self._check_left(store)
        for manifest in store.list():
            self._unprotect(manifest.uuid)
        if self.simulation.seed % 2:
            for experiment in ("gpt", "import"):
                prune(store, plan_pruning(store, KEEP_NONE, experiment))
        else:
            for trial in store.trials():
                store.forget_trial(trial)
        assert store.list() == [], "some checkpoints stay where none should"
        self.simulation.seconds += 40 * DAY
        sweep_leftovers(store, find_leftovers(store))
        self._check_left(store)

    def _check_left(self, store: CheckpointStore) -> None:
        """Check that each object belongs to a checkpoint."""
        listed = store.list()
        needed = {file.key(each.uuid) for each in listed for file in each.copies}
        needed |= {each.name.key for each in listed}
        uuids = {each.uuid for each in listed}
        # What comes twice may stay: a tombstone for ever, the intent of a checkpoint until its
        # trial runs again.
        for key, (data, _) in self.simulation.objects.items():
            name = layout.parse_manifest_key(key)
            if name is not None and is_tombstone(data):
                self.simulation.counts["tombstones left"] += 1
                uuids.add(name.uuid)
                needed.add(key)
        families = (layout.MANIFESTS, layout.CHECKPOINTS, layout.UPLOADS, layout.DELETIONS)
        left = {key for key in self.simulation.objects if key.startswith(families)} - needed
        begun = {key for key, _ in self.simulation.unfinished.values()}
        left |= {key for key in begun if key.startswith(f"{layout.CHECKPOINTS}/")}
        if not self.simulation.weather.tells_times:  # how old orphaned files are is not known
            left = {key for key in left if not key.startswith(f"{layout.CHECKPOINTS}/")}
        left = {key for key in left if not any(uuid in key for uuid in uuids)}
        assert not left, f"these belong to no checkpoint and stay: {sorted(left)}"


def _has_later_upload(store: CheckpointStore, base: Manifest) -> bool:
    """Return whether an upload that no sweep finds yet may refer to the files of a checkpoint."""
    newest = next((number for number, _ in newest_attempts(store.storage, base.trial)), 0)
    begun = intents(store.storage, base.trial)
    return any(each.base == base.uuid and each.number > newest for each in begun)


class _Run:
    """A run of a trial, whose driver is this process.

    Attributes:
        wipes: `Judge.wipes` when it began.
    """

    def __init__(self, trial: str, fence: Fence, stack: ExitStack, wipes: int) -> None:
        self.trial, self.fence, self.stack, self.wipes = trial, fence, stack, wipes
        self.batches = 0


class Actor:
    """A process: a driver now and then, else a person with the commands."""

    def __init__(self, judge: Judge, choose: random.Random, name: str) -> None:
        self._judge, self._choose, self._name = judge, choose, name
        self._simulation = judge.simulation
        self._store = judge.store()
        self._store.experiment = choose.choice(("", "gpt"))
        self._trials = TRIALS[: random.Random(self._simulation.seed).choice((1, 2))]
        self._run: _Run | None = None
        self._flow = f"flow-run-{int(name) % 4}"
        self._plan: PruningPlan | None = None
        self._leftovers: Sequence[Leftover] = ()

    def act(self) -> None:
        """Do one thing."""
        kinds = [self.save] * 6 + [self._end] if self._run else [self._begin] * 4
        others = [self._prune, self._read, self._delete, self._pin, self._sweep]
        if self._simulation.weather.sleeps:
            others += [self._pass_time, self._sweep_at_night, self._sweep_at_night]
        others += [self._import] if self._choose.random() < 0.3 else []
        rare = [self._break] if self._choose.random() < 0.04 else []
        try:
            self._choose.choice([*kinds, *others, *rare])()
        except TrialflowError as error:
            self._simulation.counts[type(error).__name__] += 1

    # ------------------------------------------------------------------------------ a run

    def _begin(self) -> None:
        self.begin(self._choose.choice(self._trials))

    def begin(self, trial: str) -> None:
        """Begin a run of a trial."""
        take_over = self._choose.random() < 0.5
        attempt = self._choose.choice((self._flow, str(uuids.uuid4())))
        is_new = self._choose.choice((None, None, None, True, False))
        began = self._judge.wipes
        with ExitStack() as stack:
            claim, fence = stack.enter_context(
                own_trial(
                    self._store, trial, attempt, take_over=take_over, is_new=is_new,
                    mark=self._judge.marks.get(attempt),
                    source=next(iter(self._judge.committed), None) if is_new is None else None,
                )
            )  # fmt: skip
            self._judge.marks[attempt] = fence.record.storage
            assert all(map(str, self._store.sweep(trial, fence)))
            run = _Run(trial, fence, stack, began)
            wipes = self._judge.wipes
            at_least = self._judge.newest(trial)
            found = self._resume_point(trial)
            if found is not None:
                claim.renew(found.name)
                run.batches = found.progress.batches_trained
            if (
                at_least is not None
                and wipes == self._judge.wipes
                and not self._judge.may_be_lost(at_least)
            ):
                assert found is not None, f"{trial} begins, and {at_least.uuid} is not seen"
                assert found.resume_order >= at_least.resume_order, (
                    f"{trial} resumes from {found.uuid}, not from {at_least.uuid}"
                )
            self._run = run
            run.stack = stack.pop_all()
            self._simulation.kept.append(run.stack)

    def _resume_point(self, trial: str) -> Manifest | None:
        """As a run looks for it."""
        while True:
            for manifest in self._store.resume_candidates(trial):
                try:
                    return self._store.verify(manifest.uuid)
                except CheckpointNotFound:
                    break  # deleted since: look again
                except CheckpointDamaged:
                    is_lost = self._judge.may_be_lost(manifest)
                    is_committed = manifest.uuid in self._judge.committed
                    assert is_lost or not is_committed, f"{manifest.uuid} is damaged"
            else:
                return None

    def save(self) -> None:
        """As the stage ``checkpoint-upload``, which Prefect repeats after a StorageError."""
        run = self._run
        assert run is not None
        run.batches += self._choose.choice((1, 5, 10))
        uuid, saved_at = str(uuids.uuid4()), utc_now()
        for tries_left in (2, 1, 0):
            try:
                self._upload(run, uuid, saved_at)
                break
            except StorageError:
                if not tries_left:
                    self._end()
                    raise
                self._simulation.counts["retries"] += 1
            except TrialflowError:
                self._end()  # superseded
                raise
        if self._choose.random() < 0.7:
            policy = self._choose.choice((POLICY, BEST))
            prune_trial(self._store, policy, "gpt", run.trial, _SILENT)

    def _upload(self, run: _Run, uuid: str, saved_at: str) -> None:
        base, shared = announce_shared_upload(
            self._store, run.trial, uuid, f"launch-{self._name}", run.fence, _SILENT
        )
        there = {each.path: each for each in shared}
        files: list[FileEntry] = []
        for path, data in {"rank-0": uuid.encode(), **COMMON}.items():
            made, old = entry(path, data), there.get(path)
            if old is not None and old.digest == made.digest:
                if old.stored_at:
                    files.append(old)
                    continue
                made = msgspec.structs.replace(made, copy_at=old.copy_at)
            key = layout.file_key(uuid, path)
            if self._choose.random() < 0.5:
                self._store.storage.write(key, data)
            else:
                self._in_parts(key, data)
            files.append(made)
        if self._choose.random() < 0.5:
            self._in_parts(layout.run_file_key(run.trial, "log"), b"so far")
        manifest = new_manifest(
            run.batches, uuid=uuid, trial=run.trial, writer=f"launch-{self._name}", files=files,
            created_at=saved_at,
        )  # fmt: skip
        if run.wipes != self._judge.wipes:  # a later run may have the same number, and sweep it
            self._judge.doomed.add(uuid)
        self._store.commit(manifest, run.fence, base)

    def _in_parts(self, key: str, data: bytes) -> None:
        storage = self._store.storage
        assert isinstance(storage, SimulatedStorage)
        storage.upload_in_parts(key, data)

    def _end(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        run.stack.close()

    # ---------------------------------------------------------------------------- a person

    def _prune(self) -> None:
        policy = self._choose.choice((POLICY, POLICY, KEEP_NONE))
        plan, self._plan = self._plan, plan_pruning(self._store, policy, "gpt")
        assert len(self._plan.rows()) == len([*map(describe, self._plan.decisions)])
        assert self._plan.freed_bytes >= 0
        if self._choose.random() < 0.7:
            prune(self._store, plan or self._plan)  # an earlier plan: a person has thought about it
            self._plan = None

    def _read(self) -> None:
        if self._choose.random() < 0.5:
            found = self._resume_point(self._choose.choice(self._trials))
        else:
            found = self._choose.choice([None, *self._store.list()])
        if found is not None:
            self._store.read_file(found, self._choose.choice(("rank-0", "layer-1", "none")))
        if self._choose.random() < 0.2:
            self._store.newest_trial("gpt")
            self._store.open("")

    def _delete(self) -> None:
        if found := self._store.list():
            delete_checkpoint(self._store, self._choose.choice(found))

    def _pin(self) -> None:
        if found := self._store.list():
            manifest = self._choose.choice(found)
            if self._choose.random() < 0.2:  # as `models.promotion`
                hold = Protection(
                    uuid=manifest.uuid, kind="hold", by="u@h", at=utc_now(), model="m",
                    version=self._choose.choice((0, 1)), move=1, unique=self._name,
                )  # fmt: skip
                protect(self._store, manifest.name, hold.key, encode_json(hold))
                return
            act = self._choose.choice((pin, pin, unpin))
            for each in {manifest.uuid: 0, self._choose.choice(found).uuid: 0}:
                act(self._store, self._choose.choice((each, each[:1])))

    def _sweep(self) -> None:
        days = self._choose.choice((0.5, 1.0, 7.0, 7.0, 7.0, 4000.0))
        found = find_leftovers(
            self._store, after_days=days, trial=self._choose.choice((None, None, *self._trials)),
            experiment=self._choose.choice((None, None, "gpt", "import")),
        )  # fmt: skip
        assert len([each.row() for each in found]) == len(found)
        earlier, self._leftovers = self._leftovers, found
        for _ in range(self._choose.choice((0, 1, 1, 2))):  # or again, as nothing was seen of it
            swept = sweep_leftovers(self._store, earlier or found, after_days=days)
            assert all(map(str, swept.swept))
            self._leftovers = ()

    def _sweep_at_night(self) -> None:
        """As cron on several machines: they sweep at the same moment."""
        self._simulation.sleep(NIGHTS - self._simulation.seconds % NIGHTS)
        self._sweep()

    def _import(self) -> None:
        """As an import: of a new trial, without an attempt. Two try it at the same time."""
        trial = f"import-{self._choose.choice((1, 2))}"
        uuid = str(uuids.UUID(int=self._choose.getrandbits(128), version=4))
        self._store.announce_upload(trial, uuid, "import")
        self._pass_time()
        data = uuid.encode()
        self._store.storage.write(layout.file_key(uuid, "rank-0"), data)
        self._pass_time()
        files = [entry("rank-0", data)]
        for _ in range(2):  # and once more, with another time
            made = new_manifest(
                1, uuid=uuid, trial=trial, writer="import", files=files, created_at=utc_now(),
                experiment="import",
            )  # fmt: skip
            with suppress(StorageError):
                self._store.commit(made)

    def _pass_time(self) -> None:
        if self._simulation.weather.sleeps:
            hours = self._choose.choice((0.1, 2.0, 24.0, 8 * 24.0, 31 * 24.0))
            self._simulation.sleep(hours * 3600)

    def _break(self) -> None:
        """A disk is replaced, or a person deletes what is not his."""
        objects, kind = self._simulation.objects, self._choose.random()
        if kind < 0.3:
            self._judge.wipe()
        elif kind < 0.6:
            objects.pop(layout.MARK, None)
        else:
            self._judge.forget_attempts()
