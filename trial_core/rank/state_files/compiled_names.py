"""Gives the parts of a compiled module the names that they have in the module itself.

``torch.compile(module)`` returns an ``OptimizedModule``, which holds the module under the name
``_orig_mod``. All names of the model then depend on whether, and where, it is compiled, and so
would its checkpoints. ``module.compile()`` changes no names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

_WITHIN = "_orig_mod"
COMPILED = f"{_WITHIN}."
"""What torch puts before the names of a compiled module's parts."""

_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_CALLED = ("state_dict", "load_state_dict", "_load_from_state_dict")
"""Methods that the class of the module may override, such as a quantized layer's."""


def original(module: nn.Module) -> nn.Module:
    """The module that `module` compiles, if it is compiled."""
    itself: Any = module
    return itself._orig_mod if _is_compiled(module) else itself  # type: ignore[no-any-return]


def name_as_uncompiled(model: nn.Module) -> None:
    """Name the parameters, buffers and parts of a model as if it were not compiled.

    Each compiled module in it then shares its parts with the module that it compiles, instead of
    holding that module. It computes as before.
    """
    if not _may_have_compiled():  # asked for often
        return
    for compiled in [each for each in model.modules() if _is_compiled(each)]:
        own = vars(compiled)
        if _WITHIN not in own["_modules"]:
            continue
        inner: Any = own["_modules"].pop(_WITHIN)
        own[_WITHIN] = inner
        for name in _SHARED:
            shared = vars(inner)[name]
            shared.update(own[name])
            own[name] = shared
        own.update({name: getattr(inner, name) for name in _CALLED})
        own["named_modules"] = partial(_named_modules, compiled)


def _may_have_compiled() -> bool:
    return "torch._dynamo.eval_frame" in sys.modules  # imported when a module is compiled


def _is_compiled(module: nn.Module) -> bool:
    return _may_have_compiled() and isinstance(
        module, sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    )


def _named_modules(
    compiled: Any,
    memo: set[nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Module]]:
    """As torch's, which also finds the module that is compiled: code looks for a module's class."""
    memo = set() if memo is None else memo
    for name, module in nn.Module.named_modules(compiled, memo, prefix, remove_duplicate):
        yield name, module
        if module is compiled and remove_duplicate and (inner := compiled._orig_mod) not in memo:
            memo.add(inner)
            yield name, inner
