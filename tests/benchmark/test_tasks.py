"""Tasks: no example in two places, and what each condition does to the data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.examples import everything
from tests.support.populations import make, parts, people, rows_of

from coterie.benchmark.tasks import CONDITIONS, candidates, task_of
from coterie.errors import DataError, KnobError


@pytest.mark.parametrize("condition", list(CONDITIONS))
def test_no_example_is_in_two_places(condition: str) -> None:
    task = make(people(), condition)
    places = [rows_of(part) for part in parts(task).values()] + [
        rows_of(peer.examples) for peer in task.peers
    ]
    assert [len(rows) for rows in places[:3]] == [12, 12, 16]
    flat = [row for rows in places for row in rows]
    assert sorted(flat) == list(range(200))
    own = set(flat[:40])
    assert (own == set(range(40, 80))) == (condition != "permuted")


def test_parts_have_the_classes_in_equal_shares_and_depend_on_the_seed() -> None:
    source = people()
    tasks = [make(source, seed=seed) for seed in (0, 0, 1)]
    shares = np.bincount(source.targets[source.rows("user 1")], minlength=4) / 40
    for part in parts(tasks[0]).values():
        counts = np.bincount(everything(part)[1].numpy(), minlength=4)
        assert np.abs(counts - shares * len(part)).max() < 1.5
    rows = [rows_of(task.me.examples) for task in tasks]
    assert rows[0] == rows[1] != rows[2]


def test_peers_are_drawn_and_need_several_classes() -> None:
    source = people()
    source.targets[source.rows("user 4")] = 2
    names = {
        tuple(
            peer.name
            for peer in task_of(source, "user 1", own_examples=9, most_peers=2, seed=seed).peers
        )
        for seed in range(20)
    }
    assert names == {("user 0", "user 2"), ("user 0", "user 3"), ("user 2", "user 3")}
    assert "user 4" not in candidates(source, 9)
    with pytest.raises(DataError, match="'user 4' cannot be user 0"):
        task_of(source, "user 4", own_examples=9, most_peers=2)
    with pytest.raises(KnobError, match="unknown condition 'odd'"):
        make(source, "odd")


def test_wrong_labels_are_wrong_in_half_of_the_peers_only() -> None:
    source = people()
    task = make(source, "wrong-labels")
    assert len(task.peers) == 4
    assert len(task.wrong) == 2
    for peer in task.peers:
        truth = source.targets[rows_of(peer.examples)]
        labels = everything(peer.examples)[1].numpy()
        if peer.name in task.wrong:
            np.testing.assert_array_equal(labels, (truth + 1) % 4)
        else:
            np.testing.assert_array_equal(labels, truth)
    for part in parts(task).values():
        np.testing.assert_array_equal(everything(part)[1].numpy(), source.targets[rows_of(part)])


def test_a_stranger_has_other_labels_in_all_its_parts_and_its_peers_do_not() -> None:
    source = people()
    task = make(source, "stranger")
    for part in parts(task).values():
        np.testing.assert_array_equal(
            everything(part)[1].numpy(), (source.targets[rows_of(part)] + 1) % 4
        )
    for peer in task.peers:
        np.testing.assert_array_equal(
            everything(peer.examples)[1].numpy(), source.targets[rows_of(peer.examples)]
        )


def test_a_stranger_in_regression_is_mirrored() -> None:
    source = people(regression=True, as_table=True)
    honest, strange = make(source), make(source, "stranger")
    for name, part in parts(honest).items():
        inputs, targets = everything(part)
        torch.testing.assert_close(everything(parts(strange)[name])[0], inputs)
        # zero is the own mean
        torch.testing.assert_close(everything(parts(strange)[name])[1], -targets)


def test_permuted_users_hold_a_mixture_and_keep_their_sizes() -> None:
    task = make(people(), "permuted")
    assert [len(peer) for peer in task.peers] == [40] * 4
    owners = {row // 40 for row in rows_of(task.peers[0].examples)}
    assert owners == {0, 1, 2, 3, 4}
