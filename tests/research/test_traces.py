"""Readers of traces: the real files to the last row, and every kind of malformed one."""

import json

import numpy as np
import pytest

from kvlab.research.traces import file_sha256, first_turns, read_azure, read_mooncake, read_sharegpt

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
SHAREGPT_HEADER = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio"
AZURE = (
    AZURE_HEADER,
    "2023-11-16 23:59:59.9999999,374,44",
    "2023-11-17 00:00:00.0000000,396,109",
    "2023-11-17 00:00:02.5,879,55",
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]}',
    '{"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 3]}',
    '{"timestamp": 4750, "input_length": 1, "output_length": 5, "hash_ids": [4]}',
)
SHAREGPT = (
    SHAREGPT_HEADER,
    "74,18,92,4.11",
    "93,5,98,18.6",  # goes on with the first
    "98,2,100,49",  # as long as what came before: another conversation
    "7,3,10,2.33",
    "11,1,12,11",  # goes on
    "12,80,92,0.15",  # another
)
READERS = {"azure": read_azure, "mooncake": read_mooncake, "sharegpt": read_sharegpt}
GOOD = {"azure": AZURE, "mooncake": MOONCAKE, "sharegpt": SHAREGPT}


def mooncake(**fields):
    row = {**json.loads(MOONCAKE[1]), **fields}
    return json.dumps({key: value for key, value in row.items() if value is not None})


BAD = {
    "azure": {
        "missing column": ("2023-11-17 00:00:01,396", r"2 columns came .* wanted TIMESTAMP,"),
        "column too many": ("2023-11-17 00:00:01,396,1,2", "4 columns came"),
        "blank": ("", "1 columns came"),
        "no number": ("2023-11-17 00:00:01,many,1", "ContextTokens is 'many', wanted a whole"),
        "fraction": ("2023-11-17 00:00:01,396,1.5", r"GeneratedTokens is '1\.5', wanted a whole"),
        "no digits": ("2023-11-17 00:00:01,٣,1", "ContextTokens is '٣'"),
        "negative": ("2023-11-17 00:00:01,-396,1", "ContextTokens is -396"),
        "zero in": ("2023-11-17 00:00:01,0,1", "ContextTokens is 0"),
        "zero out": ("2023-11-17 00:00:01,396,0", "GeneratedTokens is 0"),
        "beyond int32": (
            "2023-11-17 00:00:01,2147483648,1",
            "ContextTokens is 2147483648, wanted .* to 2,147,483,647",
        ),
        "endless": (f"2023-11-17 00:00:01,{'9' * 5000},1", r"ContextTokens is '9{56}\.\.\."),
        "no time": ("soon,396,1", "TIMESTAMP is 'soon', wanted a time like 2023"),
        "no such day": ("2023-02-30 00:00:01,396,1", "TIMESTAMP is '2023-02-30 00:00:01'"),
        "time runs back": ("2023-11-16 23:59:58,396,1", r"the time runs back by 2 s"),
        "no UTF-8": (b"2023-11-17 00:00:01,3\xff96,1", "byte 21 of the line is not UTF-8"),
    },
    "mooncake": {
        "no JSON": (MOONCAKE[1][:-1], "is no JSON"),
        "blank": ("", "is no JSON"),
        "deep JSON": ("[" * 100_000, "is no JSON"),
        "no object": ("[1, 2]", "wanted an object with timestamp, input_length"),
        "missing column": (mooncake(output_length=None), "wanted an object with timestamp"),
        "no number": (mooncake(input_length="1024"), "input_length is '1024', wanted a whole"),
        "truth": (mooncake(output_length=True), "output_length is True, wanted a whole"),
        "negative": (mooncake(input_length=-5), "input_length is -5"),
        "zero in": (mooncake(input_length=0, hash_ids=[]), "input_length is 0"),
        "zero out": (mooncake(output_length=0), "output_length is 0"),
        "id too few": (mooncake(hash_ids=[0]), "hash_ids has 1 ids, wanted 2: one for every 512"),
        "id too many": (mooncake(hash_ids=[0, 3, 9]), "hash_ids has 3 ids, wanted 2"),
        "ids no list": (mooncake(hash_ids="03"), "hash_ids is '03', wanted a list"),
        "id negative": (mooncake(hash_ids=[0, -3]), r"hash_ids is \[0, -3\], wanted a list"),
        "no time": (mooncake(timestamp="now"), "timestamp is 'now', wanted a number of milli"),
        "time NaN": (mooncake(timestamp=float("nan")), "timestamp is nan"),
        "time without end": (mooncake(timestamp=10**400), r"timestamp is 10+\.\.\., wanted"),
        "time runs back": (mooncake(timestamp=2999.5), r"the time runs back by 0\.0005 s"),
        "no UTF-8": (MOONCAKE[1].encode("utf-16-le"), "is no JSON"),
    },
    "sharegpt": {
        "missing column": ("74,18,92", "3 columns came .* wanted num_prefill_tokens,"),
        "no number": ("74,18,x,4.1", "num_total_tokens is 'x', wanted a whole"),
        "negative": ("74,-18,56,4.1", "num_decode_tokens is -18"),
        "zero in": ("0,18,18,0", "num_prefill_tokens is 0"),
        "zero out": ("74,0,74,0", "num_decode_tokens is 0"),
        "wrong sum": ("74,18,93,4.1", "num_total_tokens is 93, wanted 92, the sum"),
        "no UTF-8": (b"\xff,18,92,4.1", "byte 0 of the line is not UTF-8"),
    },
}
CASES = [(kind, *case) for kind, cases in BAD.items() for case in cases.values()]
CASE_IDS = [f"{kind}-{name}" for kind, cases in BAD.items() for name in cases]


