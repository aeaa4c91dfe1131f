"""Train a model for one writer of digits with the gradients of the other thirteen."""

import torch

import coterie

task = coterie.data.digits_by_writer(me=3, own_examples=30)
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
)
run = coterie.train(
    model,
    torch.nn.functional.cross_entropy,
    task.me,
    task.peers,
    rule=coterie.WeightedAveraging(alpha=0.5),
    optimizer=torch.optim.Adam,
    lr=1e-2,
    steps=300,
    seed=0,
)
print(run.summary())
