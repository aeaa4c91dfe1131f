"""`coterie federate`: train with sites of other organisations, over NVFLARE."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from coterie.cli.options.groups import Command, grouped
from coterie.cli.options.registered import ID, KnobOptions, knobs_of
from coterie.data.table import ColumnSettings
from coterie.engines.peer import Peer
from coterie.errors import KnobError
from coterie.federation import kits, manifest, membership, supervision, workspace
from coterie.federation.doctor import certificates, examine, service_of, standing
from coterie.federation.kits import accepted, set_up
from coterie.federation.lead import rule_of
from coterie.federation.participants import responder_of
from coterie.federation.provisioning import Consortium
from coterie.federation.settings import (
    FILE,
    NO_SUMS,
    Data,
    LeadSettings,
    MessageSettings,
    Model,
    Training,
    members_of,
    site_settings,
)
from coterie.federation.watching import LOG, MemberWatch, NewLines, Screen, ServerWatch, SiteWatch
from coterie.methods import entry_of
from coterie.recording.configuration import StepSettings
from coterie.registry import Computed


@dataclass(frozen=True, kw_only=True)
class ConsortiumOptions:
    """The consortium.

    Args:
        folder: Folder to write: user 0's, with one for each site in it.
        site: The name of a site; repeat it.
        server: The host name by which sites reach user 0.
        me: The name of user 0.
        name: The name of the consortium.
        port: The server's port for sites.
        admin_port: The server's port for user 0's own commands.
        everyone: Every site trains a model of its own; the server passes messages on.
    """

    folder: Annotated[Path, Argument(rich_help_panel="Arguments")]
    site: list[str]
    server: str
    me: str = "user0"
    name: str = "coterie"
    port: int = 8002
    admin_port: int = 8003
    everyone: bool = False


@dataclass(frozen=True, kw_only=True)
class OwnTableOptions(ColumnSettings):
    """User 0's table.

    Args:
        data: User 0's table, a CSV or Parquet file with one example a row.
        drop: A column not to predict from, such as a name: the sites are told what is in the
            others. Repeat it.
    """

    data: Path
    drop: Annotated[list[str], Option(metavar="COLUMN")] = field(default_factory=list)
    ids: Annotated[str | None, ID] = None

    def columns(self) -> dict[str, Any]:
        """Return what the columns are for, as `from_table` takes it."""
        names = ("kind", "categorical", "dates", "drop", "ids")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class SettingsRuleOptions(KnobOptions):
    """The rule.

    Args:
        rule: The rule, one of {rules}; or a method, one of {methods}. auto: mixture, a linear
            model in closed form, where no option says how steps are taken, else adaptive.
    """

    rule: Annotated[str, Option(metavar="NAME")] = "auto"

    def settings(self, *, linear: bool = False) -> dict[str, Any]:
        """Return the rule as it is written to the settings.

        `linear`: whether "auto" may stand for the closed form.
        """
        bare = not self.knob and self.alpha is None and self.beta is None
        if self.rule == "auto":
            return replace(self, rule="mixture" if linear and bare else "adaptive").settings()
        knobs = knobs_of(entry_of(self.rule), self.knob, alpha=self.alpha, beta=self.beta)
        for name, value in knobs.items():
            if isinstance(value, Computed) or value is None:
                remedy = "import a rule of your own"
                raise KnobError(f"`--knob {name}` cannot be written to the settings; {remedy}")
        return {"rule": self.rule, "knobs": knobs}


@dataclass(frozen=True, kw_only=True)
class StepOptions(StepSettings):
    """The run.

    Args:
        model: linear, mlp, or module.path:factory, installed everywhere.
    """

    model: str = "linear"


@dataclass(frozen=True, kw_only=True)
class MessageOptions(MessageSettings):
    """Messages, and sites that do not answer.

    Args:
        secure_sums: See only the sum of the sites' gradients; for wga and bc.
    """

    secure_sums: bool = False


ABOUT = "Train with other organisations, over NVFLARE (`coterie\\[flare]`)."
federate = typer.Typer(name="federate", no_args_is_help=True, help=ABOUT)

Folder = Annotated[Path, Argument(help="User 0's folder.")]


@federate.command(cls=Command)
@grouped
def init(
    who: ConsortiumOptions,
    table: OwnTableOptions,
    rule: SettingsRuleOptions,
    run: StepOptions,
    messages: MessageOptions,
) -> None:
    """Write certificates and settings: user 0's folder, and in sites/ one folder to hand to each site.

    Example: coterie federate init trial --data mine.csv --target ill --server ml.example.org --site
        basel
    """
    if who.everyone and messages.secure_sums:
        raise KnobError(NO_SUMS)
    steps = {name: value for name, value in vars(run).items() if name != "model"}
    stepwise = any(steps[each.name] != each.default for each in fields(StepSettings))
    linear = run.model == "linear" and not (stepwise or who.everyone or messages.secure_sums)
    training = Training(**rule.settings(linear=linear), **steps, **vars(messages))
    named: dict[str, Any] = {"target": table.target, "own_examples": table.own_examples}
    own = Data(table=str(table.data.absolute()), **named, **table.form)
    settings = LeadSettings(who.me, tuple(who.site), own, Model(run.model), training)
    rule_of(settings)  # what cannot be built is told now
    members = (who.me, *who.site) if who.everyone else tuple(who.site)
    ports = (who.port, who.admin_port)
    consortium = Consortium(who.name, who.server, members, *ports, everyone=who.everyone)
    fingerprints = set_up(who.folder, consortium, settings, **table.columns())
    _print_next_steps(who, fingerprints)


def _print_next_steps(who: ConsortiumOptions, fingerprints: Mapping[str, str]) -> None:
    """Say which folder is for whom, how it is known to be the right one, and what comes next."""
    folder, mine = who.folder, f"{who.folder}/sites/{who.me}"
    if who.everyone:
        typer.echo(f"{mine}   your own: `coterie federate site {mine}`")
    else:
        typer.echo(f"{folder}/coterie.toml   what user 0 trains")
    for site, fingerprint in fingerprints.items():
        if site != who.me:
            _print_kit(folder, site, fingerprint)
    too = f" and coterie federate site {mine}" if who.everyone else ""
    begin = f"coterie federate run {folder}"
    typer.echo(f"next: coterie federate server {folder}{too}; with all sites there: {begin}")


@federate.command(cls=Command)
def server(folder: Folder) -> None:
    """Start user 0's server, and stay with it until Ctrl-C."""
    place = folder / "server"
    command = workspace.server_command(place)
    _print_certificates(folder)
    typer.echo(f"the server of {folder}; Ctrl-C ends it; NVFLARE's log: {place / LOG}")
    watch = ServerWatch(place, Screen(typer.echo))
    _end(workspace.run_process(command, place, lambda: watch), place / LOG)


