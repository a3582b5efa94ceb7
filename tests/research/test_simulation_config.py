"""What can be simulated, by its name and sizes."""

import numpy as np
import pytest

from kvlab.research.cost_model import OPT_13B, StepCost
from kvlab.research.devices import DEVICES
from kvlab.research.simulated_runs import SimulatedRuns, simulated
from kvlab.research.simulation import SimulatedPages, SimulationConfig

COST = StepCost(OPT_13B, DEVICES["A100-40GB"])

CONFIGS = {
    "an unknown allocator": ({"allocator": "slab"}, "allocator='slab' given: use paged, max, pow2"),
    "no tokens a page": ({"page_size": 0}, "page_size=0 given; it must be 1 or more"),
    "no pool": ({"kv_slots": 0}, "kv_slots=0 given"),
    "no slots": ({"slots": -1}, "slots=-1 given"),
    "no length": ({"max_length": 0}, "max_length=0 given"),
    "a pool of no page": ({"kv_slots": 15}, "kv_slots=15 and page_size=16: the pool holds no page"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_cannot_be_simulated_is_refused(case):
    fields, reason = CONFIGS[case]
    with pytest.raises(ValueError, match=reason):
        SimulationConfig(COST, **{"allocator": "paged", "page_size": 16, "kv_slots": 64, **fields})


def test_an_allocator_by_its_name():
    for allocator, kind in {"paged": SimulatedPages, "pow2": SimulatedRuns}.items():
        assert isinstance(simulated(SimulationConfig(COST, allocator, 16, 100)), kind)
    paged = simulated(SimulationConfig(COST, "paged", 16, 100))
    assert paged.pool_pages() == 6
    assert paged.token_slots(np.zeros(0)) == (96, 0)
