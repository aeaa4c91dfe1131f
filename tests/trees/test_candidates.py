"""Trees as candidates: what is judged is honest, what is served is what was judged, and bad input is survived."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

import coterie
from coterie.errors import FileError, KnobError, ModelError
from coterie.mixture.families import POISSON, SOFTMAX, SQUARED, Array
from coterie.sklearn import CoterieClassifier, CoterieRegressor
from coterie.tables.models import load_model, save_model
from coterie.trees.boosting import Growth
from coterie.trees.tensors import Trees
from coterie.trees.tree_candidates import boosted, candidates, forest

SHORT = Growth(trees=10, looks=(5, 10))


def rows(n: int, seed: int, classes: int = 0) -> tuple[Array, Array]:
    """Return rows with a product of two columns as target."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 4)).astype(np.float32).astype(np.float64)
    y = x[:, 0] * x[:, 1]
    return x, np.eye(classes)[np.digitize(y, [-0.3, 0.3][: classes - 1])] if classes else y[:, None]


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_the_module_gives_the_outputs_that_grew(classes: int) -> None:
    own, peers = rows(40, 0, classes), [rows(60, 1, classes)]
    family, folds = SOFTMAX if classes else SQUARED, np.arange(40) % 2
    others = own[0], own[1].copy()
    others[1][:] = rows(40, 5, classes)[1]
    blocks = boosted(own, peers, family, folds, held_out=own[0], growth=SHORT)
    # an ensemble that is blind to a fold is that of all rows without it
    keep = folds == 1
    without = boosted(
        (own[0][keep], own[1][keep]), peers, family, np.zeros(keep.sum(), dtype=int), growth=SHORT
    )
    assert [block.many for block in blocks] == [2, 2]
    assert blocks[0].held_out is not None
    better = family.losses(blocks[0].held_out, own[1][:, None]).mean(0)
    assert better[1] < better[0]
    assert len(without) == 2


def test_a_forest_is_what_scikit_learn_predicts() -> None:
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

    x, y = rows(50, 0, 3)
    asked = rows(30, 1)[0]
    (block,) = forest((x, y), SOFTMAX, held_out=asked)
    plain = ExtraTreesClassifier(100, bootstrap=True, random_state=0).fit(x, y.argmax(1))
    shares = (50 * plain.predict_proba(asked) + 1 / 3) / 51
    assert block.held_out is not None
    assert np.exp(block.held_out[:, 0]) == pytest.approx(shares, abs=1e-5)
    x, y = rows(50, 0)
    (block,) = forest((x, y), SQUARED, held_out=asked)
    plain = ExtraTreesRegressor(100, bootstrap=True, random_state=0).fit(x, y[:, 0])
    assert block.held_out is not None
    assert block.held_out[:, 0, 0] == pytest.approx(plain.predict(asked), abs=1e-5)


def test_pooled_trees_are_not_far_from_those_of_scikit_learn_with_eight_times_the_leaves() -> None:
    own, peer, (asked, truth) = rows(40, 0), rows(500, 1), rows(500, 2)
    blocks = boosted(own, [peer], SQUARED, np.arange(40) % 2, held_out=asked)
    assert blocks[0].held_out is not None
    error = np.square(blocks[0].held_out[:, -1] - truth).mean()
    joined = [np.concatenate(each) for each in zip(own, peer, strict=True)]
    plain = HistGradientBoostingRegressor(random_state=0).fit(joined[0], joined[1][:, 0])
    assert error < 1.5 * np.square(plain.predict(asked) - truth[:, 0]).mean()


def task(
    classes: int, own: int = 40, change: str = ""
) -> tuple[coterie.User, list[coterie.User], torch.nn.Module, Any]:
    """Return users whose trees are worth more than linear models, and what is trained."""
    users = []
    for k, n in enumerate((own, 100, 100)):
        x, y = rows(n, k, classes)
        if change == "constant":
            y[:] = y[0]
        if change == "only peers" and k == 0:
            x[:, 1] = 0.0
        if change == "only me" and k:
            x[:, 1] = 0.0
        targets = torch.tensor(y.argmax(1)) if classes else torch.tensor(y).float()
        users.append(coterie.User(f"user {k}", torch.tensor(x).float(), targets))
    functions = torch.nn.functional
    loss = functions.cross_entropy if classes else functions.mse_loss
    return users[0], users[1:], torch.nn.Linear(4, classes or 1), loss