SiteFolder = Annotated[Path, Argument(help="The site's folder.")]


@federate.command(cls=Command)
@grouped
def accept(
    folder: Annotated[Path, Argument()] = Path(),
    fingerprint: str | None = None,
    renews: Annotated[Path | None, Option(metavar="FOLDER")] = None,
) -> None:
    """Check the folder that user 0 has made for a site, and write the site's own settings to it.

    Example: coterie federate accept basel

    Args:
        folder: The site's folder.
        fingerprint: What user 0 has told you; shown and asked for if left out.
        renews: Your folder that has this kit's old certificates.
    """
    shown = manifest.fingerprint(folder)
    typer.echo(f"{folder} has the fingerprint {shown}")
    question = "Has user 0 told you the same, not in this folder?"
    if fingerprint is None and not typer.confirm(question):
        raise KnobError(f"{folder} is not accepted; ask user 0 for its fingerprint, by telephone")
    if renews is not None:
        membership.take_renewed(renews, folder, fingerprint or shown)
        typer.echo(f"{renews} has the new certificates; start `coterie federate site` again")
        return
    kit = kits.accept(folder, fingerprint or shown)
    who = f"{', '.join(kit.others)} plan" if kit.everyone else f"{kit.lead} plans"
    typer.echo(f"{who} to ask for at most {kit.asked}")
    then = f"`coterie federate check {folder}`"
    typer.echo(f"{folder / FILE} says what you give: edit it, then {then}")


