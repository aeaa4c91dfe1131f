"""Many runs as one program: each against the same run by itself, what cannot take part, and what may go wrong."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie import Alone, BiasCorrection, Run, Step, User, Wanted, WeightedAveraging, train_many
from coterie.aggregators import CoordinateMedian
from coterie.benchmark.models import cnn
from coterie.engines.in_process import copies
from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.engine import InProcess
from coterie.learners.sharing import Needs, passes
from coterie.learners.tables import Pool
from coterie.methods import FedAvg

Users = Callable[..., list[User]]
SETTINGS: dict[str, Any] = {"steps": 12, "batch_size": 4, "evaluate_every": 5, "progress": False}

OPTIMIZERS: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "groups": lambda p, lr: torch.optim.Adam(
        [{"params": p[:2], "lr": lr / 2}, {"params": p[2:], "betas": (0.5, 0.9)}], lr=lr
    ),
    "a part": lambda p, lr: torch.optim.Adam(p[2:], lr=lr),
}


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.ReLU(), nn.Linear(5, 3)).double()


def by_itself(model: nn.Module, loss: Any, wanted: Wanted, **settings: Any) -> Run:
    """Return the run that `train` gives."""
    own = {"lr": wanted.lr, "optimizer": wanted.optimizer, "scheduler": wanted.scheduler}
    settings = settings | {name: value for name, value in own.items() if value is not None}
    users: dict[str, Any] = {"me": wanted.me, "peers": wanted.peers, "rule": wanted.rule}
    others: dict[str, Any] = {"seed": wanted.seed, "callbacks": wanted.callbacks, "guard": "off", "measure": False}
    return coterie.train(wanted.model or model, loss, **users, **settings, **others)


def assert_same(found: Run, expected: Run, tolerance: float = 1e-9) -> None:
    """Compare all that a run holds, but for how long it took."""
    close: dict[str, Any] = {"rel": tolerance, "abs": tolerance}
    assert (found.step, found.best_step, found.stopped) == (expected.step, expected.best_step, expected.stopped)
    assert found.test == pytest.approx(expected.test, **close)
    for a, b in zip(found.record.points, expected.record.points, strict=True):
        assert a.to_plain() == pytest.approx(b.to_plain(), **close)
    end, other = ({**run.record.end.to_plain(), "seconds": 0.0} for run in (found, expected))
    assert end.pop("test") == pytest.approx(other.pop("test"), **close)
    assert end == other
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], value, rtol=tolerance, atol=tolerance)
    assert found.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        if isinstance(value, Tensor | float):
            torch.testing.assert_close(found.state[name], value, rtol=tolerance, atol=tolerance)
        else:
            assert found.state[name] == value
    configs = [run.record.configuration.to_plain() for run in (found, expected)]
    for config in configs:
        config.pop("runs", None)  # how they were trained
        config.pop("capture", None)
    assert configs[0] == configs[1]


def together(runs: Sequence[Run]) -> list[bool]:
    return [run.record.configuration.runs.startswith("one program") for run in runs]


def compared(model: nn.Module, loss: Any, wanted: Sequence[Wanted], **settings: Any) -> list[Run]:
    """Return the runs once each is the one that `train` gives."""
    settings = SETTINGS | {"lr": 0.05} | settings
    before = copy.deepcopy(model.state_dict())
    runs = train_many(model, loss, wanted, **settings)
    assert len(runs) == len(wanted)
    for run, each in zip(runs, wanted, strict=True):
        assert_same(run, by_itself(model, loss, each, **settings))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return runs


def falling(step: int) -> float:
    return 1 / (step + 2)


RULES: list[coterie.Rule] = [
    Alone(),
    WeightedAveraging(0.3),
    WeightedAveraging(falling),
    WeightedAveraging(0.0),
    WeightedAveraging(1.0, {"peer 1": 0.25, "peer 3": 0.75}),
    BiasCorrection(0.7, 0.1),
    BiasCorrection(falling, falling, {"peer 2": 1.0}, correction=0.5, start="zero"),
    BiasCorrection(0.6, 0.2, warm_up=False),
    BiasCorrection(0.6, 0.2, correction=0.0, start="zero", warm_up=False),
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_rule_and_optimizer_gives_the_runs_of_train(make_users: Users, kind: str) -> None:
    one, other = (
        make_users(),
        make_users((3, 16, 9, 5, 7), held_out=9),
    )  # fewer examples than the batch, and other peers
    everybody = [one, other, [one[1], *one[2:]]]  # a peer as user 0, without anything held out
    wanted = [
        Wanted(users[0], users[1:], rule, seed=k % 2, lr=(0.02, 0.05)[k % 2])
        for k, users in enumerate(everybody)
        for rule in RULES
        if len(users) > 3 or not getattr(rule, "tau", None)
    ]
    runs = compared(network(), f.cross_entropy, wanted, optimizer=OPTIMIZERS[kind], lr=None)
    assert all(together(runs))
    assert runs[0].record.configuration.runs == f"one program of {len(wanted)}"


class Places(nn.Module):
    """A model of no known layers, with one output a class and place, a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)
        self.frozen = nn.Parameter(torch.tensor(0.7), requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs * self.scale).reshape(len(inputs), 3, 2)
        return output * self.frozen


