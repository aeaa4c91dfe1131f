"""What every engine must do: each user's gradient is that of a plain loop, whatever the model and the loss.

An engine joins by a line in `ENGINES`: a context that gives a function which makes engines, and in which their
processes, if they have any, live.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.support import processes
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.data import Dataset

import coterie
from coterie.engines import Capabilities
from coterie.engines.engine import MakeEngine
from coterie.engines.flare.engine import Flare
from coterie.engines.flare.sites import LocalSites
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.rules.streams import StreamAveraging
from coterie.users.sampling import seeded

SEED, BATCH = 11, 8
SIZES = (20, 16, 7, 33, 5)  # two peers with fewer examples than a batch: three sizes of batches
TAU = {"peer 1": 0.4, "peer 2": 0.3, "peer 3": 0.1, "peer 4": 0.2}


def _flare(
    model: nn.Module, loss: Any, me: coterie.User, peers: Sequence[coterie.User], *, batch_size: int, seed: int
) -> Flare:
    """Return the engine with sites whose models are at other parameters and have other buffers."""
    held = {peer.name: Peer(peer, Passes(_elsewhere(model), loss)) for peer in peers}
    made: Flare = Flare(model, loss, me, sites=LocalSites(held), names=list(held), batch_size=batch_size, seed=seed)
    return made


def _elsewhere(model: nn.Module) -> nn.Module:
    there = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*Parameters(there).named.values(), *there.buffers()):
            tensor.zero_()
    return there


ENGINES: dict[str, Callable[[], AbstractContextManager[MakeEngine]]] = {
    "in process": lambda: nullcontext(coterie.InProcess),
    "in process, one by one": lambda: nullcontext(partial(coterie.InProcess, one_by_one=True)),
    "torch.distributed": processes.torch_distributed,
    "NVFLARE's, over sites in this process": lambda: nullcontext(_flare),
}


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES))
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    with request.param() as make:
        yield make


# Models.


class LastOf(nn.Module):
    """A recurrent net's output at the last time step."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent, self.last = recurrent, nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.recurrent(inputs.view(len(inputs), 3, 2))[0][:, -1])
        return out


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.back.weight = self.there.weight

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.back(torch.tanh(self.there(inputs)))))
        return out


class Scaled(nn.Module):
    """A buffer that stays."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.linspace(0.5, 2, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs * self.scale)
        return out


class RunningMean(nn.Module):
    """A buffer that follows the inputs, changed in place or assigned anew."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.layer = in_place, nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs - self.mean)
        if self.training and self.in_place:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        elif self.training:
            self.mean = torch.lerp(self.mean, inputs.detach().mean(0), 0.1)
        return out


class Centred(nn.Module):
    """Examples that influence each other, without a layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs - inputs.mean(0))
        return out


class Pair(nn.Module):
    """An output that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(inputs), "size": inputs.square().mean()}


class ClassFirst(nn.Module):
    """An output with the examples in its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out.T


class Branching(nn.Module):
    """A forward pass that looks at its values, which `torch.func.vmap` cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out * 2 if bool(self.layer.weight.sum() > 1e6) or bool(inputs.isnan().all()) else out


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def cnn(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), *between, nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    return model


def batch_norm_off() -> nn.Module:
    model = mlp(nn.BatchNorm1d(8))
    f.batch_norm(torch.randn(9, 8), model[1].running_mean, model[1].running_var, training=True)  # type: ignore[arg-type]  # it has both
    model[1].eval()
    return model


# Losses.


def of_logits(output: Mapping[str, Tensor], targets: Tensor) -> Tensor:
    return f.cross_entropy(output["logits"], targets) * (1 + output["size"])


def transposed(output: Tensor, targets: Tensor) -> Tensor:
    return f.cross_entropy(output.T, targets)


def with_item(output: Tensor, targets: Tensor) -> Tensor:
    loss = f.cross_entropy(output, targets)
    return loss * (1 + loss.item())


