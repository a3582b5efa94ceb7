"""What is made of a workload: other times, lengths and choices, and the tokens of its prompts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.research.arrivals import (
    MAX_LENGTH,
    Arrival,
    Workload,
    blocks_of,
    fitting,
    generator,
    in_order,
    poisson,
    prompt_ids,
    scaled,
    taken,
)
from kvlab.research.traces import read_mooncake


def plain(*requests):
    """A workload without blocks from (time, prompt, output)."""
    arrivals = tuple(Arrival(number, *one) for number, one in enumerate(requests))
    return Workload("plain", arrivals, None, skipped_rows=3)


def columns(workload):
    return [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in workload.arrivals]


FIVE = plain((0, 7, 2), (1.5, 11, 3), (1.5, 5, 5), (4, 13, 1), (6, 2, 8))


@st.composite
def shared_prefixes(draw, max_block=13):
    """Requests whose prompts are paths from the root of one tree of blocks.

    A block that ends a prompt in part is its own node, as in Mooncake's trace.
    """
    block = draw(st.integers(1, max_block))
    nodes, arrivals = {}, []
    for number in range(draw(st.integers(1, 6))):
        whole = draw(st.lists(st.integers(0, 1), max_size=3))
        rest = draw(st.integers(0, block - 1)) if whole else draw(st.integers(1, block))
        path = [*((one, block) for one in whole), *([(0, rest)] if rest else [])]
        ids = [nodes.setdefault(tuple(path[: n + 1]), len(nodes)) for n in range(len(path))]
        prompt = sum(tokens for _, tokens in path)
        arrivals.append(Arrival(number, float(number), prompt, 1 + number, tuple(ids)))
    return Workload("tree", tuple(arrivals), block, skipped_rows=0)


def equal_start(one, other):
    """How many leading elements agree."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class TestTypes:
    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"prompt_tokens": 0}, "request 0: prompt_tokens=0, wanted 1 to"),
            ({"output_tokens": 0}, "request 0: output_tokens=0, wanted 1 to"),
            ({"output_tokens": MAX_LENGTH + 1}, "output_tokens=2147483648, wanted 1 to"),
            ({"arrival_s": -0.5}, r"arrival_s=-0\.5, wanted a time from 0"),
            ({"arrival_s": float("nan")}, "arrival_s=nan, wanted a time from 0"),
            ({"arrival_s": float("inf")}, "arrival_s=inf, wanted a time from 0"),
        ],
    )
    def test_a_request_checks_its_fields(self, fields, said):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(FIVE.arrivals[0], **fields)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"arrivals": ()}, "plain holds no request"),
            ({"arrivals": FIVE.arrivals[::-1]}, "request 4 at 6 s comes as number 0 after 0"),
            ({"arrivals": FIVE.arrivals[1:]}, r"request 1 at 1\.5 s comes as number 0"),
            ({"block_tokens": 4}, "has 0 block ids, wanted 2 for 7 prompt tokens in blocks of 4"),
            ({"block_tokens": 0}, "block_tokens=0, wanted at least 1, or None"),
        ],
    )
    def test_a_workload_checks_its_requests(self, fields, said):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(FIVE, **fields)

    def test_times_that_run_backwards_are_refused(self):
        with pytest.raises(ValueError, match="request 1 at 1 s comes as number 1 after 2 s"):
            plain((2, 1, 1), (1, 1, 1))

    def test_in_order_keeps_requests_of_one_time_in_their_order(self):
        mixed = (FIVE.arrivals[3], FIVE.arrivals[2], FIVE.arrivals[1])
        ordered = in_order(mixed)
        assert [one.number for one in ordered] == [0, 1, 2]
        assert [one.prompt_tokens for one in ordered] == [5, 11, 13]

    @pytest.mark.parametrize(
        ("tokens", "block", "blocks"),
        [(1, 512, 1), (512, 512, 1), (513, 512, 2), (1024, 512, 2), (7, None, 0)],
    )
    def test_blocks_of_a_prompt(self, tokens, block, blocks):
        assert blocks_of(tokens, block) == blocks


class TestChoices:
    def test_fitting_leaves_out_what_is_longer_and_counts_it(self):
        some = fitting(FIVE, 10)
        assert columns(some) == [(0, 7, 2), (1.5, 5, 5), (6, 2, 8)]
        assert (some.too_long, some.skipped_rows) == (2, 3)
        assert columns(fitting(some, 9)) == [(0, 7, 2)]
        assert fitting(some, 9).too_long == 4
        assert fitting(FIVE, None) == FIVE
        with pytest.raises(ValueError, match=r"fits max_length=8: the shortest has 9 tokens"):
            fitting(FIVE, 8)

    def test_taken_is_a_slice_with_times_from_its_first(self):
        assert columns(taken(FIVE, 3, 2)) == [(0, 5, 5), (2.5, 13, 1), (4.5, 2, 8)]
        assert [one.number for one in taken(FIVE, 3, 2).arrivals] == [0, 1, 2]
        assert taken(FIVE, 5) == FIVE

    @pytest.mark.parametrize(("count", "start"), [(6, 0), (3, 3), (0, 0), (1, -1), (1, 5)])
    def test_taken_refuses_what_there_is_not(self, count, start):
        with pytest.raises(ValueError, match="plain holds 5 requests, and"):
            taken(FIVE, count, start)


