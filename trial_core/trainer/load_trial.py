"""`load_trial_from_checkpoint_path`: a trial with the weights of a checkpoint, in this process."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_core.checkpoint.transfer.checkpoint_source import CheckpointSource, open_checkpoint
from trial_core.checkpoint.transfer.trial_code import code_of_checkpoint
from trial_core.deepspeed.mpu import forget_model_parallelism
from trial_core.errors import TrialError, TrialValueError
from trial_core.rank.rank_state import seed_everything
from trial_core.rank.state_files.safe_load import Reader
from trial_core.schedule.command import is_command
from trial_core.trainer.entrypoint import adapter_of, load_trial_class

_UNPACKED: list[tempfile.TemporaryDirectory[str]] = []
"""Code of loaded trials. It stays until this process ends: a trial may use more of it later."""


def load_trial_from_checkpoint_path(
    path: str | os.PathLike[str],
    trial_class: type[Any] | None = None,
    trial_kwargs: Mapping[str, Any] | None = None,
    torch_load_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Construct the trial that saved a checkpoint, and load its models' weights.

    Works in a plain Python process, without the original code folder, slots or a server. The
    checkpoint may be of any number of data-parallel ranks and any ZeRO stage.

    **Without `trial_class`, the code of the checkpoint is imported, and so executed.** Do
    that only if you trust its writer. With `trial_class` nothing from the checkpoint is executed.

    The hyperparameters, the section `data` and the seed are those of the checkpoint. While the
    checkpoint's code is imported and constructs the trial, the current folder is a copy of its code
    folder. Seeds the random generators, as a run does.

    Args:
        path: the folder of ``trialflow checkpoints download``, or the URL of a checkpoint in its
            storage: ``s3://bucket/folder/checkpoints/UUID`` (`checkpoint_url` of a result).
        trial_class: the trial's class. Default: the checkpoint's entrypoint, in the checkpoint's
            own code.
        trial_kwargs: further arguments of the trial's ``__init__``, besides its context.
        torch_load_kwargs: arguments of `torch.load`. ``{"weights_only": False}`` reads objects of
            any class, which can execute code.
        kwargs: the same. Deprecated, as in Determined.

    Returns:
        The trial.

    Raises:
        CheckpointNotFound: no such checkpoint exists.
        CheckpointDamaged: one of its files is missing or differs from the manifest.
        CheckpointError: it has no code, or `path` is neither a folder nor such a URL.
        TrialError: the class is not a trial, or wraps no model, or is neither given nor named.
    """
    if kwargs:
        warnings.warn(
            "load_trial_from_checkpoint_path: give the arguments of torch.load as "
            f"torch_load_kwargs ({', '.join(kwargs)})",
            DeprecationWarning,
            stacklevel=2,
        )
    options = {**(torch_load_kwargs or {}), **kwargs}
    if trial_class is not None and not hasattr(trial_class, "trial_context_class"):
        raise TrialError(
            f"trial_class: expected a class of trials, got {trial_class!r}; give a subclass of "
            "PyTorchTrial or DeepSpeedTrial, or leave it out to use the code of the checkpoint"
        )
    checkpoint = open_checkpoint(path)
    if trial_class is not None:
        return _load(checkpoint, trial_class, trial_kwargs or {}, options)
    entrypoint = checkpoint.manifest.entrypoint
    if is_command(entrypoint):
        raise TrialError(
            f"the checkpoint was saved in a script ({entrypoint}), which does not tell the trial's "
            "class: give it as trial_class"
        )
    with importing_from(_unpacked(checkpoint)):
        found = load_trial_class(entrypoint)
        return _load(checkpoint, found, trial_kwargs or {}, options)


def _unpacked(checkpoint: CheckpointSource) -> Path:
    """Unpack the code of a checkpoint into a folder of this process."""
    folder = tempfile.TemporaryDirectory(prefix="trialflow-code-")
    _UNPACKED.append(folder)
    return code_of_checkpoint(checkpoint, Path(folder.name).resolve() / "code").folder