def focal(output: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own that is no mean of one term an example."""
    losses = f.cross_entropy(output, targets, reduction="none")
    return (losses * losses.softmax(0).detach()).sum()


class OwnLoss(nn.Module):
    """A module without a reduction, whose result is one number."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return f.nll_loss(f.log_softmax(output, 1), targets) + 0.1 * output.square().mean()


class SubclassedLoss(nn.CrossEntropyLoss):
    """A subclass of torch's loss that is no longer a mean over examples."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        losses = f.cross_entropy(output, targets, reduction="none")
        return losses.logsumexp(0) if self.reduction == "mean" else losses


def one_hot(targets: Tensor) -> Tensor:
    return f.one_hot(targets, 3).double()


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    loss: Any = f.cross_entropy
    targets: Callable[[Tensor], Tensor] = lambda targets: targets
    average: str = "one pass"
    rows: str = "by layer"


def one_by_one(model: Callable[[], nn.Module], loss: Any = f.cross_entropy) -> Case:
    return Case(model, loss, average="user by user", rows="loop")


CASES = {
    "mlp": Case(mlp),
    "cnn": Case(cnn),
    "lstm": Case(lambda: LastOf(nn.LSTM(2, 5, batch_first=True)), rows="loop"),
    "gru": Case(lambda: LastOf(nn.GRU(2, 5, batch_first=True)), rows="loop"),
    "layer norm": Case(lambda: mlp(nn.LayerNorm(8))),
    "batch norm": one_by_one(lambda: mlp(nn.BatchNorm1d(8))),
    "batch norm, cnn": one_by_one(lambda: cnn(nn.BatchNorm2d(4))),
    "batch norm, no statistics": one_by_one(lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False))),
    "batch norm, evaluating": Case(batch_norm_off, rows="vmap"),
    "dropout": one_by_one(lambda: mlp(nn.Dropout(0.5))),
    "dropout, evaluating": Case(lambda: mlp(nn.Dropout(0.5)).eval()),
    "dropout and batch norm": one_by_one(lambda: mlp(nn.Dropout(0.3), nn.BatchNorm1d(8))),
    "frozen": Case(frozen),
    "tied": Case(Tied),
    "buffer": Case(Scaled),
    "buffer in place": one_by_one(lambda: RunningMean(in_place=True)),
    "buffer anew": one_by_one(lambda: RunningMean(in_place=False)),
    "examples that mix": one_by_one(Centred),
    "output not a tensor": one_by_one(Pair, of_logits),
    "examples not first": one_by_one(ClassFirst, transposed),
    "not vmappable": Case(Branching),
    "loss with item": Case(mlp, with_item),
    "loss of one's own": Case(mlp, focal),
    "module of one's own": Case(mlp, OwnLoss()),
    "subclassed loss": Case(mlp, SubclassedLoss()),
    "class weights": Case(mlp, nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64))),
    "label smoothing": Case(mlp, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "sum": Case(mlp, nn.CrossEntropyLoss(reduction="sum")),
    "class probabilities": Case(mlp, f.cross_entropy, lambda t: 0.8 * one_hot(t) + 0.2 / 3),
    "mse": Case(mlp, f.mse_loss, one_hot),
    "huber": Case(mlp, nn.HuberLoss(delta=0.3), one_hot),
    "bce": Case(mlp, f.binary_cross_entropy_with_logits, one_hot),
    "bce, class weights": Case(
        mlp, nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)), one_hot
    ),
    "soft margin": Case(mlp, f.soft_margin_loss, lambda t: 2 * one_hot(t) - 1),
    "kl": Case(lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.KLDivLoss(reduction="batchmean"), one_hot),
    "nll": Case(lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)), f.nll_loss),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_users(case: Case, sizes: Sequence[int] = SIZES) -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)
    users = []
    for k, size in enumerate(sizes):
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64) + 0.2 * k
        targets = case.targets(torch.randint(3, (size,), generator=generator))
        users.append(coterie.User("me" if not k else f"peer {k}", inputs, targets))
    return users


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.model().double()


def some_point(model: nn.Module) -> Tensor:
    """Return a point that is not the model's own parameters."""
    own = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    return own + 0.1 * torch.randn(len(own), generator=torch.Generator().manual_seed(7), dtype=own.dtype)


def plain_gradient(
    model: nn.Module, loss: Any, user: coterie.User, x: Tensor, step: int
) -> tuple[Tensor, float, nn.Module]:
    """Return a user's gradient and loss at x, and the model as its batch leaves it, by plain autograd."""
    model, done = copy.deepcopy(model), 0
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.data = x[done : done + p.numel()].view_as(p).clone()
        done += p.numel()
    inputs, targets = user.batch(BATCH, seed=SEED, step=step)
    with seeded(SEED, user.name, step):
        found = loss(model(inputs), targets)
    gradients = torch.autograd.grad(found, trainable, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients]), float(found.detach()), model


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# Gradients.


