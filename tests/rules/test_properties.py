"""What holds for every rule and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import coterie

D = 5
NUMBERS = st.floats(-1e3, 1e3, allow_subnormal=False)
WHOLE = st.integers(-1000, 1000).map(float)  # sums and differences of these are exact
SHARE = st.floats(0, 1)

Make = Callable[[float, float, Any], Any]
RULES: dict[str, Make] = {
    "averaging": lambda alpha, _, tau: coterie.WeightedAveraging(alpha, tau),
    "correction": coterie.BiasCorrection,
    "exact correction": lambda alpha, beta, tau: coterie.BiasCorrection(
        alpha, beta, tau, warm_up=False
    ),
    "half correction from zero": lambda alpha, beta, tau: coterie.BiasCorrection(
        alpha, beta, tau, correction=0.5, start="zero"
    ),
    "oracle": lambda alpha, _, tau: coterie.OracleCorrection(alpha, torch.sin, tau),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)
# whose bias, if any, is found
FOUND = {name: make for name, make in RULES.items() if name != "oracle"}
every_found = pytest.mark.parametrize("make", FOUND.values(), ids=FOUND)


def matrix(rows: int, elements: st.SearchStrategy[float] = NUMBERS) -> st.SearchStrategy[Tensor]:
    return hnp.arrays(np.float64, (rows, D), elements=elements).map(torch.from_numpy)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, float]]:
    """Draw three steps' gradients, user 0's first, and the peers' weights."""
    n = draw(st.integers(1, 5))
    shares = draw(st.lists(st.floats(0.01, 1), min_size=n, max_size=n))
    tau = {f"peer {k}": share / sum(shares) for k, share in enumerate(shares)}
    return [draw(matrix(n + 1)) for _ in range(3)], tau


def follow(rule: Any, sequence: list[coterie.Gradients]) -> list[Tensor]:
    """Return the directions of a sequence of steps, and the last state's tensors."""
    state, directions = rule.init(torch.zeros(D, dtype=torch.float64)), []
    for g in sequence:
        direction, state = rule(g, state)
        directions.append(direction)
    return directions + [value for value in state.values() if isinstance(value, Tensor)]


def with_rows(
    gradients: Tensor, names: tuple[str, ...], order: list[int] | None = None
) -> coterie.Gradients:
    order = order or list(range(len(names)))
    rows = gradients[1:][torch.tensor(order)]
    return coterie.Gradients(
        own=gradients[0], rows=rows, names=tuple(names[i] for i in order), x=gradients[0]
    )


