"""The campaign: attackers, kills, faults, damaged files, nonsense and bad input, all counted in one table.

    python benchmarks/campaign.py --out campaign --jobs 16       # everything: many hours on one core
    python benchmarks/campaign.py --out campaign --parts attacks,faults --quick

Results are saved as they come in OUT/results.jsonl: the same command goes on where it was stopped.
OUT/table.md is the table of docs/reliability.md. What counts as bad is told in each row; the aim is
0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import audit
import numpy as np
import torch
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

KS, SEEDS = (1, 2, 4, 6, 10), range(5)
FUZZED = ("questions_to_a_worker", "messages_to_a_site", "replies_to_user_0", "notes_of_strangers")
CHUNKS = 4  # into how many jobs a count is cut


def support(name: str) -> Any:
    """Return a module of the tests; a part imports its own, so that none needs the packages of another."""
    return importlib.import_module(f"tests.support.{name}")


def attacked(rule: str, attack: str, k: int, seed: int, guarded: bool) -> dict[str, Any]:
    """Return the accuracy under attack."""
    reached = support("attack_runs").accuracy(rule, attack, k, seed, guarded=guarded)
    return {"n": 1, "bad": 0, "accuracy": reached}


def fault(name: str) -> dict[str, Any]:
    """Return whether a run went on in spite of a fault, or refused it in words."""
    with tempfile.TemporaryDirectory() as folder:
        told = support("faults").FAULTS[name](Path(folder))
    return {"n": 1, "bad": told not in ("went on", "refused"), "told": told}


def damage(name: str, count: int, seed: int) -> dict[str, Any]:
    """Return how many damaged files were accepted in silence, or ended in a raw error."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = support("damage").corrupt(
            name, Path(folder), count // 3, count - count // 3, seed
        )
    told = f"{outcome.refused} refused, {outcome.survived} read up to the damage, {outcome.silent} in silence"
    return {
        "n": count,
        "bad": outcome.silent + len(outcome.raw),
        "told": "; ".join([told, *outcome.raw[:3]]),
    }


def kills(count: int, seed: int) -> dict[str, Any]:
    """Return how many runs, killed at random moments and taken up again, came to other bits or were lost."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "tests/support/killed_runs.py"),
            folder,
            str(count),
            str(seed),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    lost = sum(each["digest"] != each["wanted"] for each in rounds) + (done.returncode != 0)
    torn = sum(each["torn"] for each in rounds)
    told = f"{torn} times while a checkpoint was written {done.stderr.strip()[-200:]}"
    return {"n": sum(len(each["killed_at"]) for each in rounds), "bad": lost, "told": told.strip()}


def kill_points(seed: int) -> dict[str, Any]:
    """Return how many of the points before, during and after each file is written lose a run."""
    points, rng = support("kill_points"), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        hit = points.killed_at_every_point(
            Path(folder), lambda point: int(rng.integers(1, 3)) if seed else 1
        )
        ledgers = []
        for point in points.LEDGER_POINTS:
            path = Path(folder) / point / "requests.jsonl"
            path.parent.mkdir()
            left, counted, more = points.ledger_killed_at(point, path)
            ledgers.append(left <= counted <= left + 1 and counted + more == 5)
    lost = (not hit["same bits"]) + ledgers.count(False)
    return {
        "n": len(points.POINTS) + len(ledgers),
        "bad": lost,
        "told": "the same bits, and the same caps",
    }


def ledgers(count: int, seed: int) -> dict[str, Any]:
    """Return how often kills of private peers, two on one ledger, lost what was spent, or ε was exceeded."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = support("killed_ledgers").killed(
            Path(folder) / "log", count, seed, 16.0 if count < 50 else 60.0
        )
    told = f"{outcome.left} answers left, {outcome.counted} of {outcome.most} were counted"
    return {"n": outcome.kills, "bad": outcome.bad, "told": told}


def fuzz(name: str, count: int, seed: int) -> dict[str, Any]:
    """Return how many messages of nonsense ended in an untyped error."""
    outcomes = getattr(support("fuzz"), name)(count, seed)
    bad = {what: n for what, n in outcomes.items() if what.startswith("untyped")}
    return {"n": count, "bad": sum(bad.values()), "told": str(dict(outcomes))[:300]}


