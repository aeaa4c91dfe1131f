"""Sets of handwritten digits, by writer."""

import gzip
import json
from pathlib import Path

import numpy as np
import torch

from coterie.benchmark.sets.user_set import register_set
from coterie.benchmark.tasks import Population
from coterie.data.handwriting import BOUNDS
from coterie.errors import DataError


@register_set("digits", models=("linear", "mlp", "cnn"), own_examples=30, most_peers=13)
def digits(_: Path) -> Population:
    """Return the digits; nothing is read from the folder."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    owners = np.repeat([f"writer {k}" for k in range(len(BOUNDS) - 1)], np.diff(BOUNDS))
    return Population(
        torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None], bunch.target, owners, 10
    )


BATCHES = 20
"""Of the 21 pictures the last holds test digits, whose writers are others."""

FILES = (
    *(f"mnist_batch_{k}.png" for k in range(BATCHES)),
    "mnist_labels.js",
    "qmnist-train-labels-idx2-int.gz",
)


@register_set(
    "mnist",
    models=("mlp", "linear", "cnn"),
    own_examples=20,
    most_peers=10,
    batch_size=16,
    folder="mnist_by_writer",
    files=FILES,
    source=(
        "the pictures and labels of github.com/karpathy/convnetjs (demo/mnist) and the training"
        " labels of github.com/facebookresearch/qmnist"
    ),
)
def mnist(folder: Path) -> Population:
    """Read the pictures, one digit a row of 784 bytes, the list of labels, and QMNIST's table of writers.

    That table is a header of 12 bytes and big-endian integers, eight a digit: the class first, the
    writer third.
    """
    import matplotlib.image

    pictures = [matplotlib.image.imread(folder / FILES[k]) for k in range(BATCHES)]
    images = np.concatenate([np.rint(255 * picture).astype(np.uint8) for picture in pictures])
    text = (folder / "mnist_labels.js").read_text(encoding="utf-8")
    labels = np.array(json.loads(text[text.index("[") : text.rindex("]") + 1]))
    about = np.frombuffer(
        gzip.decompress((folder / FILES[-1]).read_bytes()), ">i4", offset=12
    ).reshape(-1, 8)
    if not len(images) == len(about) <= len(labels) or (about[:, 0] != labels[: len(about)]).any():
        raise DataError(
            f"the pictures ({len(images)} digits), mnist_labels.js and {FILES[-1]} ({len(about)}"
            " digits) do not belong together; get them again, each whole"
        )
    order = np.argsort(about[:, 2], kind="stable")
    inputs = torch.from_numpy(images[order]).reshape(-1, 1, 28, 28)
    owners = np.char.add("writer ", about[order, 2].astype(str))
    return Population(inputs, labels[order].astype(np.int64), owners, n_classes=10)
