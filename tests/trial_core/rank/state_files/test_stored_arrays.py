"""Arrays are stored without pickles of numpy's, which are never read."""

from __future__ import annotations

import io
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as arrays

from trial_core.errors import CheckpointError, TrialError
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.safe_save import readable
from trial_core.rank.state_files.stored_arrays import as_plain

SIMPLE = arrays.scalar_dtypes() | arrays.byte_string_dtypes() | arrays.unicode_string_dtypes()
DTYPES = SIMPLE | arrays.array_dtypes(SIMPLE)
GENERATOR = np.random.RandomState(3).get_state()


def read_again(state: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state.pt")
        torch.save(readable(state, Reader()), file)
        assert torch.serialization.get_unsafe_globals_in_checkpoint(file) == []
        return Reader().load(file)


@given(arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0, max_side=3)))
def test_an_array_comes_back_as_it_was(array: np.ndarray[Any, Any]) -> None:
    """Of any type without objects: shape, byte order, fields and every bit."""
    seen = read_again({"a": [array], "again": array})
    (found,) = seen["a"]
    assert found is seen["again"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@given(arrays.arrays(SIMPLE, 1).map(lambda each: each[0]))
def test_a_number_keeps_its_type(number: np.generic) -> None:
    """Of numpy's: in a list as itself, in keys and sets as Python's."""
    (found,) = read_again([number])
    assert type(found) is type(number)
    assert found.tobytes() == number.tobytes()


@pytest.mark.parametrize(
    "state",
    [
        {"loss": np.float32(0.5), "history": np.arange(3), "type": np.dtype("<f4")},
        {"numpy": GENERATOR, "generator": np.random.default_rng(1).bit_generator.state},
        ((np.zeros((0, 2)), "text"), [np.asfortranarray(np.ones((2, 3)))]),
    ],
    ids=["values", "generators", "nested"],
)
def test_usual_states_need_no_trust(state: Any) -> None:
    """What callbacks and loaders save; plain torch reads them, too."""
    assert repr(read_again(state)) == repr(state)


def test_numbers_in_keys_and_sets_become_pythons() -> None:
    """They are found under the same values."""
    seen = read_again({np.int64(3): {np.int32(5)}, (np.str_("a"), 1): {np.float64(0.5)}})
    assert seen == {3: {5}, ("a", 1): frozenset({0.5})}
    assert [type(each) for key in seen for each in (key, *seen[key])] == [int, int, tuple, float]


HOLDS_ITSELF: list[Any] = [np.ones(2)]
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.ma.array([1, 2], mask=[0, 1]),
        np.zeros(2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [4, 0]}),
        np.dtype((np.float32, (2, 3))),
        np.dtype("S"),
        {np.longdouble(1): 1},
        {np.datetime64("2020-01-01"): 1},
        {(np.longdouble(1), 2): 1},
        HOLDS_ITSELF,
    ],
    ids=["objects", "masked", "order", "subarray", "sizeless", "long", "date", "tuple", "itself"],
)
def test_what_could_not_be_restored_is_refused_when_it_is_saved(value: Any) -> None:
    """By the place at which it is, and without the advice to allow numpy's classes."""
    with pytest.raises(TrialError, match=r"at history\.0\b") as refused:
        readable({"history": [value]}, Reader())
    assert "add_safe_globals" not in str(refused.value)


