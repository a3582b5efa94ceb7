"""The default sweep on a model that comes with kvlab: no download.

Question: that of `attention_cache`, of a Llama of 0.8 million parameters with 4 KV heads of 8.
Source: as `attention_cache`; the model: kvlab.models.named.
Expected: KV bytes per token mha : gqa : mqa = 8 : 4 : 1. A step is mostly overhead at this size, so
  speeds lie closer together than those of a larger model; the model's context is 256 tokens.
  The model has read Shakespeare alone: modern English has a perplexity of some 200, and Turkish,
  which its vocabulary spells in bytes, one in the tens of thousands.
Command: kvlab sweep --config=shipped
"""

import dataclasses

from kvlab.experiments.configs import attention_cache

CONFIG = dataclasses.replace(
    attention_cache.CONFIG,
    name="shipped",
    model="shakespeare-gqa4",
    max_length=256,
    quality_tokens=256,
)
