"""At the end of a run: the model served beside the one trained alone, and the verdict."""

from dataclasses import replace

from torch import nn

from coterie.evaluation.comparing import compare
from coterie.learners.spec import RunSpec
from coterie.recording.configuration import Configuration
from coterie.recording.describe import counted
from coterie.recording.result import Comparison, End
from coterie.reporting.verdict import serves_alone, verdict


def with_verdict(
    end: End, configuration: Configuration, spec: RunSpec, model: nn.Module, alone: nn.Module | None
) -> End:
    """Return how a run ended with the comparison of its model with the one trained alone, and the verdict."""
    if alone is not None and not serves_alone(end):
        end = replace(end, comparison=_compared(end, spec, model, alone))
    return replace(end, verdict=verdict(configuration, end).sentence)


def _compared(end: End, spec: RunSpec, model: nn.Module, alone: nn.Module) -> Comparison | None:
    """Compare on the test examples where there are any, else on the validation examples, which also chose."""
    test, validation = spec.me.test, spec.me.validation
    if end.test and test is not None:
        on = f"{counted(len(test), 'test example')} that neither was chosen by"
        return compare(model, alone, spec.loss, test, spec.metrics, on=on)
    if test is None and validation is not None and not end.account:
        on = f"{len(validation)} validation examples, which also chose both, so that it may look larger than it is"
        return compare(model, alone, spec.loss, validation, spec.metrics, on=on)
    return None
