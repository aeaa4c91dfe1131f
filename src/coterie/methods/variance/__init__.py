"""Control variates: SCAFFOLD and Mime against the drift of local steps, SVRG, SAGA and MVR against noise."""

from coterie.methods.variance.mime import Mime
from coterie.methods.variance.mvr import MVR
from coterie.methods.variance.saga import SAGA
from coterie.methods.variance.scaffold import Scaffold
from coterie.methods.variance.svrg import SVRG

__all__ = ["MVR", "SAGA", "SVRG", "Mime", "Scaffold"]
