"""What the default rule costs beside weighted averaging, for models that could not share passes before.

    OMP_NUM_THREADS=1 python benchmarks/any_model.py [llama] [cnn] [weighted] [lstm] [--repeats 3]

Each line is one case, with both sides in one run: seconds of one CPU thread, the medians of the
repeats, and their ratio. `llama` needs transformers and peft.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie


def llama() -> tuple[nn.Module, Any, list[coterie.User], dict[str, Any]]:
    """Return a small Llama with LoRA adapters, and users with sentences of their own."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # slow to import, and not everybody has it
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=64, **size))
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    users = []
    for k in range(6):
        words = torch.randint(k, 60 + 6 * k, (40, 33))
        users.append(coterie.User(_name(k), {"input_ids": words[:, :-1]}, words[:, 1:]))

    @coterie.per_example
    def loss(output: Any, targets: Tensor) -> Tensor:
        return f.cross_entropy(output.logits.transpose(1, 2), targets, reduction="none")

    return adapted, loss, users, {"steps": 100, "batch_size": 8}


def cnn() -> tuple[nn.Module, Any, list[coterie.User], dict[str, Any]]:
    """Return a convolutional network with BatchNorm and dropout, and the writers of digits."""
    task = coterie.data.digits_by_writer(me=3, own_examples=60)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ),
        *(
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        ),
        *(nn.Dropout(0.25), nn.Linear(512, 10)),
    )
    flat = nn.Sequential(nn.Flatten(), model)
    return flat, f.cross_entropy, [task.me, *task.peers][:11], {"steps": 100, "batch_size": 16}


def weighted() -> tuple[nn.Module, Any, list[coterie.User], dict[str, Any]]:
    """Return a network with a loss that weighs classes, and the writers of digits."""
    task = coterie.data.digits_by_writer(me=3, own_examples=60)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10))
    return model, loss, [task.me, *task.peers][:11], {"steps": 200, "batch_size": 16}


class LastStep(nn.Module):
    """An LSTM over the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs after the last row."""
        out: Tensor = self.last(self.recurrent(inputs.view(-1, 8, 8))[0][:, -1])
        return out


def lstm() -> tuple[nn.Module, Any, list[coterie.User], dict[str, Any]]:
    """Return an LSTM, and the writers of digits."""
    task = coterie.data.digits_by_writer(me=3, own_examples=60)
    torch.manual_seed(0)
    return (
        LastStep(),
        f.cross_entropy,
        [task.me, *task.peers][:11],
        {"steps": 100, "batch_size": 16},
    )


CASES: dict[str, Callable[[], tuple[nn.Module, Any, list[coterie.User], dict[str, Any]]]] = {
    each.__name__: each for each in (llama, cnn, weighted, lstm)
}


def _name(k: int) -> str:
    return "me" if not k else f"peer {k}"


def main() -> None:
    """Time the cases named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    for name in asked.cases or CASES:
        model, loss, users, how = CASES[name]()
        seconds: dict[str, list[float]] = {"averaging": [], "default": []}
        for repeat in range(1 + asked.repeats):
            for side, rule in (("averaging", coterie.WeightedAveraging(0.5)), ("default", None)):
                steps = how["steps"] if repeat else 2  # libraries set up what they need first
                began = time.process_time()
                coterie.train(
                    *(model, loss, users[0], users[1:], rule),
                    **{**how, "steps": steps, "measure": False, "progress": False},
                )
                if repeat:
                    seconds[side].append(time.process_time() - began)
        averaging, default = (statistics.median(seconds[side]) for side in ("averaging", "default"))
        print(
            f"{name:9} averaging {averaging:6.2f} s  default {default:6.2f} s  {default / averaging:5.1f} ×",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
