"""Draw the README's picture of the leaderboard from the table of results in docs/benchmark.md.

    python benchmarks/leaderboard.py        # writes docs/images/leaderboard.svg

The table's own command, `coterie bench`, is named beside it. Run this after the table has changed.
"""

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
SHOWN = {
    "mixture-trees": "coterie, with trees",
    "mixture": "coterie, linear",
    "sklearn-bayes": "empirical Bayes",
    "sklearn-users": "pooled, user as a column",
    "sklearn-trees": "pooled boosted trees",
    "sklearn-alone": "own rows, ridge or logistic",
}
CONDITIONS = {"honest": "honest peers", "wrong-labels": "half of the peers wrong"}
CONDITIONS |= {"permuted": "users all alike", "stranger": "a user like nobody"}


def results(page: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the mean difference to Alone and its standard error, by method and condition."""
    lines = page[page.index("| method | honest |") :].splitlines()
    names = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        cells = dict(zip(names, (cell.strip() for cell in line.split("|")[1:-1]), strict=True))
        pairs = {name: re.fullmatch(r"([+−]\.\d+) ± (\.\d+)", cells[name]) for name in CONDITIONS}
        table[cells["method"]] = {
            name: (float(found[1].replace("−", "-")), float(found[2]))
            for name, found in pairs.items()
            if found
        }
    return table


def main() -> None:
    """Write the picture."""
    table = results((ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8"))
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "coterie", "font.size": 9}
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.1), sharey=True, layout="constrained")
    for axis, (condition, title) in zip(axes, CONDITIONS.items(), strict=True):
        for place, method in enumerate(reversed(SHOWN)):
            mean, error = table[method][condition]
            colour = "#0b6e4f" if method.startswith("mixture") else "#7a7a7a"
            axis.errorbar(mean, place, xerr=error, fmt="o", color=colour, markersize=5, capsize=2)
        axis.axvline(0, color="#b3261e", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_yticks(range(len(SHOWN)), list(reversed(SHOWN.values())))
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        "better (right) or worse than a linear model of the own rows: difference in score, mean of four sets ± 1 s.e.",
        fontsize=9,
    )
    figure.savefig(
        ROOT / "docs" / "images" / "leaderboard.svg", metadata={"Date": None}, transparent=False
    )


if __name__ == "__main__":
    main()
