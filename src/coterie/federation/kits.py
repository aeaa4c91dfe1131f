"""Kits: the folder that user 0 makes for each site, and what a site makes of it."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.arguments import settings_of
from coterie.data import Preparation, read_table
from coterie.data.reading import FileForm
from coterie.engines.peer import Caps
from coterie.errors import KnobError
from coterie.federation import manifest
from coterie.federation.lead import planned_gradients
from coterie.federation.manifest import Kit, kit_files, quoted, seal, verify
from coterie.federation.participants import lead_task
from coterie.federation.provisioning import Consortium, provision
from coterie.federation.settings import (
    FILE,
    MIXTURE,
    SITE_CAPS,
    Data,
    LeadSettings,
    Model,
    Training,
)
from coterie.federation.wheel import write_installation
from coterie.tables import models

KIT_AS_MADE = "kit"
"""Where user 0 keeps what its kits have in common."""

README_OF_A_MEMBER = """# {site} in the consortium {consortium}

Every site trains a model for itself, with the others' help: {members_in_words}. At every step your machine
sends your model's parameters to the others, and each gives back the gradient of the loss on a batch of **its**
training rows. Yours does the same for them. Rows stay where they are; your model, its weights, your validation and
test rows and what comes out stay here, in `run`. The server at {server} passes messages on: they are encrypted from
site to site. But for
`install.sh`, which you can read, and the wheel that it installs, nothing in this folder is run.

1. Compare the fingerprint of this folder with {lead}, by telephone for example: it is the first 32 digits that
   `sha256sum manifest.json` shows. `manifest.json` must have what `sha256sum install.sh` shows, too.
2. `sh install.sh` makes a Python environment in `venv`: coterie itself from the wheel in this folder, and what
   it needs from your package index, each file but torch's checked by its hash. coterie is in no package index. The
   wheel is {lead}'s: who installs it trusts {lead} with this machine, as with any program. Who does not, installs
   coterie from its source.
3. `venv/bin/coterie federate accept .` checks every file by that fingerprint, and writes `{file}`, which is yours:
   nobody else has a say in it.
4. Edit `{file}`: where your table is, how its columns are called, how you train, what you give at most (below).
5. `venv/bin/coterie federate doctor .` looks for what would go wrong, and `federate check .` says what would be
   given. Nothing is sent.
6. `venv/bin/coterie federate site .` connects to {server}:{port}, trains when {lead} says so, and answers until
   you stop it (Ctrl-C). Your machine dials out; nothing needs to be opened in your firewall for incoming connections.
7. `venv/bin/coterie predict run FILE` applies your model to rows whose columns are called as in `preparation.json`;
   `run/index.html` says whether the others have helped.

The {n_others} others plan to ask you for at most {gradients} gradients in all, of {batch_size} rows each. What you
give, and how to give less, is in `[caps]` of `{file}`:

| setting | at first | meaning |
|---|---|---|
| `gradients` | {caps.gradients} | how many gradients you give in all, to all others and over every run |
| `norm` | {caps.norm:g} | a gradient is clipped to this norm |
| `examples` | {caps.examples} | no gradient of fewer rows than this is given |

Your machine draws the batches, by a secret of its own (`requests.jsonl.secret`): who asks cannot choose rows. A
gradient can still give away what is in the rows, and many gradients give away more. Every request is logged in
`requests.jsonl`: when, from whom, which step, how many rows, the norm. A site that you take out of `sites` is
neither asked nor answered.

Who has every x of your run, and that is every other site, can work out much of your own gradients too. So
nothing can be promised about a row here, as a site can where one leads.

`preparation.json` holds the medians, means, spreads and categories of {lead}'s rows, with which everybody's rows
are made into numbers. `client.key` is your key: whoever has it is you. Keep it.
"""


README = """# {site} in the consortium {consortium}

You take part in training a model for {lead}. At every step {lead} sends the model's parameters; your machine
computes the gradient of the loss on a batch of **your** rows, and sends that back. Your rows stay here. But for
`install.sh`, which you can read, and the wheel that it installs, nothing in this folder is run.