@every_case
def test_gradients_are_those_of_a_plain_loop(make_engine: MakeEngine, case: Case) -> None:
    users, model = make_users(case), make_model(case)
    twin, x = copy.deepcopy(model), some_point(model)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    for step, rows in itertools.product((0, 1, 5), (False, True)):
        wanted = [plain_gradient(twin, case.loss, user, x, step) for user in users]
        own_only = engine.gradients(x, step, {})
        twin.load_state_dict(wanted[0][2].state_dict())  # only user 0's batches move buffers
        close(own_only.own, wanted[0][0])
        assert own_only.peers is None
        assert float(own_only.own_loss) == pytest.approx(wanted[0][1], rel=1e-10)

        wanted = [plain_gradient(twin, case.loss, user, x, step) for user in users]
        g = engine.gradients(x, step, TAU, rows)
        twin.load_state_dict(wanted[0][2].state_dict())
        close(g.own, wanted[0][0])
        average, answered = g.average(TAU)
        close(average, torch.stack([TAU[u.name] * w[0] for u, w in zip(users[1:], wanted[1:], strict=True)]).sum(0))
        assert answered == 1
        assert not g.left_out
        assert g.x is not None
        assert torch.equal(g.x, x)
        if rows:
            assert g.names == tuple(TAU)
            assert g.rows is not None
            close(g.rows, torch.stack([w[0] for w in wanted[1:]]))
        for name, buffer in twin.named_buffers():
            close(dict(model.named_buffers())[name], buffer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@every_case
def test_gradients_at_the_models_own_point(make_engine: MakeEngine, case: Case) -> None:
    users, model = make_users(case), make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    twin = copy.deepcopy(model)
    x = Parameters(model).share()  # as in training
    g = engine.gradients(x, 2, TAU)
    wanted = [plain_gradient(twin, case.loss, user, x, 2)[0] for user in users]
    close(g.own, wanted[0])
    assert g.peers is not None
    close(g.peers, torch.stack([TAU[u.name] * w for u, w in zip(users[1:], wanted[1:], strict=True)]).sum(0))


@every_case
def test_each_case_goes_the_way_it_should(case: Case) -> None:
    users = make_users(case)
    engine = coterie.InProcess(make_model(case), case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    told = engine.describe()
    assert told["average"].startswith(case.average)
    assert told["rows"].startswith(case.rows)


@pytest.mark.parametrize("name", ["mlp", "batch norm", "dropout", "lstm"])
def test_a_gradient_does_not_depend_on_who_else_is_asked(make_engine: MakeEngine, name: str) -> None:
    case = CASES[name]
    users, model = make_users(case), make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, start = some_point(model), copy.deepcopy(model.state_dict())

    def row(asked: Sequence[str], step: int) -> Tensor:
        model.load_state_dict(start)
        g = engine.gradients(x, step, dict.fromkeys(asked, 1 / len(asked)), rows=True)
        assert g.names == tuple(asked)
        assert g.rows is not None
        return g.rows[list(asked).index("peer 3")]

    alone = row(["peer 3"], 4)
    for asked in (["peer 1", "peer 3"], ["peer 3", "peer 2", "peer 4"], list(TAU)):
        close(row(asked, 4), alone)
    assert not torch.allclose(row(["peer 3"], 5), alone)


def test_dropout_is_drawn_for_each_user_and_step(make_engine: MakeEngine) -> None:
    case = CASES["dropout"]
    inputs, targets = make_users(case)[0].batch(8, seed=0, step=0)
    twins = [coterie.User(name, inputs, targets) for name in ("me", "a", "b")]  # full batches of the same examples
    model = make_model(case)
    engine = make_engine(model, case.loss, twins[0], twins[1:], batch_size=8, seed=SEED)
    found = []
    for step in (0, 1):
        g = engine.gradients(some_point(model), step, {"a": 0.5, "b": 0.5}, rows=True)
        assert g.rows is not None
        found += [g.own, *g.rows]
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "loss with item", "class weights"])
@pytest.mark.parametrize("n_peers", [1, 3, 9])
def test_the_average_takes_two_passes(name: str, n_peers: int) -> None:
    case = CASES[name]
    users = make_users(case, [20, 5, 33, *[16] * 9][: n_peers + 1])
    model = make_model(case)
    engine = coterie.InProcess(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    x = Parameters(model).share()
    for point in (x, some_point(model)):
        passes.clear()
        engine.gradients(point, 0, {user.name: 1 / n_peers for user in users[1:]})
        assert len(passes) == 2
        passes.clear()
        engine.gradients(point, 0, {})
        assert len(passes) == 1


# Runs.


RULES: dict[str, coterie.Rule] = {
    "alone": coterie.Alone(),
    "averaging": coterie.WeightedAveraging(0.6, TAU),
    "averaging some": coterie.WeightedAveraging(lambda t: 0.9 / (1 + t), {"peer 4": 0.5, "peer 2": 0.5}),
    "bias correction": coterie.BiasCorrection(0.8, 0.1, TAU),
    "half correction": coterie.BiasCorrection(0.8, 0.1, correction=0.5, start="zero", warm_up=False),
    "oracle": coterie.OracleCorrection(0.7, bias=lambda x: 0.1 * x),
    "stream": StreamAveraging(horizon=12),
}


def trained(engine: MakeEngine, case: Case, rule: coterie.Rule, **settings: Any) -> coterie.Run:
    me, *peers = make_users(case)
    held_out = coterie.User("me", *me.batch(20, seed=0, step=0), validation=me.batch(9, seed=1, step=0))
    model = make_model(case)
    keywords = {"steps": 12, "batch_size": BATCH, "seed": SEED, "lr": 0.05, "engine": engine, **settings}
    return coterie.train(model, case.loss, held_out, peers, rule, **keywords)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["mlp", "dropout and batch norm"])
