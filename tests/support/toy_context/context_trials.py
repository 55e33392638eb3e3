"""A trial whose code is in another folder than what it imports, which is found by PYTHONPATH."""

from __future__ import annotations

from asking_trials import Measuring as Measuring
