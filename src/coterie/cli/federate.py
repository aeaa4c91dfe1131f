"""`coterie federate`: train with sites of other organisations, over NVFLARE."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from coterie.cli.options.registered import Command, knobs_of
from coterie.errors import KnobError
from coterie.rules import RULES

federate = typer.Typer(
    name="federate", no_args_is_help=True, help="Train with other organisations, over NVFLARE (`coterie\\[flare]`)."
)

Folder = Annotated[Path, Argument(help="User 0's folder.")]


@federate.command(cls=Command)
def init(
    folder: Annotated[Path, Argument(help="Folder to write: user 0's, with one for each site in it.")],
    data: Annotated[Path, Option(help="User 0's table, a CSV or Parquet file with one example a row.")],
    target: Annotated[str, Option(help="The column to predict.")],
    site: Annotated[list[str], Option(help="The name of a site; repeat it.")],
    server: Annotated[str, Option(help="The host name by which sites reach user 0.")],
    me: Annotated[str, Option(help="The name of user 0.")] = "user0",
    name: Annotated[str, Option(help="The name of the consortium.")] = "coterie",
    port: Annotated[int, Option(help="The server's port for sites.")] = 8002,
    admin_port: Annotated[int, Option(help="The server's port for user 0's own commands.")] = 8003,
    model: Annotated[str, Option(help="linear, mlp, or module.path:factory, installed everywhere.")] = "linear",
    kind: Annotated[str, Option(help="auto, classification or regression.")] = "auto",
    categorical: Annotated[
        list[str] | None, Option(metavar="COLUMN", help="A column of numbers that are categories; repeat it.")
    ] = None,
    own_examples: Annotated[int | None, Option(help="Train on at most so many rows of user 0.")] = None,
    rule: Annotated[str, Option(metavar="NAME", help="The rule, one of {rules}.")] = "adaptive",
    alpha: Annotated[str | None, Option(help="The peers' weight, for wga and bc, in [0, 1].")] = None,
    beta: Annotated[str | None, Option(help="How fast bc's bias estimate follows, in [0, 1].")] = None,
    knob: Annotated[list[str] | None, Option(metavar="NAME=VALUE", help="Any knob of the rule; repeat it.")] = None,
    steps: Annotated[int, Option(help="Steps to take.")] = 1000,
    lr: Annotated[float, Option(help="Adam's step size.")] = 0.01,
    batch_size: Annotated[int, Option(help="Rows each user draws for a gradient.")] = 32,
    seed: Annotated[int, Option(help="What splits, initial weights and batches depend on.")] = 0,
    exchange_every: Annotated[int, Option(help="Steps of user 0 for each exchange with the sites.")] = 1,
    local_steps: Annotated[int, Option(help="Plain steps that every user takes for one step of the run.")] = 1,
    compress: Annotated[
        Literal["bf16", "fp16"] | None, Option(help="Send in half precision; what is lost is added to the next.")
    ] = None,
    secure_sums: Annotated[
        bool, Option("--secure-sums", help="See the sum of the sites' gradients only; for wga and bc.")
    ] = False,
    timeout: Annotated[float, Option(help="Seconds to wait for a site in one step.")] = 10.0,
    misses: Annotated[int, Option(help="Steps without an answer until a site is not waited for.")] = 3,
    probe_every: Annotated[int, Option(help="Steps from one look whether it is back to the next.")] = 10,
    minimum: Annotated[int, Option(help="Answers without which a step is taken alone.")] = 1,
    everyone: Annotated[
        bool, Option("--everyone", help="Every site trains a model of its own; the server passes messages on.")
    ] = False,
) -> None:
    """Write certificates and settings: user 0's folder, and in sites/ one folder to hand to each site.

    Example: coterie federate init trial --data mine.csv --target ill --server ml.example.org --site basel
    """
    from coterie.federation.kits import set_up
    from coterie.federation.lead import rule_of
    from coterie.federation.provisioning import Consortium
    from coterie.federation.settings import NO_SUMS, Data, LeadSettings, Model, Training

    if everyone and secure_sums:
        raise KnobError(NO_SUMS)
    knobs = knobs_of(RULES.entry(rule), knob or [], alpha=alpha, beta=beta)
    if "aggregator" in knobs:
        raise KnobError("`--knob aggregator` cannot be written to the settings; import a rule of your own")
    waits: dict[str, Any] = {"timeout": timeout, "misses": misses, "probe_every": probe_every, "minimum": minimum}
    waits |= {"exchange_every": exchange_every, "local_steps": local_steps, "compress": compress or ""}
    waits["secure_sums"] = secure_sums
    training = Training(rule, knobs=knobs, steps=steps, lr=lr, batch_size=batch_size, seed=seed, **waits)
    own = Data(table=str(data.absolute()), target=target, own_examples=own_examples)
    settings = LeadSettings(me, tuple(site), own, Model(model), training)
    rule_of(settings)  # what cannot be built is told now
    members = (me, *site) if everyone else tuple(site)
    consortium = Consortium(name, server, members, port, admin_port, everyone=everyone)
    fingerprints = set_up(folder, consortium, settings, categorical=tuple(categorical or ()), kind=kind)
    if everyone:
        typer.echo(f"{folder}/sites/{me}   your own: `coterie federate site {folder}/sites/{me}`")
        fingerprints.pop(me)
    else:
        typer.echo(f"{folder}/coterie.toml   what user 0 trains")
    for each, fingerprint in fingerprints.items():
        typer.echo(f"{folder}/sites/{each}   for {each}, over a safe way: it holds a private key")
        typer.echo(f"  its fingerprint, to tell {each} in another way: {fingerprint}")
    mine = f" and coterie federate site {folder}/sites/{me}" if everyone else ""
    typer.echo(f"next: coterie federate server {folder}{mine}; with all sites there: coterie federate run {folder}")


@federate.command()
def server(folder: Folder) -> None:
    """Start user 0's server, and stay with it until Ctrl-C."""
    from coterie.federation.watching import LOG, Screen, ServerWatch
    from coterie.federation.workspace import run_process, server_command

    place = folder / "server"
    command = server_command(place)
    typer.echo(f"the server of {folder}; Ctrl-C ends it; NVFLARE's log: {place / LOG}")
    _end(run_process(command, place, ServerWatch(place, Screen(typer.echo))), place / LOG)


