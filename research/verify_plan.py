"""What `kvlab verify` checks. A new variant is one entry of a plan, a new property one of a group.

Budgets are small, so that the longer prompts lose tokens; those of lossless variants hold any text.
"""

from kvlab.ops.retention import H2O, Random, Retention, Sinks, SnapKV, Window
from kvlab.ops.specs import Contiguous, Kivi4, Paged, Placement, Ring
from kvlab.research.equivalence import CHUNK, SLOTS, OwnRing, Variant
from kvlab.research.verify import BITS, ORACLE, Plan, altered, large_page, page_size, stored

_SHAPES = "products of other shapes sum in another order"

OTHER_CHUNK = altered("chunk", f"chunk 48 against {CHUNK}", _SHAPES, chunk=48)
OTHER_SLOTS = altered("slots", f"1 slot against {SLOTS}", _SHAPES, slots=1)
OTHER_IMPLEMENTATION = altered(
    "implementation",
    "reference against the default",
    "all scores at once sum in another order than blocks of them",
    implementation="reference",
)
OTHER_SHAPE = altered(
    "shape",
    f"chunk 48, 1 slot and reference against {CHUNK}, {SLOTS} and the default",
    f"{_SHAPES}; an ulp can move a rounding",
    chunk=48,
    slots=1,
    implementation="reference",
)
KIVI_SHAPE = altered(
    "shape",
    f"chunk 48, 1 slot and reference against {CHUNK}, {SLOTS} and the default",
    "queries of a larger chunk see more tokens in full precision",
    chunk=48,
    slots=1,
    implementation="reference",
)
CHOICE_SHAPE = altered(
    "shape",
    f"chunk 48, 1 slot and reference against {CHUNK}, {SLOTS} and the default",
    f"{_SHAPES}; an ulp can decide which of two tokens stays",
    chunk=48,
    slots=1,
    implementation="reference",
)
EXACT_SHAPE = altered(
    "shape",
    f"chunk 48, 1 slot and reference against {CHUNK}, {SLOTS} and the default",
    _SHAPES,
    chunk=48,
    slots=1,
    implementation="reference",
)

_ANY_TEXT = 512  # tokens: no prompt and continuation is longer


def _variant(*placements: Placement | OwnRing, storage: str | Kivi4 = "float32") -> Variant:
    return Variant(placements, storage)


def _keeping(policy: Retention, placement: Placement, storage: str = "float32") -> Variant:
    return Variant((placement,), storage, policy)


_MHA: tuple[Placement | OwnRing, ...]
_MHA = (Contiguous(), Paged(1), Paged(8), Paged(16), Paged(64), OwnRing())

_LOSSLESS = (
    (_variant(Contiguous()), (ORACLE, *BITS, EXACT_SHAPE)),
    (
        _variant(Paged(16)),
        (ORACLE, *BITS, OTHER_CHUNK, OTHER_SLOTS, OTHER_IMPLEMENTATION),
    ),
    (_variant(Paged(1)), (ORACLE, page_size(16))),
    (_variant(Paged(8)), (ORACLE, page_size(16))),
    (_variant(Paged(64)), (ORACLE, page_size(16))),
    (_variant(Paged(128)), (ORACLE, large_page(16))),
    (_variant(OwnRing()), (ORACLE, *BITS, EXACT_SHAPE)),
    (_variant(Ring(24)), (ORACLE, *BITS, EXACT_SHAPE)),
    (_variant(Ring(60)), (ORACLE,)),  # which needs more slots for the chunk than for the window
    (_variant(Contiguous(), Paged(8)), (ORACLE, *BITS, EXACT_SHAPE)),
    *((Variant((placement,), attention="mha"), (ORACLE,)) for placement in _MHA),
    (_keeping(Sinks(_ANY_TEXT), Contiguous()), (ORACLE,)),
    (_keeping(Window(_ANY_TEXT), Paged(16)), (ORACLE,)),
    (_keeping(H2O(_ANY_TEXT), Paged(16)), (ORACLE,)),
    (_keeping(SnapKV(_ANY_TEXT, allocation="per_head"), Paged(16)), (ORACLE,)),
)

_STORED = (
    (_variant(Paged(16), storage="bfloat16"), (stored(1e-3), *BITS, OTHER_SHAPE)),
    (_variant(Paged(16), storage="float8_e4m3fn"), (stored(3e-2), *BITS, OTHER_SHAPE)),
    (_variant(Paged(16), storage="int8"), (stored(5e-3), *BITS, OTHER_SHAPE)),
    (_variant(Paged(64), storage="int8"), (page_size(16),)),
    (_variant(Ring(24), storage="int8"), BITS),
    (_variant(Paged(16), storage="int4"), (stored(1.0), *BITS, OTHER_SHAPE)),
    (_variant(Contiguous(), storage="int4"), BITS),
    (_variant(Paged(32), storage=Kivi4()), (stored(5e-2), *BITS, KIVI_SHAPE)),
    (_variant(Paged(64), storage=Kivi4()), (page_size(32),)),
    (_variant(Ring(24), storage=Kivi4()), BITS),
)

_RETAINED = (
    (_keeping(Window(24), Paged(16)), (*BITS, EXACT_SHAPE)),
    (_keeping(Sinks(24), Paged(16)), (*BITS, EXACT_SHAPE)),
    (_keeping(Sinks(24, positions="cache"), Contiguous()), (*BITS, EXACT_SHAPE)),
    (_keeping(H2O(24, recent=8), Paged(16)), (*BITS, CHOICE_SHAPE)),
    (_keeping(H2O(24, recent=8), Paged(8)), (page_size(16),)),
    (_keeping(SnapKV(24, observation=8), Paged(16)), (*BITS, CHOICE_SHAPE)),
    (
        _keeping(SnapKV(24, observation=8, allocation="per_head"), Paged(16)),
        (*BITS, CHOICE_SHAPE),
    ),
    (_keeping(Random(24), Contiguous()), (*BITS, EXACT_SHAPE)),
)

PLANS = {
    "full": Plan((*_LOSSLESS, *_STORED, *_RETAINED)),
    "short": Plan(
        (
            (_variant(Paged(16)), (ORACLE, *BITS)),
            (_variant(Paged(16), storage="int8"), (stored(5e-3), *BITS, OTHER_SHAPE)),
        ),
        "paged:16 and paged:16 int8",
    ),
}
"""Plans by the names of the command line."""
