"""Rows of user 0 at a peer, and columns that tell the target where user 0's rows do not show it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from coterie.data import from_table, users_from_table

COLUMNS: dict[str, Any] = {"user_column": "ward", "target": "ill"}


def visits(n: int = 180, seed: int = 0, decimals: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(50, 9, n).round(decimals), rng.normal(5, 1, n).round(decimals)
    return pd.DataFrame({"ward": np.resize(["a", "b", "c"], n), "age": age, "dose": dose}).assign(
        ill=np.where(age + rng.normal(0, 9, n) > 50, "yes", "no")
    )


def with_copies(n: int, *, changed: int = 0) -> pd.DataFrame:
    """Give `b` some rows of `a`, of some of which the target is another."""
    table = visits()
    rows = table[table["ward"] == "a"].head(n).assign(ward="b")
    other = rows["ill"].map({"yes": "no", "no": "yes"})
    rows["ill"] = rows["ill"].where(np.arange(n) >= changed, other)
    return pd.concat([table, rows.sample(frac=1, random_state=0)], ignore_index=True)


def test_a_peers_copies_of_user_0s_rows_are_left_out_and_told() -> None:
    table = with_copies(40, changed=7)
    words = r"of the peer 'b', 40 of its 100 rows are user 0's, 33 with the same target"
    with pytest.warns(UserWarning, match=words):
        task = from_table(table, **COLUMNS, me="a")
    assert {peer.name: len(peer) for peer in task.peers} == {"b": 60, "c": 60}
    assert task.left_out["b"].startswith("in part: 40 of its 100 rows")
    held = {tuple(row) for row in task.preparation.inputs(task.test_rows).tolist()}
    for peer in task.peers:
        inputs = peer.examples.take(torch.arange(len(peer)))[0]
        assert not held & {tuple(row) for row in inputs.tolist()}


def test_a_peer_with_no_rows_of_its_own_is_left_out() -> None:
    table = visits()
    table = pd.concat([table[table.ward != "b"], table[table.ward == "a"].assign(ward="b")])
    with pytest.warns(
        UserWarning, match="the peer 'b' is left out: 60 of its 60 rows are user 0's"
    ):
        task = from_table(table.reset_index(drop=True), **COLUMNS, me="a")
    assert [peer.name for peer in task.peers] == ["c"]


@pytest.mark.parametrize("decimals", [3, 0, -1])
def test_rows_that_are_alike_by_chance_are_no_copies(decimals: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            task = from_table(visits(600, seed, decimals), **COLUMNS, me="a")
            assert [len(peer) for peer in task.peers] == [200, 200]


def test_everyone_is_told_of_users_with_common_rows() -> None:
    with pytest.warns(UserWarning, match="users 'a' and 'b' have 40 rows in common"):
        users_from_table(with_copies(40), **COLUMNS)


def test_a_leak_that_user_0s_base_rate_hides_is_found_in_the_table() -> None:
    rng = np.random.default_rng(0)
    table = visits(600)
    mine = table["ward"] == "a"
    table["ill"] = np.where(mine & (rng.random(600) > 0.07), "no", table["ill"])
    table["discharge"] = np.where(table["ill"] == "yes", 1, 0) ^ (rng.random(600) < 0.005)
    with pytest.warns(
        UserWarning, match="'discharge' alone tells 'ill' in 9.% of the table's rows"
    ):
        from_table(table, **COLUMNS, me="a")
