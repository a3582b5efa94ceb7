"""Retention through prefill and decode: pages freed and taken by others, rows at their limit."""

import dataclasses
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.retention import H2O, Random, Sinks, SnapKV, Window
from kvlab.ops.specs import CacheSpec, Contiguous, Paged
from kvlab.research.cache_axes import load_policy
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.session import Session

BUDGET, PAGED = 19, Paged(8)
POLICIES = [
    Window(BUDGET),
    Sinks(BUDGET, num_sinks=3),
    H2O(BUDGET, recent=5),
    SnapKV(BUDGET, "both", observation=5),
    H2O(BUDGET, recent=5, allocation="per_head"),
    Random(BUDGET),
]
each_policy = pytest.mark.parametrize(
    "policy",
    [
        *POLICIES[1:5],
        *(pytest.param(policy, marks=pytest.mark.long) for policy in (POLICIES[0], POLICIES[5])),
    ],
    ids=repr,
)


def spec_of(policy, placement=PAGED):
    return CacheSpec(placement, retention=policy)


def session_of(tiny, policy):
    """A session of 20 pages of 8 tokens: a prompt of 130 takes 17."""
    return tiny.session("gqa", spec_of(policy), num_pages=20)


def tables(session):
    return [table.table for table in session.cache.all_tables()]


def lengths(session):
    return np.stack([np.asarray(table.lengths) for table in session.cache.all_tables()])


@each_policy
def test_an_eviction_frees_pages_that_another_sequence_takes(policy, tiny):
    heads = 2 if policy.by_head else 1
    session = session_of(tiny, policy)
    for admitted, (slot, length) in enumerate({0: 130, 3: 125, 1: 100}.items()):
        session.prefill({slot: tiny.prompt(length, seed=slot)})
        kept = BUDGET * (admitted + 1) * heads * len(session.cache.all_tables())
        assert lengths(session).sum() == kept  # a row's budget, or that of heads that share it
        for table in tables(session):
            in_use = -(-np.asarray(table.lengths) // 8)
            assert int(table.pages_in_use) == in_use.sum() <= 11 * heads
    taken = [set(np.asarray(table.page_indices).ravel().tolist()) for table in tables(session)]
    assert all(len(pages) > 3 for pages in taken)
    with pytest.raises(ValueError, match="more pages of 8 tokens and"):
        session.prefill({2: tiny.prompt(130)})
    results = session.decode(9)
    assert all(len(result.tokens) == 9 for result in results.values())
    assert lengths(session).sum() == kept  # rows at their limit replace, and take no page
    session.release()
    assert all(int(table.num_free) == table.num_pages for table in tables(session))


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[4]], ids=repr)
def test_contiguous_and_paged_rows_evict_alike(policy, tiny):
    results = []
    contiguous = tiny.session("gqa", spec_of(policy, Contiguous()))
    for session in (session_of(tiny, policy), contiguous):
        session.prefill(tiny.prompts)
        trace = tiny.continued(session, tiny.prompts)
        results.append((trace.tokens, trace.logits, lengths(session)))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])
    np.testing.assert_array_equal(results[0][2], results[1][2])


def test_a_window_of_a_one_layer_model_is_attention_with_that_window(tiny):
    """What is evicted is out of sight: logits are those of a model whose layer has the window."""
    model = dataclasses.replace(tiny.model("gqa"), num_layers=1, num_kv_heads=2, windows=None)
    windowed = dataclasses.replace(model, windows=BUDGET)
    traces = []
    for config, spec in ((model, spec_of(Window(BUDGET))), (windowed, CacheSpec(Paged(8)))):
        shapes = {"slots": tiny.slots, "max_length": tiny.max_length, "rows": 2}
        session = Session(
            tiny.params("gqa"), InferenceConfig(config, spec, chunk=tiny.chunk, **shapes)
        )
        session.prefill({0: tiny.prompt(70), 2: tiny.prompt(9)})
        forced = {0: tiny.prompt(20, seed=5), 2: tiny.prompt(20, seed=7)}
        traces.append(tiny.continued(session, [0, 2], steps=20, forced=forced).logits)
    evicting, masked = traces
    for slot in (0, 2):
        # The logits of the prompt's last token come from before the eviction.
        start = 1 if slot == 0 else 0
        difference = np.abs(evicting[start:, slot] - masked[start:, slot]).max()
        assert difference < 1e-5 * np.abs(masked[:, slot]).max()


def test_decode_alone_keeps_the_prompt_and_prefill_alone_grows_again(tiny):
    grown = {}
    for when in ("prefill", "decode", "both"):
        session = session_of(tiny, Sinks(BUDGET, when, num_sinks=3))
        session.prefill({0: tiny.prompt(50), 1: tiny.prompt(7)})
        before = lengths(session)[0, :2].tolist()
        session.decode(21)
        grown[when] = before, lengths(session)[0, :2].tolist()
    assert grown["prefill"] == ([BUDGET, 7], [BUDGET + 21, 28])
    assert grown["decode"] == ([50, 7], [50, BUDGET])
    assert grown["both"] == ([BUDGET, 7], [BUDGET, BUDGET])


def test_a_share_is_of_each_prompt(tiny):
    session = tiny.session("gqa", spec_of(H2O(0.4, recent=0)))
    session.prefill({0: tiny.prompt(50), 1: tiny.prompt(7), 4: tiny.prompt(1)})
    session.decode(5)
    assert lengths(session)[0].tolist() == [20, 20, 2, 2, 0, 0, 0, 0, 1, 1]


