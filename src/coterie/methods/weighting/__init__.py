"""Methods that give each user's model a weight: learned from losses, distances or gradients, or given."""

from coterie.methods.weighting.fedfomo import FedFomo
from coterie.methods.weighting.selfish import Selfish
from coterie.methods.weighting.user_centric import UserCentric
from coterie.methods.weighting.waffle import Waffle

__all__ = ["FedFomo", "Selfish", "UserCentric", "Waffle"]