def test_every_rule_makes_the_same_run(make_engine: MakeEngine, name: str, rule: coterie.Rule) -> None:
    wanted = trained(coterie.InProcess, CASES[name], rule)
    found = trained(make_engine, CASES[name], rule)
    assert found.step == 12
    for key, value in wanted.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[key], value, rtol=1e-8, atol=1e-10)
    for point, other in zip(found.record.points, wanted.record.points, strict=True):
        assert point.to_plain() == pytest.approx(other.to_plain(), rel=1e-8)


def test_a_model_of_ones_own_is_not_touched(make_engine: MakeEngine) -> None:
    before = copy.deepcopy(make_model(CASES["batch norm"]).state_dict())
    run = trained(make_engine, CASES["batch norm"], RULES["averaging"])
    assert int(run.model[1].num_batches_tracked) == run.best_step  # type: ignore[index]  # a BatchNorm1d
    assert all(torch.equal(v, before[k]) for k, v in make_model(CASES["batch norm"]).state_dict().items())


class SumsOnly(coterie.InProcess):
    """An engine that gives the peers' weighted sum alone, and notes that it was closed."""

    closed = 0

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, rows=False)

    def close(self) -> None:
        SumsOnly.closed += 1


def test_a_rule_that_needs_rows_fails_early(tmp_path: Any) -> None:
    with pytest.raises(KnobError, match="`StreamAveraging` needs every peer's gradient, but this engine gives"):
        trained(SumsOnly, CASES["mlp"], StreamAveraging(9), out=tmp_path / "run")
    assert SumsOnly.closed == 1
    with pytest.raises(KnobError, match="needs every peer's gradient to choose its knobs"):
        trained(SumsOnly, CASES["mlp"], coterie.WeightedAveraging("auto"), out=tmp_path / "run")
    assert SumsOnly.closed == 2
    assert not (tmp_path / "run").exists()
    trained(SumsOnly, CASES["mlp"], coterie.WeightedAveraging(0.5))
    assert SumsOnly.closed == 3


