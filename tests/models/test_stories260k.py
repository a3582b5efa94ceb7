"""A trained model, from a file of another project, tells its story."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.models.decoder import Decoder

LENGTH = 80  # positions of the one compiled shape; later ones change nothing before them


@pytest.fixture(scope="module")
def greedy_ids(stories260k):
    """Greedy ids from BOS by whole forward passes, LENGTH of them."""
    config, params, _ = stories260k

    @jax.jit
    def forward(tokens: jax.Array) -> jax.Array:
        return Decoder(config).apply({"params": params}, tokens, method="forward")

    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, 0] = 1
    for place in range(1, LENGTH):
        tokens[0, place] = forward(jnp.asarray(tokens))[0, place - 1].argmax()
    return tokens[0].tolist()


def test_the_first_greedy_ids(greedy_ids, stories260k):
    *_, script = stories260k
    assert tuple(greedy_ids[: len(script.FIRST_IDS)]) == script.FIRST_IDS


def test_the_greedy_text(greedy_ids, stories260k, data_path):
    *_, script = stories260k
    pieces = script.load_pieces(data_path("tinylm/stories260K/tok512.bin"))
    assert len(pieces) == 512
    text = script.decode(pieces, greedy_ids[1:])
    assert text.startswith(script.FIRST_TEXT), text