INTRUDERS = {
    "oracles": ("masked_oracles", 1, "a site told from another"),
    "views": ("inconsistent_views", 1, "a site told beside the sum"),
    "calls": ("sealed_calls", 10, "believed"),
    "relay": ("relayed", 2, "believed, or answered twice"),
    "letters": ("forged_letters", 1, "believed"),
    "private E-steps": ("private_e_steps", 1, "answered, or otherwise by a row"),
}
"""By part: who tries, how often at each count, and what is bad."""


def intruder(part: str, count: int, seed: int) -> dict[str, Any]:
    """Return how many attempts of somebody with a program of its own came to something."""
    name, each, _ = INTRUDERS[part]
    return {"n": each * count, "bad": getattr(support("intruders"), name)(count, seed)}


WORTH = 0.1
"""So much worse than Alone, in mean squared error of targets of variance about 4, is chance."""


def liars(what: str, lie: str, peers: int, lying: int, seeds: int) -> dict[str, Any]:
    """Return in how many runs peers that lie about sums of all their rows cost more than the collaboration."""
    support_of = support("liars")
    given = (lie, peers) if what == "E-steps" else (lie, peers, lying)
    cost = getattr(support_of, "cost_in_e_steps" if what == "E-steps" else "cost_in_trees")
    found = [cost(*given, seed) for seed in range(seeds)]
    bad = sum(not each < WORTH for each in found)
    return {"n": seeds, "bad": bad, "told": f"at most {max(found):+.3f} beside Alone"}


def audited(name: str, runs: int) -> dict[str, Any]:
    """Return whether a private peer told more than it states, or one that cheats was not found out."""
    case = (audit.HONEST | audit.CHEATS)[name]
    bound = audit.audited(case, runs, confidence=0.999)
    bad = bound > case.stated if name in audit.HONEST else bound <= case.stated
    return {"n": runs, "bad": bad, "told": f"ε at least {bound:.2f}, stated {case.stated:.2f}"}


def crowd(odd: float, steps: int) -> dict[str, Any]:
    """Return whether what user 0 holds for 100 sites grew by more than a twentieth."""
    held, grew = support("intruders").memory_of_a_crowd(100, steps, 100_000, odd)
    told = f"{held:.2f} times the sites' gradients, growth {grew:.3f}"
    return {"n": 100, "bad": grew > 1.05, "told": told}


def bombs() -> dict[str, Any]:
    """Return how many files were read though a device, a pipe or a bomb stood in their place."""
    n, wrong = support("intruders").bombs()
    return {"n": n, "bad": len(wrong), "told": "; ".join(wrong[:5])}


def inputs() -> dict[str, Any]:
    """Return how many bad inputs to the library were not refused in words, or left something behind."""
    wrong, bad_inputs = [], support("bad_inputs").BAD_INPUTS
    for name, attempt in bad_inputs.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                attempt(Path(folder))
                wrong.append(f"{name}: accepted")
            except CoterieError:
                wrong += [f"{name}: left files"] * any(
                    path.is_dir() for path in Path(folder).iterdir()
                )
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}")
    return {"n": len(bad_inputs), "bad": len(wrong), "told": "; ".join(wrong[:5])}


def commands() -> dict[str, Any]:
    """Return how many bad commands were not refused with one message."""
    wrong, bad_commands = [], support("bad_commands").BAD_COMMANDS
    for name, words in bad_commands.items():
        with tempfile.TemporaryDirectory() as folder:
            result = CliRunner().invoke(app, words(Path(folder)))
        if result.exit_code != 2 or "Traceback" in result.output or "not foreseen" in result.output:
            wrong.append(f"{name}: exit {result.exit_code}")
    return {"n": len(bad_commands), "bad": len(wrong), "told": "; ".join(wrong[:5])}


def surroundings(name: str, count: int) -> dict[str, Any]:
    """Return how many runs in threads, forked children or an event loop came to other bits."""
    return {"n": count, "bad": support("surroundings").SURROUNDINGS[name](count)}


def memory(steps: int) -> dict[str, Any]:
    """Return whether memory grew by more than a hundredth in a long run over torch.distributed."""
    command = [sys.executable, str(ROOT / "benchmarks/soak.py"), "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    ratios = [
        json.loads(line)["ratio"] for line in done.stdout.splitlines() if line.startswith("{")
    ]
    return {
        "n": steps,
        "bad": not ratios or max(ratios) > 1.01,
        "told": f"the last over the first: {ratios}",
    }


