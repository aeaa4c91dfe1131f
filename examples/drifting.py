"""A stream whose truth drifts for everybody, with peers that differ and come and go: correct their bias."""

import torch

import coterie

STEPS, PEERS, SIZE, NOISE, DRIFT = 3000, 10, 50, 10.0, 0.05
NAMES = tuple(f"peer {k}" for k in range(PEERS))
# from your truth, for good
apart = 0.5 * torch.randn(PEERS, SIZE, generator=torch.Generator().manual_seed(0))


def there(step: int) -> list[int]:
    """Return the peers that take part: the first leaves half-way, and the last comes then."""
    return [k for k in range(PEERS) if k != (0 if step >= STEPS // 2 else PEERS - 1)]


def tracked(rule: coterie.Rule, lr: float) -> float:
    """Return the mean loss above that of the drifting truth, over the last half."""
    random = torch.Generator().manual_seed(1)
    truth, x, total = torch.zeros(SIZE), torch.zeros(SIZE), 0.0
    state = rule.init(x)
    for step in range(STEPS):
        noise, present = NOISE * torch.randn(PEERS + 1, SIZE, generator=random), there(step)
        # gradients of ½‖x − (truth + apart)‖², with noise
        rows = (x - truth - apart + noise[1:])[present]
        left_out = {NAMES[k]: "away" for k in range(PEERS) if k not in present}
        names = tuple(NAMES[k] for k in present)
        g = coterie.Gradients(own=x - truth + noise[0], rows=rows, names=names, left_out=left_out)
        direction, state = rule(g, state)
        x = x - lr * direction
        truth = truth + DRIFT * torch.randn(SIZE, generator=random)
        total += float((x - truth).square().mean()) / 2 * (step >= STEPS // 2)
    return total / (STEPS - STEPS // 2)


def least(rule: coterie.Rule) -> tuple[float, float]:
    """Return the least loss over step sizes, and the step size."""
    return min((tracked(rule, lr), lr) for lr in (0.0025, 0.005, 0.01, 0.02))


for name, rule in {
    "alone": coterie.Alone(),
    "bias correction": coterie.BiasCorrection(0.9, 0.002),
}.items():
    loss, lr = least(rule)
    print(f"{name}: {loss:.3f} at its best step size, {lr}")
