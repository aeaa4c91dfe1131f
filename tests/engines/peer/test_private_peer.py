"""A private peer: what it gives, what it costs, and that nothing beyond its ε is given, whatever happens."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import killed_ledgers
from tests.support.processes import PATIENCE, Alone, ended, forked, torch_distributed
from torch import Tensor, nn
from torch.utils.data import Dataset

import coterie
from coterie.engines.engine import LocalWork, TellsPromises
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ghost_norms import MARGIN
from coterie.engines.peer.ledger import Ledger, Spending
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.engines.processes.engine import serve
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import answer_message
from coterie.engines.remote.sites import LocalSites
from coterie.errors import CoterieError, DataError, FileError, KnobError, ModelError, UserCodeError
from coterie.privacy import Privacy
from coterie.privacy.accountant import Budget, Event, epsilon_of

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: the extra `privacy`")
N, WIDTH, DELTA = 40, 3, 1e-3
FULL = Event(1.0, 8.0)
LOSS = nn.functional.mse_loss


def user(n: int = N) -> coterie.User:
    generator = torch.Generator().manual_seed(0)
    return coterie.User(
        "a", torch.randn(n, WIDTH, generator=generator), torch.randn(n, 1, generator=generator)
    )


def peer(log: Path | None, privacy: Privacy | None = None, caps: Caps | None = None) -> Peer:
    """Return a peer whose ε allows some gradients of all its examples."""
    torch.manual_seed(0)
    return Peer(
        user(),
        Passes(nn.Linear(WIDTH, 1), LOSS),
        caps,
        log,
        privacy=privacy or Privacy(1.5, DELTA, 1.0, 8.0),
    )


def request(points: int = 1, **changes: Any) -> Request:
    return Request(
        torch.zeros(points, WIDTH + 1),
        step=0,
        seed=0,
        batch_size=changes.pop("batch_size", N),
        **changes,
    )


def allowed() -> int:
    """Return how many gradients of all examples the peers of these tests may give."""
    return Budget(1.5, DELTA).most({}, FULL, at_least=1000)


class Looking(nn.Module):
    """A model that looks at a number, as `vmap` does not let it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) if float(inputs.sum()) < 1e9 else inputs


class Dropping(Looking):
    """The same, with dropout."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(inputs, 0.5, self.training))


class Renormed(nn.Module):
    """A model that changes its weights where it reads them, and reads them in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, 4, max_norm=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        read = self.embedding(inputs.argmax(1))
        output: Tensor = (read @ self.embedding.weight.T).sum(1, keepdim=True)
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 1),
    "layers": lambda: nn.Sequential(
        nn.Linear(WIDTH, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)
    ),
    "fixed statistics": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH).eval(), nn.Linear(WIDTH, 1)),
    "not mapped": Looking,
}


