"""The rules by name. A rule of one's own is made known by `@register_rule("name")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.registry import Registry

RULES: Registry[Callable[..., Any]] = Registry("rule", "coterie.rules")
"""What makes a rule from knobs: its class, or a function. What chooses a rule before the first step is here too."""

register_rule = RULES.register
