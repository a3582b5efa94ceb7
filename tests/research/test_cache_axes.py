"""The product of the cache axes: every parameter where it is used, nowhere else."""

import json
import re
import textwrap

import pytest

from kvlab.ops.retention import H2O, Random, SnapKV, Window
from kvlab.ops.specs import CacheSpec, Contiguous, Kivi4, Paged, Recompute, Ring
from kvlab.research.cache_axes import cache_specs, load_policy
from kvlab.research.experiment import Sweep, Variant, cross

OWN_POLICY = """
    import dataclasses

    from kvlab.ops.retention import Retention


    @dataclasses.dataclass(frozen=True)
    class Oldest(Retention):
        stride: int = 2

        def score(self, evidence):
            return -evidence.positions.astype("float32")
"""


def test_the_product_has_no_parameter_that_a_point_does_not_use():
    specs = cache_specs({"placement": ["contiguous", "paged"], "page_size": [8, 16, 64]})
    assert specs == [CacheSpec(Contiguous()), *(CacheSpec(Paged(size)) for size in (8, 16, 64))]
    assert len(cross(("mha", "gqa", "mqa"), tuple(specs))) == 12
    axes = {"retention": ["all", "window", "h2o"], "budget": [32, 0.5], "recent": [3, 5]}
    policies = [spec.retention for spec in cache_specs(axes)]
    h2o = [H2O(budget, recent=recent) for budget in (32, 0.5) for recent in (3, 5)]
    assert policies == [None, Window(32), Window(0.5), *h2o]


def test_every_axis_crosses():
    axes = {"placement": ["contiguous", "paged"], "storage": ["int8", "int4"]}
    axes |= {"retention": ["all", "snapkv", "random"], "budget": [48], "observation": [7]}
    assert len(cache_specs(axes)) == 12
    assert cache_specs(axes)[-2:] == [
        CacheSpec(Paged(16), "int4", SnapKV(48, observation=7)),
        CacheSpec(Paged(16), "int4", Random(48)),
    ]
    kivi = cache_specs({"placement": ["ring"], "window": [32, 64], "storage": ["kivi4"]})
    assert kivi == [CacheSpec(Ring(32), Kivi4()), CacheSpec(Ring(64), Kivi4())]


def test_a_safeguard_belongs_to_heads_that_share():
    axes = {"retention": ["h2o"], "allocation": ["uniform", "per_head"], "safeguard": [0.1, 0.3]}
    assert [spec.retention for spec in cache_specs(axes)] == [
        H2O(),
        H2O(allocation="per_head", safeguard=0.1),
        H2O(allocation="per_head", safeguard=0.3),
    ]