def test_an_engine_that_is_passed_in_stays_open() -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine, before = SumsOnly(model, f.cross_entropy, users[0], users[1:]), SumsOnly.closed
    coterie.train(
        model, f.cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5), engine=engine, steps=2
    )
    assert SumsOnly.closed == before


def test_costs_are_for_everybody_or_nobody(make_engine: MakeEngine) -> None:
    costs = trained(make_engine, CASES["mlp"], RULES["averaging"]).record.end.traffic
    assert not costs or set(costs) == {"me", *TAU}
    for name in costs:
        assert min(astuple(costs[name])) >= 0
        assert costs[name].bytes_sent > 0
        assert costs[name].bytes_received > 0
        assert costs[name].seconds_computing > 0


# Losses whose mean is not over all examples: what one batch shows need not hold for the next.


def padded_users(case: Case, pads: Mapping[str, Sequence[int]]) -> list[coterie.User]:
    users = make_users(case, (8, 8, 8, 5))
    made = []
    for user in users:
        inputs, targets = user.batch(8, seed=0, step=0)
        targets = targets.clone()
        targets[list(pads.get(user.name, ()))] = -100
        made.append(coterie.User(user.name, inputs, targets))
    return made


@pytest.mark.parametrize(
    "loss",
    [
        f.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda output, targets: 2 * f.cross_entropy(output, targets),
    ],
)
@pytest.mark.parametrize("mine", [(), (0, 3)])
def test_ignored_targets(make_engine: MakeEngine, loss: Any, mine: Sequence[int]) -> None:
    users = padded_users(CASES["mlp"], {"me": mine, "peer 1": (0, 1, 5), "peer 3": (4,)})
    model = make_model(CASES["mlp"])
    engine = make_engine(model, loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    weights = {"peer 1": 0.5, "peer 2": 0.2, "peer 3": 0.3}
    x = some_point(model)
    wanted = [plain_gradient(model, loss, user, x, 0)[0] for user in users]
    average = torch.stack([w * g for w, g in zip(weights.values(), wanted[1:], strict=True)]).sum(0)
    for rows in (False, True):
        g = engine.gradients(x, 0, weights, rows)
        close(g.own, wanted[0])
        close(g.average(weights)[0], average)


def test_a_peer_all_of_whose_targets_are_ignored(make_engine: MakeEngine) -> None:
    users = padded_users(CASES["mlp"], {"peer 1": range(8)})
    model = make_model(CASES["mlp"])
    engine = make_engine(model, f.cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.5, "peer 2": 0.5}
    wanted = [plain_gradient(model, f.cross_entropy, user, x, 0)[0] for user in users]
    average, answered = engine.gradients(x, 0, weights).average(weights)
    assert not wanted[1].any()  # torch's gradient is 0, though the loss is NaN
    close(average, 0.5 * wanted[2])
    assert answered == 1


def test_ignored_targets_of_another_index(make_engine: MakeEngine) -> None:
    users, model = make_users(CASES["mlp"], (20, 30, 9)), make_model(CASES["mlp"])
    loss = nn.CrossEntropyLoss(ignore_index=2)
    engine = make_engine(model, loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.25, "peer 2": 0.75}
    for step in range(4):
        wanted = [plain_gradient(model, loss, user, x, step)[0] for user in users]
        peers = engine.gradients(x, step, weights).peers
        assert peers is not None
        close(peers, 0.25 * wanted[1] + 0.75 * wanted[2])


def test_class_weights_that_the_first_batch_does_not_show(make_engine: MakeEngine) -> None:
    inputs, _ = make_users(CASES["mlp"])[0].batch(6, seed=0, step=0)
    me = coterie.User("me", inputs, torch.tensor([0, 1, 0, 1, 1, 0]))  # classes of weight 1
    peer = coterie.User("peer 1", inputs, torch.tensor([2, 1, 2, 0, 2, 2]))
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64))
    model = make_model(CASES["mlp"])
    engine = make_engine(model, loss, me, [peer], batch_size=BATCH, seed=SEED)
    x = some_point(model)
    peers = engine.gradients(x, 0, {"peer 1": 1.0}).peers
    assert peers is not None
    close(peers, plain_gradient(model, loss, peer, x, 0)[0])