def test_many_numbers_take_no_file_each(tmp_path: Path) -> None:
    """A history of losses is a list of them."""
    torch.save(readable([np.float64(0.5)] * 1000, Reader()), tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as file:
        assert len(file.namelist()) < 10


# ------------------------------------------------------------------------------ hostile files


class Pickle:
    """Writes what `torch.load` unpickles, instruction by instruction."""

    def __init__(self) -> None:
        self.content = io.BytesIO()
        self.add(b"\x80\x02")

    def add(self, data: bytes) -> Pickle:
        self.content.write(data)
        return self

    def text(self, text: str) -> Pickle:
        return self.add(b"X" + struct.pack("<I", len(text)) + text.encode())

    def raw(self, data: bytes) -> Pickle:
        self.add(b"c_codecs\nencode\n").text(data.decode("latin1")).text("latin1")
        return self.add(b"\x86R")

    def dtype(self, name: str) -> Pickle:
        return self.add(b"cnumpy\ndtype\n").text(name).add(b"\x89\x88\x87R")

    def array(self) -> Pickle:
        self.add(b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85")
        return self.raw(b"b").add(b"\x87R")

    def file(self, path: Path) -> Path:
        usual = io.BytesIO()
        torch.save({}, usual)
        with zipfile.ZipFile(usual) as source, zipfile.ZipFile(path, "w") as target:
            for name in source.namelist():
                is_pickle = name.endswith("data.pkl")
                content = self.content.getvalue() if is_pickle else source.read(name)
                target.writestr(name, content)
        return path


def pointers() -> Pickle:
    """A record whose flags say that it has no objects, and whose fields are objects."""
    hostile = Pickle().add(b"ccollections\nOrderedDict\n").array().add(b"(K\x01K\x01\x85")
    hostile.dtype("V16").add(b"(K\x03").text("|").add(b"N").text("a").text("b").add(b"\x86}")
    hostile.text("a").dtype("O").add(b"K\x00\x86s").text("b").dtype("O").add(b"K\x08\x86s")
    return hostile.add(b"K\x10K\x01K\x00tb\x89").raw(b"\x41" * 16).add(b"tb\x85R.")


def grown() -> Pickle:
    """An array whose type becomes larger once its memory is allocated."""
    hostile = Pickle().add(b"}").text("a").array().add(b"(K\x01K\x01\x85").dtype("S8")
    hostile.add(b"q\x07\x89").raw(b"ABCDEFGH").add(b"tbs").text("b").add(b"h\x07(K\x03").text("|")
    return hostile.add(b"NNNJ" + struct.pack("<i", 2**20) + b"K\x01K\x00tbs.")


@pytest.mark.parametrize("hostile", [pointers(), grown()], ids=["pointers", "grown"])
def test_no_class_of_numpy_is_read_from_a_pickle(tmp_path: Path, hostile: Pickle) -> None:
    """It is refused before numpy sees it, also where another package has allowed numpy's classes
    for the whole process; the error says where such files come from."""
    allowed = [np.dtype, np.ndarray, type(np.dtype("V")), type(np.dtype("S")), type(np.dtype("O"))]
    file = hostile.file(tmp_path / "state.pt")
    with torch.serialization.safe_globals([*allowed, (_reconstruct, RECONSTRUCT)]):
        with pytest.raises(CheckpointError, match="an earlier version and other programs do not"):
            Reader().load(file)
        assert np.dtype in torch.serialization.get_safe_globals()


RECONSTRUCT = "numpy._core.multiarray._reconstruct"
_reconstruct = np.zeros(1).__reduce__()[0]


def npy(header: str, data: bytes = b"") -> torch.Tensor:
    content = b"\x93NUMPY\x03\x00" + struct.pack("<I", len(header)) + header.encode() + data
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize(
    "stored",
    [
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\0" * 8),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (9,)}", b"\0" * 8),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999,)}"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", b"\0" * 8),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", b"\0" * 9),
        npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}", b"\0" * 8),
        npy("{'descr': '|V0', 'fortran_order': False, 'shape': (4611686018427387904,)}"),
        npy("{'descr': (), 'fortran_order': False, 'shape': (1,)}", b"\0" * 8),
        npy("{'descr': ("),
        npy("__import__('os').abort()"),
        torch.frombuffer(bytearray(b"\x93NUMPY\x01\x00\x02\x00 ("), dtype=torch.uint8),
        torch.zeros(1, dtype=torch.uint8).expand(100),
        torch.zeros(3),
        torch.zeros(2, 2, dtype=torch.uint8),
        "text",
    ],
)
def test_what_is_no_array_is_refused(tmp_path: Path, stored: Any) -> None:
    """Objects, other lengths than the bytes have, headers that are not data."""
    state = as_plain(np.zeros(1)) | {"npy": stored}
    torch.save({"of": [state]}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Reader().load(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("kind", "data"),
    [("|O", b"\0" * 8), ("<f8", b"\0" * 7), ("i8,O", b"\0" * 16), ("f8", "text"), ("what", b"x")],
)
def test_what_is_no_number_is_refused(tmp_path: Path, kind: str, data: Any) -> None:
    """Objects, other lengths than the type has, types that there are not."""
    number = dict(zip(as_plain(np.float64(1)), (kind, data), strict=True))
    torch.save({"of": number}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Reader().load(tmp_path / "state.pt")


def test_a_state_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """Not with an error of Python's."""
    hostile = Pickle().add(b"]" * 100_000 + b"a" * 99_999 + b".")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        Reader().load(hostile.file(tmp_path / "state.pt"))