@pytest.mark.parametrize("trees", [True, "only"])
@pytest.mark.parametrize("classes", [0, 2])
def test_the_default_takes_trees_where_they_are_right_and_saves_them_without_code(
    tmp_path: Path, trees: Any, classes: int
) -> None:
    me, peers, model, loss = task(classes)
    run = coterie.train(model, loss, me, peers, coterie.Mixture(trees=trees), measure=False)
    board = run.record.end.account["leaderboard"]
    assert ("hierarchical" in board) is (trees is True)
    assert sum(line["weight"] for line in board.values()) == pytest.approx(2)  # "served" has 1
    steps = "in closed form by 39 exchanges" if trees is True else "no steps"
    assert f"2 peers, {steps}" in run.summary()
    kinds = [name for name in board if name.startswith("trees")]
    assert sum(board[name]["weight"] for name in kinds) > 0.5
    x, y = rows(400, 9, classes)
    inputs = torch.tensor(x).float()
    with torch.no_grad():
        outputs = run.model(inputs)
        truth = torch.tensor(y.argmax(1) if classes else y).to(
            torch.int64 if classes else torch.float32
        )
        constant = 0.693 if classes else float(truth.var())
        assert float(loss(outputs, truth)) < 0.75 * constant
        save_model(tmp_path, run.model, "linear", 4, classes or 1)
        assert torch.equal(load_model(tmp_path)(inputs), outputs)


def test_a_run_that_is_resumed_after_its_end_serves_the_same_trees(tmp_path: Path) -> None:
    me, peers, model, loss = task(0)
    rule, inputs = coterie.Mixture(trees=True), torch.randn(20, 4)
    how: dict[str, Any] = {"measure": False, "out": tmp_path, "trackers": ()}
    first = coterie.train(model, loss, me, peers, rule, **how)
    again = coterie.train(torch.nn.Linear(4, 1), loss, me, peers, rule, resume=True, **how)
    assert torch.equal(first.model(inputs), again.model(inputs))
    assert type(again.model) is not torch.nn.Linear


def test_without_peers_at_hand_there_is_the_forest() -> None:
    me, _, model, loss = task(2)
    run = coterie.train(model, loss, me, (), coterie.Mixture(trees=True), measure=False)
    kinds = run.record.end.account["leaderboard"]
    assert "forest, alone" in kinds
    assert "trees" not in kinds


@pytest.mark.parametrize(
    ("change", "classes"),
    [("constant", 0), ("only peers", 0), ("only peers", 2), ("only me", 2)],
)
def test_constant_targets_and_columns_that_only_some_have_are_survived(
    change: str, classes: int
) -> None:
    me, peers, model, loss = task(classes, change=change)
    run = coterie.train(model, loss, me, peers, coterie.Mixture(trees=True), measure=False)
    assert torch.isfinite(run.model(torch.randn(5, 4))).all()


def test_few_own_rows_and_counts_have_no_trees() -> None:
    own = rows(5, 0)
    assert not candidates(own, [rows(50, 1)], SQUARED, np.arange(5) % 2)
    own = rows(30, 0)
    assert not candidates(own, [rows(50, 1)], POISSON, np.arange(30) % 2)


def test_missing_values_and_unknown_columns_are_told_or_survived() -> None:
    own, peer = rows(60, 0), rows(200, 1)
    own[0][::3, 2] = np.nan
    own[0][:, 3] = np.nan  # no row has it
    (block, _) = boosted(own, [peer], SQUARED, np.arange(60) % 2, held_out=own[0], growth=SHORT)
    assert block.held_out is not None
    assert np.isfinite(block.held_out).all()


def test_a_folder_with_impossible_trees_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="NODES"):
        Trees.sized("trees:3", 2, 1)
    with pytest.raises(KnobError, match="only"):
        coterie.Mixture(trees="some")  # type: ignore[arg-type]  # what is tested
    me, peers, model, loss = task(0)
    run = coterie.train(model, loss, me, peers, coterie.Mixture(trees="only"), measure=False)
    save_model(tmp_path, run.model, "linear", 4, 1)
    about = tmp_path / "model.json"
    text = about.read_text()
    assert "trees:" in text
    held = torch.load(io.BytesIO((tmp_path / "model.pt").read_bytes()), weights_only=True)
    assert all(isinstance(each, torch.Tensor) for each in held.values())
    (tmp_path / "model.pt").write_bytes(b"damaged")
    with pytest.raises(FileError, match="damaged"):
        load_model(tmp_path)


