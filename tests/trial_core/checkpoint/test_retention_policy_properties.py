"""Properties of the retention policy, over histories of trials that went back and forth."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from hypothesis import given, settings, strategies as st

from tests.trial_core.checkpoint.retention.histories import kept, saved
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import RetentionPolicy, decide
from trial_core.schedule.units import Batch, Epoch

few = settings(max_examples=25, deadline=None)

losses = st.none() | st.sampled_from([0.0, 0.25, -1.0, 7, math.nan, math.inf, -math.inf, "text"])
histories = st.lists(
    st.builds(
        saved,
        batches=st.integers(1, 40),
        loss=losses,
        trial=st.sampled_from(["one", "two", "three"]),
        second=st.integers(0, 59),
    ),
    max_size=25,
    unique_by=lambda manifest: manifest.uuid,
)
policies = st.builds(
    RetentionPolicy,
    save_trial_best=st.integers(0, 3),
    save_trial_latest=st.integers(0, 3),
    save_experiment_best=st.integers(0, 3),
    keep_every=st.none()
    | st.builds(Batch, st.integers(1, 17))
    | st.builds(Epoch, st.integers(1, 3)),
    metric=st.sampled_from(["loss", None]),
    smaller_is_better=st.booleans(),
)


@few
@given(histories, policies, st.sets(st.integers(0, 24)), st.sampled_from([(), ("one", "two")]))
def test_needed_best_and_latest_checkpoints_stay(
    manifests: list[Manifest], policy: RetentionPolicy, pins: set[int], running: tuple[str, ...]
) -> None:
    """Found here by counting the checkpoints that are better or later, without sorting."""
    needed = {manifests[i].uuid: "pinned" for i in pins if i < len(manifests)}
    stay = kept(manifests, policy, needed=needed, running=running)
    assert needed.keys() <= stay
    for manifest in manifests:
        rivals = [each for each in manifests if each.trial == manifest.trial]
        further = sum(each.resume_order > manifest.resume_order for each in rivals)
        later = sum(_late(each) > _late(manifest) for each in rivals)
        latest = policy.save_trial_latest or int(manifest.trial in running)
        if min(further, later) < latest:
            assert manifest.uuid in stay
        value = _comparable(manifest)
        if value is None or policy.metric is None:
            continue
        for among, count in (
            (rivals, policy.save_trial_best),
            (manifests, policy.save_experiment_best),
        ):
            values = [other for each in among if (other := _comparable(each)) is not None]
            not_worse = [
                other <= value if policy.smaller_is_better else other >= value for other in values
            ]
            if sum(not_worse) <= count:
                assert manifest.uuid in stay


@few
@given(histories, policies, st.sets(st.integers(0, 24)), st.sampled_from([(), ("one", "two")]))
def test_deciding_again_deletes_no_more(
    manifests: list[Manifest], policy: RetentionPolicy, pins: set[int], running: tuple[str, ...]
) -> None:
    """Applied to the kept checkpoints, the policy keeps all."""
    needed = {manifests[i].uuid: "pinned" for i in pins if i < len(manifests)}
    needs: dict[str, Any] = {"needed": needed, "running": running}
    stay = kept(manifests, policy, **needs)
    rest = [manifest for manifest in manifests if manifest.uuid in stay]
    assert kept(rest, policy, **needs) == stay


@few
@given(histories, policies, st.randoms(use_true_random=False))
def test_the_order_of_a_listing_does_not_matter(
    manifests: list[Manifest], policy: RetentionPolicy, random: Random
) -> None:
    """There is one decision for each checkpoint, in the order listed."""
    shuffled = list(manifests)
    random.shuffle(shuffled)
    assert [each.manifest for each in decide(shuffled, policy)] == shuffled
    assert kept(shuffled, policy) == kept(manifests, policy)


in_order = st.lists(
    st.builds(saved, batches=st.integers(1, 40), trial=st.sampled_from(["one", "two"])),
    unique_by=lambda manifest: manifest.uuid,
)


@few
@given(in_order, st.integers(0, 3))
def test_no_more_than_the_given_number_stay(manifests: list[Manifest], count: int) -> None:
    """Of a trial that never went back, exactly the given number of latest checkpoints."""
    stay = kept(manifests, RetentionPolicy(0, count))
    for trial in {each.trial for each in manifests}:
        of_trial = [each.uuid for each in manifests if each.trial == trial]
        assert len(stay.intersection(of_trial)) == min(count, len(of_trial))


def _late(manifest: Manifest) -> tuple[Any, ...]:
    return manifest.created_at, manifest.progress.batches_trained, manifest.uuid


def _comparable(manifest: Manifest) -> float | None:
    value = manifest.metrics.get("validation", {}).get("loss")
    return None if value is None or isinstance(value, str) or not math.isfinite(value) else value
