"""JSON output: share of predictions that parse, and that hold what the reference holds."""

from json import dumps, loads

import datasets
import evaluate

FEATURES = datasets.Features(
    {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
)


def canonical(text: str) -> str | None:
    """The one spelling of a JSON value: keys sorted, 1 as 1.0. None where the text is no JSON.

    Python's own == would take true for 1.
    """
    try:
        return dumps(loads(text, parse_int=float, parse_constant=refuse), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def refuse(constant: str) -> None:
    """NaN and Infinity: Python reads them, JSON has no such values."""
    raise ValueError(constant)


class Json(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=__doc__, citation="", features=FEATURES)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        guesses = [canonical(text) for text in predictions]
        pairs = zip(guesses, references, strict=True)
        equal = sum(guess is not None and guess == canonical(text) for guess, text in pairs)
        valid = sum(guess is not None for guess in guesses)
        return {"json_valid": valid / len(guesses), "json_equal": equal / len(guesses)}
