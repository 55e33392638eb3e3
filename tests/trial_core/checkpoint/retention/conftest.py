"""Rules and races are the same in each storage: a folder is the default one here.

On S3, `test_a_file_stays_while_a_checkpoint_lists_it` saves and deletes by default.
"""

from __future__ import annotations

import pytest

from tests.support.stores import FOLDER_FIRST


@pytest.fixture(params=FOLDER_FIRST)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of storage."""
    name: str = request.param
    return name
