"""Packing: nothing lost, nothing twice, nothing overlapping, and how dense it is."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data.packing import ALGORITHMS, pack


_SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


def _lengths(row_length, count=20_000):
    """The documents of the published table: lognormal, median 600, sigma 1."""
    rng = np.random.default_rng(0)
    drawn = np.exp(rng.normal(np.log(600), 1.0, count))
    return np.clip(drawn.astype(np.int64), 16, row_length)


@_SETTINGS
@hypothesis.given(
    lengths=st.lists(st.integers(0, 90), max_size=60),
    row_length=st.integers(1, 40),
    algorithm=st.sampled_from(ALGORITHMS),
    window=st.sampled_from([1, 7, None]),
    align=st.sampled_from([1, 3, 8]),
    max_docs=st.sampled_from([1, 2, None]),
    overlong=st.sampled_from(["truncate", "split", "drop"]),
    seed=st.sampled_from([None, 5]),
)
def test_every_token_has_one_place(
    lengths, row_length, algorithm, window, align, max_docs, overlong, seed
):
    packing = pack(
        lengths,
        row_length,
        algorithm=algorithm,
        window=window,
        align=align,
        max_docs=max_docs,
        overlong=overlong,
        seed=seed,
    )
    seen = [np.zeros(length, int) for length in lengths]
    for document, start, length in zip(
        packing.document, packing.start, packing.length, strict=True
    ):
        assert length > 0
        seen[document][start : start + length] += 1
    for length, counts in zip(lengths, seen, strict=True):
        kept = length
        if length > row_length and overlong != "split":
            kept = row_length if overlong == "truncate" else 0
        assert (counts[:kept] == 1).all()
        assert not counts[kept:].any()
    assert packing.dropped_tokens == sum(lengths) - packing.length.sum()

    assert packing.row_starts[-1] == len(packing.length)
    assert (packing.offset % align == 0).all()
    for begin, end in zip(packing.row_starts[:-1], packing.row_starts[1:], strict=True):
        offset, length = packing.offset[begin:end], packing.length[begin:end]
        assert 1 <= end - begin <= (max_docs or end - begin)
        assert (offset[1:] >= offset[:-1] + length[:-1]).all()
        assert offset[-1] + length[-1] <= row_length


@pytest.mark.parametrize(
    ("row_length", "next_fit", "bfd_256", "bfd_1024", "bfd_all"),
    [
        (2048, 0.776, 0.992, 0.998, 1.0),
        (4096, 0.812, 0.989, 0.997, 1.0),
        (8192, 0.871, 0.983, 0.995, 1.0),
        (32768, 0.960, 0.936, 0.982, 1.0),
    ],
)
def test_density_on_documents_of_realistic_lengths(
    row_length, next_fit, bfd_256, bfd_1024, bfd_all
):
    lengths = _lengths(row_length)

    def density(**options):
        return pack(lengths, row_length, **options).efficiency

    assert density(algorithm="next_fit") == pytest.approx(next_fit, abs=0.01)
    # At 32,768 a window of 256 fills eight rows only, so the last one weighs much.
    assert density(window=256) == pytest.approx(bfd_256, abs=0.01)
    assert density(window=1024) == pytest.approx(bfd_1024, abs=0.003)
    assert density(window=None) == pytest.approx(bfd_all, abs=0.002)


def test_first_fit_lies_between():
    lengths = _lengths(4096, 4000)
    first, following, best = (
        pack(lengths, 4096, algorithm=name).efficiency
        for name in ("first_fit", "next_fit", "bfd")
    )
    assert following < first < best


def test_rows_are_shuffled_by_seed_and_the_same_for_the_same_seed():
    lengths = _lengths(2048, 500)
    one, again, other = (list(pack(lengths, 2048, seed=s).rows()) for s in (1, 1, 2))
    assert one == again != other
    assert sorted(one) == sorted(other)


def test_no_document_gives_no_row():
    packing = pack([], 8)
    assert packing.num_rows == 0
    assert packing.efficiency == 0.0
    assert list(packing.rows()) == []


def test_a_document_that_fills_the_row_and_one_token_more():
    assert list(pack([8], 8).rows()) == [[(0, 0, 8)]]
    assert list(pack([9], 8, overlong="split").rows()) == [[(0, 0, 8)], [(0, 8, 1)]]
    assert list(pack([9], 8, overlong="truncate").rows()) == [[(0, 0, 8)]]
    assert list(pack([9, 2], 8, overlong="drop").rows()) == [[(1, 0, 2)]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "best"}, "algorithm is 'best', allowed are"),
        ({"overlong": "cut"}, "overlong is 'cut', allowed are"),
        ({"row_length": 0}, "row_length is 0"),
        ({"align": 0}, "align is 0"),
        ({"window": 0}, "window is 0"),
        ({"max_docs": -1}, "max_docs is -1"),
        ({"lengths": [3, -2]}, "document 1 has length -2"),
        ({"lengths": [3, 9]}, "document 1 has 9 tokens, a row holds 8"),
        ({"lengths": [9], "names": ["a.txt"]}, "document 'a.txt' has 9 tokens"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        pack(**{"lengths": [1], "row_length": 8, **options})