@pytest.fixture
def written(tmp_path):
    def write(*lines, name="trace.txt"):
        path = tmp_path / name
        coded = [line if isinstance(line, bytes) else line.encode() for line in lines]
        path.write_bytes(b"\n".join(coded) + b"\n")
        return path

    return write


def with_bad_rows(kind, *rows):
    """The good lines with bad ones after the second, from line 3 on."""
    return *GOOD[kind][:2], *rows, *GOOD[kind][2:]


def columns(workload):
    return [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in workload.arrivals]


def means(workload):
    lengths = [(one.prompt_tokens, one.output_tokens) for one in workload.arrivals]
    return np.mean(lengths, axis=0).round(1).tolist()


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_pinned_must_not_change(kind, written):
    path = written(*GOOD[kind])
    pinned = file_sha256(path)
    assert READERS[kind](path, sha256=pinned) == READERS[kind](path)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=f"has changed: its sha256 was {pinned[:12]}"):
        READERS[kind](path, sha256=pinned)


class TestSmallFiles:
    def test_azure_times_keep_every_digit_and_cross_midnight(self, written):
        workload = read_azure(written(*AZURE, name="conv.csv"))
        assert columns(workload) == [(0, 374, 44), (1e-7, 396, 109), (2.5000001, 879, 55)]
        assert [one.number for one in workload.arrivals] == [0, 1, 2]
        assert (workload.name, workload.block_tokens, workload.skipped_rows) == (
            "azure:conv",
            None,
            0,
        )

    def test_azure_times_may_name_their_offset(self, written):
        path = written(
            AZURE_HEADER,
            "2024-05-10 00:00:00.009930+00:00,1,2",
            "2024-05-10 02:00:01+02:00,3,4",
        )
        assert columns(read_azure(path)) == [(0, 1, 2), (0.99007, 3, 4)]

    def test_mooncake_times_are_from_the_first_request(self, written):
        workload = read_mooncake(written(*MOONCAKE))
        assert columns(workload) == [(0, 1025, 7), (0, 1024, 1), (1.75, 1, 5)]
        assert [one.block_ids for one in workload.arrivals] == [(0, 1, 2), (0, 3), (4,)]
        assert workload.block_tokens == 512

    def test_sharegpt_keeps_the_order_of_the_file(self, written):
        workload = read_sharegpt(written(*SHAREGPT))
        assert columns(workload)[:2] == [(0, 74, 18), (0, 93, 5)]
        assert len(workload.arrivals) == 6

    def test_first_turns_are_those_that_do_not_repeat_the_row_before(self, written):
        turns = first_turns(read_sharegpt(written(*SHAREGPT)))
        assert columns(turns) == [(0, 74, 18), (0, 98, 2), (0, 7, 3), (0, 12, 80)]
        assert [one.number for one in turns.arrivals] == [0, 1, 2, 3]

    def test_first_turns_that_do_not_fit_are_counted(self, written):
        turns = first_turns(read_sharegpt(written(*SHAREGPT)), 92)
        assert columns(turns) == [(0, 74, 18), (0, 7, 3), (0, 12, 80)]
        assert turns.too_long == 1
        with pytest.raises(ValueError, match=r"no request .* max_length=9: .* 10 tokens"):
            first_turns(read_sharegpt(written(*SHAREGPT)), 9)

    @pytest.mark.parametrize("kind", READERS)
    def test_marks_and_line_ends_of_other_systems_change_nothing(self, written, kind):
        plain = READERS[kind](written(*GOOD[kind]))
        first, *others = (line.encode() + b"\r" for line in GOOD[kind])
        foreign = READERS[kind](written(b"\xef\xbb\xbf" + first, *others, b"", b""))
        assert foreign == plain


