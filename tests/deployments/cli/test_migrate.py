"""`trialflow migrate` changes imports and entrypoints, and lists what is left."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trial_core.errors import ConfigError
from trialflow.deployments.cli import migrate as command
from trialflow.deployments.cli.migrate import migrate


def moved(folder: Path, text: str, name: str = "model_def.py") -> str:
    """A file's text after the command."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    migrate(folder)
    return path.read_text()


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of stderr, without the count at the end and without the folder.

    On a slow machine it also says which file it is at, in a line that ends with "…".
    """
    lines = [line.rpartition("/")[2] for line in capsys.readouterr().err.splitlines()[:-1]]
    return [line for line in lines if not line.endswith("…")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import determined as det", "import trial_core as det"),
        ("import os, determined as det  # both", "import os, trial_core as det  # both"),
        ("import determined.pytorch as pt", "import trial_core.pytorch as pt"),
        ("import determined.pytorch.deepspeed as ds", "import trial_core.deepspeed as ds"),
        ("from determined import pytorch as pt", "from trial_core import pytorch as pt"),
        ("from determined.pytorch import deepspeed", "from trial_core.pytorch import deepspeed"),
        ("from determined.pytorch import *", "from trial_core.pytorch import *"),
        (
            "from determined.pytorch.deepspeed import DeepSpeedTrial as T",
            "from trial_core.deepspeed import DeepSpeedTrial as T",
        ),
        ("if x:\n\timport determined.core", "if x:\n\timport trial_core.core"),
        ("from .determined import mine", "from .determined import mine"),
        ("import determined_shim", "import determined_shim"),
    ],
)
def test_every_form_of_an_import(
    tmp_path: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is changed to the module of the same meaning, and no other line is."""
    assert moved(tmp_path, f"x = 1\n\n{old}\n") == f"x = 1\n\n{new}\n"
    assert listed(capsys) == []


def test_names_change_where_they_stand_for_the_import(tmp_path: Path) -> None:
    """Comments, layout, and other things of that name stay as they are."""
    text = '''\
        """Trains with determined."""
        import determined
        from determined.pytorch import (
            DataLoader,  # loads
            PyTorchTrial,
        )


        class Mine( PyTorchTrial ):  # determined.pytorch
            def run(self, context: determined.core.Context) -> None:
                self.determined = determined.pytorch.Batch(1)
                call(determined=determined)


        def other(determined):
            return determined.pytorch
        '''
    expected = text
    for old, new in (
        ("import determined\n", "import trial_core\n"),
        ("from determined.", "from trial_core."),
        ("context: determined.", "context: trial_core."),
        ("= determined.pytorch.Batch", "= trial_core.pytorch.Batch"),
        ("determined=determined)", "determined=trial_core)"),
    ):
        assert old in expected
        expected = expected.replace(old, new)
    assert moved(tmp_path, text) == textwrap.dedent(expected)


def test_names_without_a_counterpart_are_listed_and_their_imports_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to use instead, as the error says it when the name is used."""
    text = """\
        import determined as det
        from determined import keras
        from determined.pytorch import DataLoader, lightning
        from determined.pytorch.dsat import get_ds_config_from_hparams
        det.pytorch.dsat.autotune
        det.keras.TFKerasTrial
        run(["python3", "-m", "determined.launch.wrap_rank"])
        """
    for _ in range(2):  # a second call lists what is left
        after = moved(tmp_path, text)
        keras = "use trial_core.pytorch; only PyTorch and DeepSpeed trials exist"
        assert listed(capsys) == [
            f"model_def.py:2: determined.keras: {keras}",
            "model_def.py:3: determined.pytorch.lightning: use trial_core.pytorch.PyTorchTrial",
            "model_def.py:5: determined.pytorch.dsat.autotune: use DeepSpeed's own autotuner",
            f"model_def.py:6: determined.keras.TFKerasTrial: {keras}",
            "model_def.py:7: the text determined.launch.wrap_rank: use what it starts: trialflow "
            "runs the script once in each slot",
        ]
    lines = after.splitlines()
    assert lines[:2] == ["import trial_core as det", "from determined import keras"]
    assert lines[2:4] == [
        "from trial_core.pytorch import DataLoader, lightning",
        "from trial_core.deepspeed.dsat import get_ds_config_from_hparams",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "entrypoint: >-  # folded\n  python3 -m determined.launch.torch_distributed\n"
            "  python3 train.py --lr 1\n",
            "entrypoint: python train.py --lr 1\n",
        ),
        (
            "entrypoint:\n  - python3\n  - -m\n  - determined.launch.deepspeed\n  - --trial\n"
            "  - model_def:Mine   # the last\n",
            "entrypoint:\n  model_def:Mine   # the last\n",
        ),
        (
            "entrypoint: [python3, -m, determined.launch.deepspeed, python3, t.py, 'a: b']  # c\n",
            "entrypoint: \"python t.py 'a: b'\"  # c\n",
        ),
        ("entrypoint: python3 train.py\n", "entrypoint: python3 train.py\n"),
    ],
)
def test_a_launcher_leaves_the_entrypoint(
    tmp_path: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written around it stays, and what trialflow says of the file is listed."""
    rest = "# after\nsearcher: {name: single, metric: loss, max_length: 5}\nbind_mounts: []\n"
    text = f"# top\nname: mine   # a name\n{old}{rest}"
    after = moved(tmp_path, text, "const.yaml")
    assert after == f"# top\nname: mine   # a name\n{new}{rest}"
    line = text[: text.index("bind_mounts")].count("\n") + 1
    assert [each for each in listed(capsys) if "max_length" not in each] == [
        f"const.yaml:{line}: bind_mounts: ignored: a slot is a process on its machine and sees "
        "that machine's folders"
    ]