@pytest.mark.parametrize("name", MODELS)
def test_it_gives_the_clipped_mean_and_the_stated_noise(name: str) -> None:
    """With all examples in the sample, what is random is the noise alone."""
    torch.manual_seed(1)
    model, clip = MODELS[name](), 0.7
    passes, held, n = Passes(model, LOSS), user(10), 10
    private = PrivateGradients(held, passes, Privacy(1.0, DELTA, clip, 2.0), None)
    x = passes.parameters.vector()
    given = torch.stack([private.gradient(x, event=Event(1.0, 2.0)) for _ in range(100)])
    total = torch.zeros_like(x)
    for index in range(n):
        inputs, targets = held.take(torch.tensor([index]), seed=0, step=0)
        gradient = torch.autograd.grad(
            LOSS(model(inputs), targets), list(passes.parameters.named.values())
        )
        row = torch.cat([part.flatten() for part in gradient])
        total += row * min(1.0, clip / float(row.norm()))
    deviation = 2.0 * clip / n
    assert float((given.mean(0) - total / n).abs().max()) < 5 * deviation / math.sqrt(100)
    assert float((given - given.mean(0)).std()) == pytest.approx(deviation, rel=0.2)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 1)), Dropping, Renormed],
    ids=["dropout", "by hand", "renormed"],
)
def test_an_example_adds_no_more_than_the_clip_whatever_it_draws_or_changes(
    make: Callable[[], nn.Module],
) -> None:
    """Who knows the state of the generators must not see the others' dropout move when an example joins them."""
    torch.manual_seed(1)
    private = PrivateGradients(user(), Passes(make(), LOSS), Privacy(9.0, DELTA, 1.0, 1.0), None)
    x, totals = private.passes.parameters.vector(), []
    for chosen in (torch.arange(N), torch.arange(1, N)):
        torch.manual_seed(0)
        totals.append(private._clipped(x.clone(), chosen, None, 0, 0).double())
    assert 0.1 < float((totals[0] - totals[1]).norm()) <= 1 + 1e-6


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """A data set that draws, and that cannot read one of its items."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 4:
            raise ValueError("no such file")
        return torch.full((WIDTH,), 0.01 * index) + torch.randn(WIDTH), torch.ones(1)


def test_a_data_set_that_draws_is_taken_and_no_item_moves_the_draws_of_another() -> None:
    held = coterie.User.from_dataset("a", Jittered())
    private = PrivateGradients(
        held, Passes(nn.Linear(WIDTH, 1), LOSS), Privacy(9.0, DELTA, 0.1, 1.0), None
    )
    x = torch.ones(WIDTH + 1)
    sums = [private._clipped(x, torch.arange(n, N), None, 0, 0) for n in (0, 1)]
    assert 0.05 < float((sums[0] - sums[1]).norm()) <= 0.1 + 1e-6


def test_dropout_differs_from_step_to_step() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 1))
    private = PrivateGradients(user(), Passes(model, LOSS), Privacy(9.0, DELTA, 1.0, 1.0), None)
    x = private.passes.parameters.vector()
    first, second, again = (
        private._clipped(x, torch.arange(N), None, 0, step) for step in (0, 1, 0)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_mean_over_samples_is_the_mean_over_examples() -> None:
    private = PrivateGradients(
        user(), Passes(nn.Linear(WIDTH, 1), LOSS), Privacy(9.0, DELTA, 100.0, 0.1), None
    )
    x = torch.zeros(WIDTH + 1)
    given = torch.stack([private.gradient(x, event=Event(0.25, 0.1)) for _ in range(200)])
    exact = Passes(nn.Linear(WIDTH, 1), LOSS).single(
        x, *user().take(torch.arange(N), seed=0, step=0)
    )[0]
    error = (given.mean(0) - exact) / (given.std(0) / math.sqrt(200))
    assert float(error.abs().max()) < 5


def test_what_was_spent_is_the_accountants_and_outlives_the_peer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = peer(log)
    assert first.epsilon == 0
    assert first.answer(request()).gradients is not None
    assert first.answer(request(3, batch_size=N // 4)).gradients is not None
    work = LocalWork(count=2, lr=0.1)
    assert first.answer(request(2, batch_size=N // 4, work=work)).gradients is not None
    events = {FULL: 1, Event(0.25, 8.0): 3 + 2 * 2}
    assert first.ledger.spent == events
    assert first.epsilon == peer(log).epsilon == epsilon_of(events, DELTA) > 0
    line = json.loads(log.read_text().splitlines()[1])
    assert (line["gradients"], line["rate"], line["noise"]) == (3, 0.25, 8.0)


def test_a_request_over_the_budget_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    site, most = peer(tmp_path / "log"), allowed()
    assert most > 5
    while site.ledger.given < most:
        assert site.answer(request()).gradients is not None
    spent = site.epsilon
    refused = site.answer(request()).refused
    assert refused == "1 more gradients would exceed its ε = 1.5"
    assert spent is not None
    assert site.epsilon == spent <= 1.5 < epsilon_of({FULL: most + 1}, DELTA)


def test_what_is_left_is_what_epsilon_allows_too(tmp_path: Path) -> None:
    site, most = peer(tmp_path / "log"), allowed()
    assert site.terms()["left"] is None
    assert site.terms(N, 3)["left"] == 3
    assert site.terms(N, 9 * most)["left"] == most
    site.answer(request(4))
    terms = site.terms(N, 9 * most)
    assert (terms["left"], terms["willing"], terms["promise"]["spent"]) == (
        most - 4,
        True,
        site.epsilon,
    )
    capped = peer(tmp_path / "log", caps=Caps(gradients=6))
    assert capped.terms(N, 9 * most)["left"] == 2
    assert [site.terms(*bad)["left"] for bad in ((0, 1), ("1", 1), (True, 1), (N, 2**40))] == [
        None
    ] * 4
    while site.ledger.given < most:
        site.answer(request())
    assert (site.terms(N, 1)["left"], site.terms(N, 1)["willing"]) == (0, False)


def test_no_question_keeps_the_accountant_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User 0 may ask, for nothing, whether ε lasts for billions of gradients."""
    asked: list[int] = []

    def left(self: Spending, event: Event, wanted: int) -> int:
        asked.append(wanted)
        return wanted

    monkeypatch.setattr(Spending, "left", left)
    assert peer(tmp_path / "log").terms(1, 2**31 - 1)["left"] == 10**6
    assert asked == [10**6]