def _load(
    checkpoint: CheckpointSource,
    trial_class: type[Any],
    trial_kwargs: Mapping[str, Any],
    torch_load_kwargs: Mapping[str, Any],
) -> Any:
    manifest = checkpoint.manifest
    config = {
        **manifest.config,
        "name": manifest.experiment,
        "entrypoint": manifest.entrypoint,
        "hyperparameters": manifest.hyperparameters,
    }
    context = trial_class.trial_context_class.from_config(config)
    seed = context.run_info.experiment_seed
    forget_model_parallelism()
    seed_everything(seed)  # frozen weights may not be in the checkpoint
    trial = trial_class(context, **trial_kwargs)
    adapter = adapter_of(trial, context, seed)
    rank = context.distributed.get_rank()
    entries = adapter.files_read(manifest.files, manifest.topology, "weights", [rank])
    trusted = torch_load_kwargs.get("weights_only", True) is False
    reader = Reader(trusted, adapter.checkpoint_classes, torch_load_kwargs)
    with checkpoint.files(entries) as folder:
        adapter.load_weights(folder, reader)
    return trial


_OWN = frozenset({"__main__", "trial_core", "trialflow"})


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Import modules from `folder` during the block; the current folder is `folder`, too.

    Modules of this process with the same names are set aside meanwhile, and are back after the
    block: this process may have other versions of the same code. The others stay imported, and
    modules that the folder's code imports later are found there, after all else.
    """
    names = _names_in(folder)
    set_aside = _taken_out(_replaceable(names))
    place, before = str(folder), os.getcwd()
    sys.path.insert(0, place)
    os.chdir(folder)
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        _taken_out(_replaceable(names))
        _remove_from_path(place)
        raise
    else:
        _taken_out({name.partition(".")[0] for name in set_aside})
        _remove_from_path(place)
        sys.path.append(place)
    finally:
        sys.modules.update(set_aside)
        os.chdir(before)


@contextmanager
def import_from_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Import modules from the folder `path` during the block. Follows Determined's function::

        with trial_core.import_from_path(checkpoint_folder):
            import model_def as old_model_def

    Modules of this process with the same names are set aside meanwhile, and are back after the
    block. The folder's modules are forgotten then, so the next block imports them again. The
    current folder stays, and no compiled files are written.

    Raises:
        TrialValueError: `path` is not a folder.
    """
    folder, writes_no_bytecode = Path(path).absolute(), sys.dont_write_bytecode
    if not folder.is_dir():
        raise TrialValueError(f"import_from_path: expected a folder with modules, got {path!r}")
    names = _replaceable(_names_in(folder))
    set_aside = _taken_out(names)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _taken_out(names)
        sys.modules.update(set_aside)
        sys.dont_write_bytecode = writes_no_bytecode
        with suppress(ValueError):  # the block may have changed the path itself
            sys.path.remove(str(folder))


def _names_in(folder: Path) -> set[str]:
    return {path.stem if path.suffix == ".py" else path.name for path in folder.iterdir()}


def _replaceable(names: set[str]) -> set[str]:
    """The names that are neither ours, nor Python's or an installed package's in this process.

    A folder of data may have such a name, and no process can import torch twice.
    """
    return {
        name
        for name in names - _OWN - sys.stdlib_module_names
        if not _is_installed(sys.modules.get(name))
    }


def _is_installed(module: ModuleType | None) -> bool:
    parts = Path(getattr(module, "__file__", None) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


def _taken_out(names: set[str]) -> dict[str, ModuleType]:
    """Remove these modules, with all below them, from this process's; return them."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def _remove_from_path(place: str) -> None:
    # More than once: an import of the entrypoint puts the current folder first, too.
    while place in sys.path:
        sys.path.remove(place)
