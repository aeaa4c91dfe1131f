"""What user 0 and the SuperNodes have in common: the model, the loss, and where examples come from."""

import torch

import coterie
from coterie.data import digits_by_writer

LOSS = torch.nn.CrossEntropyLoss()


def make_model() -> torch.nn.Module:
    """Return the model, with the same parameters everywhere."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def me() -> coterie.User:
    """Return user 0, whose examples stay with the ServerApp."""
    return digits_by_writer(me=0, own_examples=30).me


def peer(number: int) -> coterie.User:
    """Return one of the other writers, whose examples stay with its SuperNode."""
    peers = digits_by_writer(me=0, own_examples=30).peers
    return peers[number % len(peers)]
