"""The time of `import coterie; coterie.train` over that of `import torch, scipy.optimize`, in fresh interpreters.

Both sides take turns, so that they see the same machine; the medians are compared. It should stay
below 1.5.

    python benchmarks/import_cost.py [--repeats 15] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

SIDES = {"floor": "import torch, scipy.optimize", "coterie": "import coterie; coterie.train"}


def seconds(statement: str) -> float:
    """Return how long a statement takes in a fresh interpreter, without the interpreter's own start."""
    code = (
        f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    )
    return float(
        subprocess.run(  # noqa: S603  # our own code
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15, help="fresh interpreters a side")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(options.repeats + 1):
        for side, statement in SIDES.items():
            taken = seconds(statement)
            if turn:  # the first turn fills the disk's cache
                times[side].append(taken)
    floor, ours = (statistics.median(times[side]) for side in ("floor", "coterie"))
    if options.json:
        print(json.dumps({"floor_s": floor, "coterie_s": ours, "ratio": ours / floor}))
    else:
        print(
            f"{SIDES['floor']}: {floor:.3f} s; {SIDES['coterie']}: {ours:.3f} s; ratio {ours / floor:.3f}"
        )


if __name__ == "__main__":
    main()