class TestPoisson:
    MANY = plain(*((0, 1 + number % 97, 2) for number in range(20_011)))

    def test_gaps_are_exponential_with_the_rate(self):
        times = np.array([one.arrival_s for one in poisson(self.MANY, 5.0, seed=3).arrivals])
        gaps = np.diff(times, prepend=0.0)
        assert np.mean(gaps) == pytest.approx(1 / 5, rel=0.03)
        assert np.std(gaps) == pytest.approx(1 / 5, rel=0.03)  # as large as the mean
        assert np.median(gaps) == pytest.approx(np.log(2) / 5, rel=0.03)
        assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0, abs=0.03)

    def test_requests_and_their_order_stay(self):
        timed = poisson(self.MANY, 5.0, seed=3)
        assert [row[1:] for row in columns(timed)] == [row[1:] for row in columns(self.MANY)]

    def test_the_seed_alone_decides(self):
        times = columns(poisson(FIVE, 2.0, seed=3))
        assert times == columns(poisson(FIVE, 2.0, seed=3))
        assert times != columns(poisson(FIVE, 2.0, seed=4))
        assert [row[0] for row in times] == [
            one.arrival_s for one in poisson(self.MANY, 2.0, seed=3).arrivals[:5]
        ]

    def test_purposes_of_one_seed_share_no_draw(self):
        draws = [generator(5, purpose).integers(2**63, size=101).tolist() for purpose in (0, 1, 2)]
        assert len(np.unique(draws)) == 303
        assert draws[1] == generator(5, 1).integers(2**63, size=101).tolist()

    @pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
    def test_a_rate_that_is_none_is_an_error(self, rate):
        with pytest.raises(ValueError, match=rf"rate={rate}, wanted a number above 0"):
            poisson(FIVE, rate, seed=0)

    @pytest.mark.parametrize("seed", [-1, 2**32])
    def test_a_seed_out_of_range_is_an_error(self, seed):
        with pytest.raises(ValueError, match=rf"seed={seed}, wanted 0 to 4,294,967,295"):
            poisson(FIVE, 1.0, seed)


class TestScaled:
    def test_lengths_and_rate_by_hand(self):
        half = scaled(FIVE, lengths=0.3, rate=2.0)
        assert columns(half) == [(0, 2, 1), (0.75, 3, 1), (0.75, 2, 2), (2, 4, 1), (3, 1, 2)]
        assert scaled(FIVE) == FIVE

    def test_blocks_by_hand(self):
        one = Arrival(0, 0.0, 1025, 10, (0, 1, 2))
        workload = Workload("blocks", (one,), 512, skipped_rows=0)
        smaller = scaled(workload, lengths=0.3)
        assert smaller.block_tokens == 154
        assert smaller.arrivals == (Arrival(0, 0.0, 2 * 154 + 1, 3, (0, 1, 2)),)
        assert scaled(workload, lengths=1e-9).arrivals == (Arrival(0, 0.0, 3, 1, (0, 1, 2)),)

    @given(shared_prefixes(), st.floats(0.01, 9.0))
    @settings(deadline=None)
    def test_equal_prefixes_stay_equal_and_different_ones_different(self, workload, factor):
        result = scaled(workload, lengths=factor)
        before, after = workload.arrivals, result.arrivals
        assert [one.block_ids for one in after] == [one.block_ids for one in before]
        block = workload.block_tokens
        ratio = result.block_tokens / block
        assert result.block_tokens == max(1, round(block * factor))
        filled = {}
        for old, new in zip(before, after, strict=True):
            assert abs(new.prompt_tokens - old.prompt_tokens * ratio) <= 1
            assert new.output_tokens == max(1, round(old.output_tokens * factor))
            rest = new.prompt_tokens - result.block_tokens * (len(new.block_ids) - 1)
            assert 1 <= rest <= result.block_tokens
            assert filled.setdefault(new.block_ids[-1], rest) == rest

    @given(shared_prefixes(), st.floats(0.01, 9.0), st.floats(0.01, 9.0))
    @settings(deadline=None)
    def test_rate_divides_times_alone(self, workload, rate, other):
        result = scaled(workload, rate=rate)
        assert [row[1:] for row in columns(result)] == [row[1:] for row in columns(workload)]
        for old, new in zip(workload.arrivals, result.arrivals, strict=True):
            assert new.arrival_s == pytest.approx(old.arrival_s / rate)

    @pytest.mark.parametrize("factor", [0, -2.0, float("inf"), float("nan")])
    def test_a_factor_that_is_none_is_an_error(self, factor):
        with pytest.raises(ValueError, match=f"lengths={factor}, wanted a number above 0"):
            scaled(FIVE, lengths=factor)
        with pytest.raises(ValueError, match=f"rate={factor}, wanted a number above 0"):
            scaled(FIVE, rate=factor)

    @pytest.mark.parametrize("factor", [1e9, 1e308])
    def test_lengths_beyond_int32_are_an_error(self, factor):
        with pytest.raises(ValueError, match="prompt_tokens=2147483648, wanted 1 to"):
            scaled(FIVE, lengths=factor)

    def test_the_real_trace_keeps_its_hits(self, data_path):
        workload = read_mooncake(data_path("traces/mooncake/conversation_trace.jsonl"))
        small = scaled(workload, lengths=1 / 64, rate=10)
        assert small.block_tokens == 8
        assert [one.block_ids for one in small.arrivals] == [
            one.block_ids for one in workload.arrivals
        ]
        mean = np.mean([one.prompt_tokens for one in small.arrivals])
        assert mean == pytest.approx(12035.06 / 64, rel=1e-3)
        assert small.arrivals[-1].arrival_s == pytest.approx(353.6999)