def test_a_text_that_goes_on_after_decode_is_evicted_again(tiny):
    session = session_of(tiny, POLICIES[1])
    session.prefill({2: tiny.prompt(40)})
    session.decode(5)
    session.prefill({2: tiny.prompt(30, seed=1)})
    assert lengths(session)[0, 2] == BUDGET
    layer, table = session.cache.layers[0], session.cache.tables[0]
    stored = np.asarray(layer.inner.key["position"])[:, 0, 0]
    pages = np.asarray(table.table.page_indices)[2]
    held = stored[pages[pages < len(stored)]].ravel()[:BUDGET]
    assert sorted(held.tolist()) == [0, 1, 2, *range(75 - BUDGET + 3, 75)]


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[4]], ids=repr)
def test_a_fork_of_an_evicted_sequence_goes_its_own_way(policy, tiny):
    def at_slot(slot):
        session = session_of(tiny, policy)
        session.prefill({slot: tiny.prompt(40)})
        session.decode(3)
        return session

    session, alone, again = at_slot(1), at_slot(1), at_slot(4)
    session.fork(1, [4])
    other = tiny.prompt(9, seed=3)
    both = tiny.continued(session, [1, 4], forced={4: other})
    expected = tiny.continued(alone, [1])
    np.testing.assert_array_equal(both.logits[:, 1], expected.logits[:, 1])
    expected = tiny.continued(again, [4], forced={4: other})
    np.testing.assert_array_equal(both.logits[:, 4], expected.logits[:, 4])
    assert not np.array_equal(both.logits[-1, 1], both.logits[-1, 4])
    session.release()
    assert all(int(table.num_free) == table.num_pages for table in tables(session))


def test_a_fork_without_room_changes_nothing(tiny):
    session = tiny.session("gqa", spec_of(Window(BUDGET)), num_pages=7)
    session.prefill({0: tiny.prompt(40)})
    session.fork(0, [1])
    before = lengths(session)
    with pytest.raises(ValueError, match="no free page"):
        session.fork(0, [2])
    np.testing.assert_array_equal(lengths(session), before)


def test_an_evicting_session_compiles_three_programs_whatever_the_lengths(tiny):
    session = tiny.session("gqa", spec_of(POLICIES[2]), decode_steps=6)
    for length in (3, 70, 31):
        session.prefill({0: tiny.prompt(length)})
        session.decode(length % 7)
        session.release()
    assert session.compile_count == 3


OWN_POLICY = """
    import dataclasses
    import jax.numpy as jnp
    from kvlab.ops.retention import Retention

    @dataclasses.dataclass(frozen=True)
    class EveryOther(Retention):
        def score(self, evidence):
            even = evidence.positions % 2 == 0
            return jnp.where(even, 1e4, 0.0) + evidence.positions.astype(jnp.float32)
"""


def test_a_policy_from_outside_runs_as_the_others_do(tiny, tmp_path, monkeypatch):
    (tmp_path / "every_other.py").write_text(textwrap.dedent(OWN_POLICY))
    monkeypatch.chdir(tmp_path)
    policy = load_policy("every_other:EveryOther")(BUDGET)
    session = tiny.session("gqa", spec_of(policy, Contiguous()))
    session.prefill({0: tiny.prompt(60)})
    held = session.cache.layers[1].inner.key["position"][0, 0, 0, :BUDGET]
    assert held.tolist() == list(range(22, 60, 2))
    session.decode(4)
    held = session.cache.layers[1].inner.key["position"][0, 0, 0, :BUDGET]
    # A token at an odd place is worth nothing, and is the next to go.
    assert sorted(held.tolist()) == [*range(26, 60, 2), 60, 62, 63][-BUDGET:]
    assert jnp.array_equal(jnp.asarray(lengths(session))[0, :1], jnp.array([BUDGET]))


def test_a_text_streams_past_the_trained_context(tiny):
    """Positions of the cache keep every key near, so a text may grow beyond the context of 151."""
    streaming = Sinks(BUDGET, num_sinks=3, positions="cache")
    session = tiny.session("gqa", spec_of(streaming), max_length=400, num_pages=30)
    session.prefill({1: tiny.prompt(60)})
    result = session.decode({1: 300})[1]
    assert len(result.tokens) == 300
    assert session.lengths[1] == 360
    assert lengths(session)[0, 1] == BUDGET
    assert np.isfinite(np.asarray(session.logits)[1]).all()
    with pytest.raises(ValueError, match="160 tokens, past the model's context of 151"):
        session.prefill({0: tiny.prompt(160)})


@pytest.mark.parametrize(
    ("name", "policy", "told"),
    [
        ("gqa", Sinks(BUDGET), "past the model's context of 151 .* positions=cache"),
        ("gqa", Sinks(BUDGET, "prefill", positions="cache"), "past the model's context"),
        ("mixed", Sinks(BUDGET, positions="cache"), "dynamic NTK; use positions=text"),
        ("learned", Sinks(BUDGET, positions="cache"), "learned positions; use positions=text"),
    ],
)
def test_what_cannot_stream_says_why(name, policy, told, tiny):
    with pytest.raises(ValueError, match=told):
        tiny.config(name, spec_of(policy), max_length=400)
