"""The checkify mode, through the model's own programs: sequence and page are named."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kvlab.ops.retention import H2O
from kvlab.ops.sampling import Sampling, SamplingParams
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research import inference, sequences
from kvlab.research.cache import unwrapped
from kvlab.research.programs import stop_array

CASES = {
    "paged": CacheSpec(Paged(8)),
    "by head": CacheSpec(Paged(8), retention=H2O(40, recent=5)),
}


def with_page(cache, row, column, page):
    """The cache, whose row maps another page in one place."""
    (table,) = cache.tables
    inner, heads = unwrapped(table)
    inner = dataclasses.replace(inner, page_indices=inner.page_indices.at[row, column].set(page))
    table = inner if heads == 1 else dataclasses.replace(table, table=inner)
    return dataclasses.replace(cache, tables=(table,))


@functools.cache
def checked_decode(tiny, case):
    config = tiny.config("gqa", CASES[case])
    params = tiny.params("gqa")
    sampling = SamplingParams.from_requests([Sampling()] * config.slots)
    stops = stop_array([()] * config.slots)
    forced = jnp.zeros((config.slots, config.decode_steps), jnp.int32)

    def decode(cache, logits, limits):
        none = jnp.zeros_like(limits)
        return inference.decode(
            params, config, cache, logits, sampling, limits, stops, forced, none
        )

    return jax.jit(checkify.checkify(decode))


@pytest.mark.parametrize("case", CASES)
def test_decode_names_the_sequence_whose_page_is_none_of_its_own(case, tiny):
    """A page that is only read, in sequence 1; where heads are rows, row 2 is its first."""
    session = tiny.session("gqa", CASES[case])
    session.prefill({0: tiny.prompt(15), 1: tiny.prompt(17)})
    limits = jnp.asarray([1, 1, 0, 0, 0], jnp.int32)
    error, _ = checked_decode(tiny, case)(session.cache, session.logits, limits)
    error.throw()  # nothing is wrong yet
    row = 1 if case == "paged" else 2
    for page in (999, 20):  # no page of the pool, and a free one
        broken = with_page(session.cache, row, 0, page)
        error, _ = checked_decode(tiny, case)(broken, session.logits, limits)
        with pytest.raises(checkify.JaxRuntimeError, match=f"sequence 1 maps page {page}"):
            error.throw()


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_that_is_released_twice_is_named(case, tiny):
    session = tiny.session("gqa", CASES[case])
    session.prefill({0: tiny.prompt(15), 1: tiny.prompt(17)})
    session.release([1])
    release = checkify.checkify(sequences.release)
    error, _ = release(session.cache, jnp.asarray(np.arange(5) == 1))
    with pytest.raises(checkify.JaxRuntimeError, match="sequence 1 is released twice"):
        error.throw()
