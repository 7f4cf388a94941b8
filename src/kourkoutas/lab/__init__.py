"""The laboratory: matched-seed studies of optimizers on the paper's testbeds and on a user's own training code.

    from kourkoutas.lab import load, study, suite

Nothing is imported before one of these is asked for, so that `kourkoutas.lab` costs nothing and names no framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kourkoutas.lab.api import Result, load, study
    from kourkoutas.lab.suites import SuiteResult, load_suite, suite

__all__ = ["Result", "SuiteResult", "load", "load_suite", "study", "suite"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kourkoutas.lab import api, suites
    except ImportError as error:
        raise ImportError(f"{error}: the laboratory needs pip install 'kourkoutas-beta[lab]'") from None
    return getattr(api if hasattr(api, name) else suites, name)