SiteFolder = Annotated[Path, Argument(help="The site's folder.")]


@federate.command()
def accept(
    folder: SiteFolder = Path(),
    fingerprint: Annotated[
        str | None, Option(help="What user 0 has told you; shown and asked for if left out.")
    ] = None,
) -> None:
    """Check the folder that user 0 has made for a site, and write the site's own settings to it.

    Example: coterie federate accept basel
    """
    from coterie.federation import kits, manifest
    from coterie.federation.settings import FILE

    shown = manifest.fingerprint(folder)
    typer.echo(f"{folder} has the fingerprint {shown}")
    if fingerprint is None and not typer.confirm("Has user 0 told you the same, not in this folder?"):
        raise KnobError(f"{folder} is not accepted; ask user 0 for its fingerprint, by telephone for example")
    kit = kits.accept(folder, fingerprint or shown)
    who = f"{', '.join(kit.others)} plan" if kit.everyone else f"{kit.lead} plans"
    typer.echo(f"{who} to ask for at most {kit.gradients} gradients, of {kit.batch_size} rows each")
    typer.echo(f"{folder / FILE} says what you give: edit it, then `coterie federate check {folder}`")


@federate.command()
def site(folder: SiteFolder = Path()) -> None:
    """Check a site's settings, connect to the server, and answer until Ctrl-C. Nothing in the folder is run."""
    from coterie.federation import workspace
    from coterie.federation.settings import site_settings
    from coterie.federation.watching import LOG, MemberWatch, Screen, SiteWatch

    kit, peer = _checked(folder)
    place = workspace.site_workspace(folder, kit)
    typer.echo(f"Ctrl-C ends it; NVFLARE's log: {place / LOG}")
    training = site_settings(folder).training
    about = (folder, place, peer.caps, peer.ledger.given, Screen(typer.echo))
    watch = SiteWatch(*about) if training is None else MemberWatch(*about, steps=training.steps)
    _end(workspace.run_process(workspace.site_command(place, kit), place, watch), place / LOG)


