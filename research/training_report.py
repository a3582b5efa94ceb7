"""What a report shows of a training run: the curve of its loss, held-out losses, speed."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.research.line_chart import Line, LinePanel, draw_lines
from kvlab.research.presentation import Picture, Presentation, shared_settings
from kvlab.research.rows import Row
from kvlab.research.tables import Table, mebibytes, percent, significant, whole

_READING = (
    "The loss of a step is the mean cross-entropy of all next tokens that it predicted, in nats, "
    "before the step changed the parameters. The held-out loss is that of the end of every text, "
    "which neither the model nor its tokenizer was trained on."
)
_TERMS = {
    "perplexity": "e to the power of the loss: between how many tokens the model hesitates.",
    "bits a byte": "the held-out loss over the bytes of the text, which compares models whose "
    "tokenizers differ.",
    "MFU": "operations of forward and backward passes over what the machine's best measured matrix "
    "product computes in that time; what is computed again to save memory does not count.",
    "step MiB": "memory that a step holds beside parameters, moments and rows, a device.",
    "row filled": "share of the places of a row that hold a token.",
}


def label(config: Mapping[str, Any]) -> str:
    """A row's config in a few words."""
    heads = f"{config['num_kv_heads']} KV heads of {config['num_heads']}"
    run = f"{config['run']}: " if "run" in config else ""
    return f"{run}{heads}, {config['kind'].replace('_', ' ')} {config['step']}"


def present_train(rows: Sequence[Row]) -> Presentation:
    """What a report shows of the rows of `train`."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            runs.setdefault(_run_of(row), []).append(row)
    configs = [row["config"] for row in rows]
    finished = [table for table in (_models(runs),) if table.rows]
    tables = [*finished, *(table for table in (_held_out(runs), _steps(runs)) if table.rows)]
    return Presentation(
        reading=_READING,
        terms=_TERMS,
        findings=[sentence for name, some in runs.items() for sentence in _findings(name, some)],
        tables=tables,
        brief_tables=[table for table in (*finished, _held_out(runs)) if table.rows],
        pictures=_pictures(runs),
        labels=[label(config) for config in configs],
        held_fixed=shared_settings(configs),
    )


def _run_of(row: Row) -> str:
    """What a curve is called."""
    config = row["config"]
    heads = f"{config['num_kv_heads']} KV heads of {config['num_heads']}, seed {row['seed']}"
    return f"{config['run']}: {heads}" if "run" in config else heads


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    some = [row for row in rows if row["config"]["kind"] == kind]
    return sorted(some, key=lambda row: row["config"]["step"])


def _models(runs: Mapping[str, Sequence[Row]]) -> Table:
    cells = [
        {
            "model": name,
            "parameters": whole(metrics["parameters"]),
            "held-out loss": f"{metrics['held_out_loss']:.4f}",
            "perplexity": significant(metrics["held_out_perplexity"]),
            "bits a byte": f"{metrics['held_out_bits_per_byte']:.3f}",
            "tokens read": whole(metrics["tokens_read"]),
            "tokens/s": whole(metrics["train_tokens_per_s"]),
            "MFU %": percent(metrics["mfu"]),
            "row filled %": percent(metrics["row_filled"]),
        }
        | _working_memory(metrics)
        for name, rows in runs.items()
        for metrics in [row["metrics"] for row in _of_kind(rows, "model")]
    ]
    return _table("Trained models", cells)


def _working_memory(metrics: Mapping[str, float]) -> dict[str, str]:
    """The cell of a step's memory, where the backend told it."""
    found = metrics.get("step_working_bytes")
    return {} if found is None else {"step MiB": mebibytes(found)}


def _held_out(runs: Mapping[str, Sequence[Row]]) -> Table:
    cells = [
        {
            "model": name,
            "step": whole(row["config"]["step"]),
            "held-out loss": f"{row['metrics']['held_out_loss']:.4f}",
            "perplexity": significant(row["metrics"]["held_out_perplexity"]),
            "bits a byte": f"{row['metrics']['held_out_bits_per_byte']:.3f}",
        }
        for name, rows in runs.items()
        for row in _of_kind(rows, "held_out")
    ]
    return _table("Held-out loss", cells)


def _steps(runs: Mapping[str, Sequence[Row]]) -> Table:
    cells = [
        {
            "model": name,
            "step": whole(row["config"]["step"]),
            "loss": f"{row['metrics']['loss']:.4f}",
            "perplexity": significant(row["metrics"]["perplexity"]),
            "gradient norm": significant(row["metrics"]["gradient_norm"]),
            "learning rate": significant(row["metrics"]["learning_rate"]),
            "tokens/s": whole(row["metrics"]["train_tokens_per_s"]),
            "MFU %": percent(row["metrics"]["mfu"]),
        }
        for name, rows in runs.items()
        for row in _of_kind(rows, "steps")
        if "loss" in row["metrics"]
    ]
    return _table("Steps", cells)


def _table(title: str, cells: Sequence[dict[str, str]]) -> Table:
    return Table(title, tuple(cells[0]) if cells else (), tuple(cells))


def _pictures(runs: Mapping[str, Sequence[Row]]) -> list[Picture]:
    lines = []
    speeds: dict[str, list[Line]] = {"train_tokens_per_s": [], "mfu": []}
    for number, (name, rows) in enumerate(runs.items()):
        steps = _of_kind(rows, "steps")
        for metric, measured in speeds.items():
            points = [
                (float(row["config"]["step"]), row["metrics"][metric])
                for row in steps
                if metric in row["metrics"]
            ]
            if points:
                measured.append(Line(name, number, tuple(points)))
        curve = [(x, y) for row in steps for x, y in row.get("series", {}).get("loss", [])]
        judged = [
            (float(row["config"]["step"]), row["metrics"]["held_out_loss"])
            for row in _of_kind(rows, "held_out")
        ]
        if curve:
            lines.append(Line(f"{name}, training", number, tuple(curve)))
        if judged:
            lines.append(Line(f"{name}, held out", number, tuple(judged), dash=1))
    if not lines:
        return []
    title = "Loss over the steps"
    panel = LinePanel(title, "steps", "nats a token", tuple(lines))
    caption = "Lower is better. Dashed: the text that is held out."
    pictures = [Picture("loss.png", title, caption, draw_lines([panel]))]
    if all(speeds.values()):
        tokens, shares = map(tuple, speeds.values())
        panels = [
            LinePanel("Speed", "steps", "tokens a second", tokens, from_zero=True),
            LinePanel("MFU", "steps", "share of the best product", shares, from_zero=True),
        ]
        caption = "Higher is better. MFU is the share of what the machine computes at best."
        pictures.append(Picture("speed.png", "Speed of training", caption, draw_lines(panels)))
    return pictures


def _findings(name: str, rows: Sequence[Row]) -> list[str]:
    found = []
    for row in _of_kind(rows, "model"):
        metrics = row["metrics"]
        found.append(
            f"{name}: {whole(metrics['parameters'])} parameters reach a held-out loss of "
            f"{metrics['held_out_loss']:.3f} (perplexity "
            f"{significant(metrics['held_out_perplexity'])}, "
            f"{metrics['held_out_bits_per_byte']:.2f} bits a byte) after "
            f"{whole(metrics['tokens_read'])} tokens, {whole(metrics['train_tokens_per_s'])} "
            "a second."
        )
    return found
