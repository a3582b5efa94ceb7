"""What the rows of a sweep say, in sentences computed from them.

Each sentence compares variants that differ in one setting alone, so it can be read as the
effect of that setting. A ratio whose spreads meet is said to be within the noise.
"""

import itertools
from collections.abc import Mapping, Sequence

from kvlab.research.grouping import (
    Measured,
    Points,
    Variant,
    Workload,
    attention_rank,
    combined_label,
)
from kvlab.research.tables import language_name, quality_metrics, quality_parts, significant

# Lossless variants differ from the oracle by rounding alone; this is far above that, and far
# below what any change of the model costs.
_LOSSY_AXES = ("attention", "storage", "retention")
_LOSSLESS_KL_NATS = 1e-5

_DISTANCES = {"perplexity": "perplexity", "kl_vs_oracle": "KL"}

_Pair = tuple[Variant, Variant]


def findings(points: Points) -> list[str]:
    """Says in words what a sweep found.

    Args:
        points: the points; any may be missing, and what cannot be compared is not mentioned.

    Returns:
        One sentence per finding: memory, speed, then quality.
    """
    sentences: list[str] = []
    for effect in (_caching, _heads, _paging):
        for workload in points.workloads:
            sentences += effect(points, workload)
    return [
        *_bytes(points),
        *sentences,
        *_batching(points),
        *_waste(points),
        *_quality(points),
    ]


def _caching(points: Points, workload: Workload) -> list[str]:
    pairs = _pairs(points, "placement", "recompute", ["contiguous", "paged", "ring"])
    ratios = _ratios(points, pairs, "decode_tokens_per_s", workload)
    if not ratios:
        return []
    claim = (
        f"keeping a KV cache decodes {_range(ratios)} times as fast as recomputing the whole text "
        "at every step."
    )
    return [_at(workload, claim)]


def _bytes(points: Points) -> list[str]:
    sentences = []
    by_rest: dict[str, list[tuple[Variant, float]]] = {}
    for variant in points.variants:
        found = points.measured(variant, "kv_bytes_per_token")
        if found and found.value > 0 and "attention" in variant.settings:
            by_rest.setdefault(variant.without("attention"), []).append((variant, found.value))
    for group in by_rest.values():
        most, most_bytes = max(group, key=lambda item: item[1])
        fewer = [(variant, value) for variant, value in group if value < most_bytes]
        if not fewer:
            continue
        shares = ", ".join(
            f"{variant.settings['attention']} {_fraction(value / most_bytes)} of that "
            f"({value:,.0f})"
            for variant, value in fewer
        )
        sentences.append(
            f"{most.settings['attention']} stores {most_bytes:,.0f} bytes of KV cache per token, "
            f"{shares}."
        )
    return list(dict.fromkeys(sentences))


def _heads(points: Points, workload: Workload) -> list[str]:
    names = sorted({str(v.settings.get("attention", "")) for v in points.variants} - {""})
    names.sort(key=attention_rank)
    gains = []
    for name in names[1:]:
        pairs = [
            pair
            for pair in _pairs(points, "attention", names[0], [name])
            if pair[0].settings.get("placement") != "recompute"
        ]
        ratios = _ratios(points, pairs, "decode_tokens_per_s", workload)
        if ratios:
            noise = _noise(points, pairs, "decode_tokens_per_s", workload)
            gains.append(f"{name} decodes {_range(ratios)} times as fast as {names[0]}{noise}")
    return [_at(workload, f"with a cache {'; '.join(gains)}.")] if gains else []


def _paging(points: Points, workload: Workload) -> list[str]:
    pairs = _pairs(points, "placement", "contiguous", ["paged"])
    ratios = _ratios(points, pairs, "tpot_s", workload)
    if not ratios:
        return []
    each = ", ".join(f"{variant.label} {_ratio(ratio)}" for variant, ratio in ratios)
    detail = f" ({each})" if 1 < len(ratios) <= 4 else ""
    claim = (
        f"a decode step with a paged cache takes {_range(ratios)} times as long as with a "
        f"contiguous one{detail}{_noise(points, pairs, 'tpot_s', workload)}."
    )
    return [_at(workload, claim)]


def _batching(points: Points) -> list[str]:
    by_batch = {
        dict(w.settings)["batch_size"]: w
        for w in points.workloads
        if "batch_size" in dict(w.settings)
    }
    if len(by_batch) < 2:
        return []
    least, most = min(by_batch), max(by_batch)
    ratios = []
    for variant in points.variants:
        one = points.measured(variant, "decode_tokens_per_s", by_batch[least])
        many = points.measured(variant, "decode_tokens_per_s", by_batch[most])
        if one and many and variant.settings.get("placement") != "recompute":
            ratios.append((variant, many.value / one.value))
    if not ratios:
        return []
    return [
        f"Decoding {most} sequences at a time instead of {least} gives {_range(ratios)} "
        "times the tokens per second."
    ]


