"""The trainable parameters as one flat vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie.errors import ModelError
from coterie.gradients.parameters import Parameters


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))


def test_the_vector_is_torchs_own() -> None:
    net = model()
    parameters = Parameters(net)
    wanted = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert torch.equal(parameters.vector(), wanted)
    assert parameters.size == len(wanted) == 3 * 2 + 2 + 2 + 2 + 2
    for name, piece in parameters.unflatten(wanted).items():
        assert torch.equal(piece, net.get_parameter(name))
        assert piece.data_ptr() >= wanted.data_ptr()
        assert piece.untyped_storage().data_ptr() == wanted.untyped_storage().data_ptr()
    assert torch.equal(parameters.flatten(parameters.unflatten(wanted).values()), wanted)


def test_the_vector_is_a_copy() -> None:
    net = model()
    x = Parameters(net).vector()
    before = x.clone()
    with torch.no_grad():
        net.get_parameter("0.weight").add_(1)
    assert torch.equal(x, before)
    assert not x.requires_grad


def test_frozen_parameters_are_not_in_it_and_tied_ones_once() -> None:
    net = model()
    net.get_parameter("0.weight").requires_grad = False
    assert list(Parameters(net).named) == ["0.bias", "1.weight", "1.bias", "2.weight"]
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert list(Parameters(tied).named) == ["0.weight", "0.bias", "1.bias"]
    assert Parameters(tied).size == 8


def test_sharing_lets_an_optimizer_move_the_vector() -> None:
    net = model()
    parameters = Parameters(net)
    assert not parameters.are_views_of(parameters.vector())
    start = parameters.vector()
    x = parameters.share()
    assert torch.equal(x, start)
    assert parameters.are_views_of(x)
    assert not parameters.are_views_of(x.clone())
    assert not parameters.are_views_of(x[:-1])
    direction = torch.arange(float(parameters.size))
    parameters.set_gradient(direction)
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    assert torch.equal(x, start - 0.5 * direction)
    assert torch.equal(nn.utils.parameters_to_vector(net.parameters()).detach(), x)


def test_a_gradient_reaches_the_parameter_it_is_of() -> None:
    net = model()
    parameters = Parameters(net)
    parameters.set_gradient(torch.arange(float(parameters.size)))
    first, last = net.get_parameter("0.weight").grad, net.get_parameter("2.weight").grad
    assert first is not None
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert last is not None
    assert last.tolist() == [[12, 13]]


def test_one_parameter() -> None:
    net = nn.Linear(2, 1, bias=False)
    parameters = Parameters(net)
    assert parameters.are_views_of(parameters.share())


def test_models_without_trainable_parameters_or_of_two_kinds() -> None:
    with pytest.raises(ModelError, match="no trainable parameter; set `requires_grad`"):
        Parameters(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(
        ModelError,
        match=r"one dtype and device, got torch.float32 on cpu, torch.float64 on cpu; use",
    ):
        Parameters(mixed)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused_since_nothing_would_call_them(register: str) -> None:
    model = nn.Linear(2, 1)
    handle = getattr(model.bias, register)(lambda _: None)
    with pytest.raises(
        ModelError, match=r"the parameter 'bias' has a hook on its gradient.* give `clip_norm`"
    ):
        Parameters(model)
    handle.remove()
    assert Parameters(model).size == 3


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is not supported in Python:FutureWarning")
def test_scripted_modules_are_refused_with_the_remedy(inside: bool) -> None:
    scripted = torch.jit.script(nn.Linear(2, 1))
    with pytest.raises(ModelError, match="give the module that it was made from"):
        Parameters(nn.Sequential(scripted) if inside else scripted)
