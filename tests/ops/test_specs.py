"""Cache specs: legal points are values, impossible ones name the fields and a way out."""

import dataclasses
import itertools

import pytest

from kvlab.ops.specs import (
    PLACEMENTS,
    STORAGES,
    CacheSpec,
    Contiguous,
    Paged,
    Recompute,
    assign_tables,
    parse_placement,
    table_placements,
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
    [(Recompute(), "recompute"), (Contiguous(), "contiguous"), (Paged(13), "paged:13")],
)
def test_placements_print_as_they_are_named(placement, name):
    assert str(placement) == name
    assert parse_placement(name.partition(":")[0], 13) == placement


def test_every_named_placement_is_known():
    kinds = [type(parse_placement(name, 16)) for name in PLACEMENTS]
    assert kinds == [Recompute, Contiguous, Paged]


def test_an_unknown_placement_lists_the_legal_ones():
    with pytest.raises(ValueError, match=r"'pagde' is not known; .* recompute, contiguous, paged$"):
        parse_placement("pagde", 16)


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
        ValueError, match=r"storage='float64' is not known; .* float32, bfloat16, .*int4$"
    ):
        CacheSpec(storage="float64")


def test_every_point_is_legal_or_names_a_legal_neighbour():
    placements = [Recompute(), Contiguous(), Paged(1), Paged(16)]
    for placement, storage in itertools.product(placements, STORAGES):
        if placement == Recompute() and storage != "float32":
            message = f"placement=recompute .* storage={storage} .* use storage=float32, or placem"
            with pytest.raises(ValueError, match=message):
                CacheSpec(placement, storage)
        else:
            assert CacheSpec(placement, storage).storage == storage


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
    assert [dataclasses.replace(spec, table=0) for spec in assigned] == specs
    assert table_placements(assigned) == (Paged(16), Contiguous(), Paged(8))
    assert assign_tables(assigned) == assigned


def test_recompute_on_every_layer_has_one_table():
    assigned = assign_tables([CacheSpec(Recompute())] * 3)
    assert table_placements(assigned) == (Recompute(),)


@pytest.mark.parametrize("other", [Contiguous(), Paged(8)])
def test_recompute_beside_another_placement_names_both_and_the_way_out(other):
    message = f"placement=recompute on some layers and placement={other} on others.* use {other} "
    for specs in itertools.permutations([CacheSpec(Recompute()), CacheSpec(other)]):
        with pytest.raises(ValueError, match=message):
            assign_tables(specs)