def _waste(points: Points) -> list[str]:
    by_placement: dict[str, list[float]] = {}
    for variant, workload in itertools.product(points.variants, points.workloads):
        found = points.measured(variant, "kv_waste", workload)
        if found and "placement" in variant.settings:
            by_placement.setdefault(str(variant.settings["placement"]), []).append(found.value)
    if len(by_placement) < 2:
        return []
    shares = ", ".join(
        f"{name} {min(values):.0%}" + (f" to {max(values):.0%}" if _apart(values) else "")
        for name, values in by_placement.items()
    )
    return [
        "Share of the KV memory taken by sequences (their pages, or whole reserved rows) that held "
        f"no token: {shares}."
    ]


def _quality(points: Points) -> list[str]:
    names = [name for name in quality_metrics(points) if quality_parts(name)[0] == "kl_vs_oracle"]
    worst: dict[Variant, float] = {}
    for variant in points.variants:
        values = [found.value for name in names if (found := points.measured(variant, name))]
        if values:
            worst[variant] = max(values)
    exact = {variant: kl for variant, kl in worst.items() if kl <= _LOSSLESS_KL_NATS}
    sentences = []
    if exact:
        bound = f"{max(*exact.values(), 1e-8):.0e}".replace("e-0", "e-")
        gives, change = ("gives", "it changes") if len(exact) == 1 else ("give", "they change")
        sentences.append(
            f"{combined_label(list(exact))} {gives} the oracle's predictions up to rounding (KL at "
            f"most {bound} nats): {change} the cost and not the output."
        )
    axis = next((name for name in _LOSSY_AXES if name in points.varying), _LOSSY_AXES[0])
    lossy: dict[str, list[Variant]] = {}
    for variant in worst:
        if variant not in exact:
            name = str(variant.settings.get(axis, variant.label))
            lossy.setdefault(name, []).append(variant)
    for name, variants in lossy.items():
        sentences += _distance(points, name, variants, exact)
    return sentences


def _distance(
    points: Points, name: str, variants: Sequence[Variant], exact: Mapping[Variant, float]
) -> list[str]:
    """Says how far lossy variants of one name are, by the worst of them."""
    parts: dict[str, list[str]] = {"perplexity": [], "KL": []}
    for metric in quality_metrics(points):
        base, language = quality_parts(metric)
        values = [found.value for v in variants if (found := points.measured(v, metric))]
        if base not in _DISTANCES or not values:
            continue
        text = significant(max(values)) + (" nats" if base == "kl_vs_oracle" else "")
        oracle = [found.value for v in exact if (found := points.measured(v, metric))]
        if oracle and base == "perplexity":
            text += f" against {significant(min(oracle))}"
        parts[_DISTANCES[base]].append(text + (f" ({language_name(language)})" if language else ""))
    details = "; ".join(f"{what} {', '.join(texts)}" for what, texts in parts.items() if texts)
    subject = variants[0].label if len(variants) == 1 else name
    worst = "at worst " if len(variants) > 1 and _vary(points, variants) else ""
    return [f"{subject} does not give the oracle's predictions: {worst}{details}."]


def _vary(points: Points, variants: Sequence[Variant]) -> bool:
    return any(
        len({significant(found.value) for v in variants if (found := points.measured(v, metric))})
        > 1
        for metric in quality_metrics(points)
    )


def _pairs(points: Points, axis: str, base: str, others: Sequence[str]) -> list[_Pair]:
    """Variants that differ from the base in one axis alone (a page size belongs to its axis)."""
    parameters = (axis, "page_size") if axis == "placement" else (axis,)
    bases = {
        variant.without(*parameters): variant
        for variant in points.variants
        if str(variant.settings.get(axis)) == base
    }
    return [
        (bases[rest], variant)
        for variant in points.variants
        if str(variant.settings.get(axis)) in others
        and (rest := variant.without(*parameters)) in bases
    ]


def _measured_pairs(
    points: Points, pairs: Sequence[_Pair], metric: str, workload: Workload
) -> list[tuple[Variant, Measured, Measured]]:
    found = (
        (v, points.measured(base, metric, workload), points.measured(v, metric, workload))
        for base, v in pairs
    )
    return [(v, base, own) for v, base, own in found if base and own and base.value > 0]


def _ratios(
    points: Points, pairs: Sequence[_Pair], metric: str, workload: Workload
) -> list[tuple[Variant, float]]:
    return [
        (v, own.value / base.value)
        for v, base, own in _measured_pairs(points, pairs, metric, workload)
    ]


def _noise(points: Points, pairs: Sequence[_Pair], metric: str, workload: Workload) -> str:
    found = _measured_pairs(points, pairs, metric, workload)
    if all(own.overlaps(base) for _, base, own in found):
        return ", with spreads of the repeats that overlap"
    return ""


def _at(workload: Workload, claim: str) -> str:
    if workload.label:
        return f"At {workload.label}, {claim}"
    return claim[0].upper() + claim[1:]


def _ratio(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}"


def _range(ratios: Sequence[tuple[Variant, float]]) -> str:
    shown = sorted(ratio for _, ratio in ratios)
    least, most = _ratio(shown[0]), _ratio(shown[-1])
    return least if least == most else f"{least} to {most}"


def _fraction(share: float) -> str:
    inverse = 1 / share
    if abs(inverse - round(inverse)) < 0.01 * inverse and round(inverse) <= 64:
        return f"1/{round(inverse)}"
    return f"{share:.0%}"


def _apart(values: Sequence[float]) -> bool:
    return f"{min(values):.0%}" != f"{max(values):.0%}"
