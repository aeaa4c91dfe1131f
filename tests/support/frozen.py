"""Digests of the frozen cases: written, and compared with what the library gives now.

    python -m tests.support.frozen --compare [PART OF A NAME ...]
    python -m tests.support.frozen --write [PART OF A NAME ...]

Where this machine computes as the one that wrote `tests/frozen.json`, which `machine` tells, every
bit must agree; elsewhere the rounded values must, to `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from tests.support.frozen_cases.every import BITS, CASES, DRAWS, Parts
from torch import Tensor
from torch.nn import functional as f

PATH = Path(__file__).parents[1] / "frozen.json"
TOLERANCE = 1e-3
"""How far vectors may be apart where bits need not agree, as a share of their largest entry."""
SMALL = 1e-4
"""Differences of vectors whose entries are all below this are a share of this."""
WHOLE = 24
"""Vectors up to this length are stored whole, of longer ones the norm and a few projections."""


def digest(part: Mapping[str, Tensor]) -> str:
    """Return a digest of the exact bits of vectors by name, in whatever order they are."""
    hashed = hashlib.sha256()
    for name, vector in sorted(part.items()):
        hashed.update(f"{name}\0{len(vector)}\0".encode())
        hashed.update(vector.double().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def rounded(vector: Tensor) -> list[float]:
    """Return a vector to nine digits; of a long one its norm and projections."""
    values = vector.double().numpy()
    if len(values) > WHOLE:
        places = np.arange(len(values))
        waves = [
            np.cos((1 + 2 * k) * (places + 0.5) * math.pi / (2 * len(values))) for k in (0, 1, 3, 7)
        ]
        values = np.array([np.linalg.norm(values), *(values @ wave for wave in waves)])
    return [float(f"{value:.9g}") for value in values.tolist()]


def frozen(parts: Parts) -> dict[str, Any]:
    """Return what is stored of a case: for each part its digest and its rounded values."""
    return {
        part: {
            "digest": digest(vectors),
            "values": {name: rounded(v) for name, v in sorted(vectors.items())},
        }
        for part, vectors in parts.items()
        if vectors
    }


def apart(now: Sequence[float], stored: Sequence[float]) -> float:
    """Return how far two vectors are apart, as a share of the largest entry; infinite where they do not compare."""
    a, b = np.array(now, dtype=float), np.array(stored, dtype=float)
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return math.inf
    same = (a == b) | np.isnan(a)
    if same.all():
        return 0.0
    if not np.isfinite(a[~same]).all() or not np.isfinite(b[~same]).all():
        return math.inf
    known = np.abs([a, b])[:, np.isfinite(a) & np.isfinite(b)]
    return float(np.abs(a - b)[~same].max() / max(known.max(), SMALL))


def differences(now: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Return for each part that has other bits how far it is apart, and where most; 0.0 for rounding too small."""
    apart_by = {}
    for part in sorted({*now, *stored}):
        ours, theirs = now.get(part), stored.get(part)
        if ours is None or theirs is None:
            apart_by[part] = math.inf, "there" if theirs is None else "gone"
        elif ours["digest"] != theirs["digest"]:
            names = {*ours["values"], *theirs["values"]}
            missing = {
                name: f"{name!r} is {'new' if name in ours['values'] else 'gone'}"
                for name in names
                if name not in ours["values"] or name not in theirs["values"]
            }
            if missing:
                apart_by[part] = math.inf, "; ".join(sorted(missing.values())[:5])
            else:
                far = {
                    name: apart(ours["values"][name], theirs["values"][name])
                    for name in sorted(names)
                }
                worst = max(far, key=far.__getitem__)
                apart_by[part] = (
                    far[worst],
                    f"{worst!r}: {ours['values'][worst]} was {theirs['values'][worst]}",
                )
    return apart_by


def taken(name: str) -> dict[str, Any]:
    """Return what a case gives now."""
    return frozen(CASES[name]())


