"""Beam search gives the sequences and scores of transformers, and its beams share pages."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

from kvlab.models.checkpoints.huggingface import load_huggingface
from kvlab.ops.page_table import PageTable
from kvlab.ops.specs import CacheSpec, Contiguous, Paged
from kvlab.research.beam import BeamOptions, beam_search
from kvlab.research.compilation import count_compilations
from kvlab.research.inference import InferenceConfig
from kvlab.research.prompts import Prompt
from kvlab.research.session import Session

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
TOLERANCE = 1e-4  # of a score
PAGE_SIZE, NUM_PAGES = 5, 47


def _script(name):
    spec = importlib.util.spec_from_file_location(f"kvlab_goldens_{name}", GOLDENS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MAKE, FAMILIES = _script("make_beams"), _script("tiny_families")
PROMPTS = [Prompt(tuple(ids)) for ids in MAKE.prompts(FAMILIES)]
CASES = json.loads((GOLDENS / "beams.json").read_text())
each_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c['length_penalty']}-{c['early_stopping']}-{c['stop_ids']}"
)


def case_of(length_penalty, early_stopping, stop_ids):
    """The case of these settings."""
    (found,) = (
        case
        for case in CASES
        if case["length_penalty"] == length_penalty
        and case["early_stopping"] == early_stopping
        and tuple(case["stop_ids"]) == stop_ids
    )
    return found


ONE_STOP, TWO_STOPS = MAKE.STOP_IDS
DEFAULTS = case_of(1.0, False, ONE_STOP)


def options(setting=DEFAULTS, **changes):
    fields = {name: setting[name] for name in ("length_penalty", "early_stopping", "stop_ids")}
    fields["stop_ids"] = tuple(fields["stop_ids"])
    fields |= {"num_beams": MAKE.NUM_BEAMS, "max_tokens": MAKE.MAX_TOKENS}
    return BeamOptions(**(fields | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return FAMILIES.write_tiny_folder(MAKE.CASE, tmp_path_factory.mktemp("beams") / MAKE.CASE)


@pytest.fixture(scope="module")
def open_session(folder):
    """Three prompts side by side, and a slot that nobody gets."""
    model, params = load_huggingface(folder)

    def opened(placement):
        pages = {"num_pages": NUM_PAGES} if isinstance(placement, Paged) else {}
        sizes = {"slots": 13, "max_length": 59, "rows": 2, "chunk": 11, "decode_steps": 2}
        return Session(params, InferenceConfig(model, CacheSpec(placement), **sizes, **pages))

    return opened


@pytest.fixture(scope="module")
def paged(open_session):
    return open_session(Paged(PAGE_SIZE))


@pytest.fixture(scope="module")
def contiguous(open_session):
    return open_session(Contiguous())


def pages_in_use(session):
    table = session.cache.tables[0]
    assert isinstance(table, PageTable)
    return int(table.pages_in_use)


def assert_beams(found, tokens, scores):
    assert [beam.tokens for beam in found] == [tuple(ids) for ids in tokens]
    np.testing.assert_allclose([beam.score for beam in found], scores, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("placement", ["paged", "contiguous"])
@each_case
def test_sequences_and_scores_are_those_of_transformers(case, placement, request):
    session = request.getfixturevalue(placement)
    found = list(beam_search(session, PROMPTS, options(case, num_return=MAKE.NUM_BEAMS)))
    for beams, tokens, scores in zip(found, case["tokens"], case["scores"], strict=True):
        assert_beams(beams, tokens, scores)
        for beam in beams:
            stopped = beam.tokens[-1] in case["stop_ids"]
            assert beam.finish_reason == ("stop" if stopped else "length")
            length = len(beam.tokens) ** case["length_penalty"]
            assert beam.score == pytest.approx(beam.log_prob / length)
    assert not session.lengths.any()


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # of torch and transformers
@each_case
def test_the_goldens_are_what_transformers_gives_now(case, folder):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for prompt, tokens, scores in zip(PROMPTS, case["tokens"], case["scores"], strict=True):
        live_tokens, live_scores = MAKE.reference_beams(folder, list(prompt.ids), case)
        assert live_tokens == tokens
        np.testing.assert_allclose(live_scores, scores, rtol=0, atol=1e-5)


def test_a_prompt_gets_the_same_bits_alone_and_in_any_wave(paged):
    chosen = options(case_of(1.0, False, TWO_STOPS), num_return=3)
    together = list(beam_search(paged, [*PROMPTS, PROMPTS[2], PROMPTS[0]], chosen))  # two waves
    assert together[3] == together[2]
    assert together[4] == together[0]
    for prompt, found in zip(PROMPTS, together, strict=False):
        assert list(beam_search(paged, [prompt], chosen)) == [found]


def test_beams_share_pages_while_they_run_and_all_come_back(paged, monkeypatch):
    decode, used = paged.decode, []

    def watched(*arguments, **named):
        results = decode(*arguments, **named)
        used.append((pages_in_use(paged), -(-int(paged.lengths[0]) // PAGE_SIZE)))
        return results

    monkeypatch.setattr(paged, "decode", watched)
    list(beam_search(paged, [PROMPTS[2]], options(stop_ids=())))
    assert len(used) == MAKE.MAX_TOKENS - 1  # nothing is computed from the last token
    full_pages = len(PROMPTS[2].ids) // PAGE_SIZE
    assert all(pages <= full_pages + MAKE.NUM_BEAMS * (alone - full_pages) for pages, alone in used)
    assert used[-1][0] < 0.7 * MAKE.NUM_BEAMS * used[-1][1]
    assert pages_in_use(paged) == 0
    assert int(paged.cache.tables[0].num_free) == NUM_PAGES


def test_a_prompt_that_is_done_gives_its_pages_to_the_others(paged, monkeypatch):
    decode, lengths = paged.decode, []

    def watched(*arguments, **named):
        results = decode(*arguments, **named)
        lengths.append(paged.lengths)
        return results

    monkeypatch.setattr(paged, "decode", watched)
    list(beam_search(paged, PROMPTS, options(case_of(1.0, False, TWO_STOPS))))
    assert lengths[-1][:8].tolist() == [0] * 8
    assert lengths[-1][8:].tolist() == [23 + MAKE.MAX_TOKENS - 1] * 4 + [0]


def test_one_beam_is_greedy_decoding(paged):
    ((beam,),) = beam_search(paged, [PROMPTS[1]], options(num_beams=1))
    paged.prefill([PROMPTS[1].ids])
    greedy = paged.decode(MAKE.MAX_TOKENS, stop_ids=ONE_STOP)[0]
    paged.release()
    assert beam.tokens == greedy.tokens
    assert beam.log_prob == pytest.approx(sum(greedy.log_probs), abs=TOLERANCE)


def test_beams_end_where_the_session_does(paged):
    ((beam,),) = beam_search(paged, [Prompt(tuple(range(50)))], options(stop_ids=()))
    assert len(beam.tokens) == 9
    assert beam.finish_reason == "max_length"


def test_whatever_the_lengths_nothing_more_compiles(paged):
    list(beam_search(paged, PROMPTS, options()))
    with count_compilations() as compilations:
        list(beam_search(paged, PROMPTS[1:], options(case_of(2.0, True, ONE_STOP), max_tokens=7)))
        list(beam_search(paged, [Prompt((3,) * 40), *PROMPTS, PROMPTS[0]], options(num_return=4)))
    assert compilations.count == 0


@pytest.mark.parametrize(
    ("beams", "prompts", "tokens", "told"),
    [
        (1, 4, 58, "the prompts need 48 more pages of 5 tokens and 47 of 47 are free"),
        (3, 4, 54, "no free page to copy a partial page"),  # 4 * 11 pages, and 2 copies each
        (4, 3, 28, "of 12 beams found no free page for their next token; give more num_pages"),
    ],
    ids=["prompts", "first beams", "later"],
)
def test_too_few_pages_are_an_error_and_the_session_goes_on(beams, prompts, tokens, told, paged):
    texts = [Prompt(tuple(np.arange(tokens) * step % 97)) for step in range(1, prompts + 1)]
    with pytest.raises(ValueError, match=told):
        list(beam_search(paged, texts, options(num_beams=beams, stop_ids=())))
    assert pages_in_use(paged) == 0
    assert not paged.lengths.any()
    (found,) = beam_search(paged, PROMPTS[:1], options(num_return=4))
    assert_beams(found, DEFAULTS["tokens"][0], DEFAULTS["scores"][0])


@pytest.mark.parametrize(
    ("ids", "changes", "told"),
    [
        ((), {}, "prompt 1 is empty"),
        ((1,) * 59, {}, "prompt 1 has 59 tokens and leaves no room for a new one: max_length=59"),
        ((1, 97), {}, "prompt 1 has token id 97, which is out of range"),
        ((1,), {"num_beams": 14}, "num_beams=14 needs as many slots and the session has slots=13"),
        (
            (1,),
            {"num_beams": 13, "stop_ids": tuple(range(7))},
            "num_beams=13 with 7 stop ids looks at 104 tokens and the vocabulary has 97",
        ),
    ],
)
def test_what_cannot_be_searched_is_named(ids, changes, told, paged):
    with pytest.raises(ValueError, match=told):
        list(beam_search(paged, [Prompt(ids)], options(**changes)))
    assert not paged.lengths.any()


def test_a_session_in_use_is_left_as_it_is(paged):
    paged.prefill({3: [1, 2]})
    with pytest.raises(ValueError, match="the session holds sequences; release them before"):
        list(beam_search(paged, PROMPTS, options()))
    assert paged.lengths[3] == 2
    paged.release()


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("num_beams", 0, "1 or more"),
        ("max_tokens", 0, "1 or more"),
        ("length_penalty", float("inf"), "from -40 to 40"),
        ("length_penalty", 1000.0, "from -40 to 40"),
        ("length_penalty", float("nan"), "from -40 to 40"),
        ("early_stopping", "always", "True, False or 'never'"),
        ("early_stopping", 1, "True, False or 'never'"),
        ("num_return", 5, "from 1 to num_beams=4"),
    ],
)
def test_wrong_options_are_named(field, value, legal):
    with pytest.raises(ValueError, match=f"{field}={value!r} given: it must be {legal}"):
        BeamOptions(**{field: value})
