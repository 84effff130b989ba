"""The pipeline: batches are what they claim, resume and sharding are exact."""

import collections
import dataclasses
import json
import signal
import subprocess
import sys

import grain
import numpy as np
import pytest

from jaxaccel.data.corpus import Corpus
from jaxaccel.data.pipeline import DataConfig, make_iterator, prepare
from jaxaccel.data.sources import InMemorySource, StdlibSource, TextFolderSource
from jaxaccel.data.tokenizer import ByteTokenizer, train_bpe
from jaxaccel.data.worker import exit_with_parent


FIELDS = ("tokens", "targets", "segment_ids", "positions", "loss_mask", "num_bytes")


def _texts(count=40):
    # Each document is one letter run and its own number, so that a leak shows.
    rng = np.random.default_rng(0)
    return tuple(
        f"{n:03d}" + chr(97 + n % 26) * int(rng.integers(0, 30)) for n in range(count)
    )


def _config(**changes):
    defaults = {
        "sources": (InMemorySource(texts=_texts()),),
        "tokenizer": "byte",
        "seq_len": 48,
        "batch_size": 4,
        "heldout_fraction": 0.2,
        "prefetch": 0,
    }
    return DataConfig(**{**defaults, **changes})


def _take(iterator, count):
    return [next(iterator) for _ in range(count)]


def _assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(batch, field), getattr(other, field))


def _documents(batches):
    """Texts of the documents in batches, by their segments."""
    found = []
    for batch in batches:
        for row in range(batch.tokens.shape[0]):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                is_here = batch.segment_ids[row] == segment
                found.append(ByteTokenizer().decode(batch.tokens[row][is_here]))
    return found


@pytest.mark.parametrize("align", [1, 16])
def test_batches_are_what_packed_batch_says(align):
    config = _config(align=align)
    corpus = prepare(config)
    for batch in _take(make_iterator(corpus, config), 8):
        for field in FIELDS:
            array = getattr(batch, field)
            is_float = field in ("loss_mask", "num_bytes")
            assert array.dtype == (np.float32 if is_float else np.int32)
            assert array.shape == (4, 48)
        is_real = batch.segment_ids > 0
        for field in FIELDS:
            assert not getattr(batch, field)[~is_real].any()
        assert ((batch.positions == 0) & is_real).sum() == batch.segment_ids.max(
            1
        ).sum()
        starts = np.nonzero((batch.positions == 0) & is_real)[1]
        assert (starts % align == 0).all()
        goes_on = np.zeros_like(is_real)
        goes_on[:, :-1] = is_real[:, 1:] & (np.diff(batch.segment_ids) == 0)
        np.testing.assert_array_equal(batch.loss_mask, goes_on.astype(np.float32))
        np.testing.assert_array_equal(
            batch.targets, np.where(goes_on, np.roll(batch.tokens, -1, 1), 0)
        )
        np.testing.assert_array_equal(np.diff(batch.positions)[goes_on[:, :-1]], 1)
        # One byte for each byte token; the eos id stands for none.
        is_text = goes_on & (batch.targets != corpus.tokenizer.eos_id)
        np.testing.assert_array_equal(batch.num_bytes, is_text.astype(np.float32))


def test_a_heldout_pass_is_every_heldout_document_once():
    config = _config()
    corpus = prepare(config)
    iterator = make_iterator(corpus, config, "heldout")
    count = iterator.num_batches
    batches = list(iterator)
    assert len(batches) == count
    assert collections.Counter(_documents(batches)) == collections.Counter(
        corpus.texts("heldout")
    )
    with pytest.raises(StopIteration):
        next(iterator)
    assert all(batch.tokens.shape == (4, 48) for batch in batches)


