"""The aggregators by name. One of one's own is made known by `@register_aggregator("name")`."""

from coterie.aggregators.points import Aggregator
from coterie.registry import Registry

AGGREGATORS: Registry[type[Aggregator]] = Registry("aggregator", "coterie.aggregators")

register_aggregator = AGGREGATORS.register
