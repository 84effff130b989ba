"""Pattern strings: every one reads and writes back; bad ones say what is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxaccel.models.config import repeated_runs
from jaxaccel.models.hybrid_pattern import SYMBOLS, HybridPattern


QUICK = settings(max_examples=100, deadline=None, derandomize=True)
symbols = st.text(st.sampled_from("".join(SYMBOLS)), min_size=1, max_size=30)
strings = st.builds(
    lambda stages, block, depth: "|".join(stages) + f"/{block}" * depth,
    st.lists(symbols, min_size=1, max_size=4),
    symbols,
    st.integers(0, 3),
)


@QUICK
@given(strings)
def test_reading_and_writing_are_inverse(text):
    pattern = HybridPattern.parse(text)
    assert str(pattern) == text
    assert HybridPattern.parse(str(pattern)) == pattern
    main, *blocks = text.split("/")
    # Counts by symbol, of layers and of the block.
    for symbol, kind in SYMBOLS.items():
        assert pattern.layers.count(kind) == main.count(symbol)
        assert pattern.block.count(kind) == (blocks[0] if blocks else "").count(symbol)
    assert pattern.depth == len(blocks)
    assert len(pattern.cuts) == main.count("|")
    # Each cut stands where its bar does.
    assert [main.replace("|", "", i).index("|") for i in range(main.count("|"))] == (
        list(pattern.cuts)
    )


@QUICK
@given(st.text(st.sampled_from("M*E"), min_size=1, max_size=40))
def test_runs_are_the_layers(text):
    kinds = HybridPattern.parse(text).layers
    runs = repeated_runs(kinds)
    assert sum((run.kinds * run.repeats for run in runs), ()) == kinds
    # No cut is worse than one layer after another.
    assert sum(len(run.kinds) for run in runs) <= len(kinds)


def test_published_patterns_compile_few_layers():
    nano = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    runs = repeated_runs(tuple(nano))
    found = [("".join(run.kinds), run.repeats) for run in runs]
    assert found == [("MEMEM*E", 5), ("ME", 3), ("M*E", 1), ("ME", 4)]


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "stage without layers"),
        ("ME|", "stage without layers"),
        ("MXE", "'X', allowed are M"),
        ("ME/", "block without layers"),
        ("ME/*E/*-", "must be equal"),
        ("ME/*|E", r"has '\|'"),
    ],
)
def test_what_is_no_pattern(text, match):
    with pytest.raises(ValueError, match=match):
        HybridPattern.parse(text)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"layers": ()}, "at least one layer"),
        ({"layers": ("conv",)}, "'conv'"),
        ({"cuts": (0,)}, r"cuts=\(0,\)"),
        ({"cuts": (2, 1)}, r"cuts=\(2, 1\)"),
        ({"depth": 1}, "depth=1"),
        ({"block": ("moe",)}, "depth=0"),
    ],
)
def test_fields_are_checked(changes, match):
    with pytest.raises(ValueError, match=match):
        HybridPattern(**{"layers": ("mamba", "moe", "mlp"), **changes})
