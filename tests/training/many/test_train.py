"""Many runs as one program: each is the run that `train` gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.support.many_runs import RULES, compared, falling, network, run_of, together
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie import Alone, BiasCorrection, User, WeightedAveraging
from coterie.benchmark.sets.user_set import cnn
from coterie.engines.in_process import copies
from coterie.learners.captured import Captured, StackBlock
from coterie.rules import FormulaRule, Knob
from coterie.training.many import ManyLoop
from coterie.users.sampling import seeded

Users = Callable[..., list[User]]

OPTIMIZERS: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda p, lr: torch.optim.SGD(
        p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "groups": lambda p, lr: torch.optim.Adam(
        [{"params": p[:2], "lr": lr / 2}, {"params": p[2:], "betas": (0.5, 0.9)}], lr=lr
    ),
    "a part": lambda p, lr: torch.optim.Adam(p[2:], lr=lr),
}


def test_steps_in_blocks_go_on_to_the_next_evaluation(
    make_users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ManyLoop, "_captured", lambda loop, *_: Captured(StackBlock(loop.program, undone=False))
    )
    taken, advance = [], Captured.advance

    def noted(captured: Captured, most: int) -> list[float] | None:
        losses = advance(captured, most)
        taken.append(0 if losses is None else len(losses))
        return losses

    monkeypatch.setattr(Captured, "advance", noted)
    spec = run_of(make_users(), WeightedAveraging(0.5), steps=12, evaluate_every=6)
    coterie.train_many([spec, replace(spec, seed=1)])
    assert taken == [0, 5, 6]  # the first step, in which optimizers make their state, by itself


@pytest.mark.parametrize(
    ("kind", "in_blocks"),
    [*((kind, False) for kind in OPTIMIZERS), ("momentum", True), ("groups", True)],
)
def test_every_rule_and_optimizer_gives_the_runs_of_train(
    make_users: Users, monkeypatch: pytest.MonkeyPatch, kind: str, in_blocks: bool
) -> None:
    if in_blocks:  # as on a GPU
        monkeypatch.setattr(
            ManyLoop, "_captured", lambda loop, *_: Captured(StackBlock(loop.program, undone=False))
        )
    one, other = (
        make_users(),
        make_users((3, 16, 9, 5, 7), held_out=9),
    )  # fewer examples than the batch, and other peers
    everybody = [one, other, [one[1], *one[2:]]]  # a peer as user 0, without anything held out
    base = run_of(one, optimizer=OPTIMIZERS[kind])
    specs = [
        replace(base, me=users[0], peers=users[1:], rule=rule, seed=k % 2, lr=(0.02, 0.05)[k % 2])
        for k, users in enumerate(everybody)
        for rule in RULES
        if len(users) > 3 or not getattr(rule, "tau", None)
    ]
    runs = compared(specs)
    assert all(together(runs))
    assert runs[0].record.configuration.runs == f"one program of {len(specs)}"


@dataclass(frozen=True)
class Clipped(FormulaRule):
    """A rule of a user's own: average with a clipped difference, and remember it."""

    alpha: Knob
    limit: Knob = 0.05
    sign: float = 1.0

    memory = ("last",)

    def direction(
        self, own: Tensor, peers: Tensor, state: Mapping[str, Any], knobs: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        limit = own * 0 + knobs["limit"]
        gap = torch.minimum(torch.maximum(peers - own, -limit), limit)
        return own + self.sign * knobs["alpha"] * (gap + 0.1 * state["last"]), {"last": gap}


def test_a_rule_of_ones_own_takes_part(make_users: Users) -> None:
    users = make_users()
    rules = [Clipped(0.5), Clipped(falling, 0.1), Clipped(0.2, falling), Clipped(0.5, sign=-1.0)]
    base = run_of(users, optimizer=torch.optim.SGD)
    runs = compared(
        replace(base, rule=rule, seed=seed) for rule in [*rules, *RULES[4:7]] for seed in (0, 1)
    )
    assert all(together(runs))
    assert not torch.equal(runs[0].state["last"], runs[2].state["last"])


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
        (
            "classes",
            nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)),
            f.cross_entropy,
        ),
        (
            "classes",
            nn.Sequential(
                nn.Linear(3, 4).requires_grad_(requires_grad=False), nn.ReLU(), nn.Linear(4, 3)
            ),
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
        return torch.randn(n, 3, generator=generator, dtype=torch.float64), targets_of(
            kind, n, generator
        )

    me = User("me", *examples(9), validation=examples(8), test=examples(8))
    peers = [User(name, *examples(n)) for name, n in (("a", 12), ("b", 3))]
    model = copy.deepcopy(model).double()
    with seeded(0, "model", 0):  # those above are drawn as the file is read, by no seed
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    base = run_of([me, *peers], model=model, loss=loss, metrics={} if kind == "shares" else None)
    rules = Alone(), WeightedAveraging(0.4)
    assert all(
        together(compared(replace(base, rule=rule, seed=seed) for rule in rules for seed in (0, 1)))
    )


def test_pictures_through_convolutions(make_users: Users) -> None:
    users = [
        User(
            u.name,
            u.examples.take(torch.arange(len(u)))[0]
            .repeat_interleave(24, 1)[:, :64]
            .reshape(-1, 1, 8, 8),
            torch.arange(len(u)) % 3,
        )
        for u in make_users()
    ]
    torch.manual_seed(0)
    for model in (cnn(64, 3), nn.Sequential(nn.Flatten(), nn.Linear(64, 3))):
        base = run_of(users, model=model.double())
        assert all(
            together(compared(replace(base, rule=WeightedAveraging(alpha)) for alpha in (0.2, 0.8)))
        )


def test_users_in_turn_share_their_batches(make_users: Users) -> None:
    everybody = make_users((8, 8, 8, 8, 8, 8))[1:]
    model = network()
    base = run_of(everybody, WeightedAveraging(0.5), model)
    specs = [
        replace(base, me=me, peers=[user for user in everybody if user is not me], seed=seed)
        for me in everybody
        for seed in (0, 1)
    ]
    assert all(together(compared(specs)))


def test_memory_bounds_what_goes_together(
    make_users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(copies.MAX_ACTIVATION_BYTES, "cpu", 3000)
    base = run_of(make_users())
    compared(replace(base, rule=rule, seed=seed) for rule in RULES for seed in (0, 1))


def test_each_may_start_elsewhere_and_schedules_are_kept(make_users: Users) -> None:
    users = make_users()
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)  # noqa: E731
    cosine = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)  # noqa: E731
    specs = [
        run_of(users, rule, network(seed), scheduler=schedule)
        for rule in (Alone(), BiasCorrection(0.5, 0.1))
        for seed in (1, 2)
        for schedule in (halving, cosine)
    ]
    assert all(together(compared(specs)))


