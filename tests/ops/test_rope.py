"""RoPE against transformers (golden), a slow float64 reference, and its own algebra."""

import importlib.util
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvlab.ops.rope import (
    DynamicNTK,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    apply_rope,
    attention_factor,
    inverse_frequencies,
    rotate,
    rotation,
)

apply = jax.jit(apply_rope, static_argnums=2)
frequencies_of = jax.jit(inverse_frequencies, static_argnums=(0, 1))

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
GOLDEN = np.load(GOLDENS / "rope.npz")
CASES = [json.loads(str(text)) for text in GOLDEN["cases"]]
LAST_POSITION = 131_071


def drawn(*shape, seed):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values.astype(np.float32))


def case_name(case):
    parameters = case["rope_parameters"]
    return f"{parameters['rope_type']}-{case['head_dim']}-{case['prompt_length']}"


def rope_of(case):
    given = case["rope_parameters"]
    original = given.get("original_max_position_embeddings")
    optional = (
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
    match given["rope_type"]:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(given["factor"])
        case "dynamic":
            scaling = DynamicNTK(given["factor"], case["max_length"])
        case "llama3":
            scaling = Llama3Scaling(
                given["factor"], given["low_freq_factor"], given["high_freq_factor"], original
            )
        case "yarn":
            extra = {key: given[key] for key in optional if key in given}
            scaling = YarnScaling(given["factor"], original, **extra)
    return Rope(given["rope_theta"], scaling)


def prompt_lengths_of(case):
    length = case["prompt_length"]
    return None if length is None else jnp.array([length], jnp.int32)


def reference_frequency(rope, head_dim, pair, prompt_length):
    """One frequency from the papers' formulas, in Python floats."""
    theta, scaling = rope.theta, rope.scaling
    if isinstance(scaling, DynamicNTK):
        longest = max(prompt_length, scaling.original_max_length)
        growth = scaling.factor * longest / scaling.original_max_length - (scaling.factor - 1)
        theta = theta * growth ** (head_dim / (head_dim - 2))
    plain = theta ** (-2 * pair / head_dim)
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_length * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = min(max((turns - low) / (high - low), 0), 1)
        return kept * plain + (1 - kept) * plain / scaling.factor
    if isinstance(scaling, YarnScaling):
        ends = []
        for turns in (scaling.beta_fast, scaling.beta_slow):
            wave = scaling.original_max_length / (turns * 2 * math.pi)
            ends.append(head_dim * math.log(wave) / (2 * math.log(theta)))
        first, last = ends
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        divided = min(max((pair - first) / (last - first), 0), 1)
        return (1 - divided) * plain + divided * plain / scaling.factor
    return plain


def reference_rotation(x, positions, frequencies, factor=1.0):
    """Pairs as complex numbers, turned in float64 by float32 angles."""
    batch, tokens, heads, head_dim = x.shape
    half = head_dim // 2
    out = np.zeros(x.shape)
    for b in range(batch):
        for t in range(tokens):
            for i in range(half):
                angle = float(np.float32(positions[b, t]) * np.float32(frequencies[b, i]))
                for n in range(heads):
                    pair = complex(x[b, t, n, i], x[b, t, n, i + half])
                    turned = pair * complex(math.cos(angle), math.sin(angle)) * factor
                    out[b, t, n, i], out[b, t, n, i + half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize(
    ("index", "case"), list(enumerate(CASES)), ids=[case_name(case) for case in CASES]
)
class TestAgainstTransformers:
    def frequencies(self, case):
        rows = inverse_frequencies(rope_of(case), case["head_dim"], prompt_lengths_of(case))
        return np.asarray(rows).reshape(-1)

    def test_frequencies(self, index, case):
        ours, theirs = self.frequencies(case), GOLDEN[f"frequencies_{index}"]
        assert ours.dtype == theirs.dtype == np.float32
        # Dynamic bases take a power on the device, and of the growth instead of the base.
        ulps = 8 if case["rope_parameters"]["rope_type"] == "dynamic" else 1
        np.testing.assert_array_max_ulp(ours, theirs, maxulp=ulps)
        if ulps == 1:
            assert np.mean(ours == theirs) > 0.9

    def test_frequencies_are_the_papers(self, index, case):
        rope, head_dim = rope_of(case), case["head_dim"]
        wanted = [
            reference_frequency(rope, head_dim, pair, case["prompt_length"])
            for pair in range(head_dim // 2)
        ]
        np.testing.assert_allclose(self.frequencies(case), wanted, rtol=1e-6)

    def test_attention_factor(self, index, case):
        assert attention_factor(rope_of(case)) == pytest.approx(
            GOLDEN["attention_factors"][index], rel=1e-12
        )

    def test_rotated_heads(self, index, case):
        x, positions = GOLDEN[f"x_{index}"], GOLDEN[f"positions_{index}"]
        ours = np.asarray(
            apply_rope(
                jnp.asarray(x), jnp.asarray(positions), rope_of(case), prompt_lengths_of(case)
            )
        )
        # At the largest position one last bit of a frequency turns a pair by 0.008, so an
        # element is compared as closely as the two frequencies agree.
        theirs = GOLDEN[f"frequencies_{index}"]
        drift = np.abs(self.frequencies(case).astype(np.float64) - theirs)
        drift = np.tile(positions[0][:, None] * drift[None, :], (1, 2))[None, :, None, :]
        allowed = 3e-6 + 6 * drift
        assert np.all(np.abs(ours - GOLDEN[f"rotated_{index}"]) <= allowed)


@pytest.mark.peers
def test_golden_is_what_transformers_gives_now():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("make_rope", GOLDENS / "make_rope.py")
    make_rope = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_rope)
    live = make_rope.build()
    assert set(live) == set(GOLDEN.files)
    for name, array in live.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, GOLDEN[name], rtol=0, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(array, GOLDEN[name], err_msg=name)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearScaling(3.0),
        DynamicNTK(2.5, 101),
        Llama3Scaling(8.0, 1.0, 4.0, 8191),
        YarnScaling(4.0, 4093),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
def test_matches_the_reference_up_to_the_last_position(scaling):
    rope = Rope(500_000.0, scaling)
    generator = np.random.default_rng(3)
    x = generator.standard_normal((2, 5, 3, 14)).astype(np.float32)
    positions = np.array([[0, 1, 97, 65_537, LAST_POSITION], [LAST_POSITION - 1, 2, 0, 5, 8191]])
    positions = positions.astype(np.int32)
    lengths = jnp.array([89, 1009], jnp.int32)
    frequencies = np.asarray(inverse_frequencies(rope, 14, lengths))
    frequencies = np.broadcast_to(frequencies, (2, 7))
    wanted = reference_rotation(x, positions, frequencies, attention_factor(rope))
    ours = apply(x, positions, rope, lengths)
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=0, atol=2e-6)


def test_angle_error_at_the_last_position_is_that_of_float32():
    head_dim, theta = 62, 10_000.0
    positions = jnp.array([[LAST_POSITION]], jnp.int32)
    cos, sin = jax.jit(rotation, static_argnums=(1, 2))(positions, Rope(theta), head_dim)
    angles = LAST_POSITION * theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    # Exponent, power, reciprocal and product each round once.
    allowed = 4 * 2.0**-24 * angles * (1 + math.log(theta)) + 1e-7
    assert np.all(np.abs(np.asarray(cos)[0, 0] - np.cos(angles)) <= allowed)
    assert np.all(np.abs(np.asarray(sin)[0, 0] - np.sin(angles)) <= allowed)


def test_position_zero_and_norms_are_kept():
    x = drawn(3, 2, 5, 22, seed=0)
    same = apply(x, jnp.zeros((3, 2), jnp.int32), Rope())
    np.testing.assert_array_equal(np.asarray(same), np.asarray(x))
    turned = apply(x, jnp.full((3, 2), 7919, jnp.int32), Rope())
    assert not np.allclose(turned, x)
    norms = np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(*norms, rtol=1e-6)


def test_scores_depend_on_the_distance_alone():
    query, key = drawn(2, 1, 1, 1, 26, seed=1)

    def score(query_position, key_position):
        turned = [
            np.asarray(apply(x, jnp.array([[position]], jnp.int32), Rope()), np.float64)
            for x, position in ((query, query_position), (key, key_position))
        ]
        return np.sum(turned[0] * turned[1])

    assert score(17, 4) == pytest.approx(score(1013, 1000), abs=1e-3)
    assert abs(score(17, 4) - score(17, 5)) > 1e-2


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x = drawn(2, 3, 5, 14, seed=2).astype(jnp.bfloat16)
    positions = jnp.array([[0, 257, LAST_POSITION], [1, 1031, 4099]], jnp.int32)
    ours = apply(x, positions, Rope())
    wanted = apply(x.astype(jnp.float32), positions, Rope()).astype(jnp.bfloat16)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted))


