"""Sampling: filters against plain Python, distributions, and draws that no neighbour changes."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kvlab.ops import sampling
from kvlab.ops.sampling import Sampling, SamplingParams

VOCAB = 31
SMALLEST_FLOAT32 = 1e-45

sample = jax.jit(sampling.sample)
filter_logits = jax.jit(sampling.filter_logits)
token_log_prob = jax.jit(sampling.token_log_prob)

# Every filter alone, pairs, all at once, and values at the ends of their ranges.
SETTINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.7, top_k=5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=VOCAB),
    Sampling(temperature=1.0, top_k=10 * VOCAB),
    Sampling(temperature=1.0, top_p=0.71),
    Sampling(temperature=2.3, top_p=0.997),
    Sampling(temperature=1.0, top_p=SMALLEST_FLOAT32),
    Sampling(temperature=1.0, min_p=0.083),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.3, top_k=17, top_p=0.83),
    Sampling(temperature=1.3, top_k=17, top_p=0.83, min_p=0.31),
    Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2),
    Sampling(temperature=1e30, top_k=7),
    Sampling(temperature=1e-37, top_p=0.9),
)

ROWS = len(SETTINGS)


def drawn_logits(batch, vocab=VOCAB, seed=0):
    values = 2.5 * np.random.default_rng(seed).standard_normal((batch, vocab))
    return values.astype(np.float32)


def reference(logits, request):
    """Kept ids with their probabilities, one token at a time in Python floats."""
    best_first = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if request.temperature == 0:
        return {best_first[0]: 1.0}
    largest = max(logits)
    weights = {
        token: math.exp((float(logits[token]) - largest) / request.temperature)
        for token in best_first
    }
    if request.top_k > 0:
        best_first = best_first[: request.top_k]
    if request.top_p < 1:
        total = sum(weights[token] for token in best_first)
        nucleus, held = [], 0.0
        for token in best_first:
            if nucleus and held >= request.top_p * total:
                break
            nucleus.append(token)
            held += weights[token]
        best_first = nucleus
    kept = [token for token in best_first if weights[token] >= request.min_p]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def assert_filtered_as_reference(logits, requests):
    rows = np.asarray(filter_logits(logits, SamplingParams.from_requests(requests)))
    assert rows.dtype == np.float32
    for row, given, request in zip(rows, np.asarray(logits, np.float32), requests, strict=True):
        wanted = reference(given, request)
        assert set(np.flatnonzero(row > -np.inf)) == set(wanted), request
        for token, probability in wanted.items():
            assert row[token] == pytest.approx(math.log(probability), abs=1e-5), request


class TestFilters:
    @pytest.mark.parametrize("seed", range(5))
    def test_match_plain_python(self, seed):
        assert_filtered_as_reference(drawn_logits(ROWS, seed=seed), SETTINGS)

    @pytest.mark.parametrize("seed", range(5))
    def test_ties_go_to_the_lower_id(self, seed):
        tied = np.round(drawn_logits(ROWS, seed=seed))
        assert_filtered_as_reference(tied, SETTINGS)

    def test_all_tied(self):
        requests = [
            Sampling(temperature=1.0, top_k=3),
            Sampling(temperature=1.0, top_p=0.25),  # 7.75 of 31 tokens: 8
            Sampling(temperature=1.0, top_k=11, top_p=0.5),  # 5.5 of 11: 6
            Sampling(temperature=1.0, min_p=1.0),
        ]
        params = SamplingParams.from_requests(requests + [Sampling()] * (ROWS - 4))
        rows = np.asarray(filter_logits(np.ones((ROWS, VOCAB), np.float32), params))
        kept = [np.flatnonzero(row > -np.inf).tolist() for row in rows[:5]]
        assert kept == [[0, 1, 2], list(range(8)), list(range(6)), list(range(VOCAB)), [0]]

    def test_sets_worked_out_by_hand(self):
        cases = (
            (Sampling(temperature=1.0, top_p=0.79), {1, 3}),
            (Sampling(temperature=1.0, top_p=0.81), {0, 1, 3}),
            (Sampling(temperature=1.0, min_p=0.59), {1, 3}),
            (Sampling(temperature=1.0, min_p=0.61), {1}),
            # Of the two that top-k leaves the first holds 0.625.
            (Sampling(temperature=1.0, top_k=2, top_p=0.62), {1}),
            (Sampling(temperature=1.0, top_k=2, top_p=0.63), {1, 3}),
            # The first two hold 0.67 at temperature 2; the first holds 0.68 at 0.5.
            (Sampling(temperature=2.0, top_p=0.6), {1, 3}),
            (Sampling(temperature=0.5, top_p=0.6), {1}),
        )
        logits = np.log(np.array([[0.15, 0.5, 0.05, 0.3]] * len(cases), np.float32))
        params = SamplingParams.from_requests([request for request, _ in cases])
        rows = np.asarray(filter_logits(logits, params))
        for row, (request, kept) in zip(rows, cases, strict=True):
            assert set(np.flatnonzero(row > -np.inf)) == kept, request

    def test_impossible_tokens_stay_impossible(self):
        logits = drawn_logits(ROWS)
        logits[:, ::2] = -np.inf
        rows = np.asarray(filter_logits(logits, SamplingParams.from_requests(SETTINGS)))
        assert np.all(rows[:, ::2] == -np.inf)
        np.testing.assert_allclose(np.exp(rows).sum(axis=-1), 1, rtol=1e-5)

    def test_bfloat16_logits_are_filtered_in_float32(self):
        logits = jnp.asarray(drawn_logits(ROWS)).astype(jnp.bfloat16)
        params = SamplingParams.from_requests(SETTINGS)
        wide = filter_logits(logits.astype(jnp.float32), params)
        np.testing.assert_array_equal(filter_logits(logits, params), wide)

    def test_a_real_vocabulary(self):
        vocab = 49_157
        requests = [Sampling(temperature=1.0, top_k=50), Sampling(temperature=1.0, top_p=0.9)]
        logits = drawn_logits(2, vocab)
        rows = np.asarray(filter_logits(logits, SamplingParams.from_requests(requests)))
        kept = np.sum(rows > -np.inf, axis=-1)
        assert kept[0] == 50
        # Float32 sums over the vocabulary may move the cut by a few of thousands of tokens.
        assert kept[1] == pytest.approx(len(reference(logits[1], requests[1])), abs=5)


class TestGreedy:
    def test_first_index_on_ties(self):
        logits = np.zeros((ROWS, VOCAB), np.float32)
        logits[0, [5, 19]] = 1
        logits[1, [0, 30]] = 1
        params = SamplingParams.from_requests([Sampling()] * ROWS)
        tokens = sample(logits, params, jnp.arange(ROWS))
        assert np.asarray(tokens).tolist() == [5, *[0] * (ROWS - 1)]
        assert tokens.dtype == jnp.int32

    def test_is_argmax_alone_and_beside_sampled_rows(self):
        logits = drawn_logits(ROWS)
        best = np.argmax(logits, axis=-1)
        greedy = SamplingParams.from_requests([Sampling()] * ROWS)
        np.testing.assert_array_equal(sample(logits, greedy, jnp.arange(ROWS)), best)
        requests = [Sampling(temperature=float(row % 2)) for row in range(ROWS)]
        mixed = sample(logits, SamplingParams.from_requests(requests), jnp.arange(ROWS))
        np.testing.assert_array_equal(np.asarray(mixed)[::2], best[::2])
        assert np.any(np.asarray(mixed)[1::2] != best[1::2])

    def test_temperatures_too_small_for_float32_are_greedy(self):
        requests = [Sampling(temperature=SMALLEST_FLOAT32), Sampling(temperature=1e-300)]
        params = SamplingParams.from_requests([*requests, *SETTINGS[2:]])
        assert np.asarray(params.greedy)[:2].tolist() == [True, True]
        logits = drawn_logits(ROWS)
        tokens = np.asarray(sample(logits, params, jnp.arange(ROWS)))
        np.testing.assert_array_equal(tokens[:2], np.argmax(logits, axis=-1)[:2])

    def test_a_greedy_batch_draws_no_noise_and_searches_no_cut(self):
        params = SamplingParams.from_requests([Sampling()] * 3)
        jaxpr = jax.make_jaxpr(sampling.sample)(drawn_logits(3), params, jnp.arange(3))
        outside_branches = {eqn.primitive.name for eqn in jaxpr.eqns}
        assert "cond" in outside_branches
        assert not outside_branches & {"random_bits", "scan", "while", "sort", "cumsum"}


def chi_square(tokens, probabilities):
    """The chance of counts at least this far from the probabilities."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = np.array(probabilities) > 0
    assert np.all(counts[~possible] == 0)
    expected = np.array(probabilities, np.float64)[possible]
    expected *= len(tokens) / expected.sum()
    return stats.chisquare(counts[possible], expected).pvalue


