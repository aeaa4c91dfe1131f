"""A SuperNode: it answers user 0 about its own examples."""

from coterie.flower import client_app
from writers.task import LOSS, make_model, peer

app = client_app(
    lambda context: peer(int(context.node_config["partition-id"])),
    lambda context: make_model(),
    LOSS,
)
