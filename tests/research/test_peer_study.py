"""Systems compared: led along kvlab's tokens, one after the other; processes that play a part."""

import numpy as np
import pytest

from kvlab.research import peer_study
from kvlab.research.peer_study import PeerError, PeerStudy, run_peers
from kvlab.research.results import RunFolder

TOKENS = [[5, 7, 9], [2, 4, 6]]
SECOND = [[50, 70, 90], [20, 40, 60]]
MARGINS = [[1.0, 1e-4, 1.0], [1.0, 1.0, 0.9e-3]]  # two ties


class Played:
    """A process that answers as its part says: what it finds at each step."""

    parts: dict = {}  # noqa: RUF012 (set by the fixture)

    def __init__(self, system, scratch, threads):
        self.system, self.versions, self.asked = system, {}, []
        if self.parts[system] is None:
            raise AssertionError("a system that was not asked for")

    def ask(self, do, **request):
        part = self.parts[self.system]
        self.asked.append(do)
        if isinstance(part, PeerError):
            raise part
        if do == "open":
            return {"versions": {self.system: "1.2"}}
        if do == "forced":
            assert np.array(request["tokens"]).tolist() == TOKENS
            best = np.stack([part["best"], SECOND], axis=-1).tolist()
            return {"best": best, "margins": MARGINS}
        if do == "log_probs":
            logits = np.zeros((request["ids"].size, 3), np.float32)
            logits[:, 0] = part["tilt"]
            np.save(request["out"], logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
            return {}
        return {"seconds": part["seconds"], "tokens": TOKENS}

    def close(self):
        pass


@pytest.fixture
def rows(monkeypatch, tmp_path):
    def run(precision="float32", **parts):
        Played.parts = {name.replace("_", "."): part for name, part in parts.items()}
        monkeypatch.setattr(peer_study, "PeerProcess", Played)
        monkeypatch.setattr(peer_study, "write_gguf_as", lambda *_: None)
        study = PeerStudy(
            model="absent.gguf",
            model_name="played",
            systems=tuple(Played.parts),
            precisions=(precision,),
            batches=(2,),
            prompt_tokens=4,
            new_tokens=3,
            repeats=2,
            text_tokens=5,
        )
        with RunFolder.open(tmp_path, command="peers", config=study.to_json()) as folder:
            found = run_peers(study, np.arange(40), 0, folder)
        return {row["config"]["system"]: row for row in found}

    return run


def part(best=TOKENS, seconds=0.5, tilt=0.0):
    return {"best": best, "seconds": seconds, "tilt": tilt}


@pytest.mark.parametrize(
    ("place", "token", "agreement"),
    [
        ((0, 0), 50, 5 / 6),  # no tie there
        ((0, 1), 70, 1.0),  # a tie, and the second of it
        ((0, 1), 71, 5 / 6),  # a tie, and neither
        ((1, 2), 60, 1.0),
    ],
)
def test_a_token_agrees_where_it_is_kvlabs_or_the_second_of_a_tie(rows, place, token, agreement):
    best = np.array(TOKENS)
    best[place] = token
    found = rows(kvlab=part(), llama_cpp=part(best.tolist()))
    assert found["kvlab"]["metrics"]["greedy_agreement"] == 1.0
    assert found["llama.cpp"]["metrics"]["greedy_agreement"] == pytest.approx(agreement)
    assert found["llama.cpp"]["metrics"]["greedy_ties"] == 2


def test_times_become_tokens_a_second_and_versions_are_kept(rows):
    found = rows(kvlab=part(seconds=0.5), llama_cpp=part(seconds=2.0))
    assert found["llama.cpp"]["repeats"] == {
        "prefill_tokens_per_s": [4.0, 4.0],
        "decode_tokens_per_s": [3.0, 3.0],
    }
    assert found["kvlab"]["metrics"]["prefill_tokens_per_s"] == 16.0
    assert found["llama.cpp"]["system_versions"] == {"llama.cpp": "1.2"}


def test_fewer_bits_are_compared_by_their_divergence(rows):
    found = rows("int8", kvlab=part(), llama_cpp=part(tilt=1.0))
    # The played kvlab says the same in float32 and in int8.
    assert found["kvlab"]["metrics"]["kl_vs_float32"] == pytest.approx(0.0, abs=1e-7)
    tilted = np.log(np.array([np.e, 1, 1]) / (np.e + 2))
    wanted = np.mean(np.log(1 / 3) - tilted)
    assert found["llama.cpp"]["metrics"]["kl_vs_float32"] == pytest.approx(wanted, rel=1e-5)


def test_a_system_that_fails_leaves_the_others_their_rows(rows):
    found = rows(kvlab=part(), llama_cpp=PeerError("out of memory"))
    assert found["kvlab"]["status"] == "ok"
    assert found["llama.cpp"]["error"] == "out of memory"