class TestDistribution:
    """Seeds are fixed, so that a p-value here is one number and no test is flaky."""

    draws = 20_011
    logits = np.log(np.array([0.02, 0.4, 0.07, 0.11, 0.19, 0.16, 0.05], np.float32))

    def drawn(self, request, vary):
        """One token for each of `draws` values of the part of the key that varies."""
        batch = np.broadcast_to(self.logits, (self.draws, 7))
        params = SamplingParams.from_requests([request] * self.draws)
        count = jnp.arange(self.draws)
        positions = count if vary == "position" else jnp.full_like(count, 11)
        if vary != "position":
            column = count.astype(getattr(params, vary).dtype)
            params = dataclasses.replace(params, **{vary: column})
        return np.asarray(sample(batch, params, positions))

    @pytest.mark.parametrize("vary", ["position", "seed", "sample_index"])
    def test_every_part_of_the_key_gives_fresh_draws(self, vary):
        tokens = self.drawn(Sampling(temperature=1.0, seed=3), vary)
        assert chi_square(tokens, np.exp(self.logits)) > 0.01
        pairs = np.zeros((7, 7))
        np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
        assert stats.chi2_contingency(pairs).pvalue > 0.01

    @pytest.mark.parametrize(
        "request_",
        [
            Sampling(temperature=0.6, seed=1),
            Sampling(temperature=2.0, seed=2),
            Sampling(temperature=1.0, top_k=3, seed=3),
            Sampling(temperature=1.5, top_p=0.8, seed=4),
            Sampling(temperature=1.0, min_p=0.2, seed=5),
            Sampling(temperature=1.2, top_k=5, top_p=0.9, min_p=0.3, seed=6),
        ],
        ids=str,
    )
    def test_follows_the_filtered_probabilities(self, request_):
        kept = reference(self.logits, request_)
        wanted = [kept.get(token, 0.0) for token in range(7)]
        assert len(kept) > 1
        assert chi_square(self.drawn(request_, "position"), wanted) > 0.01

    def test_winning_noise_has_more_than_23_bits(self):
        params = SamplingParams.from_requests([Sampling(temperature=1.0, seed=7)])
        noise = np.asarray(sampling._gumbel(2**22, params, jnp.zeros(1, jnp.int32)))
        assert np.all(np.isfinite(noise))
        largest = noise[noise > 10]  # 190 expected; a grid of 2 ** -23 has 380 places for them
        assert 130 < len(largest) < 260
        assert len(set(largest.tolist())) == len(largest)
        assert stats.kstest(noise[0, :10_007], "gumbel_r").pvalue > 0.01


