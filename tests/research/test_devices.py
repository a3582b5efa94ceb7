"""Devices: ridge points and limits worked out by hand, and what is refused."""

import math

import pytest

from kvlab.research.devices import DEVICES, Device

SMALL = Device("small", flops=700.0, bandwidth=100.0, memory=13.0, float32_flops=50.0)


def test_the_ridge_point_parts_memory_from_compute():
    assert SMALL.ridge("bfloat16") == SMALL.ridge("float16") == 7
    assert SMALL.ridge("float32") == 0.5
    assert SMALL.attainable(3, "bfloat16") == 300
    assert SMALL.attainable(11, "bfloat16") == SMALL.peak("bfloat16") == 700
    assert [SMALL.bound(one, "bfloat16") for one in (6.9, 7)] == ["memory", "compute"]


def test_time_is_that_of_the_larger_of_operations_and_bytes():
    assert SMALL.seconds(1400, 100, "float16") == 2
    assert SMALL.seconds(1400, 500, "float16") == 5
    assert SMALL.seconds(1400, 500, "float32") == 28


def test_an_efficiency_scales_every_rate_and_leaves_the_memory():
    half = SMALL.scaled(0.5)
    assert (half.flops, half.bandwidth, half.float32_flops) == (350, 50, 25)
    assert (half.memory, half.int8_flops) == (13, None)
    assert half.ridge("bfloat16") == SMALL.ridge("bfloat16")
    for efficiency in (0, 1.01, -1, math.nan):
        with pytest.raises(ValueError, match=r"efficiency=.* given: want above 0, at most 1"):
            SMALL.scaled(efficiency)


def test_devices_are_named_as_in_the_table_and_have_their_data_sheets_numbers():
    assert {name: device.name for name, device in DEVICES.items()} == {n: n for n in DEVICES}
    a100 = DEVICES["A100-40GB"]
    assert (a100.flops, a100.bandwidth, a100.memory) == (312e12, 1.555e12, 40e9)
    assert DEVICES["H100-80GB"].bandwidth > DEVICES["A100-80GB"].bandwidth > a100.bandwidth
    assert len(DEVICES) == 9
    for device in DEVICES.values():
        # int8 is twice 16 bits everywhere, within the sheets' rounding; float32 far below.
        assert device.peak("int8") == pytest.approx(2 * device.peak("bfloat16"), rel=0.003)
        if device.float32_flops is not None:
            assert device.peak("float32") < device.peak("bfloat16") / 3.9
        assert 100 < device.ridge("bfloat16") < 600


def test_a_peak_that_is_not_known_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="'TPU-v5e' has no known peak for dtype='float32'; known:"):
        DEVICES["TPU-v5e"].peak("float32")
    with pytest.raises(ValueError, match="dtype='int8'; known: float32, bfloat16, float16"):
        SMALL.peak("int8")
    measured = Device("this machine", None, 20e9, 8e9, float32_flops=1e11)
    assert measured.ridge("float32") == 5
    with pytest.raises(ValueError, match=r"dtype=.bfloat16.; known: float32$"):
        measured.peak("bfloat16")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"flops": None}, "device 'd' has no peak: give flops, float32_flops, int8_flops"),
        ({"bandwidth": 0.0}, "bandwidth=0.0 given for device 'd': want above 0"),
        ({"memory": math.inf}, "memory=inf given"),
        ({"int8_flops": -1.0}, "int8_flops=-1.0 given"),
    ],
)
def test_numbers_that_no_device_has_are_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        Device(**({"name": "d", "flops": 1.0, "bandwidth": 1.0, "memory": 1.0} | fields))