1. Compare the fingerprint of this folder with {lead}, by telephone for example: it is the first 32 digits that
   `sha256sum manifest.json` shows. `manifest.json` must have what `sha256sum install.sh` shows, too.
2. `sh install.sh` makes a Python environment in `venv`: coterie itself from the wheel in this folder, and what
   it needs from your package index, each file but torch's checked by its hash. coterie is in no package index. The
   wheel is {lead}'s: who installs it trusts {lead} with this machine, as with any program. Who does not, installs
   coterie from its source.
3. `venv/bin/coterie federate accept .` checks every file by that fingerprint, and writes `{file}`, which is yours:
   nobody else has a say in it.
4. Edit `{file}`: where your table is, how its columns are called, what you give at most (below).
5. `venv/bin/coterie federate doctor .` looks for what would go wrong, and `federate check .` says what would be
   given. Nothing is sent.
6. `venv/bin/coterie federate site .` connects to {server}:{port} and answers until you stop it (Ctrl-C). Your
   machine dials out; nothing needs to be opened in your firewall for incoming connections.

{lead} plans a run of at most {asked}. What you give, and how to give less,
is in `[caps]` of `{file}`:

| setting | at first | meaning |
|---|---|---|
| `gradients` | {caps.gradients} | how many gradients you give in all, over every run |
| `norm` | {caps.norm:g} | a gradient is clipped to this norm |
| `examples` | {caps.examples} | no gradient of fewer rows than this is given |

Your machine draws the batches, by a secret of its own (`requests.jsonl.secret`): {lead} cannot choose rows. A
gradient can still give away what is in the rows, and many gradients give away more. Every request is logged in
`requests.jsonl`: when, which step, how many rows, the norm.

With a section `[privacy]` you can state what all you give tells about any one row: an ε and a δ, which your machine
keeps to by noise and by a count of what was spent, in `requests.jsonl` too. `{file}` shows how.

`preparation.json` holds the medians, means, spreads and categories of {lead}'s rows, with which your rows are made
into numbers. `client.key` is your key: whoever has it is you. Keep it.
"""

SITE = """# Yours: written by the `coterie` that is installed here, changed by nobody but you.
name = {name}
kit = {kit}   # the fingerprint that you have compared
threads = 1
{sites}
[data]
table = {table}      # a CSV or Parquet file: a path, or a file in this folder
target = {target}
{own_examples}
[data.columns]          # ours = "yours", where your table calls a column otherwise
{columns}

[model]                 # built from the code installed here
{model}

[caps]                  # what you give at most
gradients = {gradients}   # in all, over every run; inf: no limit
norm = {norm}             # a gradient is clipped to this norm; inf: not clipped
examples = {examples}     # no gradient of fewer rows than this

