"""Cache specs: legal points are values, impossible ones name the fields and a way out."""

import dataclasses
import itertools
import subprocess
import sys

import pytest

from kvlab.ops.retention import H2O, POLICIES, Sinks, SnapKV, Window
from kvlab.ops.specs import (
    PLACEMENTS,
    RETENTIONS,
    STORAGES,
    CacheSpec,
    Contiguous,
    Kivi4,
    Paged,
    Recompute,
    Ring,
    assign_tables,
    parse_placement,
)


def test_specs_are_frozen_values():
    spec = CacheSpec(Paged(7), "bfloat16")
    assert spec == CacheSpec(Paged(7), "bfloat16")
    assert hash(spec) == hash(CacheSpec(Paged(7), "bfloat16"))
    different = [CacheSpec(Paged(8), "bfloat16"), CacheSpec(Paged(7)), CacheSpec(Contiguous())]
    assert len({spec, *different}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.storage = "float32"


def test_the_default_is_paged_float32():
    assert CacheSpec() == CacheSpec(Paged(16), "float32", table=0)


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        (Recompute(), "recompute"),
        (Contiguous(), "contiguous"),
        (Paged(13), "paged:13"),
        (Ring(37), "ring:37"),
    ],
)
def test_placements_print_as_they_are_named(placement, name):
    assert str(placement) == name
    assert parse_placement(name.partition(":")[0], 13, 37) == placement


def test_every_name_is_known():
    kinds = [type(parse_placement(name, 16, 7)) for name in PLACEMENTS]
    assert kinds == [Recompute, Contiguous, Paged, Ring]
    assert ("all", *POLICIES) == RETENTIONS


def test_an_unknown_placement_lists_the_legal_ones():
    with pytest.raises(ValueError, match=r"'pagde' is not known; .* contiguous, paged, ring$"):
        parse_placement("pagde", 16)


def test_a_ring_has_a_window_of_a_position_or_more():
    with pytest.raises(ValueError, match="placement=ring needs a window; give window=256"):
        parse_placement("ring", 16)
    with pytest.raises(ValueError, match="window=0 given: a ring holds a whole number"):
        Ring(0)


def test_the_sizes_of_kivi_are_checked():
    assert CacheSpec(Contiguous(), "kivi4").storage == Kivi4(32, 0)
    assert str(Kivi4(16, 48)) == "kivi4:16:48"
    with pytest.raises(ValueError, match="group=24 given: legal values: 2, 4, 8, 16, 32, 64"):
        Kivi4(24)
    with pytest.raises(ValueError, match="residual=-1 given"):
        Kivi4(32, -1)


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_holds_a_token(page_size):
    message = f"page_size={page_size} given: .* use page_size=1 or more"
    with pytest.raises(ValueError, match=message):
        Paged(page_size)
    with pytest.raises(ValueError, match=message):
        parse_placement("paged", page_size)


def test_other_placements_do_not_read_the_page_size():
    assert parse_placement("contiguous", 0) == Contiguous()


def test_an_unknown_storage_lists_the_legal_ones():
    with pytest.raises(
        ValueError, match=r"storage='float64' is not known; .* float32, bfloat16, .*kivi4$"
    ):
        CacheSpec(storage="float64")


def test_every_point_is_legal_or_names_both_fields_and_a_legal_neighbour():
    placements = [Recompute(), Contiguous(), Paged(1), Paged(16), Paged(64), Ring(37)]
    policies = [None, *(policy() for policy in POLICIES.values())]
    seen = set()
    for placement, storage, policy in itertools.product(placements, STORAGES, policies):
        name = policy
        if placement == Recompute() and storage != "float32":
            message = f"placement=recompute .* storage={storage}.* use storage=float32, or placem"
        elif policy and placement in (Recompute(), Ring(37)):
            message = f"placement={placement} .* retention={name} .* use retention=all, or placeme"
        elif policy and storage == "kivi4":
            message = f"retention={name} .* storage=kivi4:32:0 .* use storage=int4, or retention"
        elif storage == "kivi4" and placement in (Paged(1), Paged(16)):
            message = f"storage=kivi4:32:0 .* page_size={placement.page_size} .* use page_size=32"
        else:
            spec = CacheSpec(placement, storage, policy)
            assert spec.storage == (Kivi4() if storage == "kivi4" else storage)
            assert spec.evicts == (policy is not None)
            continue
        seen.add(message)
        with pytest.raises(ValueError, match=message):
            CacheSpec(placement, storage, policy)
    assert len(seen) == 22