def test_neither_time_nor_sample_nor_error_leaves(tmp_path: Path) -> None:
    site = peer(tmp_path / "log")
    reply = site.answer(request())
    assert (reply.seconds, reply.examples) == (0.0, N)
    assert not torch.equal(site.answer(request()).gradients, site.answer(request()).gradients)  # type: ignore[arg-type]
    site._private.gradient = None  # type: ignore[method-assign,union-attr]
    message = {"points": np.zeros((1, WIDTH + 1)), "step": 0, "seed": 0, "batch_size": N}
    assert answer_message(site, "server", message) == {"refused": "it failed"}
    assert site.ledger.given == 4, "what was written down is spent"


def test_a_package_that_is_missing_is_told_before_anything_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in an answer does not leave: user 0 would see a peer that gives nothing, and nobody would know."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(
        CoterieError, match=r"cryptography is not installed; `pip install \"cryptography>="
    ):
        peer(tmp_path / "log")


def test_an_example_whose_gradient_is_not_finite_is_not_told(tmp_path: Path) -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (output.exp() * targets).mean()

    privacy = Privacy(1.5, DELTA, 1.0, 8.0)
    site = Peer(user(), Passes(nn.Linear(WIDTH, 1), loss), None, tmp_path / "log", privacy=privacy)
    given = site.answer(Request(torch.full((1, WIDTH + 1), 100.0), 0, 0, N)).gradients
    assert given is not None
    assert bool(given.isfinite().all())


# among the examples that the model is tried with, and not
@pytest.mark.parametrize("place", [0, N])
@pytest.mark.parametrize("layers", [[], [nn.Unflatten(1, (WIDTH,))]])  # by layer, and by example
@pytest.mark.parametrize("bad", ["class", "input"])
def test_an_example_that_does_not_pass_is_not_told(
    tmp_path: Path, layers: list[nn.Module], place: int, bad: str
) -> None:
    """A class that the model does not have is an error: whether it comes would tell that the example is there."""
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
    inputs, targets = (
        user(N + 1).take(torch.arange(N + 1), seed=0, step=0)[0],
        torch.arange(N + 1) % 3,
    )
    if bad == "class":
        targets[place] = 3
    else:
        inputs[place] = math.nan
    held, privacy = coterie.User("a", inputs, targets), Privacy(1.5, DELTA, 1.0, 8.0)
    site = Peer(
        held, Passes(model, nn.functional.cross_entropy), None, tmp_path / "log", privacy=privacy
    )
    assert site.answer(Request(torch.zeros(1, 12), 0, 0, N + 1)).refused is None
    x, private = torch.zeros(12), site._private
    assert private is not None
    assert private._by_layer is not bool(layers)
    others, everyone = torch.arange(N + 1), torch.arange(N + 1)
    others = others[others != place]
    sums = [private._clipped(x, some, None, 0, 0).double() for some in (others, everyone)]
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