def machine() -> str:
    """Return a digest of a plain computation of torch's and NumPy's, and of what the bits depend on beside it."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((37, 29))).float()
    image = torch.from_numpy(random.standard_normal((5, 2, 9, 9))).float()
    kernel = torch.from_numpy(random.standard_normal((3, 2, 3, 3))).float()
    computed = [
        x @ x.T,
        x @ x[0],
        x.double() @ x.double().T,
        torch.exp(x),
        torch.tanh(x),
        torch.softmax(x, 1),
        f.conv2d(image, kernel),
        f.layer_norm(x, (29,)),
        x.norm(dim=1),
        x.sum(0),
        torch.linalg.solve(x[:29].double(), x[29].double()),
        torch.from_numpy(x.double().numpy().T @ x.double().numpy()),
    ]
    versions = f"{torch.__version__} {np.__version__} {scipy.__version__} {platform.machine()}"
    hashed = hashlib.sha256(versions.encode())
    for tensor in computed:
        hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def draws() -> list[float]:
    """Return numbers from torch's own generator."""
    before = torch.get_rng_state()
    torch.manual_seed(1)
    ones = torch.ones(8)
    drawn = torch.cat(
        [
            torch.rand(4),
            torch.randn(4),
            torch.randn(20),
            f.dropout(ones, 0.5),
            torch.empty(3).uniform_(),
        ]
    )
    torch.set_rng_state(before)
    return [round(value, 4) for value in drawn.tolist()]


def stored() -> dict[str, Any]:
    """Return what was written."""
    content: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return content


def said(difference: Mapping[str, tuple[float, str]]) -> str:
    """Say how a case compares: the same bits, rounding, or changed."""
    if not difference:
        return "same bits"
    worst = max(far for far, _ in difference.values())
    word = "rounding" if worst <= TOLERANCE else "CHANGED"
    return f"{word} ({worst:.2g}) in " + "; ".join(
        f"{part} {far:.2g}" + (f" [{where}]" if far > TOLERANCE else "")
        for part, (far, where) in difference.items()
    )


def main(arguments: Sequence[str]) -> int:
    """Write or compare; return how many cases have other bits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--write", action="store_true", help="rewrite tests/frozen.json, or the cases named in it"
    )
    which.add_argument("--compare", action="store_true", help="compare with tests/frozen.json")
    parser.add_argument("--all", action="store_true", help="show the cases with the same bits too")
    parser.add_argument("--times", action="store_true", help="show the slowest cases")
    parser.add_argument("name", nargs="*", help="only the cases whose names contain one of these")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if asked.write and asked.name and stored()["machine"] != machine():
        parser.error(
            "bits of two machines cannot be mixed: --compare shows what changed, --write alone writes all"
        )
    names = [name for name in CASES if not asked.name or any(part in name for part in asked.name)]
    times, now = {}, {}
    for name in names:
        began = time.perf_counter()
        now[name] = taken(name)
        times[name] = time.perf_counter() - began
    if asked.times:
        for name in sorted(times, key=times.__getitem__, reverse=True)[:15]:
            print(f"{times[name]:6.2f} s  {name}")
    if asked.write:
        kept = stored()["cases"] if asked.name and PATH.exists() else {}
        cases = {name: (kept | now)[name] for name in CASES if name in kept or name in now}
        _write({"machine": machine(), "draws": draws(), "cases": cases})
        print(f"{len(now)} cases in {sum(times.values()):.0f} s: {PATH}")
        return 0
    before = stored()
    changes = {name: differences(now[name], before["cases"].get(name, {})) for name in names}
    for name, difference in changes.items():
        if difference or asked.all:
            print(f"{name:50}  {said(difference)}")
    gone = [] if asked.name else [name for name in before["cases"] if name not in CASES]
    for name in gone:
        print(f"{name:50}  GONE")
    other = sum(bool(difference) for difference in changes.values()) + len(gone)
    alike = "computes as" if machine() == before["machine"] else "does not compute as"
    print(
        f"{len(names)} cases, {other} with other bits; this machine {alike} the one that wrote them"
    )
    return other


def _write(now: Mapping[str, Any]) -> None:
    """Write one case a line, so that a change shows which cases it is in."""
    cases = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
        for name, value in now["cases"].items()
    )
    head = f'"machine": {json.dumps(now["machine"])},\n"draws": {json.dumps(now["draws"])}'
    PATH.write_text(f'{{\n{head},\n"cases": {{\n{cases}\n}}\n}}\n', encoding="utf-8")


__all__ = [
    "BITS",
    "CASES",
    "DRAWS",
    "TOLERANCE",
    "differences",
    "draws",
    "machine",
    "said",
    "stored",
    "taken",
]

if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
