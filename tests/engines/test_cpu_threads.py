"""A run of small passes takes one CPU thread, and gives the others back."""

from __future__ import annotations

import torch
from threadpoolctl import ThreadpoolController, threadpool_limits
from torch import nn
from torch.nn import functional as f

import coterie
from coterie.engines.cpu_threads import cpu_threads, operations, threads_for
from coterie.engines.in_process.passes import Passes

INPUTS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))


def test_a_run_of_small_passes_takes_one_thread_and_gives_them_back() -> None:
    me, *peers = (
        coterie.User(name, x, x.sum(1, keepdim=True))
        for name, x in zip("012", torch.split(INPUTS, 10), strict=True)
    )
    small, large = (
        nn.Linear(4, 1),
        nn.Sequential(nn.Linear(4, 1300), nn.Linear(1300, 1300), nn.Linear(1300, 1)),
    )
    passes = Passes(small, f.mse_loss)
    # more than the 80 of products
    assert operations(passes, passes.parameters.vector(), INPUTS[:10]) == 2 * 10 * 5
    seen: list[int] = []
    with cpu_threads(2):
        for model in (small, large):
            engine = coterie.InProcess(model, f.mse_loss, me, peers)
            seen.append(threads_for(None, engine))
            assert threads_for(3, engine) == 3
        for asked in (None, 2):
            note = [lambda _: seen.append(torch.get_num_threads())]
            coterie.train(
                small, f.mse_loss, me, peers, coterie.Alone(), steps=1, hooks=note, threads=asked
            )
        assert torch.get_num_threads() == 2
    assert seen == [1, 2, 1, 2]


def test_matrix_products_of_numpy_take_as_many_threads_and_give_them_back() -> None:
    def threads() -> set[int]:
        found = ThreadpoolController().lib_controllers
        return {each.num_threads for each in found if each.user_api == "blas"}

    with threadpool_limits(2, "blas"):
        with cpu_threads(1):
            assert threads() == {1}
            with cpu_threads(2):
                assert threads() == {2}
        assert threads() == {2}