{rest}"""

PRIVACY = """\
# [privacy]             # what you promise about every row; take `norm` above away. It needs the extra `privacy`
# epsilon = 4.0         # over all runs; a request beyond it is refused
# delta = 1e-5          # less than one over the number of your rows
# clip = 1.0            # each row's gradient is clipped to this norm
# noise = 1.0           # in multiples of `clip`; left out: the least with which epsilon lasts for `gradients` above
# batch_size = {batch_size:<10} # the only size that is answered for: user 0 cannot choose by what it has seen
# margin = 1            # with [sums] and its keys: sites split the noise, of whom so many others may tell theirs
"""

SUMS = """# [sums]                # give gradients under masks only: user 0 sees their sum with other sites'
# peers = 3             # of at least so many sites
# share = 0.5           # of which none has more of the weight
# keys = { }            # other = "its fingerprint", by `coterie federate check` there, told by telephone
"""

KEYS = """# [keys]                # other = "its fingerprint", by `coterie federate check` there, told by telephone
"""


def set_up(
    folder: Path, consortium: Consortium, settings: LeadSettings, **columns: Any
) -> dict[str, str]:
    """Write user 0's folder, with a kit for each site and coterie's wheel, and return the kits' fingerprints.

    The folder must hold no consortium yet. User 0's table is read to learn how rows become inputs.
    Where everyone trains user 0 has a kit too, which is accepted, and the folder beside it is the
    server's alone. `columns` are `kind`, `categorical`, `drop` and `ids` of `from_table`.
    """
    rows = read_table(settings.data.table, **settings.data.form)
    task = lead_task(rows, settings, **columns)
    preparation = task.preparation
    model = models.build(settings.model.name, task.n_inputs, task.n_outputs)
    size = sum(tensor.numel() for tensor in model.state_dict().values())
    kit = _kit(consortium.sites[0], consortium, settings, preparation, size)
    # what a run asks is found out once
    kits = [replace(kit, site=site) for site in consortium.sites]
    with _whole_or_nothing(folder):
        return _write(folder, consortium, settings, preparation, kits)


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[None]:
    """Take away what was written to a folder where that has failed, so that a second try finds it as before."""
    there = set(folder.iterdir()) if folder.exists() else None
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - (there or set()) if folder.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if there is None and folder.exists():
            folder.rmdir()
        raise


def _write(
    folder: Path,
    consortium: Consortium,
    settings: LeadSettings,
    preparation: Preparation,
    kits: Sequence[Kit],
) -> dict[str, str]:
    """Write user 0's folder and the kits; see `set_up`."""
    provision(consortium, folder, kits[0].size)
    if not consortium.everyone:
        preparation.save(folder)
    text = _server_file(consortium.sites) if consortium.everyone else _lead_file(settings)
    (folder / FILE).write_text(text, encoding="utf-8")
    (folder / KIT_AS_MADE).mkdir(mode=0o700)
    kits[0].save(folder / KIT_AS_MADE)  # by which kits of later sites are made
    fingerprints = {
        kit.site: write_kit(folder / "sites" / kit.site, kit, preparation) for kit in kits
    }
    if consortium.everyone:
        accept(folder / "sites" / settings.me, fingerprints[settings.me], mine=settings.data)
    return fingerprints


def write_kit(place: Path, kit: Kit, preparation: Preparation) -> str:
    """Write a kit where its certificates are, and return its fingerprint."""
    write_installation(place)
    kit.save(place)
    preparation.save(place)
    (place / "README.md").write_text(_page(kit), encoding="utf-8")
    return seal(place)


def _page(kit: Kit) -> str:
    page = README_OF_A_MEMBER if kit.everyone else README
    return page.format(
        file=FILE,
        caps=first_caps(kit),
        n_others=len(kit.others),
        members_in_words=", ".join(kit.members),
        asked=kit.asked,
        **vars(kit),
    )


def _kit(
    site: str, consortium: Consortium, settings: LeadSettings, preparation: Preparation, size: int
) -> Kit:
    return Kit(
        consortium=consortium.name,
        site=site,
        lead=settings.me,
        server=consortium.server,
        port=consortium.port,
        target=settings.data.target,
        columns=(*preparation.numeric, *preparation.categorical),
        model=settings.model.name,
        size=size,
        gradients=planned_gradients(settings)
        * (len(consortium.sites) - 1 if consortium.everyone else 1),
        batch_size=0 if settings.training.rule == MIXTURE else settings.training.batch_size,
        members=consortium.sites if consortium.everyone else (),
        training=_proposed(settings.training) if consortium.everyone else {},
    )


def _proposed(training: Training) -> dict[str, Any]:
    """Return how user 0 proposes that everyone trains, as plain data; masked sums cannot be had."""
    return {name: value for name, value in _given(training).items() if name != "secure_sums"}


def first_caps(kit: Kit) -> Caps:
    """Return what a site gives at most until it sets otherwise.

    As many gradients again for each who asks.
    """
    return replace(SITE_CAPS, gradients=(SITE_CAPS.gradients or 0) * max(1, len(kit.others)))