def test_each_train_epoch_is_every_train_document_once_in_a_new_order():
    config = _config(batch_size=1, sources=(InMemorySource(texts=_texts(12)),))
    corpus = prepare(config)
    iterator = make_iterator(corpus, config)
    epochs = collections.defaultdict(list)
    while iterator.epoch < 3:
        epochs[iterator.epoch] += _documents(_take(iterator, 1))
    texts = collections.Counter(corpus.texts("train"))
    assert [collections.Counter(epochs[e]) for e in range(3)] == [texts] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_splits_are_disjoint_and_cover_the_corpus():
    corpus = prepare(_config())
    train, heldout = corpus.documents("train"), corpus.documents("heldout")
    assert sorted([*train, *heldout]) == list(range(40))
    assert 0 < len(heldout) < len(train)
    assert sorted([*corpus.texts("train"), *corpus.texts("heldout")]) == list(_texts())
    summary = corpus.summary()
    tokens = sum(part["tokens"] for part in summary.values())
    assert tokens == sum(len(text) + 1 for text in _texts())
    assert sum(part["bytes"] for part in summary.values()) == tokens - 40


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("taken", [0, 1, 3, 17])
def test_resume_is_exact_in_and_across_epochs(taken, prefetch):
    config = _config(prefetch=prefetch, max_docs=3)
    corpus = prepare(config)
    with make_iterator(corpus, config) as iterator:
        _take(iterator, taken)
        state = json.loads(json.dumps(iterator.get_state()))
        rest = _take(iterator, 9)
        iterator.set_state(state)
        _assert_same(_take(iterator, 9), rest)
        assert iterator.epoch >= 2
    with make_iterator(corpus, config, start=state) as fresh:
        assert fresh.get_state() == state
        _assert_same(_take(fresh, 9), rest)


def test_the_state_does_not_grow():
    config = _config(batch_size=64)
    iterator = make_iterator(prepare(config), config)
    _take(iterator, 2)
    before = len(json.dumps(iterator.get_state()))
    _take(iterator, 6)
    assert iterator.epoch > 20
    assert len(json.dumps(iterator.get_state())) <= before + 6


def test_a_heldout_pass_resumes():
    config = _config()
    corpus = prepare(config)
    iterator = make_iterator(corpus, config, "heldout")
    next(iterator)
    state = iterator.get_state()
    rest = list(iterator)
    assert iterator.get_state()["batch"] == iterator.num_batches
    iterator.set_state(state)
    _assert_same(list(iterator), rest)


def test_worker_processes_change_nothing(tmp_path):
    config = _config(batch_size=4)
    corpus = prepare(config, tmp_path)
    plain = make_iterator(corpus, config)
    _take(plain, 5)
    state = plain.get_state()
    expected = _take(plain, 9)
    config = dataclasses.replace(config, num_workers=2, prefetch=1)
    with make_iterator(corpus, config, start=state) as iterator:
        _assert_same(_take(iterator, 5), expected[:5])
        plain.set_state(json.loads(json.dumps(iterator.get_state())))
    _assert_same(_take(plain, 4), expected[5:])


def test_workers_watch_their_parent(monkeypatch):
    given = []

    def prefetch(dataset, options, worker_init_fn=None):
        given.append((options.num_workers, worker_init_fn))
        return dataset

    monkeypatch.setattr(grain.IterDataset, "mp_prefetch", prefetch)
    config = _config(num_workers=2)
    next(make_iterator(prepare(config), config))
    assert given == [(2, exit_with_parent)]


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, os, signal, time\n"
        "from jaxaccel.data.worker import exit_with_parent\n"
        "def work(pipe):\n"
        "    exit_with_parent(0, 1)\n"
        "    pipe.send('works')\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    here, there = context.Pipe()\n"
        "    context.Process(target=work, args=(there,), daemon=True).start()\n"
        "    print(here.recv(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The worker holds its parent's output open, so reading ends when both are gone.
    done = subprocess.run(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, timeout=20
    )
    assert (done.stdout, done.returncode) == ("works\n", -signal.SIGKILL)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_processes_together_read_what_one_reads(split):
    config = _config()
    corpus = prepare(config)
    count = make_iterator(corpus, config, "heldout").num_batches
    count = count if split == "heldout" else 9
    whole = _take(make_iterator(corpus, config, split), count)
    for processes in (2, 4):
        parts = [
            make_iterator(
                corpus, config, split, process_index=i, process_count=processes
            )
            for i in range(processes)
        ]
        for batch in whole:
            shares = [next(part) for part in parts]
            for field in FIELDS:
                joined = np.concatenate([getattr(share, field) for share in shares])
                np.testing.assert_array_equal(joined, getattr(batch, field))
        assert len({json.dumps(part.get_state()) for part in parts}) == 1


def test_a_state_moves_between_process_counts():
    config = _config()
    corpus = prepare(config)
    one = make_iterator(corpus, config)
    _take(one, 7)
    second = make_iterator(
        corpus, config, process_index=1, process_count=2, start=one.get_state()
    )
    np.testing.assert_array_equal(next(second).tokens, next(one).tokens[2:])


def test_seeds_differ_and_repeat():
    config = _config()
    corpus = prepare(config)
    first, again = (_take(make_iterator(corpus, config), 3) for _ in range(2))
    _assert_same(first, again)
    other = make_iterator(corpus, dataclasses.replace(config, seed=1))
    assert (next(other).tokens != first[0].tokens).any()


