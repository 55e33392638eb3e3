"""Callbacks: the reference's hooks, and which of them are overridden."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from trial_core.errors import TrialError
from trial_core.rank.trial.callback import HOOKS, PyTorchCallback, built_callbacks, overridden_hooks

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


def test_hooks_are_those_of_the_reference() -> None:
    """The same names and parameters, and a hook does nothing by default."""
    methods = {name for name in vars(PyTorchCallback) if name.startswith("on_")}
    assert methods == set(HOOKS) == set(REFERENCE)
    for hook, parameters in REFERENCE.items():
        method = getattr(PyTorchCallback(), hook)
        assert list(inspect.signature(method).parameters) == parameters == list(HOOKS[hook])
        assert method(*parameters) is None


def test_the_docstring_shows_every_hook_in_order() -> None:
    """The loop in the docstring has all hooks, in the order of HOOKS, and the state methods."""
    drawing = inspect.getdoc(PyTorchCallback) or ""
    places = [drawing.index(f"{hook}({', '.join(HOOKS[hook])})") for hook in HOOKS]
    assert places == sorted(places)
    assert "state_dict()" in drawing
    assert "load_state_dict(state_dict)" in drawing


def test_overridden_hooks() -> None:
    """A hook counts if a callback's class, a base class or the instance overrides it."""
    assert overridden_hooks({}) == frozenset()
    assert overridden_hooks({"plain": PyTorchCallback()}) == frozenset()
    two = {"on_training_epoch_start", "on_validation_end"}
    assert overridden_hooks({"plain": PyTorchCallback(), "own": Counting()}) == two
    assert overridden_hooks({"own": Inheriting()}) == two | {"on_trial_shutdown"}
    patched = PyTorchCallback()
    patched.on_training_start = lambda: None  # type: ignore[method-assign]
    assert overridden_hooks({"patched": patched}) == {"on_training_start"}


def test_deprecated_hook_warns() -> None:
    """Overriding on_checkpoint_end causes a warning at the class definition; other hooks do not."""
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
        (None, "must return a dict of callbacks by name, got None"),
        ([Counting()], "must return a dict of callbacks by name"),
        ({"c": Counting}, r'returned the class Counting for "c"; return an instance: Counting\(\)'),
        ({"c": object()}, 'returned an object of type object for "c"; derive its class'),
        ({3: Counting()}, "names of callbacks must be strings, got 3"),
    ],
)
def test_wrong_callbacks_are_refused(callbacks: Any, message: str) -> None:
    """The error says what build_callbacks must return."""
    with pytest.raises(TrialError, match=message):
        built_callbacks(SimpleNamespace(build_callbacks=lambda: callbacks), None)
