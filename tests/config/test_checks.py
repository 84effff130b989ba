"""What fits an annotation, what is converted, and what is refused."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import pytest

from jaxaccel.config.checks import Mismatch, accepts_text, coerce


@runtime_checkable
class Reads(Protocol):
    def read(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Book:
    def read(self) -> str:
        return ""


type Size = int | Literal["auto"]


@pytest.mark.parametrize(
    "value, annotation, expected",
    [
        (3, int, 3),
        (3, float, 3.0),
        (0.5, float, 0.5),
        (True, bool, True),
        ("x", str, "x"),
        (None, int | None, None),
        (3, int | None, 3),
        (3, float | None, 3.0),
        (3, float | int, 3),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ([1, 2], tuple[float, int], (1.0, 2)),
        ([[1], [2, 3]], tuple[tuple[int, ...], ...], ((1,), (2, 3))),
        ((1, 2), Sequence[int], (1, 2)),
        ([1, [2]], Any, (1, (2,))),
        ({"a": 1}, Mapping[str, float], {"a": 1.0}),
        ("b", Literal["a", "b"], "b"),
        ("auto", Size, "auto"),
        (7, Annotated[Size, "pixels"], 7),
        (len, Callable[[str], int], len),
        (int, type[int], int),
        (Book(), Reads, Book()),
        ((Book(),), tuple[Reads, ...], (Book(),)),
    ],
)
def test_what_fits(value, annotation, expected):
    result = coerce(value, annotation)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    "value, annotation, message",
    [
        ("16", int, "expected int, got str '16'"),
        (1.0, int, "expected int, got float 1.0"),
        (True, int, "expected int, got bool True"),
        (1, bool, "expected bool, got int 1"),
        (False, float, "expected float, got bool False"),
        (None, int, "expected int, got NoneType None"),
        ("3", int | None, "expected int, got str '3'"),
        ("3", int | float, r"expected int \| float, got str '3'"),
        ("c", Literal["a", "b"], "allowed are 'a', 'b', got 'c'"),
        (True, Literal[1], "allowed are 1, got True"),
        ("abc", tuple[str, ...], "got str 'abc'"),
        ([1, "2"], tuple[int, ...], "expected int, got str '2'"),
        ([1], tuple[int, int], "expected 2 items, got 1"),
        ({"a": "b"}, dict[str, int], "expected int"),
        (3, Reads, "expected Reads, got int 3"),
        (3, Callable[[], int], "expected a function"),
    ],
)
def test_what_does_not_fit_is_told(value, annotation, message):
    with pytest.raises(Mismatch, match=message):
        coerce(value, annotation)


def test_where_a_bare_word_may_be_a_string():
    assert accepts_text(str)
    assert accepts_text(str | None)
    assert accepts_text(Literal["a"] | int)
    assert not accepts_text(int | None)
    assert not accepts_text(tuple[str, ...])