def test_mixture_of_two_sources_by_tokens():
    letters = InMemorySource(texts=("a" * 9,) * 50, names=tuple(map(str, range(50))))
    digits = InMemorySource(texts=("1" * 19,) * 50)
    config = _config(
        sources=(letters, digits), weights=(0.5, 0.5), heldout_fraction=0.0, seq_len=40
    )
    corpus = prepare(config)
    counts = np.zeros(256)
    iterator = make_iterator(corpus, config)
    while iterator.epoch < 2:
        tokens = next(iterator).tokens
        counts += np.bincount(tokens[tokens < 256], minlength=256)
    share = counts[ord("a")] / (counts[ord("a")] + counts[ord("1")])
    assert share == pytest.approx(9 / (9 + 9.5), abs=0.04)


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        ("split", ["x" * 48, "x" * 48, "x" * 4, "ab"]),
        ("truncate", ["x" * 48, "ab"]),
        ("drop", ["ab"]),
    ],
)
def test_documents_longer_than_a_row(overlong, expected):
    config = _config(
        sources=(InMemorySource(texts=("x" * 100, "ab")),),
        heldout_fraction=0.0,
        append_eos=False,
        overlong=overlong,
        batch_size=1,
    )
    iterator = make_iterator(prepare(config), config)
    found = []
    while iterator.epoch == 0:
        found += _documents(_take(iterator, 1))
    assert sorted(found) == sorted(expected)


def test_a_document_too_long_is_refused_by_name_before_training():
    source = InMemorySource(texts=("x" * 100, "ab"), names=("big.txt", "b.txt"))
    config = _config(sources=(source,), heldout_fraction=0.0, overlong="error")
    corpus = prepare(config)
    with pytest.raises(ValueError, match=r"document 'big\.txt' has 101 tokens, a row"):
        make_iterator(corpus, config)
    everything_is_long = InMemorySource(texts=("x" * 100,))
    config = _config(
        sources=(everything_is_long,), heldout_fraction=0.0, overlong="drop"
    )
    with pytest.raises(ValueError, match="no row is left of 1 documents"):
        make_iterator(prepare(config), config)


def test_bos_and_eos():
    config = _config(prepend_bos=True, sources=(InMemorySource(texts=("ab",)),))
    config = dataclasses.replace(config, heldout_fraction=0.0)
    corpus = prepare(config)
    tokenizer = corpus.tokenizer
    np.testing.assert_array_equal(
        corpus.tokens(0), [tokenizer.bos_id, ord("a"), ord("b"), tokenizer.eos_id]
    )
    assert next(make_iterator(corpus, config)).num_bytes.sum() == 2 * 4
    # Four rows, because a batch of four is four epochs of one document.


def test_efficiency_is_that_of_the_rows():
    config = _config(batch_size=1)
    iterator = make_iterator(prepare(config), config)
    rows = iterator.packing.num_rows
    real = sum((batch.segment_ids > 0).sum() for batch in _take(iterator, rows))
    iterator.set_state(make_iterator(prepare(config), config).get_state())
    assert iterator.efficiency == pytest.approx(real / (rows * 48))
    assert iterator.efficiency > 0.8


def test_bpe_is_trained_on_the_train_split_only():
    source = StdlibSource(include=("stdlib/json/*",))
    config = _config(sources=(source,), tokenizer="bpe", vocab_size=300)
    corpus = prepare(config)
    trained_on = sorted(corpus.texts("train"))
    assert corpus.tokenizer.vocab_size == 300
    assert corpus.tokenizer.fingerprint == train_bpe(trained_on, 300).fingerprint
    everything = [*trained_on, *corpus.texts("heldout")]
    assert corpus.tokenizer.fingerprint != train_bpe(everything, 300).fingerprint
    batch = next(make_iterator(corpus, config, "heldout"))
    sizes = corpus.tokenizer.token_bytes()[batch.targets] * batch.loss_mask
    np.testing.assert_array_equal(batch.num_bytes, sizes)


