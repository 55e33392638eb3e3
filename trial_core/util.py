"""What scripts use of ``determined.util``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trial_core.config.yaml_file import merged


def merge_dicts(base_dict: Mapping[Any, Any], source_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """A new dict of `base_dict` with the values of `source_dict`, key by key at every depth.

    A dict of the source is merged into the base's dict of that name; every other value of the
    source replaces the base's, or is added to it.
    """
    return copy.deepcopy(merged(base_dict, source_dict))