@federate.command(cls=Command)
@grouped
def site(folder: Annotated[Path, Argument()] = Path(), service: bool = False) -> None:
    """Check a site's settings, connect to the server, and answer until Ctrl-C.

    Nothing in the folder is run.

    Args:
        folder: The site's folder.
        service: Write a systemd unit that does so, and end.
    """
    settings = site_settings(folder)
    kit = accepted(folder, settings.kit)
    _print_certificates(folder)
    if service:
        _print_site(folder)
        unit = service_of(folder)
        typer.echo(f"{unit}; for this user: systemctl --user enable --now {unit}")
        return
    place = workspace.site_workspace(folder, kit)
    typer.echo(f"Ctrl-C ends it; NVFLARE's log: {place / LOG}")
    log = NewLines(place / LOG)

    def watching() -> SiteWatch:
        _, peer = _print_site(folder)
        about = (folder, log, peer.caps, peer.ledger.given, Screen(typer.echo))
        if settings.training is None:
            return SiteWatch(*about)
        return MemberWatch(*about, steps=settings.training.steps)

    # it connects while the table is read, on which nothing depends that it does before a job comes
    _end(workspace.run_process(workspace.site_command(place, kit), place, watching), place / LOG)


def _print_certificates(folder: Path) -> None:
    """Say what keeps the other side from being believed, or soon will."""
    for finding in certificates(folder):
        if finding.remedy:
            typer.echo(str(finding), err=True)


def _end(status: int, log: Path) -> None:
    """End with the status of NVFLARE's process; tell where its reasons are."""
    if status:
        typer.echo(f"NVFLARE has ended with status {status}; the end of {log} says why", err=True)
    raise typer.Exit(status)


@federate.command(cls=Command)
def check(folder: SiteFolder = Path()) -> None:
    """Say what a site would give. Nothing is sent."""
    _print_site(folder)


def _print_site(folder: Path) -> tuple[Any, Any]:
    """Say what a site would give, and return the kit and the peer that would give it."""
    settings = site_settings(folder)
    kit = accepted(folder, settings.kit)
    responder = responder_of(folder)
    peer = responder.peer
    size = sum(tensor.numel() for tensor in peer.passes.model.state_dict().values())
    where = f"{kit.server}:{kit.port}"
    typer.echo(f"the kit is the one accepted, {settings.kit}; it connects to {where}")
    rows = "a stream of examples" if peer.user.is_stream else f"{len(peer.user)} examples"
    given = f"{peer.ledger.given} given before"
    typer.echo(f"{peer.user.name}: {rows}; gradients of {size} numbers; {given}")
    typer.echo(f"given at most: {peer.caps.in_words()}")
    if not kit.everyone:
        typer.echo(f"{kit.lead} plans to ask for at most {kit.asked}")
    if not kit.batch_size and peer.why_no_e_steps:
        remedy = f'ask {kit.lead} to name the rule "adaptive", which takes gradient steps'
        typer.echo(f"it answers no E-steps, {peer.why_no_e_steps}; {remedy}")
    if kit.everyone != (settings.training is not None):
        raise KnobError(
            f"{folder} must have `sites` and [training] where everyone trains, and only there; take"
            " them from what `federate accept` wrote"
        )
    if settings.training is not None:
        rule_of(settings.as_lead())  # what cannot be built is told now
        typer.echo(f"trained here: {settings.training.steps} steps by {settings.training.rule!r}")
        typer.echo(f"asked and answered: {', '.join(settings.sites)}")
        _print_key(peer)
        if unknown := [name for name in settings.sites if name not in settings.keys]:
            then = "the first key that the server passes on is taken"
            typer.echo(f"not under [keys]: {', '.join(unknown)}; {then}")
    promise = peer.promise(kit.batch_size) if kit.batch_size else None
    if settings.privacy is not None and promise is not None:
        typer.echo(f"promised: {settings.privacy.in_words()}; ε = {peer.epsilon:.3g} spent before")
        allowed = peer.of_planned(kit.batch_size, kit.gradients)
        planned = f"{kit.gradients} gradients of {kit.batch_size} rows that {kit.lead} plans"
        noise = f"with noise of {promise['noise']:.3g} on each number"
        typer.echo(f"of the {planned}, ε and the caps allow {allowed}, {noise}")
    if responder.only_sums:
        typer.echo(f"given only under masks: {responder.sums}")
        _print_key(peer)
    if size != kit.size:
        wanted = f"user 0's ({kit.model}) {kit.size}; name the same in [model]"
        raise KnobError(f"your model has {size} numbers, {wanted}")
    return kit, peer