def test_mistakes_of_an_experiment_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a search, each with its line. YAML files of other programs are not read."""
    (tmp_path / "other.yaml").write_text("entrypoint is a word: here\n")
    experiment = """\
        entrypoint: python3 train.py
        hyperparameters:
          lr: {type: log, minval: -4, maxval: 0, base: 10}
        searcher: {name: adaptive_asha, metric: loss}
        """
    moved(tmp_path, experiment, "adaptive.yaml")
    (line,) = listed(capsys)
    assert line.startswith('adaptive.yaml:4: searcher.name: expected "single"')
    moved(tmp_path, experiment.replace("adaptive_asha", "single"), "adaptive.yaml")
    (line,) = listed(capsys)
    assert line.startswith("adaptive.yaml:2: hyperparameters.lr: ")
    assert "is drawn from its search range" in line


def test_a_difference_is_printed_and_no_file_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a patch on stdout, with paths from the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model_def.py"
    path.write_bytes(b"import determined as det\r\n")
    migrate(tmp_path, diff=True)
    assert capsys.readouterr().out == (
        "--- a/model_def.py\n+++ b/model_def.py\n@@ -1 +1 @@\n"
        "-import determined as det\r\n+import trial_core as det\r\n"
    )
    assert path.read_bytes() == b"import determined as det\r\n"


def test_a_file_that_cannot_be_read_is_listed_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are changed, and keep their rights."""
    bad = "import determined as (\n"
    (tmp_path / "bad.py").write_text(bad)
    (tmp_path / "bad.yaml").write_text("entrypoint: [\n")
    (tmp_path / "latin.yaml").write_bytes(b"entrypoint: \xe9\n")
    (tmp_path / "latin.py").write_bytes(b"# determined \xe9\n")
    (tmp_path / "startup-hook.sh").write_text("pip install attrdict\n")
    script = tmp_path / "run.py"
    script.write_text("import determined\n")
    script.chmod(0o751)
    migrate(tmp_path)
    found = listed(capsys)
    assert [each.partition(":")[0] for each in found] == [
        "bad.py", "bad.yaml", "latin.py", "latin.yaml", "startup-hook.sh"
    ]  # fmt: skip
    assert (tmp_path / "bad.py").read_text() == bad
    assert script.read_text() == "import trial_core\n"
    assert script.stat().st_mode & 0o777 == 0o751


def test_environments_hidden_folders_and_links_are_left(tmp_path: Path) -> None:
    """They are not the user's sources, or are in another folder."""
    folder = tmp_path / "code"
    for name in ("venv/lib", ".git", "sub"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.py").write_text("import determined\n")
    (folder / "venv/pyvenv.cfg").touch()
    (tmp_path / "outside.py").write_text("import determined\n")
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    migrate(folder)
    changed = [path for path in tmp_path.rglob("*.py") if "trial_core" in path.read_text()]
    assert changed == [folder / "sub/a.py"]


def test_what_the_command_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, and libcst, which an extra installs."""
    with pytest.raises(ConfigError, match="no such folder or file"):
        migrate(tmp_path / "missing")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trialflow\[migrate\]'"):
        migrate(tmp_path)
