"""Makes the models that come with kvlab, and their curves: models/shipped/MODEL_CARD.md has both.

    python benchmarks/matched_set.py TEXT RUNS SHIPPED

TEXT is tinyshakespeare; runs go to RUNS and go on where they were stopped; models and curves.json
are written to SHIPPED. Every step is a `kvlab` command, and is printed. 4 trainings of 2.5 million
tokens and 3 of 0.12 million: half an hour on two cores.
"""

import json
import pathlib
import shlex
import subprocess
import sys

from kvlab.research.results import read_rows

TRAINED = {"mha": 8, "gqa4": 4, "gqa2": 2, "mqa": 1}  # KV heads, of 8 query heads
ATTENTION = {"gqa4": "gqa:4", "gqa2": "gqa:2", "mqa": "mqa"}
UPTRAINING = ("--steps=60", "--warmup_steps=6", "--eval_every=20", "--checkpoint_every=60")
DIGITS = 8


def main(text: str, runs: pathlib.Path, shipped: pathlib.Path) -> None:
    """Trains, converts, trains further and writes what comes of it."""
    curves = {}
    for name, heads in TRAINED.items():
        run = runs / name
        _kvlab("train", f"--data={text}", f"--num_kv_heads={heads}", f"--out={run}")
        _ship(run, shipped / f"shakespeare-{name}")
        curves[f"shakespeare-{name}"] = _curve(run)
    for name, attention in ATTENTION.items():
        pooled, run = runs / f"{name}-pooled", runs / f"{name}-uptrained"
        source = f"--model={shipped / 'shakespeare-mha'}"
        _kvlab("convert", source, f"--attention={attention}", f"--out={pooled}", "--overwrite")
        _kvlab("train", f"--data={text}", f"--init={pooled}", f"--out={run}", *UPTRAINING)
        _ship(run, shipped / f"shakespeare-{name}-uptrained")
        curves[f"shakespeare-{name}-uptrained"] = _curve(run)
    lines = [f"{json.dumps(name)}: {json.dumps(curve)}" for name, curve in curves.items()]
    (shipped / "curves.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _ship(run: pathlib.Path, path: pathlib.Path) -> None:
    written = ("--format=huggingface", "--dtype=bfloat16", f"--out={path}", "--overwrite")
    _kvlab("convert", f"--model={run / 'model'}", *written)


def _curve(run: pathlib.Path) -> dict[str, list]:
    """Every step's loss, and [step, loss] on the held-out text."""
    curve: dict[str, list] = {"loss": [], "held_out": []}
    for row in read_rows(run):
        if row["config"]["kind"] == "steps":
            curve["loss"] += [round(value, DIGITS) for _, value in row["series"]["loss"]]
        elif row["config"]["kind"] == "held_out":
            loss = round(row["metrics"]["held_out_loss"], DIGITS)
            curve["held_out"].append([row["config"]["step"], loss])
    return curve


def _kvlab(*arguments: str) -> None:
    command = ["kvlab", *arguments]
    print(shlex.join(command), flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