def test_examples_are_clipped_alike_however_they_are_passed() -> None:
    """Which way serves may hang on one example; the sum of the others must not."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
    private = PrivateGradients(user(), Passes(model, LOSS), Privacy(9.0, DELTA, 0.1, 1.0), None)
    assert private._by_layer
    x, sums = private.passes.parameters.vector(), []
    for way in ((True, True), (False, True), (False, False)):
        private._by_layer, private._mapped = way
        sums.append(private._clipped(x, torch.arange(N), None, 0, 0).double())
    for other in sums[1:]:
        assert float((sums[0] - other).norm()) < 1e-5 * N * 0.1


def test_a_model_that_passes_no_example_is_told() -> None:
    # it wants more than one number to normalise
    alone = nn.Sequential(nn.Linear(WIDTH, 1), nn.GroupNorm(1, 1))
    with pytest.raises(UserCodeError, match="given one example, raised ValueError"):
        PrivateGradients(user(), Passes(alone, LOSS), Privacy(9.0, DELTA, 0.1, 1.0), None)
    model = nn.Linear(WIDTH, 1)
    nn.init.constant_(model.weight, math.inf)
    with pytest.raises(ModelError, match="no example has a finite gradient"):
        PrivateGradients(user(), Passes(model, LOSS), Privacy(9.0, DELTA, 0.1, 1.0), None)


def test_where_one_gradient_is_not_finite_the_others_count() -> None:
    inputs = user(4).examples.take(torch.arange(4))[0]
    inputs[0] = 1e15  # whose squares are too large
    held = coterie.User("a", inputs, torch.zeros(4, 1))
    private = PrivateGradients(
        user(4), Passes(nn.Linear(WIDTH, 1), LOSS), Privacy(1.0, DELTA, 1.0, 1.0), None
    )
    assert private._by_layer
    x, private.user = torch.full((WIDTH + 1,), 1e15), held
    rows = torch.stack(
        [private.passes.single(x, inputs[[k]], torch.zeros(1, 1))[0] for k in range(1, 4)]
    )
    total = private._clipped(x, torch.arange(4), None, 0, 0)
    expected = (rows.double() / rows.double().norm(dim=1, keepdim=True)).sum(0)
    torch.testing.assert_close(total, expected, rtol=2 * MARGIN, atol=0)


def test_a_log_with_plain_gradients_promises_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    Peer(user(), Passes(nn.Linear(WIDTH, 1), LOSS), None, log).answer(request())
    site = peer(log)
    assert site.epsilon == math.inf
    assert "without noise" in str(site.answer(request()).refused)


def test_the_cap_on_gradients_sets_the_noise(tmp_path: Path) -> None:
    site = peer(tmp_path / "log", Privacy(2.0, DELTA, 1.0), Caps(gradients=6))
    assert site.answer(request(5)).gradients is not None
    assert "1 gradients left" in str(site.answer(request(2)).refused)
    assert site.answer(request()).gradients is not None
    assert site.epsilon is not None
    assert 1.9 < site.epsilon <= 2.0
    assert site.left == 0


def test_user_0_cannot_tire_the_accountant(tmp_path: Path) -> None:
    site = peer(tmp_path / "log", Privacy(50.0, DELTA, 1.0, 20.0))
    refused = [site.answer(request(batch_size=size)).refused for size in range(1, 19)]
    assert refused[:16] == [None] * 16
    assert "16 sizes" in str(refused[16])


def test_examples_that_come_and_go_do_not_end_what_is_given(tmp_path: Path) -> None:
    """Each number of examples is another rate; of more than 16 the nearest count as the one that costs more."""
    before = Counter({Event((10 + k) / N, 40.0): 1 for k in range(20)})
    for event in before:
        assert Ledger(tmp_path / "log").spend(event, 1, lambda: None) is None
    site = peer(tmp_path / "log", Privacy(0.5, DELTA, 1.0, 40.0))
    exact = epsilon_of(before, DELTA)
    assert site.epsilon is not None
    assert exact < site.epsilon < 1.05 * exact
    assert site.answer(request()).refused is None
    tight = peer(tmp_path / "log", Privacy(site.epsilon + 1e-6, DELTA, 1.0, 40.0))
    assert "would exceed its ε" in str(tight.answer(request()).refused)


def test_user_0_cannot_have_the_noise_of_ever_other_batches_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where noise follows from ε, to find it takes seconds; a question costs user 0 nothing."""
    site, looked_for = (
        peer(tmp_path / "log", Privacy(9.0, DELTA, 1.0), Caps(gradients=500)),
        set[float](),
    )

    def noise_at(self: Privacy, rate: float, gradients: int | None) -> float:
        looked_for.add(rate)
        return 20.0

    monkeypatch.setattr(Privacy, "noise_at", noise_at)
    left = [site.terms(size, 1)["left"] for size in range(1, N)]
    assert left == [1] * 16 + [0] * (N - 17)
    assert "16 sizes" in str(site.answer(request(batch_size=30)).refused)
    assert site.answer(request(batch_size=3)).gradients is not None
    assert site.noise_terms(30) == {}
    assert len(looked_for) == 16


