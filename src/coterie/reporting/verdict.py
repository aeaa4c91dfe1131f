"""The verdict: whether collaboration helped, by how much, and who had weight."""

from coterie.recording.record import Record

NAMED = 5
"""How many peers without weight are named; beyond one more, the rest is counted."""


def verdict(record: Record) -> str:
    """Say whether collaboration helped, and name the peers with most weight and with none.

    The guard's comparison on held-out examples decides, else the account of adaptive averaging, where there is one.
    """
    return _helped(record) + _who(record)


def verdict_on_test_set(metric: str, difference: float, error: float, examples: int) -> str:
    """Say whether collaboration helped on the test set, where a model was also trained alone.

    The difference is the metric (of accuracy more is better, of any other less) of the collaborative model, less
    that of the one trained alone; its standard error is paired by example.

    Example:
        >>> verdict_on_test_set("accuracy", 0.05, 0.01, 200)
        'Collaboration helped: accuracy +0.05 ± 0.01 against Alone (one standard error, paired).'
    """
    gain = difference if metric == "accuracy" else -difference
    word = "helped" if gain > 0 else "hurt"
    if not abs(gain) > 2 * error:
        word = f"made no difference that {examples} test examples could show"
    numbers = f"{metric} {difference:+.4g} ± {error:.2g}"
    return f"Collaboration {word}: {numbers} against Alone (one standard error, paired)."


def _helped(record: Record) -> str:
    configuration, guard = record.configuration, record.end.guard
    if guard is not None:
        which = "trained with peers" if guard.served == "collaborative" else "trained alone"
        return (
            f"{_clear(guard.difference, guard.error)}: validation loss {guard.difference:+.3g} ± {guard.error:.2g} "
            f"against alone ({configuration.me.validation} examples, one standard error, paired); "
            f"the model {which} is served"
        )
    account = record.end.account
    if account:
        clear = f"{_clear(account['difference'], account['error'])}: " if "difference" in account else ""
        return f"{clear}{account['sentence']}"
    if configuration.alone:
        return "trained alone"
    return f"whether collaboration helped is not known: guard {configuration.guard}"


def _clear(difference: float, error: float) -> str:
    """Say in words what a difference in loss, collaborative less alone, shows beyond two standard errors."""
    word = "helped" if difference < -2 * error else "hurt" if difference > 2 * error else "made no clear difference"
    return f"collaboration {word}"


def _who(record: Record) -> str:
    """Name the peers with most weight, where weights differ, and those with none."""
    tau, names = record.end.tau, list(record.configuration.peers)
    if not tau:
        return ""
    most = sorted(tau, key=lambda name: tau[name], reverse=True)[:3]
    without = [name for name in names if tau.get(name, 0.0) < 0.001]
    shares = [tau[name] for name in tau if name not in without]
    text = ""
    if max(shares) > 1.01 * min(shares) or len(shares) == 1 < len(names):
        text = "; most weight among peers: " + ", ".join(f"{name} {tau[name]:.2g}" for name in most if tau[name])
    if without:
        more = f" and {len(without) - NAMED} more" if len(without) > NAMED + 1 else ""
        text += f"; left out: {', '.join(without[: NAMED if more else None])}{more}"
    return text
