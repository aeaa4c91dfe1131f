"""The comparison with Alone: its difference and standard error against plain formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import coterie
from coterie.data import from_table
from coterie.tables.fit import fit


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_difference_and_its_error(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(1)
    n = 400
    x = rng.normal(size=(n, 3))
    y = x @ [1.0, -1.0, 0.5] + rng.normal(0, 1, n)
    frame = pd.DataFrame(x, columns=list("uvw")).assign(
        who=np.resize(["a", "b"], n), y=y if kind == "regression" else y > 0
    )
    task = from_table(frame, user_column="who", target="y", me="a", own_examples=10)
    fitted = fit(task, coterie.WeightedAveraging(0.8), "linear", tmp_path, steps=80, lr=0.05)
    assert fitted is not None
    assert task.me.test is not None
    inputs, targets = task.me.test.take(torch.arange(len(task.me.test)))
    with torch.no_grad():
        outputs = [run.model(inputs) for run in (fitted.run, fitted.alone)]
    difference, error = fitted.difference()
    if kind == "classification":
        right = [(o.argmax(1) == targets).double().numpy() for o in outputs]
        assert difference == pytest.approx(right[0].mean() - right[1].mean(), abs=1e-12)
        assert error == pytest.approx(np.std(right[0] - right[1], ddof=1) / np.sqrt(len(targets)))
    else:
        squares = np.array([((o - targets) * task.preparation.scale).square().flatten().numpy() for o in outputs])
        roots = np.sqrt(squares.mean(1))
        assert difference == pytest.approx(roots[0] - roots[1], rel=1e-5)
        pick = rng.integers(0, len(targets), (20_000, len(targets)))  # the bootstrap knows no formula
        resampled = np.sqrt(squares[0][pick].mean(1)) - np.sqrt(squares[1][pick].mean(1))
        assert error == pytest.approx(resampled.std(), rel=0.15)
    sentence = fitted.sentence()
    assert f"{difference:+.4g}" in sentence
    if abs(difference) <= 2 * error:
        assert "no difference" in sentence
