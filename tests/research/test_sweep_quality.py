"""The quality of a sweep: the forced path where a variant evicts, passkeys, texts of the user's."""

import dataclasses
import json

import numpy as np
import pytest

from kvlab.models.load import load_model
from kvlab.ops.retention import Window
from kvlab.ops.specs import CacheSpec, Paged, Recompute
from kvlab.research import sweep_quality
from kvlab.research.evaluation_texts import TextFile, text_file
from kvlab.research.experiment import Sweep, Variant
from kvlab.research.forced_scoring import ForcedText
from kvlab.research.inference_config import InferenceConfig
from kvlab.research.results import RunFolder
from kvlab.research.session import Session
from kvlab.research.sweep import run_sweep, sweep_points
from kvlab.research.sweep_quality import SweepQuality

FULL = Variant("gqa", CacheSpec(Paged(8)))
EVICTING = Variant("gqa", CacheSpec(Paged(8), retention=Window(11)))
SWEEP = Sweep(
    name="tiny",
    question="Does eviction show?",
    model="random:tiny-gqa",
    variants=(Variant("gqa", CacheSpec(Recompute())), FULL, EVICTING),
    batch_sizes=(2,),
    prompt_tokens=13,
    decode_tokens=5,
    recompute_decode_tokens=1,
    repeats=1,
    quality_tokens=37,
    window_tokens=47,
    forced_tokens=16,
    max_length=64,
    chunk=16,
)


@pytest.fixture(scope="module")
def model():
    return load_model(SWEEP.model)


@pytest.fixture
def calls(monkeypatch):
    """The texts of each oracle computation."""
    made = []

    def counted(config, params, texts, *others):
        made.append(texts)
        return recomputed(config, params, texts, *others)

    recomputed = sweep_quality.recomputed_hidden
    monkeypatch.setattr(sweep_quality, "recomputed_hidden", counted)
    return made


def run(sweep, model, path):
    with RunFolder.open(path, command="sweep", config=sweep.to_json()) as folder:
        rows = run_sweep(sweep, model, folder)
        assert [row.get("error") for row in rows if row["status"] == "failed"] == []
        return rows, folder.manifest["notes"]


def test_all_variants_of_an_evicting_sweep_are_scored_on_the_forced_path(model, calls, tmp_path):
    rows, (note,) = run(SWEEP, model, tmp_path / "run")
    sizes = {"quality_tokens": 37, "window_tokens": 47, "forced_tokens": 16}
    assert all(sizes.items() <= row["config"].items() for row in rows)
    recompute, full, evicting = (row["metrics"] for row in rows)
    assert recompute["kl_vs_oracle"] == recompute["kl_vs_oracle_p99"] == 0
    assert full["kl_vs_oracle_p99"] < 1e-6
    assert full["perplexity"] == pytest.approx(recompute["perplexity"], rel=1e-5)
    assert evicting["kl_vs_oracle_p99_en"] > evicting["kl_vs_oracle_en"] > 1e-4
    # Two texts of three windows, computed once for three variants.
    assert [[len(text.forced) for text in texts] for texts in calls] == [[16, 16, 5]] * 2
    assert "31 tokens, retention was applied, and the next 16 tokens were forced" in note
    assert "37 (en), 37 (tr) in all" in note


def test_without_a_policy_a_text_is_scored_by_one_prefill(model, calls):
    sweep = dataclasses.replace(SWEEP, variants=(FULL,))
    (point,) = sweep_points(sweep)
    assert "window_tokens" not in point.settings
    quality = SweepQuality(sweep, model)
    assert [len(tokens) for tokens in quality.texts.values()] == [37, 37]
    assert quality.notes() == []
    assert calls == []


def test_a_budget_that_no_window_exceeds_is_said(model):
    never = Variant("gqa", CacheSpec(Paged(8), retention=Window(47)))
    sweep = dataclasses.replace(SWEEP, variants=(EVICTING, never))
    assert SweepQuality(sweep, model).notes()[1] == (
        "A budget of 47 tokens or more evicts nothing in windows of 47: raise window_tokens to see "
        "what it costs."
    )
    assert len(SweepQuality(SWEEP, model).notes()) == 1


def test_quality_over_all_texts_is_that_of_their_positions(model):
    sweep = dataclasses.replace(SWEEP, variants=(EVICTING,))
    quality = SweepQuality(sweep, model)
    session = session_of(sweep, model)
    metrics = quality.metrics(EVICTING, session, model.config, model.params)
    for figure in ("kl_vs_oracle", "top1_agreement"):
        both = [metrics[f"{figure}_en"], metrics[f"{figure}_tr"]]
        assert metrics[figure] == pytest.approx(np.mean(both))
    logs = np.log([metrics["perplexity_en"], metrics["perplexity_tr"]])
    assert metrics["perplexity"] == pytest.approx(np.exp(logs.mean()), rel=1e-5)
    percentiles = sorted(metrics[f"kl_vs_oracle_p99{text}"] for text in ("_en", "_tr"))
    assert percentiles[0] <= metrics["kl_vs_oracle_p99"] <= percentiles[1]


