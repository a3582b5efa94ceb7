"""A per-layer sweep: attention and cache that differ between the layers of one model.

Question: if only some layers can afford the model's own KV heads, which should keep them, and does
  a cache that is paged in some layers and contiguous in others change anything but memory?
Source: layers are known to differ in how much their keys and values matter; Pyramid-shaped budgets
  build on it (PyramidKV, arXiv 2406.02069, section 3). Pooling as in GQA (arXiv 2305.13245), 2.1.
Expected: pooled layers cost quality wherever they are, so every mixed row lies between gqa and mqa
  in bytes and in perplexity; mixed placement has the perplexity of a single one to rounding.
Command: kvlab sweep --config=per_layer
"""

from kvlab.ops.specs import CacheSpec, Contiguous, Paged
from kvlab.research.experiment import Sweep, Variant

_LAYERS = 30  # of SmolLM2-135M
_PAGED = CacheSpec(Paged(16))

CONFIG = Sweep(
    name="per_layer",
    question="Which layers can do with fewer KV heads, and can placements be mixed?",
    model="smollm2-135m",
    variants=(
        Variant("gqa", _PAGED),
        Variant(("gqa",) * 15 + ("mqa",) * (_LAYERS - 15), _PAGED),
        Variant(("mqa",) * 15 + ("gqa",) * (_LAYERS - 15), _PAGED),
        Variant(("gqa",) * (_LAYERS - 2) + ("mqa",) * 2, _PAGED),
        Variant("gqa", (_PAGED,) * 15 + (CacheSpec(Contiguous()),) * (_LAYERS - 15)),
    ),
    batch_sizes=(1,),
)
