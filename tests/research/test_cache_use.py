"""The bytes of a cache, measured from its arrays, against counts made by hand."""

import jax
import pytest

from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.cache import cache_use
from kvlab.research.session import Session

TOKEN_BYTES = 2 * 2 * 2 * 10 * 4  # keys and values, 2 layers, K = 2, H = 10, float32


def array_bytes(session):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(session.cache.layers))


def test_a_new_cache_is_allocated_and_holds_nothing(tiny):
    session = tiny.session("gqa", Paged(8))
    use = session.use()
    assert use.allocated_bytes == array_bytes(session) == tiny.few_pages * 8 * TOKEN_BYTES
    assert session.cache.nbytes() == use.allocated_bytes
    assert use.bytes_per_token == TOKEN_BYTES
    assert use.used_bytes == 0
    assert use.waste == 0


def test_pages_waste_the_rest_of_their_last_one(tiny):
    session = tiny.session("gqa", Paged(8))
    session.prefill({0: tiny.prompt(17), 3: tiny.prompt(8)})  # 3 pages and 1
    use = session.use()
    assert use.used_bytes == 25 * TOKEN_BYTES
    assert use.waste == pytest.approx(1 - 25 / 32)
    session.decode(3)
    assert session.use().used_bytes == 31 * TOKEN_BYTES
    assert session.use().waste == pytest.approx(1 - 31 / 40)
    session.release([0])
    assert session.use().used_bytes == 11 * TOKEN_BYTES
    assert session.use().waste == pytest.approx(1 - 11 / 16)


def test_a_shared_page_counts_once(tiny):
    session = tiny.session("gqa", Paged(8))
    session.prefill({0: tiny.prompt(17)})
    session.fork(0, [1, 2])
    # Two whole pages shared by three, and the partial one three times.
    assert session.use().used_bytes == (16 + 3) * TOKEN_BYTES
    assert session.use().waste == pytest.approx(1 - 19 / 40)
    session.decode({1: 2})
    assert session.use().used_bytes == (16 + 5) * TOKEN_BYTES
    session.release([0, 2])
    assert session.use().used_bytes == 19 * TOKEN_BYTES


def test_pages_of_one_token_waste_nothing(tiny):
    session = tiny.session("gqa", Paged(1))
    session.prefill({0: tiny.prompt(17), 3: tiny.prompt(8)})
    assert session.use().used_bytes == 25 * TOKEN_BYTES
    assert session.use().waste == 0


def test_contiguous_wastes_the_rest_of_every_row_in_use(tiny):
    session = tiny.session("learned", Contiguous())
    row = 192  # max_length 139 in whole read blocks
    assert session.use().allocated_bytes == array_bytes(session) == 5 * row * TOKEN_BYTES
    assert session.use().bytes_per_token == pytest.approx(TOKEN_BYTES * row / 139)
    assert session.use().waste == 0
    session.prefill({0: tiny.prompt(17), 3: tiny.prompt(8)})
    use = session.use()
    assert use.used_bytes == 25 * TOKEN_BYTES
    assert use.waste == pytest.approx(1 - 25 / (2 * row))


def test_layers_add_up_each_by_its_own_table_and_storage(tiny):
    specs = (CacheSpec(Paged(8)), CacheSpec(Paged(16), "bfloat16"), CacheSpec(Contiguous()))
    config = tiny.config("mixed", specs, num_pages=tiny.few_pages)
    session = Session(tiny.params("mixed"), config)
    bytes_per_token = [2 * 1 * 10 * 4, 2 * 6 * 10 * 2, 2 * 2 * 10 * 4]  # K = 1, 6 and 2
    slots = [tiny.few_pages * 8, tiny.few_pages * 16, 5 * 192]
    use = session.use()
    assert use.allocated_bytes == array_bytes(session)
    assert use.allocated_bytes == sum(n * b for n, b in zip(slots, bytes_per_token, strict=True))
    bytes_per_token[2] *= 192 / 139  # whole read blocks for 139 tokens
    assert use.bytes_per_token == pytest.approx(sum(bytes_per_token))


def test_recompute_holds_nothing_to_measure(tiny):
    session = tiny.session("gqa", Recompute())
    session.prefill({0: tiny.prompt(17)})
    assert session.use() is None
    assert cache_use(session.cache, session.config.layer_specs) is None
    assert session.cache.nbytes() == 0