def test_runs_of_other_losses_lengths_or_batches(make_users: Users) -> None:
    """What differs in loss, steps, evaluations or metrics is a program of its own; batches may differ in one."""
    base = run_of(make_users(), WeightedAveraging(0.5))
    others: list[dict[str, Any]] = [
        {"steps": 7},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    ]
    others += [{"evaluate_every": 4}, {"metrics": {}}]
    changed = [replace(base, seed=seed, **other) for other in others for seed in (0, 1)]
    runs = compared([base, *changed, replace(base, batch_size=3)])
    assert [run.record.configuration.runs for run in runs] == ["one program of 2"] * len(runs)
    assert [run.step for run in runs[:4]] == [12, 7, 7, 12]


def test_what_is_settled_before_the_first_step_takes_part(make_users: Users) -> None:
    users = make_users((12, 16, 9))
    rules = [WeightedAveraging("auto"), BiasCorrection("auto", 0.1)]
    base = run_of(users, model=nn.Linear(3, 3).double(), lr=0.02)
    runs = compared(replace(base, rule=rule) for rule in (*rules, Alone()))
    assert all(together(runs))
    assert all(run.record.configuration.choice for run in runs[:-1])
    adaptive = [replace(base, rule=rule) for rule in (None, coterie.AdaptiveAveraging(single=True))]
    for run in compared(adaptive):
        assert "by itself: `AdaptiveAveraging` is not a rule" in run.record.configuration.runs
