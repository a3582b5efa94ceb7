"""Limits of this machine: what the probes really do, and the device they make."""

import jax
import numpy as np
import pytest

from kvlab.research.machine import (
    LIMITS,
    NAME,
    PROBES,
    Probe,
    Work,
    machine,
    measure,
    memory_bytes,
    probes,
)

READS = [probe for probe in probes() if probe.limit == "bandwidth"]
PRODUCTS = [probe for probe in probes() if probe.limit != "bandwidth"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Work as small as it gets: nothing here is about speed."""
    monkeypatch.setattr("kvlab.research.machine._LEAST_CALL_S", 0.0)
    monkeypatch.setattr("kvlab.research.machine._SAMPLE_S", 0.0)


@pytest.mark.parametrize("probe", READS, ids=lambda probe: probe.by)
def test_a_read_takes_every_number_of_an_array_that_fits(probe):
    work = probe.prepare(16 * 112 * 4096.0)  # a sixteenth of it: 112 columns of 1,024, 7 panels
    assert work.amount == work.size == 112 * 4096
    assert float(np.sum(work.run())) == 112 * 1024


@pytest.mark.parametrize("probe", PRODUCTS, ids=lambda probe: f"{probe.limit} {probe.by}")
def test_a_product_has_as_many_operations_as_it_says(probe):
    work = probe.prepare(1e9)
    product = np.asarray(work.run())
    assert product.shape == (256, 256)
    assert (product == 256).all()
    assert work.amount == 2 * 256**3
    if probe in PROBES:
        assert product.dtype == (np.int32 if probe.limit == "int8_flops" else np.float32)


def test_products_grow_until_one_takes_long_enough_or_memory_ends(monkeypatch):
    monkeypatch.setattr("kvlab.research.machine._LEAST_CALL_S", 1e9)
    (probe,) = (one for one in PROBES if one.limit == "float32_flops")
    assert probe.prepare(16 * 12 * 513.0**2).size == 512
    assert probe.prepare(1.0).size == 256


def test_samples_are_rates_of_whole_calls(monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    ran = []
    probe = Probe("flops", "counting", lambda memory: Work(lambda: ran.append(1), 10.0, 3))
    samples, size = measure(probe, 1.0, 4)
    assert samples == [5.0] * 4  # 10 operations in 2 seconds
    assert size == 3
    assert len(ran) == 1 + 1 + 4


def test_the_machine_has_the_fastest_of_each_limit():
    limits = [("bandwidth", 3.0), ("flops", 7.0), ("bandwidth", 5.0), ("float32_flops", 11.0)]
    device = machine([*limits, ("flops", 2.0)], 13.0)
    assert device.name == NAME
    assert (device.bandwidth, device.flops, device.float32_flops) == (5.0, 7.0, 11.0)
    assert (device.int8_flops, device.memory) == (None, 13.0)
    with pytest.raises(ValueError, match="bandwidth of this machine"):
        machine(limits[1:2], 13.0)
    with pytest.raises(ValueError, match="no peak"):
        machine(limits[:1], 13.0)


def test_every_limit_has_a_probe_and_a_name_of_its_own():
    assert {probe.limit for probe in PROBES} == LIMITS.keys()
    assert len({(probe.limit, probe.by) for probe in probes()}) == len(probes())


def test_the_kernel_is_measured_where_it_serves(monkeypatch):
    monkeypatch.setattr("kvlab.research.machine.best_implementation", lambda: "xla")
    assert probes() == PROBES
    monkeypatch.setattr("kvlab.research.machine.best_implementation", lambda: "cpu")
    added = [probe for probe in probes() if probe not in PROBES]
    assert [probe.limit for probe in added] == ["bandwidth", "float32_flops", "flops"]


def test_memory_is_what_programs_get(monkeypatch, tmp_path):
    host = memory_bytes()
    assert host > 2**28
    (tmp_path / "max").write_text("12345678\n")
    monkeypatch.setattr("kvlab.research.machine._CGROUP_LIMITS", (tmp_path / "max",))
    assert memory_bytes() == 12345678

    class Device:
        def memory_stats(self):
            return {"bytes_limit": 17}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert memory_bytes() == 17
