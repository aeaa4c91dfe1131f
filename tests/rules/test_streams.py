"""Streams: users who draw fresh samples, and the weights found from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie import AdaptiveAveraging, Gradients, User
from coterie.errors import DataError, KnobError
from coterie.gradients.parameters import Parameters
from coterie.rules import weights_in
from coterie.rules.streams import MIN_STEPS_SEEN, STEPS_BETWEEN_SOLUTIONS, StreamAveraging, _pooled

TRUTH = torch.tensor([1.0, -2.0, 0.5, 1.5])


def user(name: str, truth: Tensor = TRUTH, noise: float = 2.0) -> User:
    def draw(size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([seed, step])
        inputs = torch.tensor(random.normal(size=(size, 4)), dtype=torch.float32)
        errors = torch.tensor(random.normal(size=size), dtype=torch.float32)
        return inputs, (inputs @ truth + noise * errors)[:, None]

    return User.stream(name, draw)


def run(peers: list[User], rule: Any = None, **changed: Any) -> coterie.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "lr": 0.02,
        "steps": 400,
        "batch_size": 2,
    }
    rule = AdaptiveAveraging() if rule is None else rule
    return coterie.train(
        nn.Linear(4, 1), mse_loss, user("me"), peers, rule, progress=False, **(settings | changed)
    )


def test_a_stream_gives_fresh_batches_that_depend_on_seed_user_and_step() -> None:
    me = user("me")
    batches = [
        me.batch(3, seed=seed, step=step)[0] for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    assert torch.equal(batches[0], batches[3])
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert not torch.equal(batches[0], user("you").batch(3, seed=0, step=0)[0])
    assert (repr(me), me.is_stream) == ("User('me', a stream)", True)
    with pytest.raises(DataError, match="no examples to take"):
        me.examples.take(torch.tensor([0]))


def test_users_alike_share_and_the_contrary_get_nothing() -> None:
    peers = [
        *(user(f"alike {k}") for k in range(4)),
        *(user(f"contrary {k}", -TRUTH) for k in range(4)),
    ]
    trained = run(peers)
    tau = weights_in(trained.state)
    assert sum(tau[f"contrary {k}"] for k in range(4)) < 0.02
    assert sum(tau[f"alike {k}"] for k in range(4)) > 0.5
    assert trained.record.configuration.choice["regime"].startswith("stream")
    assert trained.record.configuration.me.examples == "a stream"


def test_with_strangers_it_returns_to_alone() -> None:
    far = [
        user(f"far {k}", 5 * torch.randn(4, generator=torch.Generator().manual_seed(k)))
        for k in range(5)
    ]
    assert run(far).state["weight"] < 0.1


def test_copies_beat_alone() -> None:
    """With batches of two every gradient is mostly noise, and that must not be taken for bias."""
    peers = [user(f"alike {k}") for k in range(8)]
    distances = {
        rule: np.mean(
            [
                float((Parameters(run(peers, rule, seed=s).model).vector()[:4] - TRUTH).norm())
                for s in (0, 1)
            ]
        )
        for rule in (coterie.Alone(), AdaptiveAveraging())
    }
    assert distances[AdaptiveAveraging()] < 0.75 * distances[coterie.Alone()]


def test_bias_and_noise_are_estimated_without_bias() -> None:
    """The running means against the truth of a plain Gaussian problem at one point."""
    generator = torch.Generator().manual_seed(0)
    shift = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0]])
    rule = StreamAveraging(horizon=50_000)
    state = rule.init(torch.zeros(2))
    for _ in range(4000):
        own, *rows = torch.randn(4, 2, generator=generator) * torch.tensor(
            [[1.0], [1.0], [2.0], [1.0]]
        )
        g = Gradients(own, rows=torch.stack(rows) + shift, names=("a", "b", "c"))
        state = rule(g, state)[1]
    np.testing.assert_allclose(state["bias"], (shift @ shift.T).numpy(), atol=0.25)
    np.testing.assert_allclose(state["noise"], [2, 2, 8, 2], rtol=0.1)


def test_weights_are_those_of_what_was_sent_at_the_last_solution() -> None:
    """Weights found at one such step stay until the next, and go by the running means of the one before."""
    generator = torch.Generator().manual_seed(0)
    rule = StreamAveraging(horizon=100)
    state = rule.init(torch.zeros(3))
    taken: dict[int, Any] = {}
    for step in range(41):
        own, *rows = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        state = rule(Gradients(own, rows=torch.stack(rows), names=("a", "b")), state)[1]
        taken[step] = state
    first = next(step for step in taken if bool(taken[step]["tau"].any()))
    assert (
        first == MIN_STEPS_SEEN + STEPS_BETWEEN_SOLUTIONS
    )  # the first solution after means of enough steps were sent
    for step in range(first, 41):
        sent = taken[step - step % STEPS_BETWEEN_SOLUTIONS - STEPS_BETWEEN_SOLUTIONS]
        kappa = rule._kappa({name: sent[name] for name in ("bias", "squares", "counts", "noise")})
        assert taken[step]["tau"].tolist() == kappa[1:].tolist()


def test_between_solutions_the_host_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = StreamAveraging(horizon=100)
    state = rule.init(torch.zeros(3))
    generator = torch.Generator().manual_seed(0)
    asked: list[int] = []

    def noted(name: str) -> None:
        before = getattr(torch.Tensor, name)

        def asking(*arguments: Any) -> Any:
            asked.append(state["step"])
            return before(*arguments)

        monkeypatch.setattr(torch.Tensor, name, asking)

    for name in ("item", "tolist", "__bool__", "__float__", "numpy", "cpu", "nonzero"):
        noted(name)
    for _ in range(31):
        own, *rows = torch.randn(3, 3, generator=generator)
        state = rule(Gradients(own, rows=torch.stack(rows), names=("a", "b")), state)[1]
    monkeypatch.undo()
    assert {step % STEPS_BETWEEN_SOLUTIONS for step in asked} == {0}
    assert set(asked) == {5, 10, 15, 20, 25, 30}


def test_peers_that_come_and_go() -> None:
    """One that is missing in a step has no weight in it; one that comes back is known again."""
    generator = torch.Generator().manual_seed(0)
    rule = StreamAveraging(horizon=200)
    state = rule.init(torch.zeros(3))
    for step in range(200):
        own, *rows = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        names = ("a", "b", "c") if step % 3 else ("a", "c")
        used = [row for name, row in zip("abc", rows, strict=True) if name in names]
        g = Gradients(
            own,
            rows=torch.stack(used),
            names=names,
            left_out={} if "b" in names else {"b": "no answer"},
        )
        direction, state = rule(g, state)
        assert bool(direction.isfinite().all())
    counts = dict(zip(state["names"], state["counts"].diag().tolist(), strict=True))
    # steps in which it answered, after one in which it did
    assert counts == {"a": 199, "c": 199, "b": 66}
    assert weights_in(state)["b"] > 0
    gone = Gradients(
        own,
        rows=torch.empty(0, 3, dtype=torch.float64),
        names=(),
        left_out=dict.fromkeys("abc", "no answer"),
    )
    direction, after = rule(gone, state)
    assert torch.equal(direction, own)
    assert after["weight"] == 0.0


def test_resuming_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    peers = [user("a"), user("b", -TRUTH)]
    whole = run(peers, steps=60)
    run(peers, steps=60, out=tmp_path, hooks=[lambda step: step.step == 33])
    resumed = run(peers, steps=60, out=tmp_path, resume=True)
    assert torch.equal(Parameters(resumed.model).vector(), Parameters(whole.model).vector())
    assert torch.equal(resumed.state["tau"], whole.state["tau"])


def test_wrong_uses_are_named() -> None:
    with pytest.raises(KnobError, match="`horizon` must be a whole number, at least 1, got 0"):
        StreamAveraging(0)
    with pytest.raises(KnobError, match="every peer's gradient"):
        StreamAveraging(5)(Gradients(torch.zeros(2)), {"step": 0, "tau": {}})


def test_values_that_cannot_be_told_apart_get_their_mean() -> None:
    near = _pooled(torch.tensor([1.0, 3.0, 90.0]), torch.tensor([4.0, 4.0, 4.0]))
    assert near.tolist() == pytest.approx([1.8756, 2.1244, 90.0], abs=1e-4)
