"""What the rows of `attention_quality` say, in words made from their numbers.

Axes: N query heads, K KV heads.
"""

import itertools
from collections.abc import Sequence

from kvlab.research.attention_quality_scores import Scores, Variant
from kvlab.research.attention_quality_study import MEMORY, SPEED, TRAINED, UPTRAINED, shown
from kvlab.research.intervals import Estimate
from kvlab.research.rows import Row
from kvlab.research.tables import percent, whole

TABLE_1 = {
    "MHA-Large": (0.37, 46.0),
    "MHA-XXL": (1.51, 47.2),
    "MQA-XXL": (0.24, 46.6),
    "GQA-8-XXL": (0.28, 47.1),
}
"""Seconds a sample and mean score of T5 models, the last two uptrained by 5 %: GQA, Table 1."""

FIG_4 = {"mean": 55.6, "first": 55.1, "random": 54.6}
"""Score of T5-Large converted to MQA and uptrained by 5 %, read off the bars: GQA, Fig. 4."""


def findings(scores: Scores, costs: Sequence[Row]) -> list[str]:
    """Sentences, the most important first.

    Args:
      scores: of the rows on quality.
      costs: the finished rows on memory and speed.
    """
    sentences = []
    share = scores.common_share
    if share is not None:
        sentences += _recovery(scores, share) + _ways(scores, share)
    if scores.poolings:
        sentences += _more_training(scores, scores.poolings[0])
    sentences += _from_scratch(scores) + _savings(costs)
    return sentences + (_limits(scores) if scores.rows else [])


def nats(value: Estimate, sign: bool = False) -> str:
    """A loss or a difference of two with its interval, where it has one."""
    margin = "" if value.margin is None else f" ± {value.margin:.3f}"
    return f"{value.mean:{'+' if sign else ''}.3f}{margin}"


def _recovery(scores: Scores, share: float) -> list[str]:
    """How much of the gap that pooling opened uptraining closes."""
    way = scores.poolings[0]
    parts: list[str] = []
    most: list[int] = []
    not_most: list[int] = []
    unclear: list[int] = []
    for heads in scores.fewer:
        opened, left = scores.opened(heads, way), scores.left(heads, way, share)
        closed = scores.recovered(heads, way, share)
        if opened is None or left is None:
            continue
        said = f"K={heads}: {nats(opened, sign=True)}, then {nats(left, sign=True)}"
        if closed is None:
            parts.append(f"{said} (no gap was opened)")
            continue
        margin = "" if closed.margin is None else f" ± {percent(closed.margin)}"
        uncontrolled = scores.recovered(heads, way, share, controlled=False)
        whole_gap = "" if uncontrolled is None else f" ({percent(uncontrolled.mean)} % as it was)"
        parts.append(f"{said}, {percent(closed.mean)}{margin} % recovered{whole_gap}")
        (most if closed.mean > 0.5 else not_most).append(heads)
        if closed.margin is not None and abs(closed.mean - 0.5) <= closed.margin:
            unclear.append(heads)
    if not parts:
        return []
    trained = shown(share)
    verdict = _split("most of the gap is recovered", "most of it is not", most, not_most)
    if unclear:
        verdict += f"; 50 % lies within the interval at K={_listed(unclear)}"
    return [
        f"Pooling {scores.num_heads} KV heads to K by {way} costs so many nats a token, and after "
        f"uptraining by {trained} so many more than the {scores.num_heads}-head model trained on "
        f"for as long (in brackets: recovered of the gap to that model as it was; shares of "
        f"several models are means of theirs): {'; '.join(parts)}. With {trained} {verdict}."
    ]


def _split(yes: str, no: str, holds: Sequence[int], fails: Sequence[int]) -> str:
    """Says for which K something holds, and for which it does not."""
    if not fails:
        return f"{yes} at every K"
    if not holds:
        return f"{no} at any K"
    return f"{yes} at K={_listed(holds)}; {no} at K={_listed(fails)}"


def _listed(heads: Sequence[int]) -> str:
    return ", ".join(map(str, heads))


def _ways(scores: Scores, share: float) -> list[str]:
    """Whether mean, first and random pooling come in that order, after uptraining."""
    ways = scores.poolings
    trained = shown(share)
    sentences = []
    for better, worse in itertools.pairwise(ways):
        parts: list[str] = []
        holds: list[int] = []
        fails: list[int] = []
        unclear: list[int] = []
        for heads in scores.fewer:
            lead = scores.difference(
                Variant(UPTRAINED, heads, worse, share), Variant(UPTRAINED, heads, better, share)
            )
            if lead is None:
                continue
            parts.append(f"K={heads}: {nats(lead, sign=True)}")
            (holds if lead.mean >= 0 else fails).append(heads)
            if lead.margin is not None and not lead.is_clear:
                unclear.append(heads)
        if not parts:
            continue
        verdict = _split(f"{better} is at least as good", f"{better} is not as good", holds, fails)
        spread = f"; within the spread of the models at K={_listed(unclear)}" if unclear else ""
        sentences.append(
            f"Nats that {worse} pooling loses more than {better}, both uptrained by {trained}: "
            f"{'; '.join(parts)}: {verdict}{spread} (the paper scores {FIG_4[better]} with "
            f"{better} and {FIG_4[worse]} with {worse}, T5-Large to MQA, Fig. 4)."
        )
    return sentences