def test_layers_of_one_placement_share_a_table():
    specs = [
        CacheSpec(Paged(16)),
        CacheSpec(Contiguous()),
        CacheSpec(Paged(8)),
        CacheSpec(Paged(16), "bfloat16"),  # another storage, the same mapping
        CacheSpec(Contiguous()),
    ]
    assigned = assign_tables(specs)
    assert [spec.table for spec in assigned] == [0, 1, 2, 0, 1]
    assert [dataclasses.replace(spec, table=0, place=None) for spec in assigned] == specs
    assert assign_tables(assigned) == assigned


def test_recompute_on_every_layer_has_one_table():
    assert [spec.table for spec in assign_tables([CacheSpec(Recompute())] * 3)] == [0, 0, 0]


def test_a_ring_counts_with_the_contiguous_layers():
    specs = [CacheSpec(Ring(7)), CacheSpec(Contiguous()), CacheSpec(Ring(9)), CacheSpec(Paged(7))]
    assert [spec.table for spec in assign_tables(specs)] == [0, 0, 0, 1]


def test_evicting_layers_share_a_table_where_they_hold_equally_many_tokens():
    def tables(*policies, heads=3):
        specs = [CacheSpec(Paged(16), retention=policy) for policy in policies]
        return [spec.table for spec in assign_tables(specs, [heads] * len(specs))]

    assert tables(None, Window(40), Sinks(40), Window(41)) == [0, 1, 1, 2]
    assert tables(H2O(40), SnapKV(40, when="both"), H2O(40, when="prefill")) == [0, 0, 1]
    assert tables(Window(40), H2O(40)) == [0, 1]  # a row a sequence, and a row a head
    shared = SnapKV(40, allocation="per_head")
    assert tables(shared, shared, SnapKV(40)) == [0, 0, 1]
    specs = [CacheSpec(Paged(16), retention=policy) for policy in (shared, None, shared)]
    assert [spec.place for spec in assign_tables(specs, [3, 3, 3])] == [0, None, 1]
    mixed = [CacheSpec(Paged(16), retention=H2O(40))] * 3
    assert [spec.table for spec in assign_tables(mixed, [3, 1, 3])] == [0, 1, 0]


@pytest.mark.parametrize("other", [Contiguous(), Paged(8)])
def test_recompute_beside_another_placement_names_both_and_the_way_out(other):
    message = f"placement=recompute on some layers and placement={other} on others.* use {other} "
    for specs in itertools.permutations([CacheSpec(Recompute()), CacheSpec(other)]):
        with pytest.raises(ValueError, match=message):
            assign_tables(specs)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("Paged(2.5)", "page_size=2.5 given"),
        ("Ring(1.5)", "window=1.5 given"),
        ("CacheSpec('paged')", "placement='paged' is no placement; use parse_placement"),
        ("CacheSpec(retention='window')", "retention='window' is no policy; use None, or"),
    ],
)
def test_names_and_other_types_are_refused_where_specs_are_wanted(made, message):
    """Without the type checks of tests, as a user meets them."""
    program = f"from kvlab.ops.specs import *\ntry: {made}\nexcept ValueError as e: print(e)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert message in ran.stdout


def test_a_policy_with_a_field_that_cannot_be_hashed_is_refused():
    with pytest.raises(ValueError, match=r"cannot be part of .*unhashable.*; .* tuples, not lists"):
        CacheSpec(retention=_Listed())


@dataclasses.dataclass(frozen=True)
class _Listed(Window):
    weights: list = dataclasses.field(default_factory=list)
