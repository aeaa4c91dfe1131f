"""HypCluster: planted clusters, FedAvg as one cluster, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT, ExactUsers
from tests.support.least_squares import (
    LOCAL_STEPS,
    START,
    D,
    LeastSquares,
    balance,
    least_squares,
    pull,
    same_models,
)

import coterie
from coterie.methods import Clients, FedAvg, HypCluster
from coterie.recording.costs import Costs


def two_clusters(signs: tuple[int, ...]) -> LeastSquares:
    """Return users of clusters: those of a sign want nearly the same, of the other sign the opposite."""
    random, users, optima = torch.Generator().manual_seed(5), [], []
    problem = least_squares((8, 20, 12, 15, 9), seed=2)
    for user, sign in zip(problem.users, signs, strict=True):
        inputs, _ = user.batch(10**6, seed=0, step=0)
        truth = (
            sign * torch.ones(D, 1).double() + 0.2 * torch.randn(D, 1, generator=random).double()
        )
        targets = inputs @ truth + 0.1 * torch.randn(len(inputs), 1, generator=random).double()
        users.append(coterie.User(user.name, inputs, targets))
        optima.append(torch.linalg.lstsq(inputs, targets).solution.flatten())
    return LeastSquares(users, problem.curvatures, torch.stack(optima))


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("signs", [(1, -1, 1, -1, -1), (-1, 1, 1, 1, 1)])
def test_hyp_cluster_recovers_planted_clusters(local_steps: int, signs: tuple[int, ...]) -> None:
    problem, which = two_clusters(signs), torch.tensor(signs)
    users = ExactUsers(problem)
    models = users.play(HypCluster(2, local_steps), rounds=2400 // local_steps, lr=0.1)
    for sign in (-1, 1):
        mine = which == sign
        shares = users.sizes[mine] / users.sizes[mine].sum()
        point = balance(
            shares, pull(problem.curvatures[mine], local_steps, 0.1), problem.optima[mine]
        )
        assert torch.allclose(models[mine], point.expand(int(mine.sum()), -1), rtol=0, atol=1e-9)


def test_hyp_cluster_against_a_plain_loop() -> None:
    problem = two_clusters((1, -1, 1, -1, -1))
    users = ExactUsers(problem)
    models, cluster = list(HypCluster(4, 2).init(users, START)["x"]), [0] * 5
    assert torch.equal(models[0], START)
    for _ in range(2):
        ends = []
        for k in range(5):
            losses = [float(problem.loss(k, model)) for model in models]
            cluster[k] = losses.index(min(losses))
            ends.append(problem.walk(k, models[cluster[k]], 2, 0.1))
        for j in set(cluster):
            members = [k for k in range(5) if cluster[k] == j]
            weight = sum(len(problem.users[k]) for k in members)
            models[j] = sum((len(problem.users[k]) / weight * ends[k] for k in members), START)
    run = problem.train(HypCluster(4, 2), rounds=2, lr=0.1)
    assert same_models(run, [models[j] for j in cluster])
    assert torch.allclose(run.state["x"], torch.stack(models), rtol=0, atol=1e-12)
    assert len(set(cluster) | {0}) < 4  # a model other than zero has nobody, and stays


def test_one_cluster_is_fedavg() -> None:
    one, fedavg = HypCluster(1, 3), FedAvg(3)
    assert torch.allclose(EXACT.play(one, 20, 0.1), EXACT.play(fedavg, 20, 0.1), rtol=0, atol=1e-12)


def test_a_cluster_is_chosen_by_all_examples() -> None:
    """At the true centres one noisy example would often choose wrongly; all of a user's examples do not."""
    signs = (1, -1, 1, -1, -1, 1, 1, -1)
    random = torch.Generator().manual_seed(0)
    users = []
    for k, sign in enumerate(signs):
        inputs = torch.randn(60, 3, generator=random)
        targets = 0.5 * sign * inputs.sum(1, keepdim=True) + torch.randn(60, 1, generator=random)
        users.append(coterie.User(f"u{k}", inputs, targets))
    model, loss = torch.nn.Linear(3, 1, bias=False), torch.nn.functional.mse_loss
    engine = coterie.InProcess(model, loss, users[0], users[1:], batch_size=1)
    clients = Clients(engine, users[0], users[1:], Costs({user.name: 1 for user in users}))
    centres, method = torch.tensor([[0.5] * 3, [-0.5] * 3]), HypCluster(2, 1)
    for step in range(0, 20, 2):
        state = {**method.init(clients, centres[0]), "x": centres, "step": step}
        assert method.round(clients, state, lr=0.0)["cluster"].tolist() == [
            int(sign < 0) for sign in signs
        ]
