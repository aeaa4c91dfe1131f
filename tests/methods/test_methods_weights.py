"""Learned weights: FedFomo, WAFFLE, user-centric and selfish learning, weight erosion and MeritFed's descent."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.least_squares import D, LeastSquares, last_of, least_squares, path_of, weights_of
from torch import Tensor

import coterie
from coterie.errors import DataError, KnobError
from coterie.methods import FedFomo, Method, MirrorDescent, Scaffold, Selfish, UserCentric, Waffle, WeightErosion
from coterie.rules import weights_in

STEPS = [1, 3, 8]
PROBLEM = least_squares(held_out=30)
ALONE = least_squares()  # the same users with nothing held out: the model is the last one
N = len(PROBLEM.users)
OPTIMUM = PROBLEM.optima[0]
START = torch.zeros(D, dtype=torch.float64)


def planted(truths: list[Tensor], examples: int = 40, noise: float = 0.1) -> LeastSquares:
    """Return users of one curvature, but for the draw, with these truths; user 0 holds 40 examples out."""
    random = torch.Generator().manual_seed(3)
    users, curvatures, optima = [], [], []
    for k, truth in enumerate([truths[0], *truths]):  # the first is what user 0 holds out
        inputs = torch.randn(examples, D, generator=random, dtype=torch.float64)
        targets = (inputs @ truth).unsqueeze(1)
        targets = targets + noise * torch.randn(examples, 1, generator=random, dtype=torch.float64)
        users.append(coterie.User(f"user {k - 1}", inputs, targets))
        curvatures.append(2 * inputs.T @ inputs / examples)
        optima.append(torch.linalg.lstsq(inputs, targets).solution.flatten())
    held_out, *users = users
    users[0].validation = held_out.examples
    return LeastSquares(users, torch.stack(curvatures[1:]), torch.stack(optima[1:]))


TRUTH = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
OTHER = torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64)
COPIES_AND_STRANGERS = planted([TRUTH, TRUTH, -TRUTH, TRUTH, OTHER])


def gradient(k: int, x: Tensor) -> Tensor:
    found: Tensor = PROBLEM.curvatures[k] @ (x - PROBLEM.optima[k])
    return found


def moved(k: int, x: Tensor, lr: float, add: Tensor = START) -> Tensor:
    """Return where user k is after three local steps."""
    for _ in range(3):
        x = x - lr * (gradient(k, x) + add)
    return x


def validation_loss(x: Tensor) -> float:
    assert PROBLEM.users[0].validation is not None
    inputs, targets = PROBLEM.users[0].validation.take(torch.arange(30))
    return float((inputs @ x - targets.flatten()).square().mean())


@pytest.mark.parametrize("start", ["own", "mine"])
def test_fedfomo_against_a_plain_loop(start: str) -> None:
    points, chosen = [START] * N, []
    for _ in range(3):
        x = points[0]
        points = [moved(k, points[k], 0.02) for k in range(N)]
        gains = [
            max(0.0, (validation_loss(x) - validation_loss(point)) / math.dist(point.tolist(), x.tolist()))
            for point in points
        ]
        chosen = [gain / sum(gains) for gain in gains]
        x = x + sum(w * (point - x) for w, point in zip(chosen, points, strict=True))
        points = [x] * N if start == "mine" else [x, *points[1:]]
    run = PROBLEM.train(FedFomo(3, start), rounds=3, lr=0.02)  # type: ignore[arg-type]
    assert min(chosen) == 0 < chosen[0] < 1  # somebody is shut out, and somebody is not
    assert torch.allclose(last_of(run), torch.stack(points), atol=1e-12)
    assert run.state["weights"].tolist() == pytest.approx(chosen)
    assert run.state["weight"] == pytest.approx(sum(chosen[1:]))


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("start", ["own", "mine"])
def test_fedfomo_follows_copies_and_no_strangers(local_steps: int, start: str) -> None:
    weights: list[Tensor] = []
    problem = COPIES_AND_STRANGERS
    for rounds in (1, 2, 4):
        method = FedFomo(local_steps, start)  # type: ignore[arg-type]
        weights.append(problem.train(method, rounds=rounds, lr=0.02).state["weights"])
    for found in weights:
        assert found[2] == 0  # whose truth is the opposite
        assert float(found[[0, 1, 3]].sum()) > 0.9
        assert float(found[[0, 1, 3]].min()) > 0.03  # a copy that lags behind user 0 says little


def test_fedfomo_stays_where_nobody_is_better_and_needs_examples_to_judge_by() -> None:
    path = path_of(COPIES_AND_STRANGERS, FedFomo(1), rounds=150, lr=0.1)
    assert torch.equal(path[-1], path[-2])
    assert float((path[-1] - TRUTH).norm()) < 0.1
    with pytest.raises(DataError, match="validation"):
        ALONE.train(FedFomo(1), rounds=1, lr=0.1)


def waffle_weights(points: list[Tensor], share: float) -> list[float]:
    far = [float((point - points[0]).square().sum()) for point in points]
    least, largest = min(far[1:]), max(far[1:])
    far[0] = least * (1 - (largest - least) / largest * (1 - share))
    raw = [max(share - (d - far[0]) / (largest - far[0]), 0.0) for d in far]
    return [w / sum(raw) for w in raw]


def test_waffle_against_a_plain_loop() -> None:
    """Six rounds of eight, more than the three that weights are averaged over."""
    x, c, c_k = START, START, [START] * N
    last: list[list[float]] = []
    for r in range(6):
        points = [moved(k, x, 0.05, c - c_k[k]) for k in range(N)]
        following = [c_k[k] - c + (x - points[k]) / (3 * 0.05) for k in range(N)]
        last = [*last, waffle_weights(points, 1 / (1 + math.exp(3.2 * (r / 4 - 1))))][-3:]
        a = [sum(column) / len(last) for column in zip(*last, strict=True)]
        x = x + sum(a[k] * (points[k] - x) for k in range(N))
        c = c + sum((a[k] * (following[k] - c_k[k]) for k in range(N)), START)
        c_k = following
    run = ALONE.train(Waffle(8, 3), rounds=6, lr=0.05)
    assert torch.allclose(weights_of(run), x, atol=1e-12)
    assert run.state["weights"].tolist() == pytest.approx(a)
    assert run.state["weight"] == pytest.approx(sum(a[1:]))


@pytest.mark.parametrize("local_steps", STEPS)
def test_waffle_ends_alone_with_a_correction_that_is_out_of_date(local_steps: int) -> None:
    rounds = 240 // local_steps
    run = ALONE.train(Waffle(rounds // 2, local_steps), rounds=rounds, lr=0.1)
    left = run.state["c_k"][0] - run.state["c"]
    assert torch.allclose(gradient(0, weights_of(run)), left, atol=1e-3)
    assert float(left.norm()) > 0.05


def test_waffle_hears_copies_first_and_strangers_less() -> None:
    first = COPIES_AND_STRANGERS.train(Waffle(20, 2), rounds=1, lr=0.05).state["weights"]
    assert float(first[[1, 3]].min()) > 0.25
    assert float(first[2]) == 0 < float(first[4]) < 0.2


def test_waffle_cannot_tell_users_of_one_curvature_once_corrections_are_there() -> None:
    """Whose gradients differ by constants: from the second round on their updates, and so their c_k, move alike."""
    inputs = torch.randn(30, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    users = [
        coterie.User(f"user {k}", inputs, (inputs @ truth).unsqueeze(1))
        for k, truth in enumerate([TRUTH, -TRUTH, OTHER])
    ]
    problem = LeastSquares(users, torch.empty(0), torch.empty(0))
    one, two = (problem.train(Waffle(9, 1), rounds=r, lr=0.05).state["c_k"] for r in (1, 2))
    assert float((two - one).std(0).max()) < 1e-12
    assert float(one.std(0).min()) > 0.1


def mixing_by_hand(problem: LeastSquares, blocks: int) -> list[list[float]]:
    """Return the weights of user-centric learning at 0, written out."""
    means, noises = [], []
    for user in problem.users:
        inputs, targets = user.examples.take(torch.arange(len(user)))
        whole = -2 * inputs.T @ targets.flatten() / len(user)
        parts = [
            -2 * inputs[b::blocks].T @ targets[b::blocks].flatten() / len(inputs[b::blocks]) for b in range(blocks)
        ]
        means.append(whole)
        noises.append(math.sqrt(sum(float((part - whole).square().sum()) for part in parts) / blocks))
    rows = []
    for mean, noise in zip(means, noises, strict=True):
        raw = [
            len(user) * math.exp(-float((mean - other).square().sum()) / (2 * noise * theirs))
            for user, other, theirs in zip(problem.users, means, noises, strict=True)
        ]
        rows.append([w / sum(raw) for w in raw])
    return rows


@pytest.mark.parametrize("blocks", [2, 5])
def test_user_centric_weights_are_the_formula(blocks: int) -> None:
    run = ALONE.train(UserCentric(1, blocks=blocks), rounds=1, lr=0.05)
    expected = mixing_by_hand(ALONE, blocks)
    assert torch.allclose(run.state["mixing"], torch.tensor(expected).double(), atol=1e-9)
    assert run.state["weights"].tolist() == pytest.approx(expected[0])
    assert run.state["weight"] == pytest.approx(sum(expected[0][1:]))
    points = torch.stack([START - 0.05 * gradient(k, START) for k in range(N)])
    assert torch.allclose(last_of(run), torch.tensor(expected).double() @ points, atol=1e-9)


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("clusters", [None, 2])
def test_user_centric_ends_where_mixed_local_steps_stand_still(local_steps: int, clusters: int | None) -> None:
    """x_k = Σ_j w_kj (o_j + S_j^K (x_j − o_j)) for all k at once, solved as one linear system."""
    run = ALONE.train(UserCentric(local_steps, clusters, blocks=3), rounds=360 // local_steps, lr=0.1)
    shrink = torch.eye(D).double() - 0.1 * ALONE.curvatures
    powers = torch.linalg.matrix_power(shrink, local_steps)
    stays = ALONE.optima - torch.einsum("kij,kj->ki", powers, ALONE.optima)
    system = torch.einsum("kj,jab->kajb", run.state["mixing"], powers).reshape(N * D, N * D)
    right = (run.state["mixing"] @ stays).flatten()
    expected = torch.linalg.solve(torch.eye(N * D).double() - system, right).reshape(N, D)
    assert torch.allclose(last_of(run), expected, atol=1e-7)


def test_user_centric_finds_planted_clusters() -> None:
    groups = [0, 1, 0, 2, 1, 0, 2]
    problem = planted([3 * torch.eye(D).double()[group] for group in groups], examples=100)
    mixing = problem.train(UserCentric(1, clusters=3), rounds=1, lr=0.05).state["mixing"]
    for k, mine in enumerate(groups):
        for j, other in enumerate(groups):
            assert torch.equal(mixing[k], mixing[j]) == (mine == other)
            assert (float(mixing[k, j]) > 0.1) == (mine == other)
    assert torch.allclose(mixing.sum(1), torch.ones(7).double())
    one = problem.train(UserCentric(1, clusters=1), rounds=1, lr=0.05).state["mixing"]
    each = problem.train(UserCentric(1), rounds=1, lr=0.05).state["mixing"]
    assert torch.allclose(one, each.mean(0).expand(7, -1))


def test_user_centric_mixes_with_nobody_whose_gradients_are_not_finite() -> None:
    bad = coterie.User("bad", torch.full((6, D), torch.inf, dtype=torch.float64), torch.zeros(6, 1).double())
    problem = LeastSquares([*ALONE.users, bad], ALONE.curvatures, ALONE.optima)
    run = problem.train(UserCentric(2), rounds=3, lr=0.05)
    assert run.state["mixing"][:4, 4].tolist() == [0.0] * 4
    assert run.state["mixing"][4].tolist() == [0.0] * 4 + [1.0]
    assert torch.isfinite(last_of(run)).all()


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("internal", [(), ("user 2",)])
def test_selfish_ends_at_the_minimiser_of_the_internal_users(
    local_steps: int, alpha: float | None, internal: tuple[str, ...]
) -> None:
    run = ALONE.train(Selfish(local_steps, internal, alpha), rounds=400 // local_steps + 70, lr=0.1)
    inside = torch.tensor([1.0, 0.0, float(bool(internal)), 0.0], dtype=torch.float64)
    assert torch.allclose(weights_of(run), ALONE.minimiser(inside), atol=1e-6)


def test_selfish_against_a_plain_loop() -> None:
    x, c = START, [START] * N
    weights = [0.35, 0.15, 0.35, 0.15]
    for _ in range(3):
        wanted = (c[0] + c[2]) / 2
        points = [moved(k, x, 0.05, wanted - c[k]) for k in range(N)]
        c = [c[k] - wanted + (x - points[k]) / (3 * 0.05) for k in range(N)]
        x = sum((weights[k] * points[k] for k in range(N)), START)
    run = ALONE.train(Selfish(3, ("user 2",), 0.3), rounds=3, lr=0.05)
    assert torch.allclose(weights_of(run), x, atol=1e-12)
    assert run.state["weights"].tolist() == pytest.approx(weights)


def test_selfish_without_the_others_is_scaffold_among_the_internal_users() -> None:
    few = LeastSquares(ALONE.users[:2], ALONE.curvatures[:2], ALONE.optima[:2])
    selfish = ALONE.train(Selfish(3, ("user 1",), 0.0), rounds=6, lr=0.05, batch_size=5)
    scaffold = few.train(Scaffold(3), rounds=6, lr=0.05, batch_size=5)
    assert torch.allclose(weights_of(selfish), weights_of(scaffold), atol=1e-12)


def test_mirror_descent_climbs_what_automatic_differentiation_says() -> None:
    """MeritFed's direction: the derivative by w of user 0's loss after the step, but for the scale."""
    rule, x = MirrorDescent(0.5), START
    rows = torch.stack([gradient(k, x) for k in range(N)])
    names = tuple(user.name for user in PROBLEM.users[1:])
    direction, state = rule(coterie.Gradients(rows[0], rows=rows[1:], names=names), rule.init(x))
    before, x = state["tau"], x - 0.1 * direction
    following = torch.stack([gradient(k, x) for k in range(N)])
    _, state = rule(coterie.Gradients(following[0], rows=following[1:], names=names), state)

    w = torch.full((N,), 1 / N, dtype=torch.float64, requires_grad=True)
    away = START - 0.1 * w @ rows - OPTIMUM
    (slope,) = torch.autograd.grad(0.5 * away @ PROBLEM.curvatures[0] @ away, w)
    scale = 0.1 * float(following[0].norm() * rows.norm(dim=1).max())
    expected = before * torch.exp(-0.5 * slope / scale)
    assert state["names"] == ["", *names]
    assert state["tau"].tolist() == pytest.approx((expected / expected.sum()).tolist())


@pytest.mark.parametrize("rule", [MirrorDescent(0.5), WeightErosion(0.02)], ids=repr)
def test_rules_of_this_family_tell_copies_from_strangers(rule: coterie.Rule) -> None:
    me, *peers = COPIES_AND_STRANGERS.users
    model = torch.nn.Linear(D, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    settings = {"optimizer": torch.optim.SGD, "lr": 0.05, "steps": 30, "batch_size": 10, "guard": "off"}
    run = coterie.train(model, torch.nn.functional.mse_loss, me, peers, rule, **settings)  # type: ignore[arg-type]
    tau = weights_in(run.state)
    assert min(tau["user 1"], tau["user 3"]) > 2 * max(tau["user 2"], tau["user 4"])


def test_knobs_are_checked() -> None:
    for make, match in (
        (lambda: FedFomo(3, "theirs"), "start"),  # type: ignore[arg-type]
        (lambda: Waffle(0), "rounds"),
        (lambda: UserCentric(3, clusters=0), "clusters"),
        (lambda: UserCentric(3, blocks=1), "blocks"),
        (lambda: Selfish(3, alpha=1.5), "alpha"),
        (lambda: ALONE.train(Selfish(3, ("nobody",)), rounds=1, lr=0.1), "nobody"),
    ):
        with pytest.raises(KnobError, match=match):
            make()


@pytest.mark.parametrize("method", [FedFomo(2), Waffle(5, 2), UserCentric(2), Selfish(2)], ids=repr)
def test_the_record_has_the_peers_weight_and_each_ones_share(method: Method) -> None:
    run = PROBLEM.train(method, rounds=3, lr=0.02)
    shares = run.state["weights"][1:] / run.state["weights"][1:].sum()
    assert run.record.end["tau"] == pytest.approx(
        dict(zip(("user 1", "user 2", "user 3"), shares.tolist(), strict=False))
    )
    assert (
        run.record.points[-1]["weight"]
        == run.state["weight"]
        == pytest.approx(float(run.state["weights"][1:].sum()))
    )
