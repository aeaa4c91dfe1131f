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
    "adaptive": "adaptive, the default",
    "fine-tuned": "pooled, fine-tuned",
    "wga": "wga, α by validation",
}
SHOWN |= {"pooled": "pooled", "bc": "bc"}
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
    figure, axes = plt.subplots(1, 4, figsize=(9, 1.9), sharey=True, layout="constrained")
    for axis, (condition, title) in zip(axes, CONDITIONS.items(), strict=True):
        for place, method in enumerate(reversed(SHOWN)):
            mean, error = table[method][condition]
            colour = "#0b6e4f" if method == "adaptive" else "#7a7a7a"
            axis.errorbar(mean, place, xerr=error, fmt="o", color=colour, markersize=5, capsize=2)
        axis.axvline(0, color="#b3261e", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_yticks(range(len(SHOWN)), list(reversed(SHOWN.values())))
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        "better (right) or worse than training alone: difference in score, mean of seven sets ± 1 standard error",
        fontsize=9,
    )
    figure.savefig(
        ROOT / "docs" / "images" / "leaderboard.svg", metadata={"Date": None}, transparent=False
    )


if __name__ == "__main__":
    main()
