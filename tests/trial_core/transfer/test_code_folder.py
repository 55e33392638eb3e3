"""Code folders become archives: equal ones for equal code, without what is no code."""

from __future__ import annotations

import io
import logging
import os
import tarfile
from pathlib import Path

import pytest

from tests.support.manifests import commit_files
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import CheckpointDamaged, ConfigError
from trial_core.transfer import code_folder
from trial_core.transfer.code_folder import pack_code, unpack_code
from trial_core.transfer.trial_code import code_of_folder


def write(folder: Path, **files: str) -> Path:
    return write_all(folder, files)


def write_all(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def packed(folder: Path, *not_code: Path) -> list[str]:
    """The names in a folder's archive."""
    return sorted(unpacked(pack_code(folder, not_code).data))


def unpacked(data: bytes | None) -> dict[str, bytes]:
    assert data is not None
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {each.name: (archive.extractfile(each) or io.BytesIO()).read() for each in archive}


def test_equal_code_gives_equal_bytes(tmp_path: Path) -> None:
    """Whatever the folder, the times and the order of writing."""
    files = {"model_def.py": "x = 1", "lib/a.py": "", "größe/b.json": "{}"}
    first = write_all(tmp_path / "a", files)
    second = write_all(tmp_path / "b", dict(reversed(files.items())))
    os.utime(second / "model_def.py", (1, 1))
    (first / "lib" / "a.py").chmod(0o600)
    assert pack_code(first) == pack_code(second)
    (second / "model_def.py").write_text("x = 2")
    assert pack_code(first) != pack_code(second)


def test_an_archive_can_be_unpacked(tmp_path: Path) -> None:
    """Contents and the right to execute are the same; packed again it gives the same bytes."""
    folder = write_all(tmp_path / "code", {"m.py": "1", "lib/run.sh": "#!", ".trialflowignore": ""})
    (folder / "lib" / "run.sh").chmod(0o755)
    data = pack_code(folder).data
    assert data is not None
    target = write_all(tmp_path / "target", {"of_an_earlier_run.py": ""})
    unpack_code(data, target)
    for path in (target, target / "lib" / "run.sh"):
        assert path.stat().st_mode & 0o777 == 0o755
    assert pack_code(target).data == data


def test_what_is_ignored_by_default(tmp_path: Path) -> None:
    """Histories, caches, environments, credentials, runs and checkpoints are no code."""
    folder = write_all(
        tmp_path / "code",
        {
            "m.py": "", ".git/config": "", "__pycache__/m.pyc": "", ".env": "KEY=1",
            "my env/pyvenv.cfg": "", "my env/lib/x.py": "", "conda/conda-meta/history": "",
            "trialflow-runs/toy/report.md": "", "storage/manifests/t.json": "", "lib/m.key": "",
            "lib/storage/code.py": "",
        },
    )  # fmt: skip
    assert packed(folder, folder / "storage") == ["lib/storage/code.py", "m.py"]


def test_an_ignore_file_is_read_as_git_reads_one(tmp_path: Path) -> None:
    """It adds to the defaults, and can take one back; .detignore counts if there is no other."""
    folder = write_all(
        tmp_path / "code",
        {"m.py": "", "data/a.csv": "", "data/keep.csv": "", "ca.pem": "", "lib/data/b.csv": ""},
    )
    (folder / ".detignore").write_text("/data/*\n!/data/keep.csv\n!*.pem\n")
    assert packed(folder) == [".detignore", "ca.pem", "data/keep.csv", "lib/data/b.csv", "m.py"]
    (folder / ".trialflowignore").write_text("*\n")
    assert pack_code(folder).data is None


def test_a_line_that_is_no_pattern(tmp_path: Path) -> None:
    """The error names the file and the line."""
    write_all(tmp_path, {".trialflowignore": "data/\n!\n"})
    with pytest.raises(ConfigError, match=r"\.trialflowignore, line 2: '!' is not a pattern"):
        pack_code(tmp_path)


def test_a_storage_in_the_code_folder_is_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the storage is the code folder itself, and if the runs' folder is in it."""
    digests = set()
    for index, place in enumerate(("{}", "file://{}", "{}/storage", "memory://{}")):
        folder = write_all(tmp_path / str(index), {"m.py": "", "my runs/toy/report.md": ""})
        monkeypatch.setenv("TRIALFLOW_HOME", str(folder / "my runs"))
        store = CheckpointStore(place.format(folder))
        commit_files(store)
        archive = code_of_folder(folder, store, logging.getLogger()).archive
        assert archive is not None
        digests.add(archive.digest)
    assert len(digests) == 1


def test_large_files_are_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those over the limit of a file, and the largest of those that exceed the limit of all."""
    monkeypatch.setattr(code_folder, "MAX_FILE_BYTES", 2048)
    monkeypatch.setattr(code_folder, "MAX_TOTAL_BYTES", 3000)
    folder = write(tmp_path, a="x" * 1100, b="x" * 1200, c="x" * 1300, data="x" * 3072)
    result = pack_code(folder)
    assert sorted(unpacked(result.data)) == ["a", "b"]
    warning = result.warning(folder)
    assert warning is not None
    assert "c (1.3 KiB; all files may have 2.9 KiB together)" in warning
    assert "data (3.0 KiB; a file may have 2.0 KiB)" in warning
    assert str(folder / ".trialflowignore") in warning


def test_a_folder_of_many_files_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds data. The walk ends early, and the other folders are packed."""
    monkeypatch.setattr(code_folder, "MAX_FOLDER_FILES", 5)
    for index in range(4):
        write_all(tmp_path, {f"images/{index}/{each}.txt": "" for each in range(2)})
    write_all(tmp_path, {f"lib/{each}.py": "" for each in range(5)})
    result = pack_code(tmp_path)
    assert sorted(unpacked(result.data)) == [f"lib/{each}.py" for each in range(5)]
    assert list(map(str, result.left_out)) == ["images/ (more than 5 files)"]


def test_links(tmp_path: Path) -> None:
    """Links to files and within the folder are followed; the others are named in a warning."""
    outside = write_all(tmp_path / "outside", {"shared.py": "1", "more/x.py": ""})
    folder = write_all(tmp_path / "code", {"m.py": "", "lib/a.py": ""})
    (folder / "shared.py").symlink_to(outside / "shared.py")
    (folder / "dangling.py").symlink_to(tmp_path / "gone")
    (folder / "itself.py").symlink_to(folder / "itself.py")
    (folder / "again").symlink_to(folder / "lib")
    (folder / "lib" / "loop").symlink_to(folder)
    (folder / "elsewhere").symlink_to(outside / "more")
    os.mkfifo(folder / "pipe")
    result = pack_code(folder)
    assert sorted(unpacked(result.data)) == ["again/a.py", "lib/a.py", "m.py", "shared.py"]
    assert list(map(str, result.left_out)) == [
        f"dangling.py (a link to {tmp_path}/gone, which leads to no file)",
        f"elsewhere/ (a link to {outside}/more, outside the code folder)",
        f"itself.py (a link to {folder}/itself.py, which leads to no file)",
        "pipe (not a file)",
    ]


def test_a_file_that_cannot_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is packed, and the warning says why."""
    write(tmp_path, a="1", b="2")
    read = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    result = pack_code(tmp_path)
    assert unpacked(result.data) == {"a": b"1"}
    assert list(map(str, result.left_out)) == ["b (cannot be read: Permission denied)"]


def hostile(**member: object) -> bytes:
    """An archive of one member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("x")
        for name, value in member.items():
            setattr(info, name, value)
        archive.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        hostile(name="../../escaped.py"),
        hostile(name="/tmp/escaped.py"),
        hostile(type=tarfile.SYMTYPE, linkname="/etc"),
        hostile(type=tarfile.LNKTYPE, linkname="../x"),
        hostile(type=tarfile.CHRTYPE),
        hostile(type=tarfile.GNUTYPE_SPARSE),
        b"not a tar file",
    ],
    ids=["above", "absolute", "link", "hard link", "device", "sparse", "text"],
)
def test_a_hostile_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    """Nothing is written, neither outside the folder nor inside."""
    with pytest.raises(CheckpointDamaged, match="code of the checkpoint"):
        unpack_code(data, tmp_path / "in" / "code")
    assert [path.name for path in tmp_path.rglob("*")] == ["in"]
