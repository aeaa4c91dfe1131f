"""Whom the model listens to: each peer's share of the peers' weight, and why some have none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from coterie.mixture.contributions import Contribution
from coterie.recording.configuration import Configuration, counted
from coterie.recording.result import End
from coterie.reporting.page import Bar, Interval, Section, bar_chart, interval_chart
from coterie.reporting.verdict import asks_nobody, serves_alone, weight_of_peers

SMALL = 0.001
"""A share that is smaller is not told in numbers."""
NAMED = 5
"""How many peers without weight a line of text names; beyond one more, the rest is counted."""
BARS = 14
"""How many peers a chart shows; beyond one more, the rest is added up."""


@dataclass(frozen=True)
class PeerShare:
    """A peer, its share of the peers' weight, and why it is left out or was at times."""

    name: str
    share: float
    reason: str = ""


def peer_shares(configuration: Configuration, end: End) -> list[PeerShare]:
    """Return all peers, those with most weight first.

    Nobody has any where the model trained alone is served.
    """
    nobody = asks_nobody(configuration) or serves_alone(end)
    shares = {} if nobody else {name: share for name, share in end.tau.items() if share}
    names = sorted(configuration.peers, key=lambda name: -shares.get(name, 0.0))
    return [
        PeerShare(name, shares.get(name, 0.0), _reason(name, configuration, end, name in shares))
        for name in names
    ]


def weighs(configuration: Configuration, end: End) -> bool:
    """Say whether it is known whom the model listens to.

    Methods have no weights, nor has a rule from the start.
    """
    return bool(end.tau) or asks_nobody(configuration) or serves_alone(end)


def _reason(name: str, configuration: Configuration, end: End, listened: bool) -> str:
    """Say why a peer has no weight, or when it was left out; "" where nothing is to be said."""
    missed = ", ".join(
        f"{why} in {counted(count, 'step')}" for why, count in end.left_out.get(name, {}).items()
    )
    if listened:
        when = ": its weight is of the steps in which it was there"
        often = "in most steps" if _absent(name, end) > max(10, end.step / 2) else "at times"
        return missed and f"left out {often}: {missed}{when if often != 'at times' else ''}"
    reasons = {
        "not asked": asks_nobody(configuration),
        "the model trained alone is served": serves_alone(end),
        missed: missed,
        str(configuration.choice.get("left_out", {}).get(name)): (
            name in configuration.choice.get("left_out", {})
        ),
        "no weights are known for this rule": not end.tau,
        "the own examples did not ask for it": end.account,
    }
    return next((reason for reason, holds in reasons.items() if holds), "by the rule's knobs")


def whom_section(configuration: Configuration, end: End) -> Section:
    """Return bars of whom the model listens to, or that it gives no weights."""
    title = "Whom the model listens to"
    if not weighs(configuration, end):
        why = (
            f"{configuration.rule} does not say how much it listens to each peer: it gives them no"
            " weights."
        )
        return Section(title, [why])
    what = "Shares of the weight that the peers have together, in the model served."
    asked = weight_of_peers(end)
    if asked is not None and not serves_alone(end):
        what += (
            f" Models that follow peers have {_share(asked)} of the weight in it, those of the own"
            f" rows alone {_share(1 - asked)}."
        )
    return Section(title, [what], charts=[whom_chart(configuration, end)])


def whom_chart(configuration: Configuration, end: End) -> str:
    """Return bars of whom the model listens to.

    Peers that are left out come last, with the reason.
    """
    peers = peer_shares(configuration, end)
    shown = peers if len(peers) <= BARS + 1 else peers[:BARS]
    bars = [Bar(peer.name, peer.share, _share(peer.share), peer.reason) for peer in shown]
    if rest := peers[len(shown) :]:
        share = sum(peer.share for peer in rest)
        bars.append(Bar(f"{len(rest)} more", share, _share(share)))
    return bar_chart(bars, "whom the model listens to: each peer's share of the peers' weight")


def contributed_section(contributions: Mapping[str, Contribution]) -> Section:
    """Return what each peer adds to the model, with intervals of 95 %."""
    charts = []
    for name, title in (
        ("shapley", "in the mean over orders in which peers could have come (Shapley)"),
        ("leave_one_out", "beside all the others (leave-one-out)"),
    ):
        intervals = []
        for peer, one in contributions.items():
            estimate = getattr(one, name)
            low, high = estimate.interval
            clear = True if low > 0 else False if high < 0 else None
            ends = f"{estimate.value:+.3g} ({low:+.3g} to {high:+.3g})"
            value, error, _ = estimate
            intervals.append(Interval(peer, value, error, ends, clear, estimate.interval))
        intervals.sort(key=lambda one: -one.value)
        charts.append(f"<h3>{escape(title)}</h3>{interval_chart(intervals, title)}")
    text = [
        "By how much your loss is lower with a peer, on own rows by models that did not see them."
        " What peers add in the mean over orders sums to what all of them give together; of two"
        " that can replace each other, neither adds much beside all the others. Lines are intervals"
        " of 95 %.",
        "It is a peer's worth to you among these others, for this model: no cause, no price, and"
        " not how good its rows are. Nobody is told but who reads this page; a peer that is told"
        " its value may learn of your rows.",
    ]
    return Section("What each peer adds", text, charts=charts)


def listened_to(configuration: Configuration, end: End) -> str:
    """Name the peers with most weight, where weights differ, and those with none.

    "" where all are alike.
    """
    peers = peer_shares(configuration, end)
    weighted, without = (
        [peer for peer in peers if bool(peer.share) is wanted] for wanted in (True, False)
    )
    if not weighted:
        return ""
    parts = []
    if weighted[0].share > 1.01 * weighted[-1].share or len(weighted) == 1 < len(peers):
        parts.append(
            "most weight among peers: "
            + ", ".join(f"{peer.name} {peer.share:.2g}{_where(peer, end)}" for peer in weighted[:3])
        )
    if without:
        parts.append(f"no weight: {_named([peer.name for peer in without])}")
    return "; ".join(parts)


def _absent(name: str, end: End) -> int:
    """Return in how many steps a peer was left out."""
    return int(sum(end.left_out.get(name, {}).values()))


def _where(peer: PeerShare, end: End) -> str:
    """Say of the weight of a peer that was left out in most steps in which it had it."""
    absent = _absent(peer.name, end)
    there = counted(max(0, end.step - absent), "step")
    return f" (in the {there} in which it was there)" if absent > max(10, end.step / 2) else ""


def _share(share: float) -> str:
    return "none" if not share else f"{share:.1%}" if share >= SMALL else f"below {SMALL:.1%}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED + 1 else ""
    return ", ".join(names[: NAMED if more else None]) + more