def targets_of(kind: str, n: int, generator: torch.Generator) -> Tensor:
    classes = torch.arange(n) % 3
    if kind == "places":
        return torch.stack([classes, (classes + 1) % 3], dim=1)
    if kind == "shares":
        return torch.rand(n, 3, generator=generator, dtype=torch.float64).softmax(1)
    if kind == "numbers":
        return torch.randn(n, 2, generator=generator, dtype=torch.float64)
    if kind == "yes or no":
        return (torch.arange(n) % 2).double().unsqueeze(1)
    return classes


@pytest.mark.parametrize(
    ("kind", "model", "loss"),
    [
        ("classes", nn.Linear(3, 3), nn.CrossEntropyLoss(label_smoothing=0.1)),
        (
            "classes",
            nn.Sequential(nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU()), nn.Linear(4, 3)),
            f.cross_entropy,
        ),
        ("classes", nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1)), f.nll_loss),
        ("classes", nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)), f.cross_entropy),
        (
            "classes",
            nn.Sequential(nn.Linear(3, 4).requires_grad_(requires_grad=False), nn.ReLU(), nn.Linear(4, 3)),
            f.cross_entropy,
        ),
        ("places", Places(), f.cross_entropy),
        ("shares", nn.Linear(3, 3), f.cross_entropy),
        ("numbers", nn.Sequential(nn.Linear(3, 4), nn.ELU(), nn.Linear(4, 2)), f.mse_loss),
        ("yes or no", nn.Linear(3, 1), nn.BCEWithLogitsLoss()),
    ],
)
def test_models_and_losses(kind: str, model: nn.Module, loss: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def examples(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, generator=generator, dtype=torch.float64), targets_of(kind, n, generator)

    me = User("me", *examples(9), validation=examples(8), test=examples(8))
    peers = [User(name, *examples(n)) for name, n in (("a", 12), ("b", 3))]
    model = copy.deepcopy(model).double()
    wanted = [Wanted(me, peers, rule, seed) for rule in (Alone(), WeightedAveraging(0.4)) for seed in (0, 1)]
    assert all(together(compared(model, loss, wanted, metrics={} if kind == "shares" else None)))


def test_pictures_through_convolutions(make_users: Users) -> None:
    users = [
        User(
            u.name,
            u.examples.take(torch.arange(len(u)))[0].repeat_interleave(24, 1)[:, :64].reshape(-1, 1, 8, 8),
            torch.arange(len(u)) % 3,
        )
        for u in make_users()
    ]
    torch.manual_seed(0)
    for model in (cnn(64, 3), nn.Sequential(nn.Flatten(), nn.Linear(64, 3))):
        wanted = [Wanted(users[0], users[1:], WeightedAveraging(alpha)) for alpha in (0.2, 0.8)]
        assert all(together(compared(model.double(), f.cross_entropy, wanted)))


def test_users_in_turn_share_their_batches(make_users: Users) -> None:
    everybody = make_users((8, 8, 8, 8, 8, 8))[1:]
    wanted = [
        Wanted(me, [user for user in everybody if user is not me], WeightedAveraging(0.5), seed)
        for me in everybody
        for seed in (0, 1)
    ]
    model = network()
    assert all(together(compared(model, f.cross_entropy, wanted)))
    engine = InProcess(model, f.cross_entropy, everybody[0], everybody[1:])
    pool = Pool([copy.copy(user) for user in everybody for _ in range(3)], torch.device("cpu"))
    needs = Needs()
    for run, each in enumerate(wanted):
        needs[run] = {pool.draws(peer, 4, each.seed): 0.25 for peer in each.peers}
    (found,) = passes(Copies(engine.passes), pool, needs, torch.zeros(1, 1))
    assert found.shares.shape == (2, 5, 5 * 4)  # two seeds, five runs each, all five users once
    assert torch.equal(found.shares.sum(2), torch.ones(2, 5))
    (found,) = passes(
        Copies(engine.passes), pool, {0: dict([*needs[0].items()][:1]), 1: needs[0]}, torch.zeros(1, 1)
    )
    assert found.shares.shape == (2, 1, 4 * 4)  # who needs one user only is not taken through four


def test_memory_bounds_what_goes_together(make_users: Users, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copies.MAX_ACTIVATION_BYTES, "cpu", 3000)
    users = make_users()
    compared(
        network(), f.cross_entropy, [Wanted(users[0], users[1:], rule, seed) for rule in RULES for seed in (0, 1)]
    )


def test_each_may_start_elsewhere_and_schedules_are_kept(make_users: Users) -> None:
    users = make_users()
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)  # noqa: E731
    cosine = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)  # noqa: E731
    wanted = [
        Wanted(*(users[0], users[1:], rule), model=network(seed), scheduler=schedule)
        for rule in (Alone(), BiasCorrection(0.5, 0.1))
        for seed in (1, 2)
        for schedule in (None, cosine)
    ]
    assert all(together(compared(network(), f.cross_entropy, wanted, scheduler=halving)))