def bits(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@every_rule
@given(drawn=steps(), alpha=SHARE, beta=SHARE, data=st.data())
def test_order_of_peers_is_irrelevant(
    make: Make,
    drawn: tuple[list[Tensor], dict[str, float]],
    alpha: float,
    beta: float,
    data: st.DataObject,
) -> None:
    gradients, tau = drawn
    names = tuple(tau)
    order = data.draw(st.permutations(range(len(names))))
    rule = make(alpha, beta, tau)
    straight = follow(rule, [with_rows(g, names) for g in gradients])
    shuffled = follow(rule, [with_rows(g, names, order) for g in gradients])
    renamed = follow(
        make(alpha, beta, {names[i]: tau[names[i]] for i in order}),
        [with_rows(g, names) for g in gradients],
    )
    for a, b, c in zip(straight, shuffled, renamed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-10)


@every_rule
@given(drawn=steps(), alpha=SHARE, beta=SHARE)
def test_rows_and_peers_give_the_same(
    make: Make, drawn: tuple[list[Tensor], dict[str, float]], alpha: float, beta: float
) -> None:
    gradients, tau = drawn
    rule = make(alpha, beta, tau)
    weights = torch.tensor(list(tau.values()), dtype=torch.float64)
    by_rows = follow(rule, [with_rows(g, tuple(tau)) for g in gradients])
    by_peers = follow(
        rule, [coterie.Gradients(own=g[0], peers=weights @ g[1:], x=g[0]) for g in gradients]
    )
    for a, b in zip(by_rows, by_peers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)


@every_found
@given(own=matrix(3), alpha=SHARE, other=SHARE, beta=SHARE)
def test_equal_gradients_make_alpha_irrelevant(
    make: Make, own: Tensor, alpha: float, other: float, beta: float
) -> None:
    sequence = [coterie.Gradients(own=g, peers=g.clone()) for g in own]
    for knob in (alpha, other):
        directions = follow(make(knob, beta, None), sequence)[: len(own)]
        assert torch.equal(torch.stack(directions), own)


@given(own=matrix(1, WHOLE), peers=matrix(1, WHOLE), alpha=SHARE, beta=SHARE)
def test_exact_bias_gives_the_own_gradient(
    own: Tensor, peers: Tensor, alpha: float, beta: float
) -> None:
    g = coterie.Gradients(own=own[0], peers=peers[0], x=own[0])
    bias = peers[0] - own[0]
    rule = coterie.BiasCorrection(alpha, beta)
    oracle = coterie.OracleCorrection(alpha, bias=lambda _: bias)
    known = rule.init(own[0]) | {"c": bias, "seen": 3}
    for direction in (
        rule(g, known)[0],
        oracle(g, oracle.init(own[0]))[0],
        rule(g, rule.init(own[0]))[0],
    ):
        assert torch.equal(direction, own[0])


@given(own=matrix(1), peers=matrix(1), alpha=SHARE, beta=SHARE)
def test_no_correction_is_averaging(own: Tensor, peers: Tensor, alpha: float, beta: float) -> None:
    g = [coterie.Gradients(own=own[0], peers=peers[0])] * 3
    plain = follow(coterie.WeightedAveraging(alpha), g)
    none = follow(coterie.BiasCorrection(alpha, beta, correction=0.0), g)
    assert all(torch.equal(a, b) for a, b in zip(plain, none, strict=False))


@every_rule
@given(own=matrix(3, st.sampled_from([0.0, -0.0, 1.5, -3e-320, 7e300])), alpha=SHARE, beta=SHARE)
def test_peers_all_gone_is_alone_to_the_bit(
    make: Make, own: Tensor, alpha: float, beta: float
) -> None:
    rule = make(alpha, beta, {"a": 0.25, "b": 0.75})
    state = rule.init(own[0])
    for g in own:
        nobody = coterie.Gradients(own=g, rows=g.new_empty(0, D), names=(), answered=0.0, x=g)
        direction, state = rule(nobody, state)
        assert bits(direction) == bits(g)
        assert state["weight"] == 0
        direction, state = rule(coterie.Gradients(own=g, peers=g.clone(), answered=0.0, x=g), state)
        assert bits(direction) == bits(g)
    assert state.get("seen", 0) == 0


@every_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept(make: Make, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rule, x = make(0.3, 0.5, None), torch.zeros(D, dtype=dtype)
    exact, state = make(0.3, 0.5, None), rule.init(x)
    exact_state = exact.init(x.double())
    for _ in range(4):
        own, *rows = torch.randn(4, D, generator=generator).to(dtype)
        g = coterie.Gradients(own=own, rows=torch.stack(rows), x=own)
        direction, state = rule(g, state)
        assert direction.dtype == dtype
        assert all(value.dtype == dtype for value in state.values() if isinstance(value, Tensor))
        double = coterie.Gradients(
            own=own.double(), rows=torch.stack(rows).double(), x=own.double()
        )
        wanted, exact_state = exact(double, exact_state)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(direction.double(), wanted, rtol=16 * eps, atol=16 * eps)


@every_rule
@pytest.mark.parametrize("answered", [1.0, 0.5, 0.0])
def test_inputs_stay_and_the_state_is_new(make: Make, answered: float) -> None:
    generator = torch.Generator().manual_seed(1)
    rule, state = make(0.3, 0.5, None), make(0.3, 0.5, None).init(torch.zeros(D))
    for _ in range(3):
        own, peers = torch.randn(2, D, generator=generator)
        g = coterie.Gradients(own=own, peers=peers, answered=answered, x=own)
        before, old = copy.deepcopy((own, peers, state)), state
        _, state = rule(g, old)
        assert state is not old
        assert torch.equal(own, before[0])
        assert torch.equal(peers, before[1])
        assert old.keys() == before[2].keys()
        for key, value in before[2].items():
            assert torch.equal(old[key], value) if isinstance(value, Tensor) else old[key] == value
        if "c" in state and answered:
            assert state["c"].data_ptr() not in {
                old["c"].data_ptr(),
                own.data_ptr(),
                peers.data_ptr(),
            }


@every_found
@given(drawn=steps(), alpha=SHARE, beta=SHARE, scale=st.sampled_from([0.25, 2.0, 1024.0]))
def test_directions_scale_with_the_objective(
    make: Make,
    drawn: tuple[list[Tensor], dict[str, float]],
    alpha: float,
    beta: float,
    scale: float,
) -> None:
    gradients, tau = drawn
    rule = make(alpha, beta, tau)
    plain = follow(rule, [with_rows(g, tuple(tau)) for g in gradients])
    scaled = follow(rule, [with_rows(scale * g, tuple(tau)) for g in gradients])
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(scale * a, b, rtol=1e-12, atol=1e-9)