def test_the_cache_gives_the_same_corpus_and_follows_the_files(tmp_path):
    texts, cache = tmp_path / "texts", tmp_path / "cache"
    texts.mkdir()
    for n in range(12):
        (texts / f"{n}.txt").write_text(f"document {n} " * 9)
    source = TextFolderSource(path=str(texts))
    config = _config(sources=(source,), tokenizer="bpe", vocab_size=270)
    held = prepare(config)
    built = prepare(config, cache)
    mapped = prepare(config, cache)
    assert len(list(cache.iterdir())) == 1
    for corpus in (built, mapped):
        assert isinstance(corpus, Corpus)
        assert corpus.store.path is not None
        assert corpus.fingerprint == held.fingerprint
        assert corpus.names == held.names
        assert corpus.tokenizer.fingerprint == held.tokenizer.fingerprint
        np.testing.assert_array_equal(corpus.store.tokens, held.store.tokens)
        np.testing.assert_array_equal(corpus.heldout, held.heldout)
    _assert_same(
        _take(make_iterator(mapped, config), 3), _take(make_iterator(held, config), 3)
    )
    (texts / "0.txt").write_text("changed")
    assert prepare(config, cache).fingerprint != held.fingerprint
    assert len(list(cache.iterdir())) == 2
    # What concerns packing alone shares the tokens.
    prepare(dataclasses.replace(config, seq_len=8, batch_size=2, seed=3), cache)
    assert len(list(cache.iterdir())) == 2


def test_a_cut_cache_file_is_refused(tmp_path):
    prepare(_config(), tmp_path)
    (file,) = tmp_path.glob("*/tokens.bin")
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens\.bin holds \d+ tokens, expected"):
        prepare(_config(), tmp_path)


def test_a_failed_build_leaves_nothing_in_the_cache(tmp_path):
    config = _config(sources=(InMemorySource(texts=("a",), min_chars=9),))
    with pytest.raises(ValueError, match="no document is left of 1"):
        prepare(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_or_given_tokenizer_is_used(tmp_path):
    tokenizer = train_bpe(_texts(), 265)
    tokenizer.save(tmp_path / "tokenizer.json")
    config = _config(tokenizer=str(tmp_path / "tokenizer.json"))
    from_file, given = prepare(config), prepare(_config(), tokenizer=tokenizer)
    assert from_file.fingerprint == given.fingerprint
    assert from_file.tokenizer.fingerprint == tokenizer.fingerprint
    with pytest.raises(FileNotFoundError, match="tokenizer is 'bytes'"):
        prepare(_config(tokenizer="bytes"))


def test_states_of_other_streams_are_refused():
    config = _config()
    corpus = prepare(config)
    state = make_iterator(corpus, config).get_state()
    for change, message in (
        ({"seq_len": 64}, "seq_len 48 -> 64"),
        ({"seed": 1, "align": 2}, "align 1 -> 2, seed 0 -> 1"),
    ):
        other = dataclasses.replace(config, **change)
        with pytest.raises(ValueError, match=message):
            make_iterator(corpus, other, start=state)
    with pytest.raises(ValueError, match="split 'train' -> 'heldout'"):
        make_iterator(corpus, config, "heldout", start=state)
    with pytest.raises(ValueError, match="corpus '"):
        make_iterator(prepare(_config(append_eos=False)), config, start=state)
    with pytest.raises(ValueError, match="version 0"):
        make_iterator(corpus, config, start={**state, "version": 0})


def test_empty_splits_are_refused():
    config = _config(heldout_fraction=0.0)
    with pytest.raises(ValueError, match="heldout split of 40 documents is empty"):
        make_iterator(prepare(config), config, "heldout")
    config = _config(sources=(InMemorySource(texts=("a",)),), heldout_fraction=0.999999)
    with pytest.raises(ValueError, match="train split of 1 documents is empty"):
        prepare(config)
    with pytest.raises(ValueError, match="train split is empty"):
        prepare(dataclasses.replace(config, tokenizer="bpe"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "sources is empty"),
        ({"weights": (1.0, 2.0)}, "2 weights for 1 sources"),
        ({"seq_len": -1}, "seq_len is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"window": 0}, "window is 0"),
        ({"max_docs": 0}, "max_docs is 0"),
        ({"align": 0}, "align is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"packing": "bdf"}, "packing is 'bdf', allowed are"),
        ({"overlong": "cut"}, "overlong is 'cut', allowed are"),
        ({"weight_unit": "bytes"}, "weight_unit is 'bytes', allowed are"),
        ({"mixture_end": "never"}, "mixture_end is 'never', allowed are"),
        ({"heldout_fraction": 1.0}, r"heldout fraction is 1\.0"),
    ],
)
def test_bad_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        _config(**changes)


def test_bad_process_layouts_are_named():
    config = _config()
    corpus = prepare(config)
    with pytest.raises(ValueError, match="batch_size 4 does not divide by 3"):
        make_iterator(corpus, config, process_count=3)
    with pytest.raises(ValueError, match=r"process_index is 2, must be in \[0, 2\)"):
        make_iterator(corpus, config, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="split is 'test'"):
        make_iterator(corpus, config, "test")