def test_what_is_settled_before_the_first_step_takes_part(make_users: Users) -> None:
    users = make_users((12, 16, 9))
    rules = [None, coterie.AdaptiveAveraging(budget=8), WeightedAveraging("auto"), BiasCorrection("auto", 0.1)]
    wanted = [Wanted(users[0], users[1:], rule, lr=0.02) for rule in (*rules, Alone())]
    runs = compared(nn.Linear(3, 3).double(), f.cross_entropy, wanted)
    assert all(together(runs))
    assert all(run.record.configuration.choice for run in runs[:-1])


def from_disk(user: User) -> User:
    held = torch.utils.data.TensorDataset(*user.examples.take(torch.arange(len(user))))
    data: torch.utils.data.Dataset[Any] = torch.utils.data.ConcatDataset([held])
    return User.from_dataset(user.name, data)


def my_loss(output: Tensor, target: Tensor) -> Tensor:
    return f.cross_entropy(output, target).sqrt()


class Scaled(nn.Linear):
    """A linear model with a number that is no parameter."""

    def __init__(self, factor: float) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * super().forward(inputs)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def test_what_cannot_take_part_is_trained_by_itself_and_says_why(make_users: Users) -> None:
    users = make_users()
    me, peers = users[0], users[1:]
    wanted = {
        "not all examples are in memory": Wanted(from_disk(me), peers, Alone(), lr=0.05),
        "one program of 2": Wanted(me, peers, WeightedAveraging(0.5), lr=0.05),
        "an aggregator needs every": Wanted(
            me, peers, WeightedAveraging(0.5, aggregator=CoordinateMedian()), lr=0.05
        ),
        "`CosineSimilarity` is not": Wanted(me, peers, coterie.rules.similarity.CosineSimilarity(0.5), lr=0.05),
        "`FedAvg` is not": Wanted(me, peers, FedAvg(2), lr=0.05),
        "Adafactor is not known": Wanted(me, peers, Alone(), optimizer=torch.optim.Adafactor, lr=0.05),
        "`ReduceLROnPlateau` follows": Wanted(me, peers, Alone(), scheduler=plateau, lr=0.05),
        "its model is not the one": Wanted(me, peers, Alone(), model=Scaled(2.0), lr=0.05),
    }
    model = Scaled(1.0)
    runs = train_many(model, f.cross_entropy, [*wanted.values(), Wanted(me, peers, Alone(), lr=0.05)], **SETTINGS)
    for run, (why, each) in zip(runs, wanted.items(), strict=False):
        said = run.record.configuration.runs
        assert why in said
        assert said.startswith(("by itself: ", "one program"))
        assert_same(run, by_itself(model, f.cross_entropy, each, **SETTINGS))