def session_of(sweep, model, cache=EVICTING.cache):
    """A session as the sweep's points have it."""
    shapes = InferenceConfig(
        model.config,
        cache,
        slots=2,
        max_length=sweep.max_length,
        rows=2,
        chunk=sweep.chunk,
        decode_steps=sweep.decode_tokens,
    )
    return Session(model.params, shapes)


def answerable(model):
    """Texts whose targets the model ranks first, and one whose second target it does not."""
    session = session_of(SWEEP, model, FULL.cache)
    prompts = [list(b"a text of twenty-nine letters"), list(b"and one of twenty-seven now")]
    session.prefill(prompts)
    texts = [
        ForcedText(
            np.asarray([*prompt, *ids[:-1]], np.int32), len(prompt), np.asarray(ids[1:], np.int32)
        )
        for prompt, ids in zip(prompts, (r.tokens for r in session.decode(4).values()), strict=True)
    ]
    spoilt = texts[1].targets.copy()
    spoilt[1] = (spoilt[1] + 1) % 256
    return texts, [texts[0], dataclasses.replace(texts[1], targets=spoilt)]


def test_passkeys_count_at_the_lengths_that_the_full_cache_answers(model, calls, monkeypatch):
    good, bad = answerable(model)
    monkeypatch.setattr(
        sweep_quality, "passkey_texts", lambda _, length: good if length == 40 else bad
    )
    sweep = dataclasses.replace(SWEEP, quality_tokens=0, passkey_tokens=(40, 50))
    point = next(sweep_points(sweep))
    assert point.settings["passkey_tokens"] == [40, 50]
    assert "quality_tokens" not in point.settings
    quality = SweepQuality(sweep, model)
    assert quality.notes() == [
        "Passkey retrieval at 50 tokens is not reported: with the full cache the model itself "
        "finds 1 of 2 keys."
    ]
    for variant in sweep.variants[:2]:
        session = session_of(sweep, model, FULL.cache)
        metrics = quality.metrics(variant, session, model.config, model.params)
        assert metrics == dict.fromkeys(
            ("passkey_accuracy_40", "passkey_digits_40", "passkey_accuracy", "passkey_digits"), 1.0
        )
    assert len(calls) == 2
    session = session_of(sweep, model)
    evicted = quality.metrics(EVICTING, session, model.config, model.params)
    assert evicted["passkey_accuracy"] <= evicted["passkey_digits_40"] < 1


def test_a_text_of_the_users_is_named_by_its_file_and_its_content(model, tmp_path):
    path = tmp_path / "my_own text.v2.txt"
    path.write_text("A short text of one's own, long enough for a window and some more. " * 2)
    sweep = dataclasses.replace(SWEEP, variants=(EVICTING,), texts=(text_file(path),))
    assert Sweep.from_json(json.loads(json.dumps(sweep.to_json()))) == sweep
    (point,) = sweep_points(sweep)
    (digest,) = [file.sha256 for file in sweep.texts]
    assert point.settings["quality_texts"] == {"my-own-text-v2": digest}
    metrics = SweepQuality(sweep, model).metrics(
        EVICTING, session_of(sweep, model), model.config, model.params
    )
    assert metrics["perplexity_my-own-text-v2"] == pytest.approx(metrics["perplexity"])
    path.write_text("Something else.")
    with pytest.raises(ValueError, match=r"my_own text.v2.txt has changed: its sha256 was"):
        SweepQuality(sweep, model)


def test_texts_that_cannot_be_scored_are_errors(model, tmp_path):
    with pytest.raises(ValueError, match=r"none\.txt cannot be read: No such file"):
        text_file(tmp_path / "none.txt")
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(byte 3\)"):
        text_file(path).read()
    path.write_text("short")
    twice = dataclasses.replace(SWEEP, texts=(text_file(path), TextFile("latin.txt", "")))
    with pytest.raises(ValueError, match="two texts are named 'latin'; rename one"):
        SweepQuality(twice, model)
    with pytest.raises(ValueError, match="5 tokens is too short for window_tokens=47"):
        SweepQuality(dataclasses.replace(SWEEP, texts=twice.texts[:1]), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forced_tokens": 0}, "forced_tokens=0 given; it must be 1 or more"),
        ({"forced_tokens": 47}, "forced_tokens=47 leaves no prompt in window_tokens=47"),
        ({"window_tokens": 65}, "window_tokens=65 does not fit max_length=64; raise max_length"),
        ({"passkey_tokens": (40, 65)}, "passkey_tokens=65 does not fit max_length=64"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SWEEP, **changes)


def test_lengths_past_the_models_context_are_errors(model):
    for name in ("window_tokens", "passkey_tokens"):
        length = 1025
        value = (length,) if name == "passkey_tokens" else length
        sweep = dataclasses.replace(SWEEP, max_length=2048, **{name: value})
        with pytest.raises(ValueError, match=f"{name}=1025 is past the model's context of 1024"):
            SweepQuality(sweep, model)
