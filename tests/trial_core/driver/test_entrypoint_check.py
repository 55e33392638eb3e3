"""What no rank could run is refused by the driver, which imports nothing of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import new_manifest
from tests.support.slots import toy_config
from trial_core.driver.code_source import refuse_missing_code
from trial_core.driver.entrypoint_check import checked_entrypoint
from trial_core.errors import ConfigError, TrialError

FILES = {
    "model.py": "raise SystemExit('imported')\nclass MyTrial:\n    class Inner: ...\n",
    "broken.py": "import os\nclass MyTrial\n",
    "star.py": "from model import *\n",
    "made.py": "def __getattr__(name): return name\n",
    "other.py": "from model import MyTrial as Renamed\nif True:\n    Also = Renamed\n",
    "made_too.py": "import sys\nsys.modules[__name__] = object()\n",
    "long.py": f"TEXT = ({' + '.join(['str'] * 500)}).upper()\nclass MyTrial: ...\n",
    "package/__init__.py": "",
    "package/model.py": "class MyTrial: ...\n",
    "moving/__init__.py": "__path__.append('elsewhere')\n",
    "spread/model.py": "class MyTrial: ...\n",
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def refuse(code: Path, entrypoint: str, **fields: Any) -> None:
    refuse_missing_code(toy_config(code, code=str(code), entrypoint=entrypoint, **fields))


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("modle:MyTrial", r'no module "modle" in .*there: broken.*; did you mean "model"\?'),
        ("model:MyTrail", r'module model has no "MyTrail"; did you mean "MyTrial"\?'),
        ("model:Unlike", r'module model has no "Unlike"$'),
        ("package.other:MyTrial", r'there is no module "package\.other"'),
        ("package:MyTrial", r'module package has no "MyTrial"'),
        ("spread:MyTrial", r'module spread has no "MyTrial"'),
        ("broken:MyTrial", r"broken\.py, line 2: expected ':'"),
        ("python tran.py --lr 1", r"there is no script tran\.py in .*\(scripts there: broken"),
        ("python -m package.other", r'there is no module "package\.other"'),
    ],
)
def test_a_missing_entrypoint_is_refused(code: Path, entrypoint: str, message: str) -> None:
    """With what is there instead; nothing of the user's is imported."""
    with pytest.raises(ConfigError, match=message):
        refuse(code, entrypoint)


@pytest.mark.parametrize(
    "entrypoint",
    [
        "model:MyTrial", "model:MyTrial.Inner", "package.model:MyTrial", "spread.model:MyTrial",
        "star:MyTrial", "made:MyTrial", "made_too:MyTrial", "other:Renamed", "other:Also",
        "moving.elsewhere:MyTrial", "math:MyTrial", "long:MyTrial", "python model.py",
        "python -m package.model",
    ],
)  # fmt: skip
def test_what_may_be_there_is_left_to_the_ranks(code: Path, entrypoint: str) -> None:
    """Names that a module imports or makes, and packages that look elsewhere."""
    refuse(code, entrypoint)


def test_packages_of_other_machines_and_folders_may_have_it(code: Path) -> None:
    """Nodes may have what this machine lacks, and the experiment may name a folder."""
    folder = {"environment_variables": {"PYTHONPATH": str(code / "package")}}
    (code / "package" / "deeper.py").write_text("class MyTrial: ...\n")
    refuse(code, "deeper:MyTrial", environment=folder)
    on_nodes = {"engine": "join", "slots_per_trial": 2}
    refuse(code, "only_there:MyTrial", resources=on_nodes)
    with pytest.raises(ConfigError, match='has no "MyTrail"'):
        refuse(code, "model:MyTrail", resources=on_nodes)


@pytest.mark.parametrize(
    "stored",
    [
        "python train.py --to /etc",
        "python train.d/../x.py",
        "python -m train",
        "other:Trial",
        "train.checkpoint-5.evil:Trial",
        "runs.checkpoints:Trial",
        "runs.checkpoints.evil:Trial",
        "link.evil:Trial",
        "runs.checkpoints.out.evil:Trial",
        f"{'long' * 100}:Trial",
        "downloaded.evil:Trial",
    ],  # a storage may be in the code folder
)
def test_a_stored_entrypoint_is_no_other_command(tmp_path: Path, stored: str) -> None:
    """Not even with the same beginning: its arguments would be a stranger's."""
    own = "python train.py"
    storage = tmp_path / "runs" / "checkpoints"
    storage.mkdir(parents=True)
    (tmp_path / "link").symlink_to(storage)
    (storage / "out").symlink_to("/usr")
    (tmp_path / "train.py").touch()
    (tmp_path / "downloaded").mkdir()
    (tmp_path / "downloaded" / "manifest.json").write_bytes(new_manifest(3).to_json())
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text("{}")  # the user's own
    os.mkfifo(tmp_path / "extension" / ".manifest.json.part")  # reading it would not end
    for known in (own, "train:Trial", "runs.train:Trial", "extension.model:Trial"):
        assert checked_entrypoint(known, own, tmp_path, f"file://{storage}") == known
    with pytest.raises(TrialError, match="expected module:Class"):
        checked_entrypoint(stored, own, tmp_path, f"file://{storage}")


def test_a_stored_entrypoint_is_not_in_a_storage_behind_a_link(tmp_path: Path) -> None:
    """The code folder may have a link to a shared disk."""
    code, storage = tmp_path / "code", tmp_path / "disk" / "store"
    code.mkdir()
    storage.mkdir(parents=True)
    (code / "data").symlink_to(storage.parent)
    with pytest.raises(TrialError, match="expected module:Class"):
        checked_entrypoint("data.store.evil:Trial", "toy:Trial", code, f"file://{storage}")