class TestBadRows:
    @pytest.mark.parametrize(("kind", "row", "said"), CASES, ids=CASE_IDS)
    def test_a_bad_row_is_an_error_that_says_where_and_what_to_do(self, written, kind, row, said):
        path = written(*with_bad_rows(kind, row))
        with pytest.raises(ValueError, match=said) as caught:
            READERS[kind](path)
        message = str(caught.value)
        assert message.startswith(f"{path}, line 3: ")
        assert message.endswith("--skip_bad_rows leaves such rows out and counts them")
        assert len(message) < len(str(path)) + 400

    @pytest.mark.parametrize(("kind", "row", "said"), CASES, ids=CASE_IDS)
    def test_a_bad_row_can_be_left_out_and_is_counted(self, written, kind, row, said):
        good = READERS[kind](written(*GOOD[kind]))
        workload = READERS[kind](written(*with_bad_rows(kind, row, row)), skip_bad_rows=True)
        assert workload.arrivals == good.arrivals
        assert workload.skipped_rows == 2

    @pytest.mark.parametrize("kind", READERS)
    def test_a_file_without_a_good_row_is_an_error_all_the_same(self, written, kind):
        start = GOOD[kind][:1] if kind != "mooncake" else ()
        bad = [row for row, _ in list(BAD[kind].values())[:2]]
        path = written(*start, *bad, "x")
        with pytest.raises(ValueError, match=r"line \d: no good row .*\(3 malformed\)"):
            READERS[kind](path, skip_bad_rows=True)