DOES: dict[str, Callable[..., dict[str, Any]]] = {
    "attacks": attacked,
    "faults": fault,
    "damage": damage,
    "kills": kills,
    "kill points": kill_points,
    "ledgers": ledgers,
    "fuzz": fuzz,
    **{part: partial(intruder, part) for part in INTRUDERS},
    "liars": liars,
    "audit": audited,
    "crowd": crowd,
    "bombs": bombs,
    "inputs": inputs,
    "commands": commands,
    "surroundings": surroundings,
    "memory": memory,
}
BAD = {
    "faults": "runs lost",
    "damage": "accepted in silence, or a raw error",
    "kills": "runs lost or other bits",
    "kill points": "runs lost or other bits",
    "ledgers": "budget lost or overspent",
    "fuzz": "untyped errors",
    **{part: bad for part, (_, _, bad) in INTRUDERS.items()},
    "liars": "worse than Alone",
    "audit": "more told than stated, or a cheat not found",
    "crowd": "grew by more than 5 %",
    "bombs": "read, or a raw error",
    "inputs": "not refused in words",
    "commands": "tracebacks",
    "surroundings": "other bits, or something global altered",
    "memory": "grew by more than 1 %",
}


def cells(quick: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the cases of training under attack, those without attackers too."""
    runs, seeds, ks = support("attack_runs"), range(2) if quick else SEEDS, (1, 4) if quick else KS
    asked: list[tuple[Any, ...]] = [("alone", "none", 0, seed, False) for seed in seeds]
    both = [
        (rule, seed, guarded) for seed in seeds for rule in runs.RULES for guarded in (False, True)
    ]
    asked += [(rule, "none", 0, seed, guarded) for rule, seed, guarded in both]
    asked += [
        (rule, attack, k, seed, g) for rule, seed, g in both for attack in runs.ATTACKS for k in ks
    ]
    return [
        (f"{r}{', guarded' * g}: {attack}, {k} of 10", (r, attack, k, s, g))
        for r, attack, k, s, g in asked
    ]


def lied(quick: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the cases of peers that lie, in E-steps and in histograms of trees."""
    lies = support("liars")
    asked: list[tuple[str, tuple[Any, ...]]] = [
        ("E-steps", ("E-steps", lie, peers, 1, 2 if quick else 20))
        for lie in lies.E_STEPS
        for peers in (1, 2, 6)
    ]
    counts = [(3, 3)] if quick else [(3, 1), (3, 3)]
    return asked + [
        ("histograms", ("histograms", lie, *count, 1 if quick else 3))
        for lie in lies.HISTOGRAMS
        for count in counts
    ]


def cases(part: str, quick: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Return what there is to do for a part: the case, and the arguments."""
    if part == "attacks":
        return cells(quick)
    if part == "faults":
        return [(name, (name,)) for name in support("faults").FAULTS]
    if part == "damage":
        return [(name, (name, 20 if quick else 1200, 0)) for name in support("damage").KINDS]
    if part == "surroundings":
        return [(name, (name, 2 if quick else 20)) for name in support("surroundings").SURROUNDINGS]
    if part == "fuzz":
        each = (100 if quick else 10_000) // CHUNKS
        return [(name, (name, each, chunk)) for name in FUZZED for chunk in range(CHUNKS)]
    plain: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
        "kills": [
            ("random moments", (5 if quick else 50, seed)) for seed in range(1 if quick else 10)
        ],
        "kill points": [("named points", (seed,)) for seed in range(1 if quick else 3)],
        "ledgers": [("private peers, two on a ledger", (10 if quick else 200, 0))],
        "oracles": [
            ("masked sums", (5 if quick else 250, seed)) for seed in range(1 if quick else 4)
        ],
        "views": [("masked sums", (20 if quick else 1000, 0))],
        "calls": [("through a server", (20 if quick else 1000, 0))],
        "relay": [("calls and replies on the way", (20 if quick else 5000, 0))],
        "letters": [("between processes", (20 if quick else 5000, 0))],
        "private E-steps": [("neighbours", (20 if quick else 1000, 0))],
        "liars": lied(quick),
        "audit": [
            (name, (name, 5000 if quick else 20_000)) for name in audit.HONEST | audit.CHEATS
        ],
        "crowd": [
            (f"100 sites, {odd:.0%} of answers odd", (odd, 20 if quick else 200))
            for odd in (0.0, 0.3)
        ],
        "bombs": [("in the place of files", ())],
        "inputs": [("library", ())],
        "commands": [("command line", ())],
        "memory": [("8 processes", (300 if quick else 20_000,))],
    }
    return plain[part]


def work(part: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """Do one job, in a process of its own."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = DOES[part](*given)
        except Exception as error:
            result = {"n": 1, "bad": 1, "told": f"{type(error).__name__}: {error}"[:300]}
    return result | {"seconds": round(time.perf_counter() - began, 1)}


def cells_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Return by rule, attack and number of attackers the difference to Alone, paired by seed, and its error."""
    accuracies = {tuple(row["given"]): row["accuracy"] for row in rows if "accuracy" in row}
    alone = {seed: a for (rule, _, _, seed, _), a in accuracies.items() if rule == "alone"}
    by_cell: dict[tuple[str, str, int], list[float]] = {}
    for (rule, attack, k, seed, guarded), accuracy in accuracies.items():
        if rule != "alone" and seed in alone:
            by_cell.setdefault((f"{rule}{', guarded' * guarded}", attack, k), []).append(
                accuracy - alone[seed]
            )
    return {
        cell: (
            float(np.mean(d)),
            float(np.std(d, ddof=1) / np.sqrt(len(d))) if len(d) > 1 else float("nan"),
        )
        for cell, d in by_cell.items()
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return all that was found as tables in Markdown."""
    lines = ["| part | case | tried | bad | what is bad |", "|---|---|---|---|---|"]
    counted: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["part"] != "attacks":
            total = counted.setdefault((row["part"], row["case"]), [0, 0])
            total[0] += row["n"]
            total[1] += int(row["bad"])
    lines += [f"| {p} | {c} | {n:,} | {bad} | {BAD[p]} |" for (p, c), (n, bad) in counted.items()]
    by_cell = cells_of(rows)
    if not by_cell:
        return "\n".join(lines) + "\n"
    rules, ks = (
        list(dict.fromkeys(rule for rule, _, _ in by_cell)),
        sorted({k for _, _, k in by_cell if k}),
    )
    lines += [
        "",
        "Accuracy less Alone's, mean and standard error over seeds, by attackers of ten:",
        "",
    ]
    lines += [f"| rule | attack | {' | '.join(map(str, ks))} |", "|---|---|" + "---|" * len(ks)]
    for rule in rules:
        for attack in dict.fromkeys(cell[1] for cell in by_cell if cell[0] == rule):
            told = [by_cell.get((rule, attack, k if attack != "none" else 0)) for k in ks]
            shown = [
                f"{d:+.3f} ± {e:.3f}" if each else ""
                for each in told
                for d, e in [each or (0.0, 0.0)]
            ]
            lines.append(f"| {rule} | {attack} | {' | '.join(shown)} |")
    lines += ["", "With at most half of the peers attacking:", ""]
    lines += [
        "| rule | cells | below −.05 | below Alone by 3 errors | the worst |",
        "|---|---|---|---|---|",
    ]
    for rule in rules:
        some = {cell: each for cell, each in by_cell.items() if cell[0] == rule and cell[2] <= 5}
        worst = min(some, key=lambda cell: some[cell][0])
        low = [cell for cell, (d, _) in some.items() if d < -0.05]
        sure = [cell for cell, (d, e) in some.items() if d < -3 * e and d < 0]
        name = f"{worst[1]}, {worst[2]} of 10: {some[worst][0]:+.3f} ± {some[worst][1]:.3f}"
        lines.append(f"| {rule} | {len(some)} | {len(low)} | {len(sure)} | {name} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Do what has not been done, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("campaign"))
    parser.add_argument("--parts", default=",".join(DOES), help=f"of {', '.join(DOES)}")
    parser.add_argument("--quick", action="store_true", help="a hundredth of it")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.jsonl"
    rows = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )
    done = {(row["part"], row["case"], json.dumps(row["given"])) for row in rows}
    asked = [
        (part, *case) for part in options.parts.split(",") for case in cases(part, options.quick)
    ]
    todo = [job for job in asked if (*job[:2], json.dumps(job[2])) not in done]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(options.jobs, mp_context=context) as pool,
        path.open("a", encoding="utf-8") as file,
    ):
        waiting = {
            pool.submit(work, part, given): (part, case, given) for part, case, given in todo
        }
        for count, future in enumerate(as_completed(waiting), 1):
            part, case, given = waiting[future]
            row = {"part": part, "case": case, "given": list(given), **future.result()}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                f"{count}/{len(waiting)} {part}: {case}: {row}"[:180], file=sys.stderr, flush=True
            )
    (options.out / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