@pytest.mark.parametrize(
    ("model", "loss", "why"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), f.cross_entropy, "buffers"),
        (nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)), f.cross_entropy, "random"),
        (nn.Linear(3, 3), my_loss, "not known to be a mean"),
    ],
)
def test_a_model_or_loss_that_cannot_be_shared(make_users: Users, model: nn.Module, loss: Any, why: str) -> None:
    users = make_users()
    runs = compared(
        copy.deepcopy(model).double(), loss, [Wanted(users[0], users[1:], Alone(), seed) for seed in (0, 1)]
    )
    assert all(why in run.record.configuration.runs for run in runs)


def test_a_run_that_fails_does_not_hurt_the_others(make_users: Users) -> None:
    users = make_users()
    bad = User("peer 1", *users[1].examples.take(torch.arange(16)))
    bad.examples.inputs[3] = math.nan  # type: ignore[attr-defined]
    wanted = [
        Wanted(users[0], users[1:], WeightedAveraging(0.5)),
        Wanted(users[0], [bad, *users[2:]], WeightedAveraging(0.5)),
        Wanted(users[0], users[1:], Alone(), lr=1e308),
        Wanted(users[0], users[1:], BiasCorrection(0.5, 0.1)),
    ]
    model = network()
    runs = train_many(model, f.cross_entropy, wanted, lr=0.05, optimizer=torch.optim.SGD, **SETTINGS)
    for k in (0, 1, 3):
        expected = by_itself(model, f.cross_entropy, wanted[k], lr=0.05, optimizer=torch.optim.SGD, **SETTINGS)
        assert_same(runs[k], expected)
    assert together(runs) == [True, False, False, True]
    assert runs[1].record.end.left_out["peer 1"]["not finite"] > 0
    assert runs[2].stopped == "a non-finite gradient"
    with pytest.raises(coterie.errors.GradientError) as caught:
        by_itself(model, f.cross_entropy, wanted[2], optimizer=torch.optim.SGD, **SETTINGS)
    assert_same(runs[2], caught.value.run)


def test_a_run_that_has_failed_is_not_ended_by_its_callback(make_users: Users) -> None:
    users = make_users()
    settings = SETTINGS | {"evaluate_every": 12, "optimizer": torch.optim.SGD}
    wanted = [Wanted(users[0], users[1:], Alone(), lr=lr, callbacks=[lambda s: s.step == 7]) for lr in (0.1, 1e308)]
    runs = train_many(network(), f.cross_entropy, wanted, **settings)
    assert [run.stopped for run in runs] == ["a callback", "a non-finite gradient"]