def test_a_sum_that_the_first_batch_does_not_show(make_engine: MakeEngine) -> None:
    me = coterie.User("me", torch.ones(1, 2).double(), torch.ones(1, 1).double())
    peer = coterie.User("a", torch.ones(5, 2).double(), torch.zeros(5, 1).double())
    loss, model = nn.MSELoss(reduction="sum"), nn.Linear(2, 1).double()
    x = torch.tensor([1.0, 2.0, 3.0]).double()
    peers = make_engine(model, loss, me, [peer], batch_size=8, seed=0).gradients(x, 0, {"a": 1.0}).peers
    assert peers is not None
    assert peers.tolist() == [60.0, 60.0, 60.0]  # 5 · 2 · (1 + 2 + 3)


def test_targets_of_several_dimensions(make_engine: MakeEngine) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (3, 4))).double()
    users = [
        coterie.User(
            "me" if not k else f"peer {k}",
            torch.randn(n, 6, generator=generator).double(),
            torch.randint(3, (n, 4), generator=generator).masked_fill_(
                torch.rand(n, 4, generator=generator) < 0.3, -100
            ),
        )
        for k, n in enumerate((9, 8, 5))
    ]
    engine = make_engine(model, f.cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.5, "peer 2": 0.5}
    wanted = [plain_gradient(model, f.cross_entropy, user, x, 1)[0] for user in users]
    for rows in (False, True):
        g = engine.gradients(x, 1, weights, rows)
        close(g.own, wanted[0])
        close(g.average(weights)[0], 0.5 * (wanted[1] + wanted[2]))


@pytest.mark.parametrize("sizes", [(1, 6, 6), (2, 6, 6), (9, 1, 6)])
@pytest.mark.parametrize("name", ["mlp", "examples that mix"])
def test_users_with_one_example(make_engine: MakeEngine, name: str, sizes: Sequence[int]) -> None:
    case = CASES[name]
    users, model = make_users(case, sizes), make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.5, "peer 2": 0.5}
    wanted = [plain_gradient(model, case.loss, user, x, 0)[0] for user in users]
    g = engine.gradients(x, 0, weights)
    close(g.own, wanted[0])
    close(g.average(weights)[0], 0.5 * (wanted[1] + wanted[2]))


# Data sets that are read batch by batch.


class Noisy(Dataset[tuple[Tensor, int]]):
    def __init__(self, user: coterie.User) -> None:
        self.inputs, self.targets = user.batch(len(user), seed=0, step=0)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index] + 0.1 * torch.randn(6), int(self.targets[index])


@pytest.mark.parametrize("name", ["mlp", "batch norm", "dropout"])
def test_datasets_with_random_transforms(make_engine: MakeEngine, name: str) -> None:
    case = CASES[name]
    users = [coterie.User.from_dataset(user.name, Noisy(user)) for user in make_users(case)]
    model = make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x = some_point(model)
    for rows in (False, True):
        wanted = [plain_gradient(model, case.loss, user, x, 3)[0] for user in users]
        g = engine.gradients(x, 3, TAU, rows)
        close(g.own, wanted[0])
        close(g.average(TAU)[0], torch.stack([t * w for t, w in zip(TAU.values(), wanted[1:], strict=True)]).sum(0))


