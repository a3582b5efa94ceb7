"""Memory of the compiled decode step: nothing the size of a cache beside the cache itself."""

import jax
import numpy as np
import pytest

from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import param_shapes
from kvlab.ops.retention import H2O, Sinks, SnapKV
from kvlab.ops.rope import Rope
from kvlab.ops.sampling import Sampling, SamplingParams
from kvlab.ops.specs import CacheSpec, Contiguous, Kivi4, Paged, Ring
from kvlab.research.inference import decode
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.programs import stop_array


@pytest.mark.parametrize(
    "spec",
    [
        CacheSpec(Contiguous(), "int8"),
        CacheSpec(Paged(64), "int4"),
        CacheSpec(Paged(64), Kivi4()),
        CacheSpec(Paged(64), retention=H2O(256)),
        *(
            pytest.param(spec, marks=pytest.mark.long)
            for spec in (
                CacheSpec(Ring(4096), Kivi4()),
                CacheSpec(Ring(4096)),
                CacheSpec(Paged(64), "int8", Sinks(256)),
                CacheSpec(Contiguous(), retention=SnapKV(256)),
            )
        ),
    ],
    ids=str,
)
def test_decode_copies_no_cache_in_any_precision(spec):
    """Reads dequantise block by block, writes are in place: working memory is far below a cache."""
    model = DecoderConfig(
        family="llama",
        vocab_size=31,
        num_layers=1,
        embed_dim=8,
        hidden_dim=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        max_length=8192,
        rope=Rope(),
    )
    slots = 4
    config = InferenceConfig(model, spec, slots=slots, max_length=8192, chunk=64, decode_steps=2)
    zeros = np.zeros(slots, np.int32)
    lowered = decode.lower(
        param_shapes(model),
        config,
        jax.eval_shape(config.init_cache),
        jax.eval_shape(config.init_logits),
        SamplingParams.from_requests([Sampling()] * slots),
        zeros,
        stop_array([()] * slots),
        np.zeros((slots, 2), np.int32),
        zeros,
    )
    working = lowered.compile().memory_analysis().temp_size_in_bytes
    cache = jax.eval_shape(config.init_cache).nbytes()
    assert working < 0.25 * cache
    in_float32 = 2 * slots * 8192 * 4 * 64 * 4
    assert working < 0.1 * in_float32
    if spec.storage != "float32":
        assert cache < 0.3 * in_float32
