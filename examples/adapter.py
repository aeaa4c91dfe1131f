"""A personal LoRA adapter of a small language model, for one speaker of Shakespeare's, with five of the same play.

    python examples/adapter.py FOLDER [--me "macbeth: MACBETH"] [--steps 200] [--base-steps 400]

FOLDER holds `shakespeare.zip` (github.com/nltk/nltk_data, packages/corpora/shakespeare.zip). The
model, a Llama of two layers over characters, is built from a configuration and first trained on the
other plays, in the place of one that would be downloaded; it is then frozen. Adapters are trained
alone, with all speakers' lines pooled, and by the default rule; each is judged by lines of the
speaker that nobody has seen. It needs `pip install ".[hugging-face]"` in a clone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import coterie
from coterie.benchmark.sets.shakespeare import ALPHABET, speeches

LENGTH = 32
OWN_EXAMPLES, PEERS_EXAMPLES, N_PEERS = 40, 80, 5


def sequences(text: str) -> Tensor:
    """Return a text as sequences of characters, with one more than the model sees."""
    codes = torch.tensor([max(0, ALPHABET.find(character)) for character in text.lower()])
    return codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def pair(rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return what goes into the model, by name, and the characters that follow."""
    return {"input_ids": rows[:, :-1]}, rows[:, 1:]


@coterie.per_example
def loss(output: Any, targets: Tensor) -> Tensor:
    """Return the loss of each character of each sequence, which coterie weighs."""
    return nn.functional.cross_entropy(output.logits.transpose(1, 2), targets, reduction="none")


def base_model(texts: Sequence[str], steps: int) -> nn.Module:
    """Return a language model of these texts."""
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(ALPHABET), max_position_embeddings=64, use_cache=False, **size)
    )
    rows = torch.cat([sequences(text) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        inputs, targets = pair(rows[torch.randint(len(rows), (16,))])
        optimizer.zero_grad()
        loss(model(**inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model  # type: ignore[no-any-return]


def users_of(spoken: Mapping[str, str], me: str) -> tuple[coterie.User, list[coterie.User]]:
    """Return the speaker, with lines held out for the test, and those of the same play who say most."""
    rows = sequences(spoken[me])
    play = me.partition(":")[0]
    others = [name for name in spoken if name.startswith(play + ":") and name != me]
    others.sort(key=lambda name: -len(spoken[name]))
    peers = [
        coterie.User(name, *pair(sequences(spoken[name])[:PEERS_EXAMPLES]))
        for name in others[:N_PEERS]
    ]
    return coterie.User(me, *pair(rows[:OWN_EXAMPLES]), test=pair(rows[OWN_EXAMPLES:])), peers


def main(arguments: Sequence[str]) -> None:
    """Train the adapters, and print how each does and what it costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--me", default="macbeth: MACBETH")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--base-steps", type=int, default=400)
    asked = parser.parse_args(arguments)
    torch.manual_seed(0)
    spoken = speeches(asked.folder / "shakespeare.zip")
    me, peers = users_of(spoken, asked.me)
    play = asked.me.partition(":")[0]
    base = base_model(
        [text for name, text in spoken.items() if not name.startswith(play)], asked.base_steps
    )
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"{asked.me}: {len(me)} sequences; with {', '.join(peer.name.partition(': ')[2] for peer in peers)}"
    )
    print(
        f"the adapter has {trained} numbers, the model {sum(p.numel() for p in base.parameters())}"
    )

    sizes = {peer.name: len(peer) for peer in peers}
    whole = sum(sizes.values())
    pooled = coterie.WeightedAveraging(
        whole / (whole + len(me)), {name: n / whole for name, n in sizes.items()}
    )
    default = coterie.AdaptiveAveraging()
    how: dict[str, Any] = {"steps": asked.steps, "lr": 3e-3, "batch_size": 8, "measure": False}
    spec = coterie.RunSpec(model, loss, me, peers, **how)
    print(f"the default rule will take {default.expected_cost(spec)}")
    for name, rule in (("alone", coterie.Alone()), ("pooled", pooled), ("default", default)):
        began = time.perf_counter()
        run = coterie.train(model, loss, me, peers, rule, **how)
        seconds = time.perf_counter() - began
        scores = f"test loss {run.test['loss']:.4f}, accuracy {run.test['accuracy']:.3f}"
        print(f"{name:8} {scores}; {seconds:.1f} s", flush=True)
    print(run.verdict.sentence)


if __name__ == "__main__":
    main(sys.argv[1:])