def _print_key(peer: Peer) -> None:
    typer.echo(f"its key has the fingerprint {peer.identity.fingerprint}, to tell the other sites")


@federate.command(cls=Command)
@grouped
def run(folder: Annotated[Path, Argument()], resume: bool = False, wait: float = 60.0) -> None:
    """Train: submit the job to user 0's server and follow it; the model and the record land in FOLDER/run.

    Where everyone trains, they land at each site, in `run` in its folder. Ctrl-C ends the job;
    --resume goes on.

    Args:
        folder: User 0's folder.
        resume: Go on with the run that is there.
        wait: Seconds to wait for the server and the sites.
    """
    _follow(folder, resume=resume, wait=wait)


@federate.command(cls=Command)
def doctor(folder: SiteFolder = Path()) -> None:
    """Look for what would go wrong at a site, or at user 0: a line each, with the remedy."""
    ill = False
    for finding in examine(folder):
        typer.echo(str(finding))
        ill |= bool(finding.remedy)
    raise typer.Exit(int(ill))


@federate.command(cls=Command)
def status(folder: SiteFolder = Path()) -> None:
    """Say how things stand at user 0 or at a site: who is connected, what was asked, what is left."""
    for line in standing(folder):
        typer.echo(line)


SiteName = Annotated[str, Argument(help="The name of a site.")]


@federate.command(cls=Command, name="add-site")
def add_site(folder: Folder, site: SiteName) -> None:
    """Make a kit for one more site, which the next run asks.

    Example: coterie federate add-site trial bern
    """
    _print_kit(folder, site, membership.add_site(folder, site))


@federate.command(cls=Command)
def renew(
    folder: Folder,
    site: Annotated[str | None, Argument(help="The site; user 0's own if left out.")] = None,
) -> None:
    """Make new certificates, before the old ones end: a site's, in a new kit, or user 0's own."""
    fingerprint = membership.renew(folder, site)
    if site is None or fingerprint is None:
        typer.echo("user 0's certificates are new; start `coterie federate server` again")
        return
    _print_kit(folder, site, fingerprint)
    typer.echo(f"  there: coterie federate accept {site} --renews THE-OLD-FOLDER")


@federate.command(cls=Command)
def revoke(folder: Folder, site: SiteName) -> None:
    """Let a site in no more: no run asks it, and the server refuses it from its next start on."""
    membership.revoke(folder, site)
    typer.echo(f"{site} is not asked any more; start `coterie federate server` again to refuse it")


def _print_kit(folder: Path, site: str, fingerprint: str) -> None:
    typer.echo(f"{folder}/sites/{site}   for {site}, over a safe way: it holds a private key")
    typer.echo(f"  its fingerprint, to tell {site} in another way: {fingerprint}")


@federate.command(cls=Command)
def attach(folder: Folder) -> None:
    """Follow the job that runs already, after its terminal is gone; Ctrl-C ends it."""
    _follow(folder, attach=True)


@federate.command(cls=Command)
def stop(folder: Folder) -> None:
    """End the job that runs, so that no site gives any more; what is saved stays."""
    ended = supervision.stop(folder)
    typer.echo("the job is ended" if ended else "no job runs")
    typer.echo(f"`coterie federate run {folder} --resume` goes on from what is saved")


def _follow(folder: Path, **settings: Any) -> None:
    """Follow a run to its end, and say where its results are."""
    try:
        typer.echo(supervision.follow(folder, **settings, show_line=typer.echo))
    except KeyboardInterrupt:
        goes_on = f"`coterie federate run {folder} --resume` goes on from what is saved"
        typer.echo(f"stopped; {goes_on}", err=True)
        raise typer.Exit(130) from None
    if members_of(folder):
        what = "Each site's model, record and page (index.html)"
        typer.echo(f"{what} are in `run` in its own folder, nowhere else.")
        return
    typer.echo(f"Model, record and a page (index.html): {folder / 'run'}")
    typer.echo(f"To apply it: coterie predict {folder / 'run'} FILE")
