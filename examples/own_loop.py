"""Keep your own training loop: what changes is where the gradient comes from.

Here the peers' gradients are computed in place; they may as well come from anywhere else, as flat
vectors.
"""

import torch
from torch.nn.utils import parameters_to_vector

import coterie
from coterie.gradients.parameters import Parameters

task = coterie.data.digits_by_writer(me=3, own_examples=30)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
parameters = Parameters(model)


def gradient(user: coterie.User, step: int) -> torch.Tensor:
    """Return the gradient of a user's batch at the model's parameters, as a flat vector."""
    inputs, targets = user.batch(32, seed=0, step=step)
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


rule = coterie.BiasCorrection(alpha=0.9, beta=0.05)
state = rule.init(parameters.vector())
for step in range(200):
    own = gradient(task.me, step)
    rows = torch.stack([gradient(peer, step) for peer in task.peers])
    direction, state = rule(coterie.Gradients(own=own, rows=rows), state)  # the only change:
    parameters.set_gradient(direction)  # instead of loss.backward()
    optimizer.step()

loss = torch.nn.functional.cross_entropy
assert task.me.test is not None
print(coterie.evaluate(model, loss, task.me.test))
