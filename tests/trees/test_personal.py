"""A personal last layer: its candidates are honest, it turns what peers agree on but for a factor, and it is saved."""

from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.mixture.families import SOFTMAX, SQUARED, Array, Family
from coterie.tables.models import load_model, save_model
from coterie.trees.boosting import Growth
from coterie.trees.tree_candidates import PERSONAL, boosted, personal

SHORT = Growth(trees=20, looks=(5, 20))


def users(family: Family) -> list[tuple[Array, Array]]:
    """Return five users whose target is a product of two columns, times a factor of each user's own."""
    random, each = np.random.default_rng(0), []
    for k, factor in enumerate((-1.5, 1.0, 2.0, -1.0, 0.5)):
        x = random.normal(size=(40 if k == 0 else 120, 3)).astype(np.float32).astype(np.float64)
        y = factor * x[:, 0] * x[:, 1] + 0.2 * random.normal(size=len(x))
        each.append((x, y[:, None] if family is SQUARED else np.eye(2)[(y > 0).astype(int)]))
    return each


@pytest.mark.parametrize("family", [SQUARED, SOFTMAX])
def test_the_layer_is_blind_to_a_fold_and_what_is_served_is_what_was_judged(
    family: Family,
) -> None:
    (own, *peers), folds = users(family), np.arange(40) % 4
    (block,) = personal(own, peers, family, folds, held_out=peers[0][0], growth=SHORT)
    assert block.parameters is not None
    assert block.held_out is not None
    assert block.behind is not None
    served = block.behind(block.parameters[:, 5])
    with torch.no_grad():
        outputs = served(torch.as_tensor(peers[0][0], dtype=torch.float32)).numpy()
    assert outputs == pytest.approx(block.held_out[:, 5], abs=1e-5)
    if family is SOFTMAX:  # numbers are scaled by all own targets
        others = own[0], np.where((folds == 2)[:, None], own[1][:, ::-1], own[1])
        (again,) = personal(others, peers, family, folds, growth=SHORT)
        assert again.outputs[folds == 2] == pytest.approx(block.outputs[folds == 2], abs=1e-9)
        assert np.abs(again.outputs - block.outputs).max() > 0.01


def test_it_turns_what_the_peers_agree_on_but_for_a_factor() -> None:
    (own, *peers), folds = users(SQUARED), np.arange(40) % 4
    (layer,) = personal(own, peers, SQUARED, folds, growth=SHORT)
    pooled, _ = boosted(own, peers, SQUARED, folds, growth=SHORT)
    losses = [SQUARED.losses(one.outputs, own[1][:, None]).mean(0).min() for one in (layer, pooled)]
    assert losses[0] < 0.7 * losses[1]
    assert personal(own, peers[:1], SQUARED, folds, growth=SHORT) == []


def test_it_is_offered_and_saved_as_trees(tmp_path: Path) -> None:
    me, *peers = (
        coterie.User(str(k), torch.tensor(x).float(), torch.tensor(y).float())
        for k, (x, y) in enumerate(users(SQUARED))
    )
    loss, rule = torch.nn.functional.mse_loss, coterie.Mixture(trees="personal")
    run = coterie.train(torch.nn.Linear(3, 1), loss, me, peers, rule, measure=False)
    board = run.record.end.account["leaderboard"]
    assert board[PERSONAL]["loss"] < 0.7 * board["trees"]["loss"]
    assert board[PERSONAL]["weight"] > 0.3
    save_model(tmp_path, run.model, "linear", 3, 1)
    inputs = torch.randn(50, 3)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(inputs), run.model(inputs))