class TestPromptIds:
    @given(shared_prefixes(), st.integers(0, 2**32 - 1))
    @settings(deadline=None)
    def test_equal_blocks_are_equal_tokens_and_no_others(self, workload, seed):
        vocab_size = MAX_LENGTH  # so large that no two draws agree by chance
        block = workload.block_tokens
        drawn = [prompt_ids(one, block, vocab_size, seed) for one in workload.arrivals]
        for one, ids in zip(workload.arrivals, drawn, strict=True):
            assert (ids.dtype, ids.shape) == (np.int32, (one.prompt_tokens,))
            for other, other_ids in zip(workload.arrivals, drawn, strict=True):
                blocks = equal_start(one.block_ids, other.block_ids)
                shortest = min(one.prompt_tokens, other.prompt_tokens)
                assert equal_start(ids, other_ids) == min(blocks * block, shortest)

    @given(st.integers(1, 600), st.integers(0, 10**6), st.integers(0, 2**32 - 1))
    @settings(deadline=None)
    def test_without_blocks_the_number_decides(self, length, number, seed):
        ids = prompt_ids(Arrival(number, 0.0, length, 1), None, MAX_LENGTH, seed)
        longer = prompt_ids(Arrival(number, 9.0, length + 1, 5), None, MAX_LENGTH, seed)
        np.testing.assert_array_equal(longer[:length], ids)
        for other, another_seed in ((number + 1, seed), (number, (seed + 1) % 2**32)):
            others = prompt_ids(Arrival(other, 0.0, length, 1), None, MAX_LENGTH, another_seed)
            assert np.mean(others == ids) < 0.5

    def test_a_part_of_a_block_begins_the_whole(self):
        part, whole = (Arrival(0, 0.0, n, 1, (5,)) for n in (3, 7))
        np.testing.assert_array_equal(
            prompt_ids(part, 7, 101, seed=2), prompt_ids(whole, 7, 101, seed=2)[:3]
        )

    def test_tokens_are_uniform_from_the_first_id(self):
        ids = prompt_ids(Arrival(0, 0.0, 70_001, 1), None, 17, seed=1, first_id=3)
        counts = np.bincount(ids, minlength=17)
        assert not counts[:3].any()
        np.testing.assert_allclose(counts[3:], 70_001 / 14, rtol=0.05)
        assert len(counts) == 17

    def test_draws_are_these_on_every_platform(self):
        numbered = prompt_ids(Arrival(2, 0.0, 5, 1), None, 32_000, seed=7, first_id=3)
        blocks = prompt_ids(Arrival(0, 0.0, 5, 1, (2, 10**18)), 3, 32_000, seed=7, first_id=3)
        assert numbered[:3].tolist() == blocks[:3].tolist()  # one stream, from (7, 2)
        assert numbered.tolist() == [9004, 8897, 4893, 14246, 13722]
        assert blocks.tolist() == [9004, 8897, 4893, 1842, 13802]

    @pytest.mark.parametrize(
        ("vocab_size", "first_id"), [(0, 0), (5, 5), (5, -1), (MAX_LENGTH + 1, 0)]
    )
    def test_a_vocabulary_without_tokens_is_an_error(self, vocab_size, first_id):
        with pytest.raises(ValueError, match=rf"first_id={first_id} to below vocab_size="):
            prompt_ids(FIVE.arrivals[0], None, vocab_size, 0, first_id)

    @pytest.mark.parametrize("block_tokens", [None, 4, 16])
    def test_blocks_of_another_size_are_an_error(self, block_tokens):
        one = Arrival(6, 0.0, 24, 1, (0, 1, 2))
        assert len(prompt_ids(one, 8, 101, seed=0)) == 24
        with pytest.raises(ValueError, match=f"request 6 has 3 block ids, .*={block_tokens} "):
            prompt_ids(one, block_tokens, 101, seed=0)

    def test_a_seed_out_of_range_is_an_error(self):
        with pytest.raises(ValueError, match="seed=-1, wanted 0 to"):
            prompt_ids(FIVE.arrivals[0], None, 101, seed=-1)
