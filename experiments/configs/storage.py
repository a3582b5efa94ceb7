"""How many bits do keys and values need?

Question: what does a cache cost in quality at 16, 8 and 4 bits, and does KIVI's arrangement (keys
  by channel, values by token, the newest tokens in full precision) mend what 4 bits for each token
  and head break?
Source: KIVI (arXiv 2402.02750), section 3: keys have channels of large magnitude, values do not, so
  keys want a scale for each channel.
Expected: bfloat16 and int8 are free (int8 within 0.3 % of perplexity, KL below 2e-3), int4 for each
  token and head costs 20 to 45 % by the text, kivi4 under 2 %. Bytes a token: int8 a bit over 1/4
  of float32, int4 a bit over 1/8.
Command: kvlab sweep --config=storage
"""

from kvlab.ops.specs import CacheSpec, Paged
from kvlab.research.experiment import Sweep, cross

_STORAGES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4", "kivi4")

CONFIG = Sweep(
    name="storage",
    question="How many bits do keys and values need?",
    model="smollm2-135m",
    variants=cross(("gqa",), tuple(CacheSpec(Paged(32), storage) for storage in _STORAGES)),
    batch_sizes=(8,),
)