class OverPlaces(nn.Linear):
    """A linear model of the mean over any number of places."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.mean(2))


def test_examples_of_another_shape_are_taken_by_themselves(make_users: Users) -> None:
    users = make_users()
    wanted = []
    for places in (2, 2, 5):
        inputs, targets = users[0].examples.take(torch.arange(12))
        held = [User(name, inputs.unsqueeze(2).repeat(1, 1, places), targets) for name in ("me", "a")]
        wanted.append(Wanted(held[0], held[1:], WeightedAveraging(0.5)))
    runs = compared(OverPlaces(3, 3, dtype=torch.float64), f.cross_entropy, wanted)
    assert together(runs) == [True, True, False]
    assert "another shape" in runs[2].record.configuration.runs


def test_ctrl_c_returns_what_is_there(make_users: Users) -> None:
    users = make_users()

    def press(step: Step) -> None:
        if step.step == 7:
            signal.raise_signal(signal.SIGINT)

    wanted = [
        Wanted(users[0], users[1:], WeightedAveraging(0.5, aggregator=CoordinateMedian())),
        Wanted(users[0], users[1:], WeightedAveraging(0.5), callbacks=[press]),
        Wanted(users[0], users[1:], Alone()),
        Wanted(users[0], users[1:], FedAvg(2)),
    ]
    settings = SETTINGS | {"lr": 0.05}
    runs = train_many(network(), f.cross_entropy, wanted, **settings)
    assert [(run.stopped, run.step) for run in runs] == [("Ctrl-C", n) for n in (0, 7, 7, 0)]
    assert_same(runs[1], by_itself(network(), f.cross_entropy, wanted[1], **settings))
    assert torch.equal(runs[0].model.get_parameter("0.weight"), network().get_parameter("0.weight"))
    assert not any(run.test for run in runs)
    wanted[0] = Wanted(users[0], users[1:], FedAvg(2), callbacks=[press])  # pressed in a run by itself
    runs = train_many(network(), f.cross_entropy, wanted[::3], **settings)
    assert [(run.stopped, run.step) for run in runs] == [("Ctrl-C", 7), ("Ctrl-C", 0)]


def test_callbacks_are_told_of_their_run_and_may_end_it(make_users: Users) -> None:
    users = make_users()
    told: dict[str, list[tuple[Any, ...]]] = {}

    def telling(name: str, last: int) -> Callable[[Step], bool]:
        def tell(step: Step) -> bool:
            x = [float(p.detach().sum()) for p in step.model.parameters()]
            point = step.point.validation["loss"] if step.point else -1.0
            told.setdefault(name, []).append((step.step, step.own_loss, step.weight, point, *x))
            return step.step == last

        return tell

    rules: list[coterie.Rule] = [WeightedAveraging(falling), Alone(), BiasCorrection(0.5, 0.1)]
    runs = train_many(
        network(),
        f.cross_entropy,
        [
            Wanted(users[0], users[1:], rule, callbacks=[telling(f"many {k}", 6 + 2 * k)])
            for k, rule in enumerate(rules)
        ],
        lr=0.05,
        **SETTINGS,
    )
    for k, rule in enumerate(rules):
        wanted = Wanted(users[0], users[1:], rule, callbacks=[telling(f"one {k}", 6 + 2 * k)])
        assert_same(runs[k], by_itself(network(), f.cross_entropy, wanted, lr=0.05, **SETTINGS))
        for a, b in zip(told[f"many {k}"], told[f"one {k}"], strict=True):
            assert a == pytest.approx(b, rel=1e-9)
    assert [run.stopped for run in runs] == ["a callback"] * 3


def test_metrics_and_examples_on_disk_held_out(make_users: Users) -> None:
    users = make_users()
    one, other = copy.copy(users[0]), copy.copy(users[0])
    other.validation, other.test = from_disk(users[1]).examples, None
    one.validation = None
    wanted = [Wanted(me, users[1:], WeightedAveraging(0.5)) for me in (users[0], one, other)]
    metrics = {"largest": lambda outputs, targets: float(outputs.max())}
    runs = compared(network(), f.cross_entropy, wanted, metrics=metrics, evaluate_every=None)
    assert "largest" in runs[0].record.points[-1].validation


def test_wrong_settings_are_said_as_by_train(make_users: Users) -> None:
    users = make_users()
    assert train_many(network(), f.cross_entropy, []) == []
    for wanted, words in (
        (Wanted(users[0], users[1:], WeightedAveraging(0.5, {"nobody": 1.0})), "unknown peer 'nobody'"),
        (Wanted(users[0], [users[1], users[1]], Alone()), "different names"),
        (Wanted(users[0], users[1:], Alone(), model=nn.Linear(2, 3)), "does not take user 0's inputs"),
    ):
        with pytest.raises(coterie.errors.CoterieError, match=words):
            train_many(network(), f.cross_entropy, [Wanted(users[0], users[1:], Alone()), wanted], **SETTINGS)
    with pytest.raises(coterie.errors.KnobError, match="`steps` must be at least 1"):
        train_many(network(), f.cross_entropy, [Wanted(users[0], users[1:], Alone())], steps=0)
