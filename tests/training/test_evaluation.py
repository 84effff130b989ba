"""The held-out baseline is counted on the bytes that the model is asked for."""

from jaxaccel.core.sharding import MeshConfig, make_mesh
from jaxaccel.data.pipeline import DataConfig, prepare
from jaxaccel.data.sources import InMemorySource
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.evaluation import Heldout


def test_pieces_cut_inside_a_character_cost_what_their_bytes_cost():
    # Two bytes a character, an odd number of them a row.
    data_config = DataConfig(
        sources=(InMemorySource(texts=tuple("é" * n for n in range(20, 60))),),
        tokenizer="byte",
        heldout_fraction=0.3,
        seq_len=15,
        batch_size=2,
        append_eos=False,
    )
    corpus = prepare(data_config)
    heldout = Heldout(
        corpus, data_config, None, TrainConfig(num_steps=1), make_mesh(MeshConfig())
    )
    assert heldout.batches
    # Every piece repeats one pair of bytes, which train text holds and nothing else.
    assert heldout.byte_bigram() < 0.1
