"""`coterie worker`: a peer in a process of its own."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from coterie.data.reading import read_rows
from coterie.engines.caps import Caps
from coterie.engines.torch_distributed.engine import join
from coterie.errors import KnobError
from coterie.privacy.sums import SumsOnly
from coterie.tables import cluster


def worker(
    data: Annotated[Path, Option(help="A CSV or Parquet file with this peer's examples, one a row.")],
    name: Annotated[str, Option(help="This peer's name, by which user 0 knows it.")],
    user_column: Annotated[
        str | None, Option(help="The column that says whose row it is; all rows are this peer's if left out.")
    ] = None,
    sep: Annotated[str, Option(help="What is between the columns of a CSV file; tab for a tab.")] = ",",
    decimal: Annotated[str, Option(help="What is before decimals in a CSV file.")] = ".",
    model: Annotated[
        str | None, Option(help="module.path:factory, where user 0 uses a model of its own; must be the same.")
    ] = None,
    sums_only: Annotated[
        bool, Option("--sums-only", help="Give gradients as part of a sum only, never on their own.")
    ] = False,
    secure_sums: Annotated[
        bool, Option("--secure-sums", help="Give gradients under masks only, as part of such a sum.")
    ] = False,
    keys: Annotated[
        list[str] | None,
        Option("--key", help="With --secure-sums: NAME=FINGERPRINT of every other peer's key, told by telephone."),
    ] = None,
    min_peers: Annotated[int, Option(min=1, help="With --sums-only: how many peers a sum must be of.")] = 3,
    max_share: Annotated[float, Option(help="With --sums-only: how much of the weight one peer may have.")] = 0.5,
    max_gradients: Annotated[
        int | None, Option(min=0, help="How many gradients to give in all; with --log over every run.")
    ] = None,
    max_norm: Annotated[float | None, Option(help="The norm that a gradient is clipped to.")] = None,
    min_examples: Annotated[int, Option(min=1, help="Give no gradient of fewer rows than this.")] = 1,
    log: Annotated[Path | None, Option(help="A file to which every request is added.")] = None,
    device: Annotated[str, Option(help="Where to compute: cpu, cuda, …; as user 0's.")] = "cpu",
    threads: Annotated[int, Option(min=1, help="CPU threads; more help large models only.")] = 1,
    timeout: Annotated[float, Option(help="Seconds after which a silent user 0 is lost.")] = 120.0,
) -> None:
    """Be a peer: give user 0 gradients of these rows, until its run ends. For a trusted network only.

    User 0 runs `coterie train --engine torch`. Every process is told by its environment who it is: RANK (0 is user
    0), WORLD_SIZE, MASTER_ADDR and MASTER_PORT (of user 0's machine). COTERIE_SECRET_FILE may name a file with a
    secret that all processes share, and that strangers lack.

    Example: RANK=2 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 coterie worker --data basel.csv --name Basel
    """
    import torch

    torch.set_num_threads(threads)

    def rows() -> tuple[str, Any]:
        return name, read_rows(data, user_column, name, sep=sep, decimal=decimal)

    caps = Caps(max_gradients, max_norm, min_examples)
    capped = None if caps == Caps() else caps
    sums = SumsOnly(min_peers, max_share, _known(keys or [])) if sums_only or secure_sums else False
    how: dict[str, Any] = {"sums_only": sums, "secure_sums": secure_sums, "caps": capped, "log": log}
    answered = cluster.follow(join(timeout), rows, model, device, **how)
    typer.echo(f"{name} gave {answered} gradients", err=True)


def _known(keys: list[str]) -> dict[str, str]:
    """Return the fingerprint of each peer's key."""
    pairs = dict(pair.rpartition("=")[::2] for pair in keys)
    if "" in pairs or len(pairs) < len(keys):
        raise KnobError(f"`--key` must be NAME=FINGERPRINT, once for each peer, got {', '.join(keys)}")
    return pairs