def _more_training(scores: Scores, way: str) -> list[str]:
    """What each further share of uptraining still gives."""
    shares = scores.shares(way)
    parts = []
    for heads in scores.fewer:
        left = [(share, scores.left(heads, way, share)) for share in shares]
        steps = [f"{shown(share)}: {nats(gap, sign=True)}" for share, gap in left if gap]
        if len(steps) > 1:
            parts.append(f"K={heads}: {', '.join(steps)}")
    if not parts:
        return []
    return [
        f"The gap that is left to the {scores.num_heads}-head model trained on for as long, in "
        f"nats, by share of uptraining ({way} pooling): {'; '.join(parts)} (the paper's Fig. 5: "
        "returns diminish from 5 to 10 %)."
    ]


def _from_scratch(scores: Scores) -> list[str]:
    """What fewer KV heads cost where a model is trained with them from the start."""
    base = scores.mean(scores.mha)
    parts = []
    for heads in scores.fewer:
        own = scores.mean(Variant(TRAINED, heads))
        if own is not None and base is not None:
            parts.append((heads, own.mean - base.mean))
    if base is None or not parts:
        return []
    costs = ", ".join(f"K={heads} {cost:+.3f}" for heads, cost in parts)
    spread = scores.spread()
    beside = "one model of each K was trained, so how far seeds lie apart is not known"
    if spread is not None:
        over = [heads for heads, cost in parts if abs(cost) > spread]
        beside = f"models of one K lie up to {spread:.3f} apart"
        beside += f"; more than that at K={_listed(over)}" if over else "; no cost is more"
    return [
        f"Trained from scratch, against {nats(base)} nats a token with {scores.num_heads} KV "
        f"heads: {costs}; {beside}."
    ]


def _savings(costs: Sequence[Row]) -> list[str]:
    """What the fewest KV heads save against the most."""
    parts = []
    memory = _by_heads([row for row in costs if row["config"]["kind"] == MEMORY])
    if len(memory) > 1:
        most, fewest = memory[max(memory)]["metrics"], memory[min(memory)]["metrics"]
        less = most["kv_bytes_per_token"] / fewest["kv_bytes_per_token"]
        parts.append(f"{less:.1f} times fewer KV bytes a token")
        if most["max_concurrent_sequences"]:
            more = fewest["max_concurrent_sequences"] / most["max_concurrent_sequences"]
            parts.append(f"{more:.1f} times as many sequences at once")
    speed = [row for row in costs if row["config"]["kind"] == SPEED]
    heads = {row["config"]["num_kv_heads"] for row in costs}
    for batch in sorted({row["config"]["batch"] for row in speed}):
        of_batch = _by_heads([row for row in speed if row["config"]["batch"] == batch])
        if len(of_batch) > 1:
            slow, fast = (
                of_batch[end(of_batch)]["metrics"]["decode_tokens_per_s"] for end in (max, min)
            )
            parts.append(f"x{fast / slow:.2f} the decode speed at batch {batch}")
    if not parts:
        return []
    large, small = TABLE_1["MHA-XXL"][0], TABLE_1["MQA-XXL"][0]
    return [
        f"{min(heads)} instead of {max(heads)} KV heads: {', '.join(parts)} (the paper's Table 1: "
        f"{large} s a sample with MHA-XXL, {small} with MQA-XXL, x{large / small:.1f})."
    ]


def _by_heads(rows: Sequence[Row]) -> dict[int, Row]:
    return {row["config"]["num_kv_heads"]: row for row in rows}


def _limits(scores: Scores) -> list[str]:
    """What a set of this size can show, and what it cannot."""
    trained = [
        row for one, some in scores.rows.items() if one.kind == TRAINED for row in some.values()
    ]
    if not trained:
        return []
    sizes = {row["config"]["num_kv_heads"]: row["metrics"]["parameters"] for row in trained}
    config, metrics = trained[0]["config"], trained[0]["metrics"]
    texts = ", ".join(one["file"] for one in config["data"])
    repeats = max(len(some) for one, some in scores.rows.items() if one.kind == TRAINED)
    seeds = (
        "With one model of each K nothing here has an interval, and a small difference may be the "
        "seed's."
        if repeats == 1
        else f"Intervals are over {repeats} models of each K, not over texts."
    )
    fewest, most = min(sizes), max(sizes)
    return [
        "What a set this small can show: the rough size of effects on the next token "
        f"of one kind of text ({texts}: {whole(metrics['text_tokens'])} tokens to train on, "
        f"{whole(metrics['held_out_tokens'])} held out). What it cannot: whether they are the same "
        "in models of billions of parameters, or on tasks, by which the paper judges. The models "
        f"have {whole(sizes[fewest])} (K={fewest}) to {whole(sizes[most])} parameters (K={most}): "
        "the projections of keys and values shrink, so part of what fewer heads cost is size. "
        f"{seeds}"
    ]
