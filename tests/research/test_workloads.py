"""Drawn mixes: their lengths, their seeds; and the one word that names a workload."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.research.arrivals import MAX_LENGTH
from kvlab.research.traces import first_turns, read_azure, read_mooncake, read_sharegpt
from kvlab.research.workloads import MIXES, load_workload, lognormal, split_words, uniform

AZURE = "traces/azure/AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "traces/mooncake/conversation_trace.jsonl"
SHAREGPT = "traces/sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
MANY = 40_009


def lengths_of(workload):
    """[requests, 2]: prompts and outputs."""
    return np.array([(one.prompt_tokens, one.output_tokens) for one in workload.arrivals])


class TestLognormal:
    def test_means_and_spread_before_cutting(self):
        lengths = lengths_of(lognormal(MANY, 701, 1103, (0.5, 0.9), seed=5))
        np.testing.assert_allclose(lengths.mean(0), (701, 1103), rtol=0.03)
        np.testing.assert_allclose(np.log(lengths).std(0), (0.5, 0.9), rtol=0.03)
        np.testing.assert_allclose(
            np.median(lengths, axis=0), (701 * np.exp(-0.125), 1103 * np.exp(-0.405)), rtol=0.03
        )
        assert np.corrcoef(np.log(lengths.T))[0, 1] == pytest.approx(0, abs=0.02)

    def test_one_sigma_is_for_both(self):
        assert lognormal(7, 50, 60, 0.7, seed=1) == lognormal(7, 50, 60, (0.7, 0.7), seed=1)
        assert lengths_of(lognormal(3, 50, 60, 0, seed=1)).tolist() == [[50, 60]] * 3

    @given(
        st.integers(1, 30),
        st.floats(1, 5000),
        st.floats(1, 5000),
        st.floats(0, 5),
        st.integers(0, 2**32 - 1),
        st.integers(2, 4096),
    )
    @settings(deadline=None)
    def test_cutting_touches_only_what_does_not_fit(
        self, count, prompt, output, sigma, seed, limit
    ):
        free = lengths_of(lognormal(count, prompt, output, sigma, seed))
        cut = lengths_of(lognormal(count, prompt, output, sigma, seed, limit))
        assert free.min() >= 1
        for (long_in, long_out), (short_in, short_out) in zip(free, cut, strict=True):
            assert short_in == min(long_in, limit - 1)
            assert short_out == min(long_out, limit - short_in)
            assert short_out >= 1

    def test_huge_draws_stay_lengths(self):
        assert lengths_of(lognormal(99_999, 2e9, 2e9, 5, seed=0)).max() == MAX_LENGTH

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((0, 9, 9, 1, 0), "num_requests=0, wanted at least 1"),
            ((1, 0.5, 9, 1, 0), r"mean_prompt=0\.5, wanted a number of tokens from 1"),
            ((1, 9, float("nan"), 1, 0), "mean_output=nan, wanted a number of tokens from 1"),
            ((1, 9, 9, -1, 0), r"sigma=\(-1\.0, -1\.0\), wanted 0 to 5"),
            ((1, 9, 9, (1.0, 6.0), 0), r"sigma=\(1\.0, 6\.0\), wanted 0 to 5"),
            ((1, 9, 9, 1, -1), "seed=-1, wanted 0 to"),
            ((1, 9, 9, 1, 0, 1), "max_length=1, wanted at least 2"),
        ],
    )
    def test_arguments_out_of_range(self, arguments, said):
        with pytest.raises(ValueError, match=said):
            lognormal(*arguments)


class TestUniform:
    def test_every_length_of_the_range_is_equally_likely(self):
        lengths = lengths_of(uniform(MANY, (3, 7), (11, 11), seed=5))
        counts = np.bincount(lengths[:, 0])
        assert counts[:3].tolist() == [0, 0, 0]
        np.testing.assert_allclose(counts[3:], MANY / 5, rtol=0.05)
        assert len(counts) == 8
        assert set(lengths[:, 1]) == {11}

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((0, (1, 2), (1, 2), 0), "num_requests=0, wanted at least 1"),
            ((1, (0, 2), (1, 2), 0), "prompt=0-2, wanted LOW-HIGH with 1 <= LOW <= HIGH"),
            ((1, (1, 2), (3, 2), 0), "output=3-2, wanted LOW-HIGH"),
            ((1, (1, 2), (1, 2), 2**32), "seed=4294967296, wanted 0 to"),
        ],
    )
    def test_arguments_out_of_range(self, arguments, said):
        with pytest.raises(ValueError, match=said):
            uniform(*arguments)


class TestSeeds:
    @pytest.mark.parametrize("word", ["lognormal", "uniform", *MIXES])
    def test_the_seed_decides_and_more_requests_begin_with_the_fewer(self, word):
        some = load_workload(word, num_requests=11, seed=3)
        assert some == load_workload(word, num_requests=11, seed=3)
        assert some.arrivals == load_workload(word, num_requests=500, seed=3).arrivals[:11]
        assert some != load_workload(word, num_requests=11, seed=4)
        assert {one.arrival_s for one in some.arrivals} == {0.0}
        assert (some.block_tokens, some.skipped_rows, some.too_long) == (None, 0, 0)


class TestMixes:
    @pytest.mark.parametrize(
        ("name", "limit", "means"),
        [
            ("sharegpt-like", None, (161.3, 338.0)),
            ("sharegpt-like", 2048, (156, 317)),
            ("alpaca-like", 2048, (19.3, 58.5)),
        ],
    )
    def test_means_that_come_out(self, name, limit, means):
        workload = load_workload(name, num_requests=200_003, seed=1, max_length=limit)
        assert workload.name == name
        np.testing.assert_allclose(lengths_of(workload).mean(0), means, rtol=0.01)

    def test_share_that_is_cut(self):
        long = lengths_of(load_workload("sharegpt-like", num_requests=200_003, seed=1)).sum(1)
        assert np.mean(long > 2048) == pytest.approx(0.023, abs=0.001)

    def test_range_that_is_assumed_of_alpaca(self):
        lengths = lengths_of(load_workload("alpaca-like", num_requests=200_003, seed=1))
        low, high = np.percentile(lengths, [2.5, 97.5], axis=0)
        np.testing.assert_allclose([low, high], [(5, 5), (52, 252)], rtol=0.03)

    def test_spread_of_sharegpt_is_that_of_its_first_turns(self, data_path):
        turns = lengths_of(first_turns(read_sharegpt(data_path(SHAREGPT)), 2048))
        assert np.log(turns).std(0).round(3).tolist() == [1.276, 1.081]
        assert MIXES["sharegpt-like"].sigma == tuple(np.log(turns).std(0).round(2))
        assert turns[:, 1].max() == 1024


class TestWords:
    def test_azure(self, data_path):
        path = data_path(AZURE)
        workload = load_workload(f"azure:{path}", max_length=2048, num_requests=100)
        whole = read_azure(path)
        fits = [one for one in whole.arrivals if one.total_tokens <= 2048]
        assert workload.name == "azure:AzureLLMInferenceTrace_conv"
        assert workload.too_long == len(whole.arrivals) - len(fits) == 2_838
        assert lengths_of(workload).tolist() == [
            [one.prompt_tokens, one.output_tokens] for one in fits[:100]
        ]
        assert load_workload(f"azure:{path}") == whole

    def test_mooncake(self, data_path):
        path = data_path(MOONCAKE)
        workload = load_workload(f"mooncake:{path}", num_requests=7)
        assert workload.arrivals == read_mooncake(path).arrivals[:7]
        assert workload.block_tokens == 512

    def test_sharegpt_is_its_first_turns(self, data_path):
        path = data_path(SHAREGPT)
        workload = load_workload(f"sharegpt:{path}", max_length=2048)
        assert workload == first_turns(read_sharegpt(path), 2048)
        assert len(workload.arrivals) == 5_498

    def test_more_requests_than_a_trace_holds_are_an_error(self, data_path):
        with pytest.raises(ValueError, match="holds 12031 requests, and 12032 from number 0 on"):
            load_workload(f"mooncake:{data_path(MOONCAKE)}", num_requests=12_032)

    def test_bad_rows_are_left_out_on_demand_alone(self, tmp_path):
        path = tmp_path / "conv.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\nbroken\n"
        )
        with pytest.raises(ValueError, match="line 3: 1 columns came"):
            load_workload(f"azure:{path}")
        workload = load_workload(f"azure:{path}", skip_bad_rows=True)
        assert (len(workload.arrivals), workload.skipped_rows) == (1, 1)

    def test_parameters_of_drawn_mixes(self):
        assert load_workload("lognormal:30/40.5/0.7", num_requests=9, seed=2, max_length=64) == (
            lognormal(9, 30, 40.5, 0.7, 2, 64)
        )
        assert load_workload("lognormal", num_requests=9) == lognormal(9, 128, 128, 1, 0)
        assert load_workload("uniform:5-7/11-13", num_requests=9, seed=2, max_length=20) == (
            uniform(9, (5, 7), (11, 13), 2)
        )
        assert load_workload("uniform", num_requests=9) == uniform(9, (64, 192), (64, 192), 0)

    @pytest.mark.parametrize(
        ("word", "said"),
        [
            ("azuer:x.csv", r"'azuer:x\.csv' is not known; legal values, nearest first: azure:P"),
            ("sharegpt_like", "nearest first: sharegpt-like, "),
            ("log-normal:1/2/3", r"nearest first: lognormal\[:MEAN_PROMPT"),
            ("", "workload '' is not known"),
            ("mooncake", "'mooncake' names no file: write mooncake:PATH"),
            ("azure:", "'azure:' names no file: write azure:PATH"),
            ("azure:none.csv", r"trace none\.csv cannot be read"),
            ("alpaca-like:5", "alpaca-like takes nothing after a colon"),
            ("lognormal:5/6", r"'lognormal:5/6' cannot be read; write lognormal\[:MEAN_PROMPT"),
            ("lognormal:a/b/c", "'lognormal:a/b/c' cannot be read"),
            ("lognormal:", "'lognormal:' cannot be read"),
            ("lognormal:5/6/nan", r"sigma=\(nan, nan\), wanted 0 to 5"),
            ("uniform:5/6", r"'uniform:5/6' cannot be read; write uniform\[:LOW-HIGH"),
            ("uniform:5-6,8-9", r"'uniform:5-6,8-9' cannot be read; write uniform\[:LOW-HIGH/"),
            ("uniform:5-6-7/8-9", "'uniform:5-6-7/8-9' cannot be read"),
            ("uniform:7-5/8-9", "prompt=7-5, wanted LOW-HIGH"),
            ("uniform:5-60/8-90", "draws up to 150 tokens of prompt and output, and max_length=99"),
        ],
    )
    def test_words_that_cannot_be_meant(self, word, said):
        with pytest.raises(ValueError, match=said):
            load_workload(word, num_requests=3, max_length=99)

    @pytest.mark.parametrize(
        ("written", "words"),
        [
            ("alpaca-like, uniform", ["alpaca-like", "uniform"]),
            ("uniform:5-9/5-9,lognormal:3/4/1", ["uniform:5-9/5-9", "lognormal:3/4/1"]),
            ("azure:a,b.csv,sharegpt:c,d,uniform", ["azure:a,b.csv", "sharegpt:c,d", "uniform"]),
            ("alpaca-lik,uniform", ["alpaca-lik", "uniform"]),
            ("alpaca-like,unifrom", ["alpaca-like", "unifrom"]),
        ],
    )
    def test_a_comma_list_of_words(self, written, words):
        assert split_words(written) == words

    @pytest.mark.parametrize("written", ["", "uniform,", ",uniform", "uniform,,alpaca-like"])
    def test_a_comma_list_with_nothing_in_a_place(self, written):
        with pytest.raises(ValueError, match="a value between any two commas"):
            split_words(written)

    def test_an_unknown_word_lists_all(self):
        with pytest.raises(ValueError, match="not known") as caught:
            load_workload("trace")
        listed = str(caught.value).partition("nearest first: ")[2]
        words = ["azure", "mooncake", "sharegpt", "lognormal", "uniform", *MIXES]
        assert all(word in listed for word in words)

    @pytest.mark.parametrize("word", ["lognormal", "uniform", *MIXES])
    def test_a_drawn_mix_needs_a_number_of_requests(self, word):
        with pytest.raises(ValueError, match=r"is drawn: say how many requests \(num_requests\)"):
            load_workload(word)
