"""Which tokens of a long text are worth keeping?

Question: with room for 128 or 256 tokens of a text of 640, which policy keeps those that later
  predictions need? Windows of both texts: 512 tokens are prefilled, retention is applied, and 128
  are forced through decode; only predictions after those count.
Source: StreamingLLM (arXiv 2309.17453), table 1: perplexity of Llama-2-13B on PG19 is 5,158 with a
  window alone, 5.40 with four sinks and a window. H2O (arXiv 2306.14048), SnapKV (arXiv
  2404.14469), AdaKV (arXiv 2407.11550).
Expected: window alone far worse than sinks and window; h2o better than random, its control, at the
  same budget; snapkv better than window at passkey retrieval; every curve reaches the full cache as
  its budget grows.
Command: kvlab sweep --config=retention
"""

from kvlab.ops.retention import H2O, Random, Sinks, SnapKV, Window
from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.experiment import Sweep, cross

_POLICIES = (
    None,
    *(
        policy
        for budget in (128, 256)
        for policy in (
            Window(budget),
            Sinks(budget),
            H2O(budget),
            SnapKV(budget),
            SnapKV(budget, allocation="per_head"),
            Random(budget),
        )
    ),
)

CONFIG = Sweep(
    name="retention",
    question="Which tokens of a long text are worth keeping?",
    model="smollm2-135m",
    variants=cross(("gqa",), tuple(CacheSpec(Paged(16), retention=it) for it in _POLICIES)),
    batch_sizes=(8,),
    prompt_tokens=512,
    decode_tokens=16,
    repeats=1,
    passkey_tokens=(512,),
)