def test_dynamic_base_is_each_row_s_own_and_plain_within_the_original_length():
    rope = Rope(10_000.0, DynamicNTK(2.0, 101))
    lengths = jnp.array([1, 101, 102, 997], jnp.int32)
    rows = np.asarray(frequencies_of(rope, 26, lengths))
    plain = np.asarray(inverse_frequencies(Rope(10_000.0), 26))
    np.testing.assert_array_equal(rows[:2], np.stack([plain, plain]))
    assert np.all(rows[2, 1:] < plain[1:])
    assert np.all(rows[3, 1:] < rows[2, 1:])
    assert np.all(rows[:, 0] == 1)
    alone = np.asarray(inverse_frequencies(rope, 26, lengths[3:]))
    np.testing.assert_array_equal(rows[3:], alone)


def test_a_row_has_the_same_bits_in_any_slot():
    rope = Rope(10_000.0, DynamicNTK(2.0, 101))
    x = drawn(7, 3, 5, 22, seed=3)
    positions = np.random.default_rng(4).integers(0, LAST_POSITION, (7, 3)).astype(np.int32)
    lengths = jnp.array([5, 101, 211, 997, 3, 499, 1499], jnp.int32)
    order = np.array([4, 0, 6, 2, 5, 1, 3])
    straight = np.asarray(apply(x, positions, rope, lengths))
    moved = np.asarray(apply(x[order], positions[order], rope, lengths[order]))
    np.testing.assert_array_equal(moved, straight[order])


