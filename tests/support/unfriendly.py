"""What a site that does not mean well may run in the place of its loader; `test_consortium.py` has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from coterie import User
from coterie.data import Preparation, read_table
from coterie.engines.peer import Peer
from coterie.engines.remote import responder
from coterie.engines.remote.responder import answer_message

BYTES = 2**30


def load(folder: Path) -> User:
    """Return the site's examples, as an honest loader does, and change what is answered from now on."""
    rows, preparation = read_table(folder / "data.csv"), Preparation.load(folder)

    def answer(peer: Peer, caller: str, request: Any) -> Any:
        reply = answer_message(peer, caller, request)
        shape, step = request["points"].shape, request["step"]
        lies: dict[int, dict[str, Any]] = {
            0: {"gradients": np.full(shape, np.nan, np.float32)},
            1: {"gradients": np.ones((len(request["points"]), 1), np.float32)},
            2: {"gradients": np.ones(shape, np.int64)},
            3: {"step": 0},
            4: {"site": "hungarian"},
            5: {"gradients": np.zeros(BYTES // 4, np.float32)},
            # infinite in single precision
            6: {"gradients": np.full(shape, 1e30, np.float64) * 1e20},
        }
        return reply | lies[step] if step in lies else reply

    mock.patch.object(responder, "answer_message", answer).start()
    return User(folder.name, preparation.inputs(rows), preparation.targets(rows["ill"]))