def test_recompute_is_one_point():
    axes = {"placement": ["recompute", "contiguous"], "storage": ["bfloat16", "float32"]}
    assert cache_specs(axes | {"retention": ["all", "window"]}) == [
        CacheSpec(Recompute()),
        CacheSpec(Contiguous(), "bfloat16"),
        CacheSpec(Contiguous(), "bfloat16", Window()),
        CacheSpec(Contiguous(), "float32"),
        CacheSpec(Contiguous(), "float32", Window()),
    ]


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"placement": ["pagd"]}, "placement='pagd' is not known; legal values: recompute, contig"),
        ({"page_size": [0]}, "page_size=0 given"),
        ({"storage": ["int3"]}, "storage='int3' is not known; legal values: float32"),
        ({"retention": ["h20"]}, "retention='h20' is not known; legal values: all, window, sinks"),
        ({"retention": ["json:JSONDecoder"]}, "retention=json:JSONDecoder is no policy"),
        ({"retention": ["json:Nothing"]}, "retention=json:Nothing cannot be imported"),
        ({"budget": [32]}, "budget=32 given, but no point uses it; it needs retention=window"),
        ({"observation": [3]}, "observation=3 given, but no point uses it; it needs retention=sna"),
        ({"window": [32]}, "window=32 given, but no point uses it; it needs placement=ring"),
        ({"group": [32]}, "group=32 given, but no point uses it; it needs storage=kivi4"),
        ({"retention": ["sinks"], "budget": [4]}, "num_sinks=4 with budget=4"),
        ({"retention": ["window"], "budget": [0]}, "budget=0 given"),
        ({"retention": ["window"], "budget": [1.5]}, "budget=1.5 given"),
        ({"retention": ["snapkv"], "kernel": [4]}, "kernel=4 given: want an odd number"),
        ({"retention": ["snapkv"], "observation": [256]}, "observation=256 with budget=256"),
        ({"retention": ["h2o"], "safeguard": [1.2]}, "safeguard=1.2 given"),
        ({"retention": ["h2o"], "allocation": ["x"]}, "allocation='x' is not known"),
        ({"retention": ["h2o"], "when": ["later"]}, "when='later' is not known"),
        ({"retention": ["sinks"], "positions": ["x"]}, "positions='x' is not known"),
    ],
)
def test_wrong_axis_values_are_refused(axes, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        cache_specs(axes)


@pytest.fixture
def own_policy(tmp_path, monkeypatch):
    (tmp_path / "outside_policy.py").write_text(textwrap.dedent(OWN_POLICY))
    monkeypatch.chdir(tmp_path)
    return "outside_policy:Oldest"


def test_a_policy_from_outside_crosses_as_the_others_do(own_policy):
    specs = cache_specs({"retention": ["window", own_policy], "budget": [32], "stride": [3]})
    assert [str(spec.retention) for spec in specs] == ["window:32", f"{own_policy}:32"]
    assert specs[1].retention.stride == 3


def test_a_sweep_of_every_axis_comes_back_from_its_manifest(own_policy):
    policies = [None, H2O(0.5, recent=3), SnapKV(48, observation=5, allocation="per_head")]
    policies.append(load_policy(own_policy)(48))
    specs = [CacheSpec(Paged(16), retention=policy) for policy in policies]
    specs += [CacheSpec(Ring(37), "int8"), CacheSpec(Contiguous(), Kivi4(8, 16))]
    per_layer = Variant("gqa", tuple(specs))
    sweep = Sweep("all", "?", "m", (*cross(("gqa",), tuple(specs)), per_layer))
    assert Sweep.from_json(json.loads(json.dumps(sweep.to_json()))) == sweep
    settings = [variant.settings() for variant in sweep.variants]
    assert settings[0]["retention"] == "all"
    assert settings[1] == {
        "attention": "gqa",
        "placement": "paged",
        "page_size": 16,
        "storage": "float32",
        "retention": "h2o",
        "budget": 0.5,
        "when": "both",
        "allocation": "uniform",
        "recent": 3,
    }
    assert settings[2]["safeguard"] == 0.2
    assert settings[3]["retention"] == own_policy
    assert settings[-1]["retention"] == f"1*all+1*h2o:0.5+1*snapkv:48+1*{own_policy}:48+2*all"
    assert len({json.dumps(one) for one in settings}) == len(settings)


def test_a_product_leaves_out_what_is_impossible_and_says_why():
    axes = {"storage": ["int8", "kivi4"], "retention": ["all", "window", "h2o"], "budget": [32, 64]}
    with pytest.raises(ValueError, match="recent=32 with budget=32"):
        cache_specs(axes)
    left_out = []
    specs = cache_specs({**axes, "page_size": [32]}, left_out)
    assert [f"{spec.storage} {spec.retention}" for spec in specs] == [
        "int8 None",
        "int8 window:32",
        "int8 window:64",
        "int8 h2o:64",
        "kivi4:32:0 None",
    ]
    assert len(left_out) == 1 + 3
    assert "use budget=33 or more" in left_out[0]
    assert all("use storage=int4, or retention=all" in reason for reason in left_out[1:])


def test_a_product_of_nothing_possible_is_refused():
    axes = {"storage": ["kivi4"], "page_size": [32], "retention": ["window"]}
    with pytest.raises(ValueError, match="use storage=int4, or retention=all"):
        cache_specs(axes, [])


@pytest.mark.parametrize(("name", "value"), [("storage", "int8"), ("retention", "h2o")])
def test_what_recompute_alone_would_ignore_is_refused(name, value):
    message = f"{name}={value} given, but no point uses it; it needs a placement that stores"
    with pytest.raises(ValueError, match=message):
        cache_specs({"placement": ["recompute"], name: [value]})
    assert len(cache_specs({"placement": ["recompute", "paged"], name: [value]})) == 2


def test_a_page_size_that_no_point_uses_is_refused():
    with pytest.raises(ValueError, match="page_size=8 given, but no point uses it; it needs plac"):
        cache_specs({"placement": ["contiguous"], "page_size": [8]})
