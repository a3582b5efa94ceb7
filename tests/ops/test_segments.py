"""Texts of a row: places in their own text, and who sees whom."""

import jax.numpy as jnp
import numpy as np

from kvlab.ops.segments import segment_mask, segment_positions

SEGMENTS = jnp.asarray([[1, 1, 1, 2, 3, 3, 0], [1, 1, 0, 0, 0, 0, 0]], jnp.int32)


def test_positions_begin_anew_with_every_text():
    want = [[0, 1, 2, 0, 0, 1, 0], [0, 1, 0, 1, 2, 3, 4]]
    assert np.array_equal(segment_positions(SEGMENTS), want)


def test_a_token_sees_its_own_text_alone():
    mask = np.asarray(segment_mask(SEGMENTS, SEGMENTS))
    for row, segments in zip(mask, np.asarray(SEGMENTS), strict=True):
        for query, of_query in enumerate(segments):
            for key, of_key in enumerate(segments):
                assert row[query, key] == (of_query == of_key != 0)
