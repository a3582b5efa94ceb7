"""Placements on layers of the real model: the oracle's greedy tokens, equal bits for page sizes.

Prompts of 1, 15, 16, 17 and 500 tokens share one batch. The oracle is the recompute placement fed
with a variant's own text: where it would choose each next token itself, it would have written the
same text.
"""

import dataclasses
import importlib.resources

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.inference import head
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session

pytestmark = pytest.mark.real_model

BOUND = 1e-4  # of the largest logit: DESIGN section 5, lossless variants
LENGTHS, STEPS = (1, 15, 16, 17, 500), 8
MAX_LENGTH = max(LENGTHS) + STEPS


@pytest.fixture(scope="module")
def model(smollm2_layers):
    return smollm2_layers


@pytest.fixture(scope="module")
def prompts(model):
    """Pieces of the English text, by slot."""
    text = importlib.resources.files("kvlab.research").joinpath("texts/english.txt").read_text()
    ids = model.tokenizer.encode(text)
    starts = np.cumsum([700, *LENGTHS[:-1]])
    return {
        slot: ids[start : start + length]
        for slot, (start, length) in enumerate(zip(starts, LENGTHS, strict=True))
    }


def session_of(model, placement, **fields):
    fields = {"slots": len(LENGTHS), "max_length": MAX_LENGTH, "chunk": 64, **fields}
    session = Session(
        model.params,
        InferenceConfig(model.config, CacheSpec(placement), decode_steps=STEPS, **fields),
    )
    if isinstance(placement, Paged):  # pages of a sequence do not lie side by side, nor in order
        session.warm_up()
        (table,) = session.cache.tables
        mixed = np.random.default_rng(placement.page_size).permutation(table.num_pages)
        table = dataclasses.replace(table, free_pages=jnp.asarray(mixed, jnp.int32))
        session.cache = dataclasses.replace(session.cache, tables=(table,))
    return session


@pytest.fixture(scope="module")
def baseline(model, prompts, tiny):
    return tiny.trace(session_of(model, Paged(16)), prompts, STEPS)


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_page_sizes_agree_in_bits_on_permuted_pages(page_size, model, prompts, baseline, tiny):
    trace = tiny.trace(session_of(model, Paged(page_size)), prompts, STEPS)
    assert trace.tokens == baseline.tokens
    np.testing.assert_array_equal(trace.logits, baseline.logits)


def test_slots_neighbours_and_forks_do_not_change_a_bit(model, prompts, baseline, tiny):
    session = session_of(model, Paged(16))
    session.prefill({4: prompts[2], 1: prompts[3], 3: prompts[4][:40]})
    session.fork(1, [0])
    trace = tiny.continued(session, [4, 1, 0, 3], STEPS)
    for slot, same in {4: 2, 1: 3, 0: 3}.items():
        assert trace.tokens[slot] == baseline.tokens[same]
        np.testing.assert_array_equal(trace.logits[:, slot], baseline.logits[:, same])


def test_contiguous_and_paged_write_what_recompute_would(model, prompts, baseline, tiny):
    contiguous = tiny.trace(session_of(model, Contiguous()), prompts, STEPS)
    oracle = session_of(model, Recompute(), slots=1, chunk=MAX_LENGTH)
    clear_positions = 0
    for slot, prompt in prompts.items():
        text = [*prompt, *baseline.tokens[slot]]
        hidden = oracle.prefill([text])[0][len(prompt) - 1 :]
        oracle.release()
        logits = np.asarray(head(model.params, model.config, jnp.asarray(hidden)))
        bound = BOUND * np.abs(logits).max()
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        clear = (first - second) > bound
        clear_positions += clear.sum()
        for trace in (baseline, contiguous):
            assert trace.tokens[slot] == baseline.tokens[slot]
            np.testing.assert_allclose(trace.logits[:, slot], logits, rtol=0, atol=bound)
            best = trace.logits[:, slot].argmax(-1)
            np.testing.assert_array_equal(best[clear], logits.argmax(-1)[clear])
    assert clear_positions >= 40  # of 45


def test_all_placements_decode_the_same_greedy_tokens_in_one_batch(model, prompts, baseline):
    tokens = {}
    for placement in (Recompute(), Contiguous()):
        whole = {"chunk": MAX_LENGTH} if placement == Recompute() else {}
        session = session_of(model, placement, **whole)
        session.prefill(prompts)
        tokens[placement] = session.decode(2)  # a step of recompute computes all texts again
    for slot in prompts:
        for continued in tokens.values():
            assert continued[slot].tokens == baseline.tokens[slot][:2]