def accept(
    folder: Path, fingerprint: str, caps: Caps | None = None, mine: Data | None = None
) -> Kit:
    """Check a kit that has come against the fingerprint that user 0 has told, and write the site's own settings.

    A file that belongs to no kit is refused. Code that user 0 proposes is not taken over: the site
    names its own. How user 0 proposes to train, where everyone does, is written down for the site
    to change.

    Args:
        folder: where the kit is.
        fingerprint: what user 0 has told.
        caps: what the site gives at most; `first_caps` when None.
        mine: user 0's own table, where the kit is its own.
    """
    verify(folder, fingerprint, alone=True)
    kit = Kit.load(folder)
    folder.chmod(0o700)
    for name in kit_files(folder):
        (folder / name).chmod(0o600)
    path = folder / FILE
    path.touch(mode=0o600)
    path.write_text(
        _site_file(kit, manifest.fingerprint(folder), caps or first_caps(kit), mine),
        encoding="utf-8",
    )
    return kit


def _site_file(kit: Kit, fingerprint: str, caps: Caps, mine: Data | None) -> str:
    """Return a site's settings as it begins with."""
    model = f"name = {quoted(kit.model)}"
    if ":" in kit.model and mine is None:
        model = (
            f"# {model}   # user 0 proposes this code: take the # away if it is installed here, and"
            " yours to run"
        )
    columns = "\n".join(f"# {quoted(column)} = {quoted(column)}" for column in kit.columns)
    limits = {name: "inf" if limit is None else limit for name, limit in vars(caps).items()}
    names = {"name": quoted(kit.site), "kit": quoted(fingerprint), "target": quoted(kit.target)}
    names |= {"table": quoted(mine.table if mine else "data.csv"), "sites": "", "own_examples": ""}
    names |= {"rest": f"{PRIVACY.format(batch_size=kit.batch_size or Training.batch_size)}\n{SUMS}"}
    if kit.everyone:
        wanted = (
            f"own_examples = {mine.own_examples}"
            if mine and mine.own_examples
            else "# own_examples = 100"
        )
        training = "\n".join(f"{name} = {quoted(value)}" for name, value in kit.training.items())
        names |= {
            "sites": (
                f"sites = {quoted(list(kit.others))}   # whom you ask and answer; nobody else gets"
                " anything\n"
            ),
            "own_examples": f"{wanted}   # train on at most so many rows\n",
            "rest": (
                f"[training]              # how you train a model of your own\n{training}\n\n{KEYS}"
            ),
        }
    return SITE.format(columns=columns, model=model, **names, **limits)


def accepted(folder: Path, fingerprint: str) -> Kit:
    """Return the kit that a site has accepted, once it is still the same."""
    if not fingerprint:
        raise KnobError(
            f"the kit in {folder} is not accepted yet; `coterie federate accept {folder}`"
        )
    verify(folder, fingerprint)
    return Kit.load(folder)


def _lead_file(settings: LeadSettings) -> str:
    top = [
        f"me = {quoted(settings.me)}",
        f"sites = {quoted(list(settings.sites))}",
        f"threads = {settings.threads}",
    ]
    parts = [
        f"[{name}]\n{_lines(getattr(settings, name))}" for name in ("data", "model", "training")
    ]
    return "\n\n".join(["\n".join(top), *parts]) + "\n"


def _server_file(members: Sequence[str]) -> str:
    note = "# The server passes messages on between these sites. It holds no data."
    return f"{note}\neveryone = {quoted(list(members))}\n"


def _lines(part: Data | Model | Training) -> str:
    """Return the settings of a part; those that are left out stand as comments, with what they mean."""
    kind: Any = type(part)
    given = [f"{name} = {quoted(value)}" for name, value in _given(part).items()]
    left_out = [
        f"# {name} =   # {note.help}"
        for name, note in settings_of(kind).items()
        if getattr(part, name) is None
    ]
    return "\n".join([*given, *left_out])


def _given(part: Data | Model | Training) -> dict[str, Any]:
    usual = vars(FileForm())
    return {
        name: value
        for name, value in vars(part).items()
        if value not in (None, "", {}) and (name not in usual or value != usual[name])
    }