def test_rotation_is_shared_by_queries_and_keys():
    positions = jnp.array([[3, 1009, 11]], jnp.int32)
    cos, sin = jax.jit(rotation, static_argnums=(1, 2))(positions, Rope(), 14)
    for heads in (5, 1):
        x = drawn(1, 3, heads, 14, seed=heads)
        ours, wanted = jax.jit(rotate)(x, cos, sin), apply(x, positions, Rope())
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted))


def test_specs_are_hashable_and_equal_by_value():
    specs = {Rope(1e6, YarnScaling(4, 32_768)), Rope(1e6, YarnScaling(4.0, 32_768)), Rope()}
    assert len(specs) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(1.0), r"Rope\.theta=1\.0 .*above 1"),
        (lambda: Rope(math.nan), r"Rope\.theta=nan"),
        (lambda: LinearScaling(0.5), r"LinearScaling\.factor=0\.5 .*at least 1"),
        (lambda: LinearScaling(math.inf), r"factor=inf .*finite"),
        (lambda: DynamicNTK(2.0, 0), r"DynamicNTK\.original_max_length=0 .*at least 1 token"),
        (lambda: Llama3Scaling(8, 0, 4, 8192), r"low_freq_factor=0 .*above 0"),
        (lambda: Llama3Scaling(8, 4, 4, 8192), r"high_freq_factor=4 .*above low_freq_factor=4"),
        (lambda: YarnScaling(4, 0), r"YarnScaling\.original_max_length=0"),
        (lambda: YarnScaling(4, 4096, beta_slow=0.0), r"beta_slow=0\.0 .*above 0"),
        (lambda: YarnScaling(4, 4096, beta_fast=1.0), r"beta_fast=1\.0 .*above beta_slow=1\.0"),
        (lambda: YarnScaling(4, 4096, attention_factor=0.0), r"attention_factor=0\.0"),
        (lambda: YarnScaling(4, 4096, mscale=-1.0), r"mscale=-1\.0 .*at least 0"),
        (lambda: inverse_frequencies(Rope(), 7), r"head_dim=7 .*even"),
        (lambda: inverse_frequencies(Rope(scaling=DynamicNTK(2, 7)), 14), "prompt_lengths"),
        (
            lambda: inverse_frequencies(
                Rope(scaling=DynamicNTK(2, 7)), 2, jnp.array([5], jnp.int32)
            ),
            "head_dim=2 .*4 or more",
        ),
    ],
)
def test_errors_name_field_value_and_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
