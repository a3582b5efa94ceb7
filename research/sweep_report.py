"""What a report shows of a sweep."""

from collections.abc import Sequence

from kvlab.research.figures import draw_figures
from kvlab.research.findings import findings
from kvlab.research.grouping import Points
from kvlab.research.presentation import Presentation
from kvlab.research.rows import Row
from kvlab.research.tables import quality_parts, result_tables

# What a reader has to know, shown only where the report has the metric or the placement.
_GLOSSARY = {
    "decode_tokens": (
        "steps",
        "how many tokens were decoded to measure a time; where a step costs much, there are fewer.",
    ),
    "kv_bytes_window": (
        "KV a sequence",
        "the memory in pages (or whole rows) that a sequence had taken at the end of a scored "
        "window, over all layers.",
    ),
    "ttft_s": (
        "TTFT",
        "time to first token: from the start of the prompt to the first new token. It is the "
        "prefill, in which all tokens of the prompt are computed at once.",
    ),
    "tpot_s": (
        "TPOT",
        "time per output token: one step of decoding, in which every sequence of the batch gets "
        "one new token.",
    ),
    "decode_tokens_per_s": (
        "decode tok/s",
        "new tokens per second after the first, all sequences of the batch together.",
    ),
    "kv_bytes_per_token": (
        "KV B/token",
        "measured bytes of the key and value cache, with everything it needs to work, over the "
        "tokens that it can hold.",
    ),
    "kv_waste": (
        "KV waste",
        "the share of the memory taken by sequences (their pages, or whole reserved rows) that "
        "held no token.",
    ),
    "perplexity": (
        "perplexity",
        "how many tokens the model hesitates between at each position of a real text; lower is "
        "better. Only compare it within one text: a text with more tokens per word differs.",
    ),
    "kl_vs_oracle": (
        "KL",
        "how far the predictions are from those of the oracle, the unmodified model that "
        "recomputes the whole text at every step; 0 is no difference.",
    ),
    "kl_vs_oracle_p99": (
        "KL p99",
        "the same at the position that only one in a hundred exceeds: how bad the bad places are.",
    ),
    "top1_agreement": (
        "top-1",
        "how often the most likely next token is the oracle's.",
    ),
    "passkey_accuracy": (
        "passkey",
        "a number is hidden at several depths of a long text and asked for at its end: the share "
        "of numbers whose every digit is ranked first. Only lengths that the full cache answers.",
    ),
    "passkey_digits": (
        "passkey digits",
        "the share of the digits that are ranked first.",
    ),
}
_PLACEMENTS = {
    "recompute": "no cache: every step computes the whole text again. The baseline.",
    "contiguous": "one stretch of memory per sequence, as long as the longest text allowed.",
    "paged": "memory in pages of a few tokens, handed out as a sequence grows.",
    "ring": "only the last tokens of a sliding window are kept.",
}
_NAMED_AXES = ("placement", "storage", "retention")
_RETENTIONS = {
    "window": "only the newest tokens are kept.",
    "sinks": "the first tokens, which attention leans on, and the newest are kept (StreamingLLM).",
    "h2o": "the tokens that received most attention so far, and the newest, are kept.",
    "snapkv": "the tokens that the end of the prompt attends to are kept.",
    "random": "tokens are kept by lot: the control that a policy has to beat.",
    "kivi4": "keys in 4 bits by channel, values by token, the newest tokens in full (KIVI).",
}
_ATTENTIONS = {
    "mha": "multi-head attention: every query head has its own keys and values.",
    "gqa": "grouped-query attention: groups of query heads share keys and values.",
    "mqa": "multi-query attention: all query heads share one set of keys and values.",
}


_READING = (
    "Each variant is one way to run the same model, and is named by the settings in which it "
    "differs from the others. Times are medians of repeated runs after warm-up, with the range of "
    "the repeats beside them; compiling is not part of them."
)


def present_sweep(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of sweeps.

    Args:
        rows: the newest row of each point, failed ones included.
    """
    points = Points(rows)
    return Presentation(
        reading=_READING,
        terms=_terms(points),
        findings=findings(points),
        tables=result_tables(points),
        brief_tables=result_tables(points, brief=True),
        pictures=draw_figures(points),
        labels=[_point_name(points, row) for row in points.rows],
        held_fixed=points.held_fixed(),
    )


def _point_name(points: Points, row: Row) -> str:
    variant, workload = points.variant_of(row), points.workload_of(row)
    return f"{variant.label}, {workload.label}" if workload.label else variant.label


def _terms(points: Points) -> dict[str, str]:
    """The words that this report uses, explained."""
    metrics = points.metrics()
    bases = {quality_parts(name)[0] or name for name in metrics}
    settings = [variant.settings for variant in points.variants]
    used = {str(it.get("attention", "")).partition(":")[0] for it in settings}
    used |= {str(it.get(axis, "")).partition(":")[0] for it in settings for axis in _NAMED_AXES}
    named = {**_ATTENTIONS, **_PLACEMENTS, **_RETENTIONS}
    return {
        **{name: text for name, text in named.items() if name in used},
        **{
            term: text
            for name, (term, text) in _GLOSSARY.items()
            if name in bases or name in points.varying
        },
    }
