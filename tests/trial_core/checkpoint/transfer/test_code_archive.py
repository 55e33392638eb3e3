"""Archives of code: one that trialflow has not written is refused, whatever it does to tarfile."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from trial_core.checkpoint.transfer.code_archive import tar, unpack_code
from trial_core.errors import CheckpointDamaged

_END = b"\0" * 1024


def hostile(**member: object) -> bytes:
    """An archive of one member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("x")
        for name, value in member.items():
            setattr(info, name, value)
        archive.addfile(info)
    return buffer.getvalue()


def header(name: bytes, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The block before the content of a file, or before that of a header of the next file."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:107], block[124:135], block[156:157] = b"0000644", b"%011o" % size, kind
    block[136:147], block[257:263] = b"0" * 11, b"ustar\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % 512)


def field(name: bytes, value: bytes) -> bytes:
    """A header that gives the next file a field."""
    length = len(name) + len(value) + 5  # of two digits
    content = b"%d %s=%s\n" % (length, name, value)
    return header(b"p", len(content), tarfile.XHDTYPE) + padded(content)


EMPTY = header(b"a", 0)
LONG_NAME = header(b"L", 4, tarfile.GNUTYPE_LONGNAME) + padded(b"abc\0")


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
        field(b"comment", b"x") * 3000 + EMPTY + _END,
        LONG_NAME * 3000 + EMPTY + _END,
        field(b"size", b"-1") + EMPTY + _END,
        field(b"size", b"9" * 20) + EMPTY + _END,
        field(b"GNU.sparse.map", b"x,y") + EMPTY + _END,
        field(b"GNU.sparse.size", b"x") + EMPTY + _END,
        EMPTY + EMPTY + _END,
        EMPTY + header(b"a/b", 0) + _END,
        header(b"a", 4096) + b"x" * 512,
    ],
    ids=[
        "above", "absolute", "link", "hard link", "device", "sparse", "text", "chained headers",
        "chained names", "negative size", "huge size", "sparse map", "sparse size",
        "one name twice", "file and folder", "cut off",
    ],
)  # fmt: skip
def test_a_hostile_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    """By its name. Nothing is written, neither outside the folder nor inside."""
    with pytest.raises(CheckpointDamaged, match=r"^the code of the checkpoint u-1 "):
        unpack_code(data, tmp_path / "in" / "code", "the code of the checkpoint u-1")
    assert list(tmp_path.iterdir()) == []


def test_names_that_need_a_header_of_their_own(tmp_path: Path) -> None:
    """Long ones, and ones with other letters than those of ASCII."""
    name = "größe/" + "x" * 150 + ".py"
    unpack_code(tar({name: (0o600, b"1")}), tmp_path / "code")
    assert (tmp_path / "code" / name).read_bytes() == b"1"
