"""Shakespeare by speaker.

Eight plays, a user a speaker, the next character to be told from those before it.
"""

import zipfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch

from coterie.benchmark.sets.user_set import register_set
from coterie.benchmark.tasks import Population

LENGTH = 10
"""Characters in an example.

Examples do not overlap, so that none is in two parts of a user's data.
"""

ALPHABET = "\n !',-.:;?abcdefghijklmnopqrstuvwxyz"
"""The characters told apart: capitals count as small, any other as a blank."""


@register_set(
    "shakespeare",
    models=("rnn", "gru"),
    own_examples=80,
    most_peers=5,
    batch_size=16,
    folder="shakespeare",
    files=("shakespeare.zip",),
    source="github.com/nltk/nltk_data (packages/corpora/shakespeare.zip)",
)
def shakespeare(folder: Path) -> Population:
    """Read the plays in `shakespeare.zip`: SPEECH elements of SPEAKERs and LINEs."""
    spoken = speeches(folder / "shakespeare.zip")
    number = {character: i for i, character in enumerate(ALPHABET)}
    examples, owners = [], []
    for speaker, text in spoken.items():
        codes = np.array([number.get(character, number[" "]) for character in text.lower()])
        n = (len(codes) - 1) // LENGTH
        starts = LENGTH * np.arange(n)[:, None]
        examples.append(
            codes[starts + np.arange(LENGTH + 1)] if n else np.empty((0, LENGTH + 1), np.int64)
        )
        owners += [speaker] * n
    whole = np.concatenate(examples)
    return Population(
        torch.from_numpy(whole[:, :-1].copy()), whole[:, 1:], np.array(owners), len(ALPHABET)
    )


def speeches(path: Path) -> dict[str, str]:
    """Return all that each speaker says, as one text, under `play: SPEAKER`."""
    spoken: dict[str, list[str]] = {}
    with zipfile.ZipFile(path) as archive:
        for play in sorted(name for name in archive.namelist() if name.endswith(".xml")):
            for speech in ElementTree.fromstring(archive.read(play)).iter("SPEECH"):  # noqa: S314  # the user's own file
                lines = ["".join(line.itertext()) for line in speech.iter("LINE")]
                for speaker in speech.iter("SPEAKER"):
                    name = f"{Path(play).stem}: {(speaker.text or '').strip()}"
                    spoken.setdefault(name, []).extend(lines)
    return {name: "\n".join(lines) for name, lines in spoken.items()}
