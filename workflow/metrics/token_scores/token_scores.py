"""Loss per supervised token (nats), perplexity = exp(loss), and token accuracy.

Takes sums per row, so that the result does not depend on how rows were batched.
"""

from math import exp

import datasets
import evaluate

FEATURES = datasets.Features(
    {
        "nll": datasets.Value("float64"),
        "tokens": datasets.Value("float64"),
        "correct": datasets.Value("float64"),
    }
)


class TokenScores(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=__doc__, citation="", features=FEATURES)

    def _compute(
        self, nll: list[float], tokens: list[float], correct: list[float]
    ) -> dict[str, float]:
        loss, accuracy = sum(nll) / sum(tokens), sum(correct) / sum(tokens)
        return {"loss": loss, "perplexity": exp(min(loss, 700)), "token_accuracy": accuracy}
