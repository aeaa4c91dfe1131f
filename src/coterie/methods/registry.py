"""The methods by name. A method of one's own is made known by `@register_method("name")`."""

from collections.abc import Callable

from coterie.methods.rounds import Method
from coterie.registry import Registry

METHODS: Registry[Callable[..., Method]] = Registry("method", "coterie.methods")

register_method = METHODS.register