def test_batches_of_the_size_that_was_promised_and_of_no_other(tmp_path: Path) -> None:
    """User 0 could choose sizes by what it has seen, for which what is added up does not hold."""
    site = peer(tmp_path / "log", Privacy(1.5, DELTA, 1.0, 8.0, batch_size=N // 4))
    assert site.answer(request(batch_size=N // 4)).gradients is not None
    for other in (1, N // 4 + 1, N):
        assert (
            site.answer(request(batch_size=other)).refused
            == "it gives gradients of batches of 10 only"
        )
        assert (site.terms(other, 1)["left"], site.terms(other, 1)["batch_size"]) == (0, N // 4)
    assert site.ledger.spent == {Event(0.25, 8.0): 1}
    assert site.terms(N // 4, 3)["left"] == 3
    assert "in batches of 10" in site.terms()["promises"]
    with pytest.raises(KnobError, match="`batch_size`"):
        Privacy(1.5, DELTA, 1.0, batch_size=0)


class TestDamage:
    """A log that is not as it was written, and a clock that goes back: nothing is given."""

    def test_an_edited_or_truncated_log_is_told(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        site = peer(log)
        for _ in range(3):
            site.answer(request())
        whole = log.read_text()
        lines = whole.splitlines(keepends=True)
        fewer = whole.replace('"gradients": 1', '"gradients": 0', 1)
        # as if most examples had not been in the sample
        sampled = whole.replace('"rate": 1.0', '"rate": 0.1', 1)
        for damaged in (fewer, sampled, lines[0], "".join(lines[1:]), ""):
            log.write_text(damaged)
            with pytest.raises(FileError, match="damaged"):
                peer(log)
        log.unlink()
        # at once: nothing may say that ε = 0 was spent
        with pytest.raises(FileError, match="damaged"):
            peer(log)

    @pytest.mark.parametrize(
        "line",
        [
            {"gradients": -3},
            {"gradients": math.inf},
            {"gradients": 1, "rate": 2, "noise": 1.0},
            {"gradients": 1, "noise": 1.0},
        ],
    )
    def test_a_line_that_cannot_be_is_told(self, line: dict[str, Any], tmp_path: Path) -> None:
        Ledger(tmp_path / "log").note(**line)
        with pytest.raises(FileError, match="cannot be"):
            _ = Ledger(tmp_path / "log").given

    def test_a_clock_that_goes_back_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = peer(tmp_path / "log")
        site.answer(request())
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 3600)
        for again in (
            site,
            site,
            peer(tmp_path / "log"),
        ):  # that a refusal was noted since does not excuse it
            assert "clock" in str(again.answer(request()).refused)
        monkeypatch.undo()
        assert site.answer(request()).gradients is not None


class TestRefusal:
    """What cannot be private is refused where the peer is made."""

    def test_without_a_log(self) -> None:
        with pytest.raises(KnobError, match="`log`"):
            peer(None)

    def test_a_log_where_there_is_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="cannot be written"):
            peer(tmp_path / "none" / "log")

    def test_a_cap_on_the_norm(self, tmp_path: Path) -> None:
        with pytest.raises(KnobError, match="`norm`"):
            peer(tmp_path / "log", caps=Caps(norm=1.0))

    def test_a_batch_size_that_the_caps_refuse(self, tmp_path: Path) -> None:
        promise = Privacy(1.0, DELTA, 1.0, 1.0, batch_size=4)
        with pytest.raises(
            KnobError, match="`batch_size` must be at least `examples` of the caps, 5, got 4"
        ):
            peer(tmp_path / "log", promise, Caps(examples=5))
        assert (
            peer(tmp_path / "log", promise, Caps(examples=4))
            .answer(request(batch_size=4))
            .gradients
            is not None
        )

    def test_a_delta_of_one_over_n(self, tmp_path: Path) -> None:
        with pytest.raises(KnobError, match="`delta`"):
            peer(tmp_path / "log", Privacy(1.0, 1 / N, 1.0, 1.0))

    def test_a_stream(self) -> None:
        stream = coterie.User.stream(
            "a", lambda size, seed, step: (torch.ones(size, 2), torch.ones(size, 1))
        )
        with pytest.raises(DataError, match="stream"):
            PrivateGradients(
                stream, Passes(nn.Linear(2, 1), LOSS), Privacy(1.0, DELTA, 1.0, 1.0), None
            )

    @pytest.mark.parametrize(
        ("model", "loss", "said"),
        [
            (nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)), LOSS, "BatchNorm1d"),
            (nn.Linear(WIDTH, 1), nn.MSELoss(reduction="sum"), "not the mean"),
            (
                nn.Linear(WIDTH, 1),
                lambda output, y: LOSS(output - output.mean(), y),
                "not the mean",
            ),
        ],
    )
    def test_examples_that_mix(self, model: nn.Module, loss: Any, said: str) -> None:
        with pytest.raises(ModelError, match=said):
            PrivateGradients(user(), Passes(model, loss), Privacy(1.0, DELTA, 1.0, 1.0), None)


class Following(nn.Module):
    """A model whose frozen codes follow its inputs, unseen by autograd, or a loss with a memory."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.linear, zero = nn.Linear(WIDTH, 1), torch.zeros(WIDTH)
        self.seen = nn.Parameter(zero, requires_grad=False) if frozen else nn.Buffer(zero)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None:
            self.seen.add_(inputs.detach().mean())
            return LOSS(inputs - self.seen.mean(), targets)
        self.seen.data.add_(inputs[inputs.abs().amax(1) > 50].sum(0))
        output: Tensor = self.linear(inputs - self.seen)
        return output


@pytest.mark.parametrize(
    "make", [Renormed, lambda: Following(frozen=True)], ids=["renormed", "following"]
)
def test_what_an_example_changes_in_frozen_parameters_is_nothing_to_the_next(
    make: Callable[[], nn.Module],
) -> None:
    """Nor does it matter when: user 0 may send frozen parameters that the model begins to change."""
    torch.manual_seed(1)
    model = nn.Sequential(make(), nn.Linear(1, 1))
    for name, parameter in model.named_parameters():
        if "embedding" in name or "seen" in name:
            parameter.requires_grad = False
            parameter.mul_(1e-3)
    private = PrivateGradients(user(), Passes(model, LOSS), Privacy(9.0, DELTA, 1.0, 1.0), None)
    private.user.examples.inputs[0] *= 100  # type: ignore[attr-defined]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.mul_(1e4)
    before = [parameter.clone() for parameter in frozen]
    x = private.passes.parameters.vector()
    totals = [
        private._clipped(x, chosen, None, 0, 0) for chosen in (torch.arange(1, N), torch.arange(N))
    ]
    assert 0.1 < float((totals[0] - totals[1]).norm()) <= 1
    assert all(torch.equal(*pair) for pair in zip(before, frozen, strict=True))


def test_a_loss_that_changes_its_own_tensors_is_refused() -> None:
    """An example would act on those after it, and on those of every later gradient."""
    with pytest.raises(ModelError, match="the loss changes its own 'seen'"):
        PrivateGradients(
            user(),
            Passes(nn.Linear(WIDTH, 1), Following(frozen=False)),
            Privacy(9.0, DELTA, 1.0, 1.0),
            None,
        )


def test_examples_that_mix_are_refused_where_sums_have_no_fixed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two passes of a GPU differ in their last digits, as if the model drew random numbers."""
    plain = Passes.single

    def unsteady(self: Passes, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        gradient, loss = plain(self, x, *given)
        return gradient + 1e-6 * gradient.norm() * torch.randn_like(gradient), loss

    monkeypatch.setattr(Passes, "single", unsteady)
    model, mixing = nn.Linear(WIDTH, 1), nn.MSELoss(reduction="sum")
    with pytest.raises(ModelError, match="not the mean"):
        PrivateGradients(user(), Passes(model, mixing), Privacy(1.0, DELTA, 1.0, 1.0), None)
    PrivateGradients(user(), Passes(model, LOSS), Privacy(1.0, DELTA, 1.0, 1.0), None)


def test_sums_by_layer_are_compared_in_the_precision_they_are_computed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's convolutions are in TensorFloat32 otherwise: sums differ by hundredths, and no layer would do."""
    plain, allowed = Passes.each_example, []

    def rows(self: Passes, *given: Any) -> Tensor:
        allowed.append(torch.backends.cudnn.allow_tf32)
        return plain(self, *given)

    monkeypatch.setattr(Passes, "each_example", rows)
    before = torch.backends.cudnn.allow_tf32
    PrivateGradients(user(), Passes(nn.Linear(WIDTH, 1), LOSS), Privacy(1.0, DELTA, 1.0, 1.0), None)
    assert allowed
    assert not any(allowed)
    assert torch.backends.cudnn.allow_tf32 is before


def test_a_kill_between_log_and_answer_is_counted(tmp_path: Path) -> None:
    def killed_after_the_log() -> None:
        site = peer(tmp_path / "log")
        site._gradients = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        site.answer(request())

    assert ended(forked(killed_after_the_log)) == -signal.SIGKILL
    assert peer(tmp_path / "log").ledger.spent == {FULL: 1}


def test_kills_never_lose_what_was_spent(tmp_path: Path) -> None:
    """In full, 200 kills, in `benchmarks/campaign.py --parts ledgers`."""
    outcome = killed_ledgers.killed(tmp_path / "log", kills=6, seed=0, noise=16.0)
    assert outcome.bad == 0
    assert outcome.left <= outcome.counted == outcome.most > 10


def test_processes_on_one_log_never_overspend(tmp_path: Path) -> None:
    log, most = tmp_path / "log", allowed()

    def ask() -> None:
        site = peer(log)
        given = 0
        while site.answer(request()).gradients is not None:
            given += 1
        (tmp_path / f"gave {given} {os.getpid()}").touch()

    assert [ended(child) for child in [forked(ask) for _ in range(2)]] == [0, 0]
    assert (
        sum(int(path.name.split()[1]) for path in tmp_path.glob("gave *"))
        == most
        == Ledger(log).given
    )


def test_it_answers_as_a_site(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, 1)
    sites = LocalSites({"a": peer(tmp_path / "log")})
    me = coterie.User("me", torch.randn(N, WIDTH), torch.randn(N, 1))
    engine = Remote(model, LOSS, me, sites=sites, names=["a"], batch_size=N)
    assert sites.responders["a"].peer.answer(request()).gradients is not None
    assert engine.gradients(torch.zeros(WIDTH + 1), 0, {"a": 1.0}).peers is not None
    assert sites.responders["a"].peer.ledger.given == 2


def test_neither_an_error_nor_how_many_examples_there_are_leaves_a_private_worker(
    tmp_path: Path,
) -> None:
    """What it raises goes to user 0; what it promises holds for the text too."""
    targets = torch.arange(N) % 3
    targets[7] = 5
    stray = coterie.User("a", user().take(torch.arange(N), seed=0, step=0)[0], targets)
    run = {"batch_size": N, "seed": 0, "secure_sums": False, "constants": {}}
    others: Any = Alone({"run": run})
    given: dict[str, Any] = {"privacy": Privacy(9.0, DELTA, 1.0, 8.0), "log": tmp_path / "log"}
    loss, caps = nn.functional.cross_entropy, Caps(examples=16)
    with pytest.raises(ModelError, match="5"):
        serve(nn.Linear(WIDTH, 3), loss, stray, caps=caps, processes=others, **given)
    hello = others.said["hello"]
    assert (hello["refused"], hello["examples"], hello["data"]) == ("ModelError", 32, "private")


def test_it_answers_over_torch_distributed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    serving = functools.partial(
        serve, privacy=Privacy(9.0, DELTA, 1.0, 8.0), log=log, timeout=PATIENCE
    )
    me = coterie.User("me", torch.randn(N, WIDTH), torch.randn(N, 1))
    with torch_distributed([serving]) as make:
        engine = make(nn.Linear(WIDTH, 1), LOSS, me, [user()], batch_size=N, seed=0)
        given = [engine.gradients(torch.zeros(WIDTH + 1), 0, {"a": 1.0}).peers for _ in range(2)]
        described, traffic = engine.describe(), dict(engine.traffic())
        noise = engine.capabilities.noise
    assert not torch.equal(given[0], given[1])  # type: ignore[arg-type]
    assert described["data"].endswith(" private"), "no digest, by which a guess could be checked"
    assert traffic["a"].seconds_computing == 0
    assert Ledger(log).spent == {FULL: 2}
    assert noise == {"a": 8.0 / N}
    spent = epsilon_of({FULL: 2}, DELTA)
    assert isinstance(engine, TellsPromises)
    assert engine.promises() == {
        "a": {"epsilon": 9.0, "delta": DELTA, "clip": 1.0, "spent": spent, "noise": 8.0 / N}
    }