def test_the_estimators_mix_trees_and_refuse_steps_for_them() -> None:
    random = np.random.default_rng(0)
    x = np.column_stack([np.repeat([1, 2, 3], 50), random.normal(size=(150, 3))])
    y = x[:, 1] * x[:, 2]
    asked = np.column_stack([np.repeat([1, 2, 3], 50), random.normal(size=(150, 3))])
    truth = asked[:, 1] * asked[:, 2]
    mixed = CoterieRegressor(0).fit(x, y)
    assert mixed.score(asked, truth) > 0.3
    with pytest.raises(KnobError, match="no steps"):
        CoterieClassifier(0, module="trees", lr=0.1).fit(x, y > 0)


@pytest.mark.parametrize("classes", [0, 2])
def test_monotone_constraints_hold_everywhere_and_only_where_they_are_asked(classes: int) -> None:
    random = np.random.default_rng(3)
    users = []
    for seed in range(3):  # y falls and rises in column 0, beside much noise
        x = random.normal(size=(80, 2)).round(1)
        y = np.sin(2 * x[:, 0]) + x[:, 0] * x[:, 1] + random.normal(size=80)
        targets = torch.tensor(y > 0).long() if classes else torch.tensor(y[:, None]).float()
        users.append(coterie.User(f"user {seed}", torch.tensor(x).float(), targets))
    functions = torch.nn.functional
    loss = functions.cross_entropy if classes else functions.mse_loss

    def fallen(signs: dict[int, int] | None) -> float:
        """Return how far predictions fall along column 0, at most, and rise along column 1."""
        model, rule = (
            torch.nn.Linear(2, classes or 1),
            coterie.Mixture(trees=True, monotonic_cst=signs),
        )
        run = coterie.train(model, loss, users[0], users[1:], rule, measure=False)
        grid = torch.linspace(-3, 3, 61)
        inputs = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
        with torch.no_grad():
            outputs = run.model(inputs)
        told = outputs.softmax(1)[:, 1] if classes else outputs[:, 0]
        table = told.reshape(61, 61)
        return max(float((-table.diff(dim=0)).max()), float(table.diff(dim=1).max()))

    assert fallen({0: 1, 1: -1}) < 1e-6
    assert fallen(None) > 0.05


def test_bad_constraints_are_refused() -> None:
    me, peers, model, loss = task(3)
    for signs, said in (({7: 1}, "from 0 to 3"), ({0: 2}, "1, -1 or 0"), ({0: 1}, "two classes")):
        with pytest.raises(KnobError, match=said):
            coterie.train(model, loss, me, peers, coterie.Mixture(monotonic_cst=signs))
    network = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU(), torch.nn.Linear(2, 3))
    with pytest.raises(KnobError, match="closed form"):
        coterie.train(network, loss, me, peers, coterie.Mixture(monotonic_cst={0: 1}))


def test_the_estimators_keep_constraints_for_columns_by_name() -> None:
    random = np.random.default_rng(0)
    table = pd.DataFrame({"group": list("ab") * 60, "dose": random.normal(size=120).round(1)})
    y = np.sin(3 * table["dose"]) + 0.3 * random.normal(size=120)
    fitted = CoterieRegressor("group", monotonic_cst={"dose": 1}).fit(table, y)
    grid = pd.DataFrame({"group": "a", "dose": np.linspace(-3, 3, 61)})
    assert np.diff(fitted.predict(grid)).min() > -1e-6
    assert np.diff(CoterieRegressor("group").fit(table, y).predict(grid)).min() < -0.05
    with pytest.raises(KnobError, match="closed form"):
        CoterieRegressor("group", lr=0.1, monotonic_cst={"dose": 1}).fit(table, y)
    with pytest.raises(KnobError, match="no column of numbers"):
        CoterieRegressor("group", monotonic_cst={"group": 1}).fit(table, y)