class TestInvariance:
    """A row's bits depend on its own logits, settings and position."""

    logits = drawn_logits(ROWS, 997, seed=5)
    requests = tuple(
        dataclasses.replace(request, seed=7 * row, sample_index=row % 3)
        for row, request in enumerate(SETTINGS)
    )
    positions = np.arange(ROWS, dtype=np.int32) * 13

    def outcome(self, logits, requests, positions):
        params = SamplingParams.from_requests(requests)
        tokens = sample(logits, params, positions)
        return np.asarray(tokens), np.asarray(filter_logits(logits, params))

    def test_in_any_slot(self):
        tokens, rows = self.outcome(self.logits, self.requests, self.positions)
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(len(tokens))
            moved = [self.requests[row] for row in order]
            ours = self.outcome(self.logits[order], moved, self.positions[order])
            np.testing.assert_array_equal(ours[0], tokens[order])
            np.testing.assert_array_equal(ours[1], rows[order])

    def test_beside_any_neighbours(self):
        """Idle greedy neighbours turn every branch off that the row itself does not need."""
        tokens, rows = self.outcome(self.logits, self.requests, self.positions)
        for row, request in enumerate(self.requests):
            logits = np.zeros_like(self.logits)
            logits[row] = self.logits[row]
            requests = [Sampling()] * len(tokens)
            requests[row] = request
            ours = self.outcome(logits, requests, self.positions)
            assert ours[0][row] == tokens[row], request
            np.testing.assert_array_equal(ours[1][row], rows[row], err_msg=str(request))

    def test_in_a_device_loop(self):
        params = SamplingParams.from_requests(self.requests)

        @jax.jit
        def loop(logits):
            def step(positions, _):
                return positions + 1, sampling.sample(logits, params, positions)

            return jax.lax.scan(step, jnp.asarray(self.positions), None, length=5)[1]

        host = [sample(self.logits, params, self.positions + step) for step in range(5)]
        np.testing.assert_array_equal(loop(self.logits), np.stack(host))
        sampled = np.asarray(loop(self.logits))[:, 1]
        assert len(set(sampled.tolist())) > 1

    def test_each_part_of_the_key_counts(self):
        base = Sampling(temperature=1.0, seed=5, sample_index=2)
        requests = [base] * ROWS
        requests[3] = dataclasses.replace(base, seed=6)
        requests[4] = dataclasses.replace(base, sample_index=3)
        requests[5] = dataclasses.replace(base, seed=2, sample_index=5)
        requests[6] = dataclasses.replace(base, seed=2**32 - 1)
        positions = np.full(ROWS, 11, np.int32)
        positions[2] = 12
        flat = np.zeros_like(self.logits)
        tokens = np.asarray(sample(flat, SamplingParams.from_requests(requests), positions))
        assert tokens[0] == tokens[1]
        assert np.all(tokens[7:] == tokens[0])
        assert len(set(tokens[1:7].tolist())) == 6


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whole_row", [False, True])
def test_broken_logits_stay_in_range_and_in_their_row(poison, whole_row):
    clean = drawn_logits(ROWS)
    params = SamplingParams.from_requests(SETTINGS)
    wanted = np.asarray(sample(clean, params, jnp.arange(ROWS)))
    for parity in range(2):
        broken = clean.copy()
        broken[parity::2, slice(None) if whole_row else 7] = poison
        tokens = np.asarray(sample(broken, params, jnp.arange(ROWS)))
        assert np.all((tokens >= 0) & (tokens < VOCAB))
        np.testing.assert_array_equal(tokens[1 - parity :: 2], wanted[1 - parity :: 2])