def _end(status: int, log: Path) -> None:
    """End with the status of NVFLARE's process; tell where its reasons are."""
    if status:
        typer.echo(f"NVFLARE has ended with status {status}; the end of {log} says why", err=True)
    raise typer.Exit(status)


@federate.command()
def check(folder: SiteFolder = Path()) -> None:
    """Say what a site would give. Nothing is sent."""
    _checked(folder)


def _checked(folder: Path) -> tuple[Any, Any]:
    """Say what a site would give, and return the kit and the peer that would give it."""
    from coterie.federation.kits import accepted
    from coterie.federation.lead import rule_of
    from coterie.federation.participants import responder_of
    from coterie.federation.settings import site_settings

    settings = site_settings(folder)
    kit = accepted(folder, settings.kit)
    responder = responder_of(folder)
    peer = responder.peer
    size = sum(tensor.numel() for tensor in peer.passes.model.state_dict().values())
    typer.echo(f"the kit is the one accepted, {settings.kit}; it connects to {kit.server}:{kit.port}")
    rows = "a stream of examples" if peer.user.is_stream else f"{len(peer.user)} examples"
    typer.echo(f"{peer.user.name}: {rows}; gradients of {size} numbers; {peer.ledger.given} given before")
    typer.echo(f"given at most: {peer.caps.in_words()}")
    if kit.everyone != (settings.training is not None):
        raise KnobError(
            f"{folder} must have `sites` and [training] where everyone trains, and only there; take them from "
            "what `federate accept` wrote"
        )
    if settings.training is not None:
        rule_of(settings.as_lead())  # what cannot be built is told now
        typer.echo(f"trained here: {settings.training.steps} steps by {settings.training.rule!r}")
        typer.echo(f"asked and answered: {', '.join(settings.sites)}")
    if settings.privacy is not None:
        typer.echo(f"promised: {settings.privacy.in_words()}; ε = {peer.epsilon:.3g} spent before")
    if responder.only_sums:
        typer.echo(f"given only under masks: {responder.sums}")
        typer.echo(f"its key has the fingerprint {responder.peer.identity.fingerprint}, to tell the other sites")
    if size != kit.size:
        raise KnobError(
            f"your model has {size} numbers, user 0's ({kit.model}) {kit.size}; name the same in [model]"
        )
    return kit, peer


@federate.command()
def run(
    folder: Folder,
    resume: Annotated[bool, Option("--resume", help="Go on with the run that is there.")] = False,
    wait: Annotated[float, Option(help="Seconds to wait for the server and the sites.")] = 60.0,
) -> None:
    """Train: submit the job to user 0's server and follow it; the model and the record land in FOLDER/run.

    Where everyone trains, they land at each site, in `run` in its folder.
    """
    from coterie.federation.everyone.following import follow_everyone
    from coterie.federation.settings import members_of
    from coterie.federation.supervision import supervise

    if members_of(folder):
        typer.echo(follow_everyone(folder, resume=resume, wait=wait, show_line=typer.echo))
        return
    typer.echo(supervise(folder, resume=resume, wait=wait, show_line=typer.echo))
    typer.echo(f"Model, record and a page (index.html): {folder / 'run'}")
    typer.echo(f"To apply it: coterie predict {folder / 'run'} FILE")