@pytest.mark.parametrize("skip", [False, True])
class TestBadFiles:
    @pytest.mark.parametrize("kind", READERS)
    @pytest.mark.parametrize("lines", [("",), ("", " ", "")])
    def test_empty(self, written, kind, lines, skip):
        path = written(*lines)
        with pytest.raises(ValueError, match="line 1: the file is empty, wanted") as caught:
            READERS[kind](path, skip_bad_rows=skip)
        assert str(caught.value).startswith(str(path))

    @pytest.mark.parametrize("kind", ["azure", "sharegpt"])
    def test_header_alone(self, written, kind, skip):
        with pytest.raises(ValueError, match=r"line 2: no good row .*\(0 malformed\)"):
            READERS[kind](written(GOOD[kind][0]), skip_bad_rows=skip)

    @pytest.mark.parametrize("kind", READERS)
    @pytest.mark.parametrize("other", READERS)
    def test_a_file_of_another_kind_says_how_to_read_it(self, written, kind, other, skip):
        path = written(*GOOD[other])
        if kind == other:
            assert READERS[kind](path, skip_bad_rows=skip).name == f"{kind}:trace"
            return
        with pytest.raises(ValueError, match=f"line 1: .* begins a file of kind {other}") as caught:
            READERS[kind](path, skip_bad_rows=skip)
        assert str(caught.value).endswith(f"read it as {other}:{path}")

    @pytest.mark.parametrize("kind", ["azure", "sharegpt"])
    def test_no_header(self, written, kind, skip):
        path = written(*GOOD[kind][1:])
        with pytest.raises(ValueError, match=f"line 1: the header is .*, wanted '{GOOD[kind][0]}'"):
            READERS[kind](path, skip_bad_rows=skip)

    def test_not_utf_8(self, written, skip):
        path = written("\n".join(AZURE).encode("utf-16"))
        with pytest.raises(ValueError, match=r"line 1: the header is .* in UTF-8"):
            read_azure(path, skip_bad_rows=skip)

    @pytest.mark.parametrize("kind", READERS)
    def test_unreadable(self, tmp_path, kind, skip):
        with pytest.raises(ValueError, match=r"none\.csv cannot be read: No such file"):
            READERS[kind](tmp_path / "none.csv", skip_bad_rows=skip)
        with pytest.raises(ValueError, match="cannot be read: Is a directory"):
            READERS[kind](tmp_path, skip_bad_rows=skip)


class TestRealFiles:
    def test_azure(self, data_path):
        workload = read_azure(data_path("traces/azure/AzureLLMInferenceTrace_conv.csv"))
        assert len(workload.arrivals) == 19_366
        assert means(workload) == [1154.7, 211.1]
        assert max(one.prompt_tokens for one in workload.arrivals) == 14_050
        assert max(one.output_tokens for one in workload.arrivals) == 1_000
        assert columns(workload)[1] == (4.314579, 396, 109)
        assert workload.arrivals[-1].arrival_s == 3501.721937

    def test_mooncake(self, data_path):
        workload = read_mooncake(data_path("traces/mooncake/conversation_trace.jsonl"))
        assert len(workload.arrivals) == 12_031
        assert means(workload) == [12035.1, 342.6]
        assert max(one.prompt_tokens for one in workload.arrivals) == 126_195
        assert workload.arrivals[-1].arrival_s == 3536.999

    def test_mooncake_prefixes_hit_an_infinite_cache_as_published(self, data_path):
        workload = read_mooncake(data_path("traces/mooncake/conversation_trace.jsonl"))
        cached, hits, blocks = set(), 0, 0
        for arrival in workload.arrivals:
            blocks += len(arrival.block_ids)
            for block in arrival.block_ids:
                if block not in cached:
                    break
                hits += 1
            cached.update(arrival.block_ids)
        assert (hits, blocks, len(cached)) == (105_710, 288_500, 182_790)
        assert round(hits / blocks, 3) == 0.366

    def test_mooncake_ids_stand_for_whole_prefixes(self, data_path):
        workload = read_mooncake(data_path("traces/mooncake/conversation_trace.jsonl"))
        before, filled = {}, {}
        for arrival in workload.arrivals:
            previous = None
            for place, block in enumerate(arrival.block_ids):
                assert before.setdefault(block, previous) == previous
                tokens = min(512, arrival.prompt_tokens - 512 * place)
                assert filled.setdefault(block, tokens) == tokens
                previous = block

    def test_sharegpt(self, data_path):
        name = "traces/sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
        workload = read_sharegpt(data_path(name))
        assert len(workload.arrivals) == 30_731
        assert means(workload) == [2340.0, 438.7]
        assert sum(one.total_tokens > 2048 for one in workload.arrivals) == 16_163  # 53 %
        assert len(first_turns(workload).arrivals) == 30_731 - 25_053
        turns = first_turns(workload, 2048)
        assert (len(turns.arrivals), turns.too_long) == (5_498, 180)
        assert means(turns) == [163.8, 467.2]
