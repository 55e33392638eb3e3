"""The flow `train` with an S3 endpoint that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trialflow.flows.train
import trialflow.tasks.stages
from tests.support.faults.plan import Fault
from tests.support.faults.s3 import faulty_s3
from tests.support.faults.saving import PATIENT, client_options, keys_of
from tests.support.flow import one_slot, train
from tests.support.s3 import S3Server
from tests.support.slots import lines
from tests.support.stages import faking
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.stages.checkpoint import checkpoint_upload
from trial_core.errors import StorageError

pytestmark = [pytest.mark.slots, pytest.mark.server]


@pytest.mark.long
def test_a_failed_upload_costs_no_earlier_checkpoint(
    here: Path, moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses optimizer states from the second checkpoint on.

    The run fails with the rank's message after the retries, and the first checkpoint is intact.
    The next run resumes from it, and deletes the leftovers of the failed uploads.
    """
    soon = trialflow.tasks.stages.task_of(checkpoint_upload).with_options(retry_delay_seconds=0)
    changed = faking(trialflow.flows.train.as_prefect_task, checkpoint_upload=soon.submit)
    monkeypatch.setattr(trialflow.flows.train, "as_prefect_task", changed)
    with faulty_s3(moto_s3) as endpoint:
        options = client_options(endpoint.server("run").options, PATIENT)
        storage = {"url": f"{moto_s3.new_bucket()}/runs", "options": options}

        def config(**changes: Any) -> Any:
            record = {"record": str(here)}
            return one_slot(here, 12, checkpoint_storage=storage, hyperparameters=record, **changes)

        endpoint.new_plan(Fault("500", first=1, times=None, method="PUT", key="optim_states"))
        with pytest.raises(StorageError, match=r"rank 0: cannot upload .*optim_states"):
            train(config())
        endpoint.new_plan()
        store = CheckpointStore(storage["url"], moto_s3.options)
        (first,) = store.list()
        assert first.progress.batches_trained == 4
        assert store.find_damage(first.uuid, first.files) == []
        assert leftovers(store)

        result = train(config(), first.trial)
    assert result.batches_trained == 12
    assert [line[0] for line in lines(here, "samples", 0)][-8:] == list(range(4, 12))
    assert leftovers(store) == set()


def leftovers(store: CheckpointStore) -> set[str]:
    """Objects of uploads that were never committed."""
    kept = {key for folder in ("checkpoints", "uploads") for key in store.storage.sizes(folder)}
    return kept - keys_of(store.list())
