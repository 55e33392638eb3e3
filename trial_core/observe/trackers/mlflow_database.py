"""Creates a SQLite database of MLflow: it exists with all its tables, or not at all.

MLflow creates its tables in the database's own file, which takes many seconds on a slow machine. If
its process ends meanwhile, nothing can open the file any more, not even ``mlflow db upgrade``.
"""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from pathlib import Path


def create_database(place: str, trial: str) -> None:
    """Create the database at `place` if that is a SQLite file that does not exist.

    Args:
        trial: names the file until it has all its tables. A trial has one sender at a time.
    """
    if not place.startswith("sqlite") or (path := _file_of(place)) is None or path.exists():
        return
    from mlflow.tracking import MlflowClient
    from sqlalchemy.engine import make_url

    new = path.with_name(f".{path.name}.{trial}.part")
    for left in new.parent.glob(f"{glob.escape(new.name)}*"):  # by a process that has ended
        left.unlink()
    whole = make_url(place).set(database=str(new))
    MlflowClient(whole.render_as_string(hide_password=False)).search_experiments(max_results=1)
    try:
        with suppress(FileExistsError):  # another trial's sender was faster
            os.link(new, path)
    except OSError:  # a file system without hard links
        if not path.exists():
            os.rename(new, path)
    new.unlink(missing_ok=True)


def _file_of(place: str) -> Path | None:
    """The file of a SQLite URL; None for a database in memory, or SQLite's own kind of URL."""
    from sqlalchemy.engine import make_url

    name = make_url(place).database
    return None if not name or name == ":memory:" or name.startswith("file:") else Path(name)
