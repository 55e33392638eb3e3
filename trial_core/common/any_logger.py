"""The type of a run's logger, of Python's own or Prefect's."""

from __future__ import annotations

from logging import Logger, LoggerAdapter
from typing import Any

AnyLogger = Logger | LoggerAdapter[Any]
