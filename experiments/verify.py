"""Show that variants of a model agree as they must, in a table of measured rows.

    kvlab verify --model=random:tiny-gqa
    kvlab verify --model=smollm2-135m --json

Each row is a property of a variant: what was compared, the largest difference, and the bound that
it must keep to. Lossless variants are compared with the model computed without a cache. Every
variant must have equal bits whatever shares its batch and wherever it lies, and a bounded
difference where the shapes of its programs differ. The exit status is 0 only if every row holds.
"""

import json
import sys

from kvlab.experiments.flags import Flag, choice, command_flags
from kvlab.experiments.main import execute

FLAGS = command_flags(
    "model",
    "json",
    seed="picks the texts",
    plan=Flag(choice("full", "short"), "NAME", "what to check: full, or short for a look", "full"),
)


def main(argv: list[str]) -> int:
    """Checks the plan and prints the table, or a row a line; 1 where a row fails."""
    del argv
    from kvlab.models.load import load_model
    from kvlab.research.progress import progress
    from kvlab.research.verify import table_text, verify
    from kvlab.research.verify_plan import PLANS

    plan, rows = PLANS[FLAGS.plan], []
    model = load_model(FLAGS.model)
    with progress(plan.num_rows, "verify", unit="rows") as bar:
        for row in verify(model, plan, FLAGS.seed, bar):
            rows.append(row)
            if FLAGS.json:
                print(json.dumps(row.to_json()), flush=True)
    if not FLAGS.json:
        print(table_text(rows))
        if plan.only:
            print(f"checked only {plan.only}; --plan=full checks the rest")
    return 0 if all(row.holds is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(execute(sys.modules[__name__]))
