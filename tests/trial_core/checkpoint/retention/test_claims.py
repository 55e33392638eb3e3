"""Claims: a running trial's checkpoints are needed as long as it runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.interleaving import FailingStore
from tests.support.manifests import LONG_AGO, commit_files
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.layout import claim_key
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.retention.claims import (
    Claim,
    RunClaim,
    claimed_checkpoints,
    claims,
)
from trial_core.checkpoint.retention.deletion_markers import mark_deletion, unmark_deleted
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointError, CheckpointNotFound, CommitConflict


def test_a_claim_lasts_as_long_as_the_run(store: CheckpointStore) -> None:
    """Also if the run fails."""
    manifest = commit_files(store)
    with contextlib.suppress(KeyError), RunClaim(store, "gpt-1", source="abc") as claim:
        assert [(each.trial, each.needs) for each in claims(store)] == [("gpt-1", ["abc"])]
        claim.renew(manifest.name)
        assert [each.needs for each in claims(store)] == [["abc", manifest.uuid]]
        raise KeyError
    assert claims(store) == []


def test_a_claim_needs_what_it_names(store: CheckpointStore) -> None:
    """By a uuid's first characters; by none of them, not every checkpoint."""
    source, other = commit_files(store, 7), commit_files(store, 11)
    claim = Claim(
        trial="gpt-2", by="ann@node-1", at=utc_now(), owner="a run", process="",
        needs=["", source.uuid[:8]],
    )  # fmt: skip
    needed = claimed_checkpoints([claim], [source, other])
    assert [*needed] == [source.uuid]
    assert "gpt-2" in needed[source.uuid]


def test_an_old_claim_does_not_count(local_store: CheckpointStore) -> None:
    """A killed driver leaves its claim. It counts while the trial saves."""
    old = Claim(trial="gpt-1", by="ann@here", at=LONG_AGO, needs=[], owner="", process="")
    local_store.storage.write(claim_key("gpt-1"), encode_json(old))
    assert claims(local_store) == []
    assert len(claims(local_store, last_saved={"gpt-1": utc_now()})) == 1


def test_a_run_leaves_the_next_runs_claim(local_store: CheckpointStore) -> None:
    """A presumed-dead run that ends late does not release the claim of its successor."""
    first, second = (RunClaim(local_store, "gpt-1", source=name) for name in ("abc", "def"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [claim.needs for claim in claims(local_store)] == [["def"]]
    second.__exit__(None, None, None)
    assert claims(local_store) == []


def test_an_unreadable_claim_counts(local_store: CheckpointStore) -> None:
    """A driver was killed while it wrote the claim: its trial may run."""
    local_store.storage.write(claim_key("gpt-1"), b"{")
    assert [claim.trial for claim in claims(local_store)] == ["gpt-1"]


def test_a_claim_that_is_listed_and_never_there_counts(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a link that leads nowhere. The search for another claim ends."""
    local_store.storage.write(claim_key("gpt-1", "ab"), b"{}")
    monkeypatch.setattr(local_store.storage, "read", lambda key: None)
    assert [(claim.trial, claim.by) for claim in claims(local_store)] == [("gpt-1", "unknown")]


def claimed(store: CheckpointStore, trial: str, owner: str) -> str:
    """The key of a claim that a run has just written."""
    key = claim_key(trial, owner)
    claim = Claim(trial=trial, by="ann@here", at=utc_now(), needs=[], owner=owner, process="")
    store.storage.write(key, encode_json(claim))
    return key


def test_a_run_deletes_the_claims_that_killed_ones_have_left(local_store: CheckpointStore) -> None:
    """Those of its trial alone. They would protect checkpoints for 30 days."""
    claimed(local_store, "gpt-1", "aa")
    claimed(local_store, "gpt-2", "bb")
    with RunClaim(local_store, "gpt-1") as claim:
        names = {each.owner for each in claims(local_store)}
        assert names == {"bb", claim._owner}
        assert [each.owner for each in claims(local_store, "gpt-2")] == ["bb"]


def test_a_claim_that_cannot_be_deleted_is_a_warning(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The run has ended well."""
    store = FailingStore(local_store, nth=3)
    with RunClaim(store, "gpt-1"):
        assert store.requests == 2
    assert "is not deleted, and counts for 30 days: the storage broke down" in caplog.text


def test_a_claim_that_takes_anothers_place_is_found(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted run writes its claim after the list was read, and deletes the listed one."""
    earlier, read = claimed(local_store, "gpt-1", "aa"), local_store.storage.read
    claimed(local_store, "gpt-2", "bb")

    def read_late(key: str) -> bytes | None:
        if key == earlier:
            claimed(local_store, "gpt-1", "cc")
            local_store.storage.remove(earlier)
        return read(key)

    monkeypatch.setattr(local_store.storage, "read", read_late)
    found = {each.owner: each.by for each in claims(local_store)}
    assert found == {"bb": "ann@here", "cc": "ann@here"}


def test_a_claim_that_cannot_be_written_is_a_warning(
    local_store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues."""
    with RunClaim(FailingStore(local_store, nth=1), "gpt-1"):
        pass
    assert "trial gpt-1 may have no claim" in caplog.text
    assert "the storage broke down" in caplog.text


def test_a_claim_does_not_leave_the_storage(tmp_path: Path) -> None:
    """A trial's id comes from a parameter of the flow."""
    (tmp_path / "config.json").write_text("precious")
    store = CheckpointStore(str(tmp_path / "a" / "b"))
    with (
        pytest.raises(CheckpointError, match="cannot be a trial's id"),
        RunClaim(store, "../../../config"),
    ):
        pass
    assert (tmp_path / "config.json").read_text() == "precious"


def test_a_run_waits_for_the_end_of_a_deletion(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pruner saw the claim and spared the checkpoint, or it deleted it."""
    spared, deleted = (commit_files(local_store, batches) for batches in (7, 11))
    key = mark_deletion(local_store, spared)
    mark_deletion(local_store, deleted)
    ends = iter([
        lambda: local_store.storage.remove(key),
        lambda: local_store.storage.delete(deleted.name.key),
        lambda: unmark_deleted(local_store, deleted.uuid),
    ])  # fmt: skip
    # Not `time.sleep` itself: threads that earlier tests have left sleep, too.
    clock = SimpleNamespace(sleep=lambda _: next(ends)())
    monkeypatch.setattr("trial_core.checkpoint.retention.claims.time", clock)
    claim = RunClaim(local_store, "gpt-1")
    claim.renew(spared.name)
    with pytest.raises(CheckpointNotFound, match="has just been deleted"):
        claim.renew(deleted.name)


def test_a_deletion_that_does_not_end_is_an_error(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends instead of training without its checkpoint's protection."""
    monkeypatch.setattr("trial_core.checkpoint.retention.claims.DELETION_WAIT_SECONDS", 0)
    manifest = commit_files(local_store)
    mark_deletion(local_store, manifest)
    with pytest.raises(CommitConflict, match=r"is being deleted, by .*@"):
        RunClaim(local_store, "gpt-1").renew(manifest.name)
