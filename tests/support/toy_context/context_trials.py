"""A trial in another folder than the code it imports, which is on PYTHONPATH."""

from __future__ import annotations

from context_use_trials import Measuring as Measuring
