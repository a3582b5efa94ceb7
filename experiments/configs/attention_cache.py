"""The default sweep: attention x placement on a real model.

Question: what do MHA, GQA and MQA, and recomputing, contiguous and paged caches, cost and give in
  speed, memory and quality, on one machine and one model?
Source: the explainer's three claims about the KV cache: decode without one recomputes the text at
  every step; GQA stores K/N of what MHA stores; paging costs little speed and wastes little.
  GQA (arXiv 2305.13245), section 2; PagedAttention (arXiv 2309.06180), sections 3 and 4.
Expected: KV bytes per token mha : gqa : mqa = 9 : 3 : 1 for SmolLM2-135M (9 query heads, 3 KV).
  mha, gqa and every placement of either have the same perplexity; pooled mqa without uptraining is
  ruined. Paged decode is close to contiguous, and both are many times faster than recompute.
Command: kvlab sweep --config=attention_cache
"""

from kvlab.ops.specs import CacheSpec, Contiguous, Paged, Recompute
from kvlab.research.experiment import Sweep, cross

CONFIG = Sweep(
    name="attention_cache",
    question="What do attention and cache variants cost, and what do they give?",
    model="smollm2-135m",
    variants=cross(
        ("mha", "gqa", "mqa"),
        (CacheSpec(Recompute()), CacheSpec(Contiguous()), CacheSpec(Paged(16))),
    ),
)
