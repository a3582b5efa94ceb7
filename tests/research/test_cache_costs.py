"""What caches hold, read and take: by hand, and against the arrays of real caches and sessions."""

import dataclasses

import numpy as np
import pytest

from kvlab.models.config import DecoderConfig
from kvlab.ops.retention import H2O, Sinks, Window
from kvlab.ops.rope import Rope
from kvlab.ops.specs import CacheSpec, Contiguous, Kivi4, Paged, Recompute, Ring, assign_tables
from kvlab.research.cache import cache_use, init_cache
from kvlab.research.cache_costs import (
    held_tokens,
    layer_window,
    read_bytes,
    sequence_bytes,
    token_bytes,
    written_bytes,
)

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=101,
    num_layers=2,
    embed_dim=7,
    hidden_dim=13,
    num_heads=6,
    num_kv_heads=3,
    head_dim=10,
    max_length=151,
    rope=Rope(),
)

# Of 3 heads of 10 values: codes, a float32 scale a head, notes of 4 bytes a row of the table.
TOKEN_BYTES = {
    "float32": (CacheSpec(Paged(8)), 120, 120),
    "bfloat16": (CacheSpec(Paged(8), "bfloat16"), 60, 60),
    "int8": (CacheSpec(Contiguous(), "int8"), 3 * 14, 3 * 14),
    "float8": (CacheSpec(Ring(13), "float8_e4m3fn"), 3 * 14, 3 * 14),
    "int4": (CacheSpec(Paged(8), "int4"), 3 * 9, 3 * 9),
    # Two tokens share a scale and a zero point a channel, two channels one of each a token.
    "kivi4": (CacheSpec(Paged(8), Kivi4(2)), 3 * (5 + 10 * 8 / 2), 3 * (5 + 5 * 8)),
    "sinks": (CacheSpec(Paged(8), "int8", Sinks(19)), 3 * 14 + 4, 3 * 14),
    "h2o": (CacheSpec(Paged(8), "bfloat16", H2O(19, recent=5)), 60 + 3 * 8, 60),
    "recompute": (CacheSpec(Recompute()), 0, 0),
}


@pytest.mark.parametrize("case", TOKEN_BYTES)
def test_a_stored_token_takes_its_codes_scales_and_notes(case):
    spec, key, value = TOKEN_BYTES[case]
    assert token_bytes(spec, 3, 10) == (key, value)


@pytest.mark.parametrize("case", ["float32", "int8", "int4", "sinks", "h2o"])
def test_they_are_the_bytes_of_a_real_cache(case):
    spec, key, value = TOKEN_BYTES[case]
    specs = assign_tables([spec] * 2, CONFIG.kv_heads)
    cache = init_cache(CONFIG, specs, slots=2, max_length=128, chunk=17, num_pages=None)
    use = cache_use(cache, specs)
    # An evicting layer also knows its own number, an int32.
    scalars = 0 if spec.retention is None else 2 * 4 / (2 * 128)
    assert use.bytes_per_token == pytest.approx(2 * (key + value) + scalars)


def test_a_read_takes_tokens_times_their_bytes_and_kivi_reads_the_newest_in_float32():
    assert read_bytes(TOKEN_BYTES["int4"][0], 3, 10, 36, 37, 29) == (29 * 27, 29 * 27)
    spec = CacheSpec(Paged(8), Kivi4(2, residual=5))
    closed_key, closed_value = token_bytes(spec, 3, 10)
    # Of 36 tokens before the step 31 are old enough: 30 in closed groups, and 7 of 37 are not.
    read = read_bytes(spec, 3, 10, 36, 37, 37)
    assert read == (7 * 120 + 30 * closed_key, 7 * 120 + 30 * closed_value)
    assert read_bytes(spec, 3, 10, 36, 37, 6) == (6 * 120, 6 * 120)  # a window
    assert read_bytes(spec, 3, 10, 0, 3, 3) == (3 * 120, 3 * 120)
    assert written_bytes(spec, 3, 10) == closed_key + closed_value + 2 * 240
    assert written_bytes(TOKEN_BYTES["int4"][0], 3, 10) == 54


def test_the_narrower_of_two_windows_counts():
    assert layer_window(CacheSpec(Ring(13)), None) == 13
    assert layer_window(CacheSpec(Ring(13)), 11) == layer_window(CacheSpec(Paged(8)), 11) == 11
    assert layer_window(CacheSpec(Paged(8)), None) is None


# budget, when, prompt, context: tokens held.
HELD = {
    (19, "both", 37, 41): 19,
    (19, "both", 11, 13): 13,
    (19, "both", 11, 41): 19,
    (19, "decode", 37, 41): 37,
    (19, "decode", 11, 13): 13,
    (19, "decode", 11, 41): 19,
    (19, "prefill", 37, 41): 23,
    (19, "prefill", 11, 41): 41,
    (0.5, "both", 37, 41): 18,
}


@pytest.mark.parametrize("case", HELD)
def test_a_budget_holds_what_its_time_says(case):
    budget, when, prompt, context = case
    spec = CacheSpec(Paged(8), retention=Sinks(budget, when, num_sinks=3))
    assert held_tokens(spec, context, prompt) == HELD[case]
    assert held_tokens(CacheSpec(Paged(8)), context, prompt) == context


@pytest.mark.parametrize("when", ["both", "decode", "prefill"])
def test_a_session_holds_as_many(when, tiny):
    spec = CacheSpec(Paged(8), retention=Sinks(19, when, num_sinks=3))
    session = tiny.session("gqa", spec, num_pages=20)
    session.prefill({0: tiny.prompt(37)})
    session.decode({0: 4})
    (table,) = session.cache.all_tables()
    assert int(np.asarray(table.lengths)[0]) == HELD[19, when, 37, 41]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (CacheSpec(Paged(8)), 6 * 8 * 240),  # 41 tokens on 6 pages
        (CacheSpec(Paged(8), "int4"), 6 * 8 * 54),
        (CacheSpec(Contiguous()), 64 * 240),  # whole read blocks
        (CacheSpec(Ring(7)), 64 * 240),
        (CacheSpec(Recompute()), 0),
        # 19 tokens on 3 pages, with a position each; an int32 is the layer's number.
        (CacheSpec(Paged(8), retention=Window(19)), 3 * 8 * 244 + 4),
        (CacheSpec(Contiguous(), retention=Window(19)), 64 * 244 + 4),
        # Three heads a table, with position and mass; 3 pages of each.
        (CacheSpec(Paged(8), retention=H2O(19, recent=5)), 3 * 3 * 8 * (80 + 8) + 4),
        # 16 tokens of residual, group and chunk make one block in float32.
        (CacheSpec(Paged(8), Kivi4(2, 5)), 6 * 8 * 3 * 90 + 64 * 240),
    ],
    ids=str,
)
def test_a_sequence_takes_whole_pages_or_rows_in_every_layer(spec, expected):
    assert sequence_bytes(CONFIG, (spec, spec), 41, chunk=10) == 2 * expected


def test_layers_may_differ():
    config = dataclasses.replace(CONFIG, num_kv_heads=(3, 1))
    specs = (CacheSpec(Paged(8)), CacheSpec(Contiguous(), "bfloat16"))
    assert sequence_bytes(config, specs, 41) == 48 * 240 + 64 * 40
    retained = CacheSpec(Paged(8), retention=Sinks(19, "prefill", num_sinks=3))
    assert sequence_bytes(config, (retained, specs[0]), 41, prompt=37) == (
        3 * 8 * 244 + 4 + 48 * 80
    )
