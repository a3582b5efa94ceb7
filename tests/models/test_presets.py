"""Presets have the number of parameters of the models they are named after."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from kvlab.models.decoder import Decoder, param_shapes
from kvlab.models.presets import PRESETS, parameter_count, preset
from kvlab.models.tokenizers import ByteTokenizer

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
TINY = ("tiny-mha", "tiny-gqa", "tiny-mqa", "tiny-window")


def test_every_preset_is_tiny_or_published():
    assert set(PRESETS) == {*PUBLISHED, *TINY}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name):
    assert parameter_count(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["tiny-gqa", "gpt2"])
def test_shapes_are_those_that_the_modules_initialise(name):
    config = preset(name)
    per_layer = tuple(2 if layer % 2 else config.num_heads for layer in range(config.num_layers))
    for wanted in (config, dataclasses.replace(config, num_kv_heads=per_layer)):
        tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
        initialise = functools.partial(Decoder(wanted).init, method="forward")
        assert (
            param_shapes(wanted) == jax.eval_shape(initialise, jax.random.key(0), tokens)["params"]
        )


def test_tiny_presets_are_for_the_byte_tokenizer_and_differ_in_their_name():
    configs = {name: preset(name) for name in TINY}
    assert [config.kv_heads[0] for config in configs.values()] == [6, 2, 1, 2]
    assert {config.vocab_size for config in configs.values()} == {ByteTokenizer().vocab_size}
    windows = [config.layer_windows for config in configs.values()]
    assert windows == [(None, None)] * 3 + [(64, 64)]


def test_what_shapes_do_not_show():
    assert set(preset("mistral-7b-v0.1").layer_windows) == {4096}
    assert set(preset("mistral-7b-v0.3").layer_windows) == {None}
    assert preset("gemma2-2b").layer_windows[:3] == (4096, None, 4096)
    assert preset("gemma2-27b").attention_scale == pytest.approx(1 / 12)
    assert preset("gemma2-9b").attention_scale == pytest.approx(1 / 16)
    assert preset("llama-3.2-1b").rope.scaling.factor == 32
    assert preset("llama-3.1-8b").rope.scaling.factor == 8
    assert preset("qwen2.5-7b").norm.epsilon == 1e-6


def test_an_unknown_preset_names_the_nearest_first():
    with pytest.raises(ValueError, match=r"'tiny-gqb' .* nearest first: tiny-gqa, ") as caught:
        preset("tiny-gqb")
    assert all(name in str(caught.value) for name in PRESETS)
