"""Orca's reservations as the PagedAttention paper describes them, and the buddy allocator."""

import itertools

import numpy as np
import pytest

from kvlab.research.allocators import (
    RESERVATIONS,
    BuddyAllocator,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)


def test_max_reserves_the_longest_sequence_of_the_model_whatever_is_asked():
    """Section 6.1: "always reserves the space up to the maximum sequence length", 2048 tokens."""
    for prompt, output in itertools.product((1, 25, 1000), (1, 25, 1048)):
        assert reserve_max(prompt, prompt + output, 2048) == 2048


def test_pow2_reserves_32_positions_for_a_true_output_of_25():
    """Section 6.1's own example."""
    assert reserve_pow2(100, 125, 2048) == 100 + 32
    assert [reserve_pow2(7, 7 + n, 2048) - 7 for n in (1, 2, 3, 4, 5, 31, 32, 33)] == [
        *(1, 2, 4, 4, 8, 32, 32, 64)
    ]


def test_pow2_over_reserves_an_output_by_less_than_twice():
    """Section 6.1: it "over-reserves the space for outputs by at most 2x"."""
    for output in range(1, 1100):
        reserved = reserve_pow2(900, 900 + output, 10_000) - 900
        assert output <= reserved < 2 * output
        assert reserved & (reserved - 1) == 0


def test_pow2_reserves_no_more_than_the_longest_sequence():
    assert reserve_pow2(1000, 2045, 2048) == 2048
    assert reserve_pow2(1000, 2024, 2048) == 2024  # 1,024 fit


def test_oracle_reserves_the_true_length():
    assert [reserve_oracle(100, most, 2048) for most in (101, 125, 2048)] == [101, 125, 2048]


def test_each_reservation_holds_the_sequence_and_knowing_more_reserves_less():
    assert list(RESERVATIONS) == ["max", "pow2", "oracle"]
    random = np.random.default_rng(0)
    for _ in range(300):
        prompt = int(random.integers(1, 2047))
        most = int(random.integers(prompt + 1, 2049))
        sizes = [reserve(prompt, most, 2048) for reserve in RESERVATIONS.values()]
        assert 2048 == sizes[0] >= sizes[1] >= sizes[2] == most


def runs_of(pool, size):
    """Takes runs of a size until there is none."""
    return list(iter(lambda: pool.allocate(size), None))


@pytest.mark.parametrize(
    ("slots", "size", "count"),
    # 15,728 is 8,192 + 4,096 + 2,048 + 1,024 + 256 + 64 + 32 + 16.
    [
        (15_728, 2048, 7),
        (15_728, 1025, 7),
        (15_728, 1024, 15),
        (15_728, 8192, 1),
        (15_728, 16, 983),
        (15_728, 1, 15_728),
        (2048, 2048, 1),
        (2047, 2048, 0),
        (1, 1, 1),
    ],
)
def test_a_pool_gives_as_many_runs_as_its_binary_digits_hold(slots, size, count):
    pool = BuddyAllocator(slots)
    starts = runs_of(pool, size)
    assert len(starts) == len(set(starts)) == count
    assert pool.used_slots == count * (1 << (size - 1).bit_length())
    assert pool.num_slots == slots


def test_the_lowest_of_the_smallest_runs_is_taken():
    pool = BuddyAllocator(24)  # 16 from 0, and 8 from 16
    assert pool.allocate(3) == 16
    assert pool.allocate(4) == 20
    assert pool.allocate(2) == 0
    assert pool.allocate(8) == 8
    assert pool.allocate(2) == 2
    assert pool.allocate(5) is None  # 4 to 8 is free
    assert pool.used_slots == 20


def test_a_freed_run_joins_its_buddy_and_no_other_neighbour():
    pool = BuddyAllocator(8)
    assert [pool.allocate(2) for _ in range(4)] == [0, 2, 4, 6]
    pool.free(2)
    pool.free(4)
    assert pool.allocate(4) is None  # 2 to 6 is free, and no run of four starts at 2
    pool.free(0)
    assert pool.allocate(4) == 0


def aligned_free_runs(owners, size):
    """Starts of the runs of `size` slots, at multiples of it, that nobody owns."""
    whole = len(owners) // size * size
    return (np.flatnonzero((owners[:whole].reshape(-1, size) < 0).all(axis=1)) * size).tolist()


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_agree_with_a_plain_list_of_owners(seed):
    random = np.random.default_rng(seed)
    slots = int((1, 2, 13, 64, 100, 255, 1000, 15_728)[seed % 8])
    pool, fresh, failures = BuddyAllocator(slots), BuddyAllocator(slots), 0
    owners = np.full(slots, -1)  # the start of the run that a slot is in
    runs = {}
    for _ in range(400):
        if runs and random.random() < 0.4:
            start = list(runs)[int(random.integers(len(runs)))]
            pool.free(start)
            owners[start : start + runs.pop(start)] = -1
        else:
            wanted = int(np.ceil(slots ** random.random()))
            size = next(1 << order for order in range(30) if 1 << order >= wanted)
            possible = aligned_free_runs(owners, size)
            start = pool.allocate(wanted)
            if start is None:
                assert possible == []
                failures += 1
            else:
                assert start in possible  # so it overlaps no other, and lies in the pool
                owners[start : start + size], runs[start] = start, size
        assert pool.used_slots == sum(runs.values()) == np.count_nonzero(owners >= 0)
    assert failures
    for start in random.permutation(list(runs)).tolist():
        pool.free(start)
    assert pool.used_slots == 0
    assert vars(pool) == vars(fresh)


def test_pools_runs_and_frees_that_make_no_sense_are_refused():
    for slots in (0, -1):
        with pytest.raises(ValueError, match=f"num_slots={slots} given; a pool has at least 1"):
            BuddyAllocator(slots)
    pool = BuddyAllocator(16)
    for size in (0, -3):
        with pytest.raises(ValueError, match=f"size={size} given; ask for at least one slot"):
            pool.allocate(size)
    start = pool.allocate(4)
    with pytest.raises(ValueError, match="slot 1 starts no run that is given out"):
        pool.free(start + 1)
    pool.free(start)
    with pytest.raises(ValueError, match=r"slot 0 starts no run .* it was freed already"):
        pool.free(start)
    assert vars(pool) == vars(BuddyAllocator(16))
