"""What user 0 hands out: a folder a site, with its settings and one page that says what to do and what is given."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.data import read_table
from coterie.federation.participants import lead_task
from coterie.federation.provisioning import Consortium, provision
from coterie.federation.settings import FILE, Data, LeadSettings, Model, Training
from coterie.tables import models

README = """# {site} in the consortium {name}

You take part in training a model for {me}. At every step {me} sends the model's parameters; your machine computes
the gradient of the loss on a batch of **your** rows, and sends that back. Your rows stay here. No code comes here:
your machine runs the `coterie` that you installed, with the model named in `{file}`.

1. `pip install "coterie[flare]"` in a Python environment of your own.
2. Edit `{file}`: where your table is, how its columns are called, what you give at most (below).
3. `coterie federate check .` says what would be given. Nothing is sent.
4. `coterie federate site .` connects to {server}:{port} and answers until you stop it (Ctrl-C). Your machine dials
   out; nothing needs to be opened in your firewall for incoming connections.

What you give, and how to give less (`[caps]` in `{file}`):

| setting | meaning |
|---|---|
| `gradients` | how many gradients you give in all, over every run |
| `norm` | a gradient is clipped to this norm |
| `examples` | no gradient of fewer rows than this is given |

A gradient of few rows can give away what is in them. With `examples` at the size of a batch and `norm` set it
tells less; it never tells nothing. Every request is logged in `requests.jsonl`: when, which step, how many rows,
the norm.

`preparation.json` and `preparation.skops` hold the medians, means, spreads and categories of {me}'s rows, with
which your rows are made into numbers. `startup` holds your certificate and key: whoever has them is you. Keep them.
"""

SITE = """name = {name}
threads = 1

[data]
table = "data.csv"      # a CSV or Parquet file: a path, or a file in this folder
target = {target}

[data.columns]          # ours = "yours", where your table calls a column otherwise
{columns}

[model]                 # built from the code installed here
{model}

[caps]
# gradients = 10000     # how many in all
# norm = 10.0           # clipped to this norm
examples = {examples}   # no gradient of fewer rows
"""


def set_up(
    folder: Path,
    consortium: Consortium,
    settings: LeadSettings,
    *,
    categorical: tuple[str, ...] = (),
    kind: str = "auto",
    examples: int = 1,
) -> None:
    """Write user 0's folder, which must hold no consortium yet, and one for each site.

    User 0's table is read to learn how rows become inputs. At least so many examples must be behind a gradient,
    unless a site sets otherwise.
    """
    rows = read_table(settings.data.table)
    task = lead_task(rows, settings, categorical=categorical, kind=kind)
    preparation = task.preparation
    model = models.build(settings.model.name, task.n_inputs, task.n_outputs)
    provision(consortium, folder, sum(tensor.numel() for tensor in model.state_dict().values()))
    preparation.save(folder)
    (folder / FILE).write_text(_lead_file(settings), encoding="utf-8")
    for site in consortium.sites:
        kit = folder / "sites" / site
        preparation.save(kit)
        page = README.format(site=site, me=settings.me, file=FILE, **vars(consortium))
        (kit / "README.md").write_text(page, encoding="utf-8")
        columns = "\n".join(f"# {_toml(c)} = {_toml(c)}" for c in (*preparation.numeric, *preparation.categorical))
        values = {"name": _toml(site), "target": _toml(settings.data.target), "model": _lines(settings.model)}
        (kit / FILE).write_text(SITE.format(columns=columns, examples=examples, **values), encoding="utf-8")


def _lead_file(settings: LeadSettings) -> str:
    top = [f"me = {_toml(settings.me)}", f"sites = {_toml(list(settings.sites))}", f"threads = {settings.threads}"]
    parts = [f"[{name}]\n{_lines(getattr(settings, name))}" for name in ("data", "model", "training")]
    return "\n\n".join(["\n".join(top), *parts]) + "\n"


def _lines(part: Data | Model | Training) -> str:
    shown = {name: value for name, value in vars(part).items() if value not in (None, "", {})}
    return "\n".join(f"{name} = {_toml(value)}" for name, value in shown.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)  # TOML's strings, numbers, truth values and lists are JSON's
