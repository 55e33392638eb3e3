"""Callbacks: every hook of the reference, and which of them anybody overrides."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

from trial_core.errors import TrialError
from trial_core.pytorch.callback import HOOKS, PyTorchCallback, overridden_hooks

REFERENCE = {
    "on_trial_startup": ["first_batch_idx", "checkpoint_uuid"],
    "on_training_start": [],
    "on_training_epoch_start": ["epoch_idx"],
    "on_training_epoch_end": ["epoch_idx"],
    "on_training_workload_end": ["avg_metrics", "batch_metrics"],
    "on_validation_start": [],
    "on_validation_epoch_start": [],
    "on_validation_epoch_end": ["outputs"],
    "on_validation_end": ["metrics"],
    "on_checkpoint_load_start": ["checkpoint"],
    "on_checkpoint_save_start": ["checkpoint"],
    "on_checkpoint_write_end": ["checkpoint_dir"],
    "on_checkpoint_end": ["checkpoint_dir"],
    "on_checkpoint_upload_end": ["uuid"],
    "on_trial_shutdown": [],
}


class Counting(PyTorchCallback):
    """Overrides two hooks."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.epochs += 1

    def on_validation_end(self, metrics: dict[str, Any]) -> None: ...


class Inheriting(Counting):
    """Overrides one more."""

    def on_trial_shutdown(self) -> None: ...


@pytest.mark.parametrize("hook", REFERENCE)
def test_hooks_are_the_references(hook: str) -> None:
    """Every hook of the reference exists with its parameters, and does nothing by default."""
    method = getattr(PyTorchCallback(), hook)
    assert list(inspect.signature(method).parameters) == REFERENCE[hook] == list(HOOKS[hook])
    assert method(*REFERENCE[hook]) is None


def test_no_other_hooks() -> None:
    """HOOKS and the class name exactly the reference's hooks."""
    methods = {name for name in vars(PyTorchCallback) if name.startswith("on_")}
    assert methods == set(HOOKS) == set(REFERENCE)


def test_every_hook_is_drawn() -> None:
    """The loop in the docstring has every hook in it, in the order of HOOKS, and the state."""
    drawing = inspect.getdoc(PyTorchCallback) or ""
    places = [drawing.index(f"{hook}({', '.join(HOOKS[hook])})") for hook in HOOKS]
    assert places == sorted(places)
    assert "state_dict()" in drawing
    assert "load_state_dict(state_dict)" in drawing


def test_state_is_empty_by_default() -> None:
    """A callback without state saves an empty dict and takes it back."""
    callback = PyTorchCallback()
    callback.load_state_dict(callback.state_dict())
    assert callback.state_dict() == {}


def test_overridden_hooks() -> None:
    """Only hooks that some callback overrides are named: in its class, above it, or on itself."""
    assert overridden_hooks({}) == frozenset()
    assert overridden_hooks({"plain": PyTorchCallback()}) == frozenset()
    two = {"on_training_epoch_start", "on_validation_end"}
    assert overridden_hooks({"plain": PyTorchCallback(), "own": Counting()}) == two
    assert overridden_hooks({"own": Inheriting()}) == two | {"on_trial_shutdown"}
    patched = PyTorchCallback()
    patched.on_training_start = lambda: None  # type: ignore[method-assign]
    assert overridden_hooks({"patched": patched}) == {"on_training_start"}


def test_deprecated_hook_warns() -> None:
    """Overriding on_checkpoint_end warns where the class is defined, and no other hook does."""
    with pytest.warns(FutureWarning, match="Old overrides on_checkpoint_end") as caught:

        class Old(PyTorchCallback):
            def on_checkpoint_end(self, checkpoint_dir: str) -> None: ...

    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class New(PyTorchCallback):
            def on_checkpoint_write_end(self, checkpoint_dir: str) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (None, "must return a dict of callbacks by name, it returned None"),
        ([Counting()], "must return a dict of callbacks by name"),
        ({"c": Counting}, r'gives the class Counting for "c"; give an instance: Counting\(\)'),
        ({"c": object()}, 'gives an object of type object for "c"; derive it'),
        ({3: Counting()}, "names of callbacks must be strings, got 3"),
    ],
)
def test_wrong_callbacks_are_refused(callbacks: Any, message: str) -> None:
    """Whatever build_callbacks may wrongly return is refused with what was expected."""
    with pytest.raises(TrialError, match=message):
        overridden_hooks(callbacks)