# Peers whose gradient cannot be used.


def spoil(user: coterie.User, value: float) -> coterie.User:
    inputs, targets = user.batch(len(user), seed=0, step=0)
    return coterie.User(user.name, torch.full_like(inputs, value), targets)


every_way = pytest.mark.parametrize("name", ["mlp", "lstm", "batch norm", "dropout", "loss with item"])


def test_the_same_weights_in_another_order(make_engine: MakeEngine) -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine = make_engine(model, f.cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x = some_point(model)
    first, second = (engine.gradients(x, 0, tau).peers for tau in (TAU, dict(reversed(TAU.items()))))
    assert first is not None
    assert second is not None
    close(first, second)


@every_way
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [False, True])
def test_bad_peers_are_left_out(make_engine: MakeEngine, name: str, value: float, rows: bool) -> None:
    case = CASES[name]
    users, model = make_users(case), make_model(case)
    x = some_point(model)
    wanted = {user.name: plain_gradient(model, case.loss, user, x, 0)[0] for user in users}
    users[1], users[4] = spoil(users[1], value), spoil(users[4], value)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    g = engine.gradients(x, 0, TAU, rows)
    assert g.left_out == {"peer 1": "not finite", "peer 4": "not finite"}
    average, answered = g.average(TAU)
    close(average, 0.3 * wanted["peer 2"] + 0.1 * wanted["peer 3"] + 0.6 * wanted["me"])
    assert answered == pytest.approx(0.4)
    assert g.answered == pytest.approx(0.4)
    if rows:
        assert g.names == ("peer 2", "peer 3")


@every_way
@pytest.mark.parametrize("rows", [False, True])
def test_all_peers_left_out_is_alone_to_the_bit(make_engine: MakeEngine, name: str, rows: bool) -> None:
    case = CASES[name]
    users, model = make_users(case), make_model(case)
    spoilt = [spoil(user, float("nan")) for user in users[1:]]
    engine = make_engine(model, case.loss, users[0], spoilt, batch_size=BATCH, seed=SEED)
    x = some_point(model)
    start = copy.deepcopy(model.state_dict())
    own = engine.gradients(x, 0, {}).own
    for rule in (
        coterie.WeightedAveraging(0.9, TAU),
        coterie.BiasCorrection(0.9, 0.5),
        coterie.WeightedAveraging(0.9),
    ):
        model.load_state_dict(start)
        g = engine.gradients(x, 0, rule.weights(engine.names), rows)
        assert sorted(g.left_out) == sorted(TAU)
        direction, state = rule(g, rule.init(x))
        assert direction.numpy().tobytes() == own.numpy().tobytes()
        assert state["weight"] == 0


def test_a_non_finite_own_gradient_moves_no_buffer(make_engine: MakeEngine) -> None:
    case = CASES["batch norm"]
    users, model = make_users(case), make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    before = copy.deepcopy(model.state_dict())
    g = engine.gradients(torch.full_like(some_point(model), float("nan")), 0, TAU)
    assert not g.own.isfinite().any()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


# What an engine refuses.


def test_bad_settings(make_engine: MakeEngine) -> None:
    users = make_users(CASES["mlp"])
    with pytest.raises(coterie.errors.KnobError, match="`batch_size` must be at least 1, got 0"):
        make_engine(mlp().double(), f.cross_entropy, users[0], users[1:], batch_size=0, seed=0)
    with pytest.raises(coterie.errors.DataError, match="users must have different names"):
        make_engine(mlp().double(), f.cross_entropy, users[0], [users[0]], batch_size=2, seed=0)
    with pytest.raises(coterie.errors.ModelError, match="no trainable parameter"):
        make_engine(frozen()[:2].double(), f.cross_entropy, users[0], users[1:], batch_size=2, seed=0)  # type: ignore[index]  # a Sequential
