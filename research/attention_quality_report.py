"""What a report shows of the study of attention and quality, beside the GQA paper's figures.

Axes: K KV heads.
"""

import math
from collections.abc import Sequence

from kvlab.research.attention_quality_figures import pictures
from kvlab.research.attention_quality_findings import FIG_4, TABLE_1, findings, nats
from kvlab.research.attention_quality_scores import Scores
from kvlab.research.attention_quality_study import MEMORY, QUALITY, SPEED, kind_name, label, shown
from kvlab.research.intervals import Estimate, estimate
from kvlab.research.presentation import Presentation, shared_settings
from kvlab.research.rows import Row
from kvlab.research.tables import DASH, Table, milliseconds, percent, significant, whole

_READING = (
    "Models that differ in their KV heads alone are judged by text that none was trained on. "
    "Trained from scratch: with these KV heads from the start. Converted: groups of KV heads of a "
    "trained model with as many KV heads as query heads become one each, and nothing else changes. "
    "Uptrained: the conversion is trained on, for a share of the original steps, on the same text, "
    "with a new Adam, a warm-up of a tenth of these steps and a cosine decay to a tenth of the "
    "learning rate. All weights are rounded to bfloat16 before they are judged, by the model "
    "without a cache in float32. Published figures: GQA (arXiv 2305.13245)."
)
_TERMS = {
    "loss": "mean cross-entropy of the next token on held-out text, in nats; a margin is half of "
    "the 95 % interval of the mean over models of one K, which differ in their seed (Student's t).",
    "perplexity": "e to the power of the loss.",
    "source": "the model that a conversion is made from. It is itself trained on for as long, so "
    "that what more training gives, or costs, is not counted as recovery.",
    "gap opened": "what the conversion loses more than its source, in nats.",
    "gap left": "what the uptrained conversion loses more than its source trained on for as long.",
    "recovered": "1 - gap left over gap opened; beside it to the source as it was.",
    "over trained from scratch": "what the uptrained conversion loses more than the mean of models "
    "that were trained with as few KV heads from the start.",
    "sequences": "of the length that is timed, whose pages fit the memory at once, as the page "
    "table grants them; keys and values in float32.",
    "decode tok/s": "tokens of all sequences a second, median of repeats and their range; models "
    "of every K took turns.",
}


def present_attention_quality(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of `attention_quality`."""
    done = [row for row in rows if row["status"] == "ok"]
    costs = [row for row in done if row["config"]["kind"] in (MEMORY, SPEED)]
    scores = Scores(done)
    measured = [table for table in (_quality(scores), _gaps(scores), _costs(costs)) if table.rows]
    judged = [row["config"] for row in rows if row["config"]["kind"] in QUALITY]
    trained = [config for config in judged if "share" in config]
    fixed = shared_settings(judged) | shared_settings(trained)
    for name in ("kind", "num_kv_heads", "share", "steps", "warmup_steps", "model", "sha256"):
        fixed.pop(name, None)
    return Presentation(
        reading=_READING,
        terms=_TERMS,
        findings=findings(scores, costs),
        tables=[*measured, *_published()] if measured else [],
        brief_tables=measured,
        pictures=pictures(scores, costs),
        labels=[label(row["config"]) for row in rows],
        held_fixed=fixed,
    )


def _quality(scores: Scores) -> Table:
    cells = []
    for one in scores.variants:
        rows = list(scores.rows[one].values())
        loss = scores.mean(one)
        assert loss is not None
        bits = estimate(row["metrics"]["held_out_bits_per_byte"] for row in rows)
        cells.append(
            {
                "model": kind_name(one.kind, one.pooling, one.share),
                "KV heads": whole(one.num_kv_heads),
                "models": whole(len(rows)),
                "parameters": whole(rows[0]["metrics"]["parameters"]),
                "KV B/token": whole(rows[0]["metrics"]["kv_bytes_per_token"]),
                "loss": nats(loss),
                "perplexity": _perplexity(loss),
                "bits a byte": f"{bits.mean:.3f}",
            }
        )
    return _table("Quality, by kind and KV heads", cells)


def _perplexity(loss: Estimate) -> str:
    middle = significant(math.exp(loss.mean))
    if loss.margin is None:
        return middle
    low, high = (significant(math.exp(end)) for end in loss.span)
    return f"{middle} [{low}{DASH}{high}]"


def _gaps(scores: Scores) -> Table:
    cells = []
    for way in scores.poolings:
        for heads in scores.fewer:
            for share in scores.shares(way):
                opened, left = scores.opened(heads, way), scores.left(heads, way, share)
                if opened is None or left is None:
                    continue
                shares = (
                    scores.recovered(heads, way, share, controlled=controlled)
                    for controlled in (True, False)
                )
                closed, plain = (_percent(found) for found in shares)
                over = scores.over_scratch(heads, way, share)
                cells.append(
                    {
                        "pooling": way,
                        "KV heads": whole(heads),
                        "uptraining": shown(share),
                        "gap opened": nats(opened),
                        "gap left": nats(left),
                        "recovered %": closed,
                        "to the source as it was %": plain,
                        "over trained from scratch": DASH if over is None else f"{over:+.3f}",
                    }
                )
    return _table("The gap that pooling opens, and what uptraining recovers of it", cells)


def _percent(share: Estimate | None) -> str:
    if share is None:
        return DASH
    margin = "" if share.margin is None else f" ± {percent(share.margin)}"
    return f"{percent(share.mean)}{margin}"


def _costs(costs: Sequence[Row]) -> Table:
    by_heads: dict[int, dict[str, str]] = {}
    ordered = sorted(costs, key=lambda row: (-row["config"]["num_kv_heads"], _batch(row)))
    for row in ordered:
        config, metrics = row["config"], row["metrics"]
        cells = by_heads.setdefault(
            config["num_kv_heads"], {"KV heads": whole(config["num_kv_heads"])}
        )
        if config["kind"] == MEMORY:
            cells["parameters"] = whole(metrics["parameters"])
            cells["KV B/token"] = whole(metrics["kv_bytes_per_token"])
            tokens = config["prompt_tokens"] + config["decode_tokens"]
            heading = f"sequences of {tokens} in {config['kv_mib']:g} MiB"
            cells[heading] = whole(metrics["max_concurrent_sequences"])
        else:
            speeds = row["repeats"]["decode_tokens_per_s"]
            low, high = significant(min(speeds)), significant(max(speeds))
            middle = significant(metrics["decode_tokens_per_s"])
            cells[f"decode tok/s, batch {config['batch']}"] = f"{middle} [{low}{DASH}{high}]"
            cells[f"ms a step, batch {config['batch']}"] = milliseconds(metrics["tpot_s"])
    return _table("Memory and speed, by KV heads", list(by_heads.values()))


def _batch(row: Row) -> int:
    batch: int = row["config"].get("batch", 0)
    return batch


def _published() -> list[Table]:
    first = [
        {"model": name, "seconds a sample": f"{seconds:.2f}", "mean score": f"{score:.1f}"}
        for name, (seconds, score) in TABLE_1.items()
    ]
    fourth = [{"pooling": way, "score": f"{score:.1f}"} for way, score in FIG_4.items()]
    return [
        _table("Published: GQA (arXiv 2305.13245), Table 1, T5 models", first),
        _table("Published: GQA, Fig. 4, T5-Large to one KV head, uptrained by 5 %", fourth),
    ]


def _table(title: str, cells: Sequence[dict[str, str]]) -> Table:
    columns = tuple(dict.fromkeys(heading for row in cells for heading in row))
    return Table(title, columns, tuple(cells))