class TestTokenLogProb:
    @pytest.mark.parametrize("leading", [(5,), (2, 3)])
    def test_matches_float64(self, leading):
        generator = np.random.default_rng(1)
        logits = (30 * generator.standard_normal((*leading, VOCAB))).astype(np.float32)
        tokens = generator.integers(0, VOCAB, leading).astype(np.int32)
        wide = logits.astype(np.float64)
        wanted = wide - np.log(np.sum(np.exp(wide), axis=-1, keepdims=True))
        wanted = np.take_along_axis(wanted, tokens[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(token_log_prob(logits, tokens), wanted, rtol=1e-6, atol=1e-5)

    def test_bfloat16_logits_give_float32(self):
        logits = jnp.asarray(drawn_logits(3)).astype(jnp.bfloat16)
        tokens = jnp.array([0, 5, 30], jnp.int32)
        ours = token_log_prob(logits, tokens)
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, token_log_prob(logits.astype(jnp.float32), tokens))

    def test_a_wrong_id_shows(self):
        tokens = jnp.array([-1, 3, VOCAB], jnp.int32)
        ours = np.asarray(token_log_prob(drawn_logits(3), tokens))
        assert np.isnan(ours).tolist() == [True, False, True]


class TestSampling:
    @pytest.mark.parametrize(
        ("field", "value", "legal"),
        [
            ("temperature", -0.1, "from 0"),
            ("temperature", math.nan, "from 0"),
            ("temperature", math.inf, "from 0"),
            ("temperature", 2e30, r"to 1e\+30"),
            ("top_k", -1, "from 0"),
            ("top_k", 2**31, "from 0"),
            ("top_p", 0.0, "above 0 and at most 1"),
            ("top_p", 1.01, "above 0 and at most 1"),
            ("min_p", -0.01, "from 0"),
            ("min_p", 1.5, "to 1"),
            ("seed", -1, "from 0"),
            ("seed", 2**32, r"2\*\*32 - 1"),
            ("sample_index", -1, "from 0"),
        ],
    )
    def test_errors_name_field_value_and_range(self, field, value, legal):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{field}={value!r}')} .*{legal}"):
            Sampling(**{field: value})

    def test_the_largest_values_reach_the_device(self):
        request = Sampling(
            temperature=1e30, top_k=2**31 - 1, seed=2**32 - 1, sample_index=2**31 - 1
        )
        params = SamplingParams.from_requests([request, Sampling()])
        assert params.seed.dtype == jnp.uint32
        assert np.asarray(params.seed).tolist() == [2**32 - 1, 0]
        assert np.asarray(params.top_k).tolist() == [2**31 - 1, 0]
        assert np.asarray(params.sample_index).tolist() == [2**31 - 1, 0]
        assert np.isfinite(params.temperature).all()
        assert np.asarray(params.top_p).tolist() == [1, 1]

    def test_params_are_a_pytree_that_jax_can_reshape(self):
        params = SamplingParams.from_requests([Sampling()] * 3)
        assert sum(jax.tree.leaves(jax.tree.map(lambda leaf: leaf.nbytes, params))) == 3 * 24
        assert jax.eval_shape(lambda params: params, params).seed.shape == (3,)
