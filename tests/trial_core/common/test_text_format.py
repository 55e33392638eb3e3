"""Names as keys, and numbers."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trial_core.common.text_format import finite_numbers, number, rate, unique_slug


def test_a_key_that_needs_no_change_stays() -> None:
    """Keys of stored objects outlive releases."""
    for name in ("evaluation-gpt-large", "trial-gpt-0000beef", "a--b-"):
        assert unique_slug(name) == name


def test_different_names_have_different_keys() -> None:
    """Also names that only differ in case, punctuation or script, or in their last letters."""
    names = [
        "gpt-large",
        "gpt_large",
        "GPT large",
        "売上予測",
        "在庫予測",
        "a" * 300,
        "a" * 301,
        "",
    ]
    for one, other in combinations(names, 2):
        assert unique_slug(one) != unique_slug(other)


@settings(max_examples=25)
@given(st.text())
def test_a_key_has_letters_digits_and_dashes(name: str) -> None:
    """Prefect refuses other keys of artifacts."""
    assert set(unique_slug(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_numbers_have_the_digits_that_mean_something() -> None:
    """Four significant ones, and never fewer than the whole part has."""
    shown = {0.0: "0", 0.25: "0.25", 0.0314159: "0.03142", 48.676: "48.68", 999.96: "1000",
             3.7: "3.7", 3.69996: "3.700", 0.99996: "1.000",
             2.5e-07: "2.5e-07", 12345.678: "12346", -48676.2: "-48676",
             3.2e9: "3.2e+09"}  # fmt: skip
    assert {value: number(value) for value in shown} == shown
    assert [number(value) for value in (float("nan"), float("-inf"), 7, "x")] == [
        "nan", "-inf", "7", "x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([0.25, 1], "[0.25, 1]"),
        ([[1, 2], [3, 4]], "[[1, 2], [3, 4]]"),
        ([0.5] * 7, "[7: mean 0.5, 0.5 to 0.5]"),
        ([[[0, 1], [2, 3]]] * 3, "[3×2×2: mean 1.5, 0 to 3]"),
        ([[1] * 9, [2]], "[10 numbers: mean 1.1, 1 to 2]"),
        (["a"] * 7, str(["a"] * 7)),
        ([[1.0, None]] * 7, str([[1.0, None]] * 7)),
        ([[1, 2, 3], [4, 5], [6, 7, 8, 9]], "[9 numbers: mean 5, 1 to 9]"),
        ([math.inf, -math.inf] * 4, "[8: mean nan, -inf to inf]"),
        ([1e308] * 8, "[8: mean nan, 1e+308 to 1e+308]"),
        ([], "[]"),
        ([math.nan] * 7, "[7: mean nan, nan to nan]"),
    ],
)
def test_a_large_array_is_shown_by_its_shape_mean_and_range(value: Any, shown: str) -> None:
    """A small one whole; and one with anything else than numbers."""
    assert number(value) == shown


def test_json_has_only_finite_numbers() -> None:
    """Others are null, also a whole one that no float can hold; what is no number is left out."""
    metrics = {
        "loss": 0.5, "nan": math.nan, "inf": math.inf, "flag": True, "table": [1, 2], "n": 3,
        "huge": 10**400,
    }  # fmt: skip
    finite = {"loss": 0.5, "nan": None, "inf": None, "n": 3, "huge": None}
    assert finite_numbers(metrics) == finite


def test_rates_have_few_digits() -> None:
    """Tokens are many: thousands and millions have letters."""
    shown = {2.5: "2.5 x", 125.0: "125 x", 9999.0: "9999 x", 10_400.0: "10.4k x",
             105_472.0: "105k x", 1_250_000.0: "1.2M x"}  # fmt: skip
    assert {value: rate(value, "x") for value in shown} == shown
